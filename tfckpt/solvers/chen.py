"""Chen's segments: keep a few nodes that cut the graph, recompute what lies between them.

A node may end a segment if every path from the inputs to the outputs passes it, that is, if it
is an articulation point of the undirected graph with one source and one target added. Such nodes
are ordered by the graph, and the boundary of everything up to one of them is that node alone.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4.1 (sqrt(n)
segments) and algorithm 3 (planning with a budget); Kusumoto et al. 2019, appendix B (articulation
points as the candidate splitting points).
Limits: a skip connection around everything leaves no point to cut at, and the whole graph is one
segment; times are ignored.

`manual` is the variant that Feng and Huang 2018 compare with (table 1, "Chen et al. manual"): the
splitting vertices alone, as a linear graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import networkx as nx

from tfckpt.errors import PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import reach_lower_sets
from tfckpt.solvers.forward.reforwarding import Checkpoints, ends, price, splitting_vertices


def lower_sets(forward: ForwardGraph, budget: int | None = None) -> tuple[int, ...]:
    """Return the lower sets that end in the chosen cut nodes.

    Args:
      forward: the graph of n nodes.
      budget: bytes that a *segment* may have before the next cut node ends it (algorithm 3's b:
        not a peak). None ends a segment once it has sqrt(n) nodes.

    Returns:
      Lower sets as bitmasks, increasing, the last one V; empty for a graph without nodes.

    Raises:
      PlanError: negative budget.

    Complexity: O(n + edges), plus O(n^2) bits for the sets.
    """
    if not len(forward):
        return ()
    sizes: Sequence[int] = forward.bytes
    if budget is None:
        sizes, budget = [1] * len(forward), math.ceil(math.sqrt(len(forward))) - 1
    reach = reach_lower_sets(forward)
    found = [reach[node] for node in _segment_ends(sizes, splitting_points(forward), budget)]
    return tuple(dict.fromkeys([*found, forward.everything]))


def _segment_ends(sizes: Sequence[int], points: Iterable[int], budget: int) -> list[int]:
    """Return the points at which the nodes since the last one exceed a budget.

    Raises:
      PlanError: negative budget.
    """
    if budget < 0:
        raise PlanError(f"plan: chen takes bytes a segment, not {budget}")
    found, total, may_end = [], 0, frozenset(points)
    for node, size in enumerate(sizes):
        total += size
        if total > budget and node in may_end:
            found.append(node)
            total = 0
    return found


def splitting_points(forward: ForwardGraph) -> tuple[int, ...]:
    """Return the nodes that every path from an input to an output passes, ascending.

    Args:
      forward: the forward part of a step; not changed.

    Source: Kusumoto et al. 2019, appendix B.
    """
    source, target = -1, len(forward)
    undirected = nx.Graph()
    for node in range(len(forward)):
        if not forward.predecessors[node]:
            undirected.add_edge(source, node)
        if not forward.successors[node] and forward.storages[node]:
            undirected.add_edge(node, target)  # a node that hands nothing on is no output
        undirected.add_edges_from((node, other) for other in forward.successors[node])
    return tuple(sorted(set(nx.articulation_points(undirected))))


def manual(forward: ForwardGraph, budget: int | None = None) -> Checkpoints:
    """Return checkpoints on the splitting vertices alone, priced by equation (1) of re-forwarding.

    Args:
      forward: the forward part of a step; without splitting vertices it stays one segment.
      budget: bytes that a segment may have before the next splitting vertex ends it, as in
        `lower_sets`. None stores every sqrt(k)-th of k splitting vertices.

    Raises:
      PlanError: negative budget.

    Complexity: O(V + E).

    Source: Chen et al. 2016, section 4.1 and algorithm 3; Feng and Huang 2018, section 5 (how
    that algorithm was applied to graphs that are not linear).
    """
    points = splitting_vertices(forward)
    chosen = {end for end in ends(forward) if 0 <= end < len(forward)}
    chosen.update(points[::math.ceil(math.sqrt(len(points))) or 1] if budget is None
                  else _segment_ends(forward.bytes, points, budget))
    return price(forward, chosen)
