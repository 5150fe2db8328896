"""Large graphs made small: runs of neighbouring vertices become one vertex each.

A run is an interval of a planned order, inside one region and on one device, that ends where
few bytes are handed on. Storages that are used inside their run alone disappear; the most bytes of
these that exist at once become the run's workspace. What the coarse graph keeps or recomputes is
given as storages of the fine one, so a choice made there is priced, and if need be refined, on the
fine graph.

Intervals of an order are convex, hence the coarse graph has no cycle.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from tfckpt.ir.costgraph import CostGraph, Storage, Vertex, check_cost_graph


@dataclasses.dataclass(frozen=True)
class Coarse:
    """A coarse graph and, for each of its storages, the storage of the fine graph."""

    graph: CostGraph
    storages: tuple[int, ...]

    def fine(self, coarse: frozenset[int]) -> frozenset[int]:
        """Return a set of storages in terms of the fine graph.

        Args:
          coarse: storages of the coarse graph.
        """
        return frozenset(self.storages[s] for s in coarse)


def coarsen(graph: CostGraph, order: Sequence[int], size: int) -> Coarse:
    """Contract runs of at most `size` vertices of an order.

    Args:
      graph: joint graph.
      order: vertices in a planned order; joins that it leaves out are left out.
      size: vertices of a run, at most.

    Returns:
      The coarse graph, with the fine graph's storage for each of its own.

    Complexity: linear in vertices and reads.
    """
    runs = _runs(graph, order, size)
    run_of = {v: number for number, run in enumerate(runs) for v in run}
    leaving = [_leaves(graph, run_of, s) for s in range(len(graph.storages))]
    kept = tuple(s for number, run in enumerate(runs) for v in run
                 for s in graph.vertices[v].writes if leaving[s])
    index = {s: i for i, s in enumerate(kept)}
    vertices = tuple(_vertex(graph, number, run, run_of, index)
                     for number, run in enumerate(runs))
    storages = tuple(
        Storage(graph.storages[s].name, graph.storages[s].bytes,
                run_of[graph.storages[s].producer], graph.storages[s].fetched)
        for s in kept)
    coarse = CostGraph(vertices, storages, graph.resident_bytes, graph.name, graph.variable_bytes,
                       graph.unknown_variables)
    check_cost_graph(coarse)
    return Coarse(coarse, kept)


def _leaves(graph: CostGraph, run_of: Mapping[int, int], s: int) -> bool:
    """Return whether a storage is read outside the run that makes it, or not at all."""
    storage = graph.storages[s]
    home = run_of.get(storage.producer)
    if home is None:
        return False
    readers = graph.readers[s]
    return storage.fetched or not readers or any(run_of.get(r, home) != home for r in readers)


def _runs(graph: CostGraph, order: Sequence[int], size: int) -> list[list[int]]:
    """Return the order cut where region, device or purity changes, and where it is narrow."""
    crossing = _crossing(graph, order)
    runs: list[list[int]] = []
    place = 0
    while place < len(order):
        stop = place + 1
        kind = _kind(graph, order[place])
        while stop < len(order) and stop - place < size and _kind(graph, order[stop]) == kind:
            stop += 1
        if stop - place == size:
            ends = range(place + (size + 1) // 2, stop + 1)
            stop = min(ends, key=lambda end: (crossing[end - 1], -end))
        runs.append(list(order[place:stop]))
        place = stop
    return runs


def _kind(graph: CostGraph, v: int) -> tuple[str, str, bool, int]:
    vertex = graph.vertices[v]
    return vertex.region, vertex.device, vertex.recomputable, v if vertex.join else -1


def _crossing(graph: CostGraph, order: Sequence[int]) -> list[int]:
    """Return for each place of the order the bytes made up to it and read later in its region."""
    place_of = {v: place for place, v in enumerate(order)}
    change = [0] * (len(order) + 1)
    for s, readers in enumerate(graph.readers):
        producer = graph.storages[s].producer
        region = graph.vertices[producer].region
        places = [place_of[r] for r in readers
                  if r in place_of and graph.vertices[r].region == region]
        if places and producer in place_of:
            change[place_of[producer]] += graph.storages[s].bytes
            change[max(places)] -= graph.storages[s].bytes
    return list(itertools.accumulate(change[:-1]))


def _vertex(graph: CostGraph, number: int, run: Sequence[int], run_of: Mapping[int, int],
            index: Mapping[int, int]) -> Vertex:
    """One vertex for a run."""
    members = [graph.vertices[v] for v in run]
    reads = sorted({index[s] for m in members for s in m.reads
                    if run_of[graph.storages[s].producer] != number})
    writes = [index[s] for m in members for s in m.writes if s in index]
    after = sorted({run_of[p] for m in members for p in m.after
                    if run_of.get(p, number) != number})
    return Vertex(
        name=members[-1].name, region=members[0].region, time=sum(m.time for m in members),
        reads=tuple(reads), writes=tuple(sorted(writes)), after=tuple(after),
        recomputable=members[0].recomputable, workspace=_workspace(graph, run, index),
        cheap=all(m.cheap for m in members), join=members[0].join, device=members[0].device,
        donates=tuple(sorted({index[s] for m in members for s in m.donates
                              if s in index and index[s] in reads})))


def _workspace(graph: CostGraph, run: Sequence[int], index: Mapping[int, int]) -> int:
    """Return the most bytes live inside the run at once, above what it hands on."""
    last = {s: v for v in run for s in graph.vertices[v].reads}
    inner = handed = most = 0
    for v in run:
        vertex = graph.vertices[v]
        for s in vertex.writes:
            if s in index:
                handed += graph.storages[s].bytes
            else:
                inner += graph.storages[s].bytes
        most = max(most, inner + handed + vertex.workspace)
        inner -= sum(graph.storages[s].bytes for s in vertex.reads
                     if s not in index and last[s] == v)
    return max(0, most - handed)
