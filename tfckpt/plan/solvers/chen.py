"""Chen's segments: keep a few nodes that cut the graph, recompute what lies between them.

A node may end a segment if every path from the inputs to the outputs passes it, that is, if it
is an articulation point of the undirected graph with one source and one target added. Such nodes
are ordered by the graph, and the boundary of everything up to one of them is that node alone.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4.1 (sqrt(n)
segments) and algorithm 3 (planning with a budget); Kusumoto et al. 2019, appendix B (articulation
points as the candidate splitting points).
Limits: a skip connection around everything leaves no point to cut at, and the whole graph is one
segment; times are not looked at.
"""

from __future__ import annotations

import math

import networkx as nx

from tfckpt.cost.with_backward import ForwardGraph
from tfckpt.errors import PlanError
from tfckpt.plan.lower_sets import reach_lower_sets


def lower_sets(forward: ForwardGraph, budget: int | None = None) -> tuple[int, ...]:
    """Lower sets that end in the chosen cut nodes.

    Args:
      forward: the graph of n nodes.
      budget: bytes that a *segment* may hold before the next cut node ends it (algorithm 3's b:
        not a peak). None ends a segment once it has sqrt(n) nodes.

    Returns:
      Lower sets as bitmasks, increasing, the last one V; empty for a graph without nodes.

    Raises:
      PlanError: negative budget.

    Complexity: O(n + edges), plus O(n^2) bits for the sets.
    """
    if budget is not None and budget < 0:
        raise PlanError(f"plan: chen takes bytes a segment, not {budget}")
    if not len(forward):
        return ()
    reach = reach_lower_sets(forward)
    cuts = set(splitting_points(forward))
    enough = math.ceil(math.sqrt(len(forward)))
    chosen = []
    nodes = held = 0
    for node, size in enumerate(forward.bytes):
        nodes += 1
        held += size
        full = nodes >= enough if budget is None else held > budget
        if full and node in cuts:
            chosen.append(reach[node])
            nodes = held = 0
    if not chosen or chosen[-1] != forward.everything:
        chosen.append(forward.everything)
    return tuple(chosen)


def splitting_points(forward: ForwardGraph) -> tuple[int, ...]:
    """Nodes that every path from an input to an output passes, ascending.

    Source: Kusumoto et al. 2019, appendix B.
    """
    source, target = -1, len(forward)
    undirected = nx.Graph()
    for node in range(len(forward)):
        if not forward.predecessors[node]:
            undirected.add_edge(source, node)
        if not forward.successors[node] and forward.storages[node]:
            undirected.add_edge(node, target)  # what hands nothing on is no output
        undirected.add_edges_from((node, other) for other in forward.successors[node])
    return tuple(sorted(set(nx.articulation_points(undirected))))
