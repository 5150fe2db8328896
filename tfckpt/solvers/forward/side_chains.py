"""The forward in an order that runs side chains early: chains of vertices that join the main path.

A mask drawn from a seed is made just before it is read, and so in the middle of vertices that
could be recomputed together. If it is made earlier, where few bytes cross, it can be kept while
they are recomputed. Only solvers look at this order; the step runs in its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tfckpt.ir.costgraph import CostGraph

__all__ = ["side_chains_first"]

WINDOW = 40
"""How far back a side chain may be moved, in vertices of the main path."""


def side_chains_first(graph: CostGraph, ahead: Sequence[int]) -> list[int]:
    """Return the forward vertices in an order that runs side chains early.

    A side chain belongs to the vertex of the main path that reads it first. It moves to the
    narrowest place (fewest bytes crossing) between the previous vertex that has a side chain and
    its own, but at most `WINDOW` vertices of the main path back. Where chains depend on one
    another so that the result is no topological order, the given order is returned.

    Args:
      graph: joint graph.
      ahead: forward vertices, in the order in which they are planned to run.
    """
    side = _side(graph, ahead)
    main_path = [v for v in ahead if v not in side]
    chains: dict[int, list[int]] = {}
    first_reader: dict[int, int] = {}
    for v in reversed(ahead):
        for p in graph.predecessors[v]:
            if p in side:
                first_reader[p] = first_reader.get(v, v)
    for v in ahead:
        if v in side:
            chains.setdefault(first_reader[v], []).append(v)
    place = {v: f for f, v in enumerate(main_path)}
    change = [0] * (len(main_path) + 1)
    for f, v in enumerate(main_path):
        for s in graph.vertices[v].writes:
            last = max((place[r] for r in graph.readers[s] if r in place), default=f)
            change[f] += graph.storages[s].bytes
            change[last] -= graph.storages[s].bytes
    crossing = list(itertools.accumulate(change))
    early: dict[int, list[int]] = {}  # what follows each vertex of the main path
    since = 0
    for reader in (v for v in main_path if v in chains):
        places = range(max(since, place[reader] - WINDOW), place[reader])
        if places:
            early.setdefault(main_path[min(places, key=crossing.__getitem__)], []).extend(
                chains.pop(reader))
        since = place[reader]
    found = [u for v in main_path for u in (*chains.get(v, ()), v, *early.get(v, ()))]
    return found if _in_order(graph, found) else list(ahead)


def _in_order(graph: CostGraph, order: Sequence[int]) -> bool:
    """Return whether each vertex comes after those of its predecessors that are in the order."""
    place = {v: f for f, v in enumerate(order)}
    return all(place.get(p, -1) < f for v, f in place.items() for p in graph.predecessors[v])


def _side(graph: CostGraph, ahead: Sequence[int]) -> set[int]:
    """Return the vertices on chains that join a longer one; for membership tests only.

    Each vertex continues the chain of the predecessor that takes the longest to reach.
    """
    source: dict[int, int] = {}
    reached: dict[int, float] = {}
    after: dict[int, list[int]] = {}
    for v in ahead:
        before = [p for p in graph.predecessors[v] if p in source]
        longest = max(before, key=reached.__getitem__, default=v)
        source[v] = source.get(longest, v)
        reached[v] = reached.get(longest, 0.0) + graph.vertices[v].time
        for p in before:
            after.setdefault(p, []).append(v)
    side: set[int] = set()
    for v in reversed(ahead):
        if after.get(v) and all(r in side and source[r] == source[v] or source[r] != source[v]
                                for r in after[v]):
            side.add(v)
    return side
