"""The partial order of a schedule with fences and waits, by transitive closure.

Steps are their positions; fence number k is `("fence", k)`. Shares nothing with `tfckpt.plan`.
"""

from __future__ import annotations

import dataclasses
import random

import networkx

from tests.support import reference_executor
from tests.support.graphs import random_joint_graph, random_schedule
from tfckpt.ir.costgraph import OTHER, CostGraph


def ordering(graph, schedule, waits=(), found=(), released=()) -> networkx.DiGraph:
    """Return a graph of all edges: data, other edges, fences (each waits for the one before),
    waits.
    """
    steps = len(schedule)

    def label(node):
        return node if node < steps else ("fence", node - steps)

    result = networkx.DiGraph()
    needed = reference_executor.edges(graph, schedule, released, waits, found)
    result.add_nodes_from(map(label, needed))
    result.add_edges_from((label(other), label(node)) for node in needed for other in needed[node])
    return result


def runs_of_copies(schedule) -> list[tuple[int, int]]:
    """(start, stop) of each longest run of neighbouring copies."""
    inside = [bool(copy) for _, copy in schedule]
    starts = [p for p, copy in enumerate(inside) if copy and (not p or not inside[p - 1])]
    stops = [p + 1 for p, copy in enumerate(inside) if copy and not any(inside[p + 1:p + 2])]
    return list(zip(starts, stops, strict=True))


def may_be_awaited(vertex) -> bool:
    """Return whether something besides its readers may wait for a vertex."""
    return not (vertex.fusible or vertex.join or vertex.conditional)


def marked_graph(seed: int, count: int, equal: bool = False) -> CostGraph:
    """Return a random joint graph in which some vertices are fusible, joins, conditional or of no
    region.

    Fusible is only what is awaited by nothing and has one reader, or, if `equal`, several: equal
    ones are one to TensorFlow.
    """
    rng = random.Random(seed)
    graph = random_joint_graph(seed, count)
    awaited = {other for v in graph.vertices for other in v.after}
    vertices = []
    for index, v in enumerate(graph.vertices):
        readers = [r for s in v.writes for r in graph.readers[s]]
        change = {}
        merged = len(v.writes) == 1 and (len(readers) == 1 or equal and bool(readers))
        if merged and index not in awaited and rng.random() < 0.4:
            change["fusible"] = True
        elif rng.random() < 0.2:
            change[rng.choice(("join", "conditional"))] = True
        if rng.random() < 0.1:
            change["region"] = OTHER
        vertices.append(dataclasses.replace(v, **change))
    return dataclasses.replace(graph, vertices=tuple(vertices))


def marked_case(seed: int, count: int, equal: bool = False):
    """Return a marked graph and a schedule of it with repeats."""
    graph = marked_graph(seed, count, equal)
    return graph, random_schedule(graph, seed + 1)
