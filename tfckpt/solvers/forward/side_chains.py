"""The forward in an order in which what joins the trunk from the side is made early.

A mask drawn from a seed is made just before it is read, between what could be recomputed from what
came before and what is recomputed from it. Made where few bytes cross, it can stay while they are
run again. Only solvers look at this order; the step runs in its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tfckpt.ir.costgraph import CostGraph

__all__ = ["side_chains_first"]

WINDOW = 40
"""How far back a side chain may be moved, in vertices of the trunk."""


def side_chains_first(graph: CostGraph, ahead: Sequence[int]) -> list[int]:
    """Return the forward in an order in which what joins the trunk from the side is made early.

    A mask drawn from a seed is made just before it is read, between what is dropped and what that
    is dropped for. Made where the trunk was narrow before, it can be kept while they are run again.
    A chain that joins belongs to the vertex that reads it first; it goes to the narrowest place
    since the last such vertex, but not further back than `WINDOW` vertices of the trunk. Where
    chains depend on one another so that this is no order, it is the one given.

    Args:
      graph: joint graph.
      ahead: forward vertices, in the order in which they are planned to run.
    """
    side = _side(graph, ahead)
    trunk = [v for v in ahead if v not in side]
    chains: dict[int, list[int]] = {}
    first_reader: dict[int, int] = {}
    for v in reversed(ahead):
        for p in graph.predecessors[v]:
            if p in side:
                first_reader[p] = first_reader.get(v, v)
    for v in ahead:
        if v in side:
            chains.setdefault(first_reader[v], []).append(v)
    place = {v: f for f, v in enumerate(trunk)}
    change = [0] * (len(trunk) + 1)
    for f, v in enumerate(trunk):
        for s in graph.vertices[v].writes:
            last = max((place[r] for r in graph.readers[s] if r in place), default=f)
            change[f] += graph.storages[s].bytes
            change[last] -= graph.storages[s].bytes
    crossing = list(itertools.accumulate(change))
    early: dict[int, list[int]] = {}  # what follows each vertex of the trunk
    since = 0
    for reader in (v for v in trunk if v in chains):
        places = range(max(since, place[reader] - WINDOW), place[reader])
        if places:
            early.setdefault(trunk[min(places, key=crossing.__getitem__)], []).extend(
                chains.pop(reader))
        since = place[reader]
    found = [u for v in trunk for u in (*chains.get(v, ()), v, *early.get(v, ()))]
    return found if _in_order(graph, found) else list(ahead)


def _in_order(graph: CostGraph, order: Sequence[int]) -> bool:
    """Return whether each vertex comes after those of its predecessors that are in the order."""
    place = {v: f for f, v in enumerate(order)}
    return all(place.get(p, -1) < f for v, f in place.items() for p in graph.predecessors[v])


def _side(graph: CostGraph, ahead: Sequence[int]) -> set[int]:
    """Vertices on chains that join a longer one; membership only.

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
