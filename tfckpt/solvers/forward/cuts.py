"""Narrow cuts of the forward pass: places where few bytes carry everything that comes after.

A cut after a position of the forward order is crossed by the storages made before it and read
by a forward vertex after it. Its prefix is a lower set (Kusumoto et al. 2019, section 2) and
the crossing storages are its boundary, so keeping the storages of some cuts and recomputing the
rest is a canonical strategy. On a chain of blocks the narrow cuts are the blocks' outputs.
"""

from __future__ import annotations

import dataclasses

from tfckpt.ir.costgraph import FORWARD, CostGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A cut after forward vertex `vertex`; `storages` cross it and have `bytes` together."""

    vertex: int
    storages: tuple[int, ...]
    bytes: int


def narrow_cuts(graph: CostGraph) -> tuple[Cut, ...]:
    """Return the cuts narrower than what lies before and after them, in forward order.

    Of neighbouring cuts of the same width the one whose storages the backward reads anyway is
    taken, else the last. Linear in the number of vertices times the width of the graph.

    Args:
      graph: joint graph; only its forward counts, and what the backward reads of it.
    """
    residual = frozenset(graph.residuals)
    narrow = []
    plateau: list[Cut] = []
    before = float("inf")
    cuts = _all_cuts(graph)
    for i, cut in enumerate(cuts):
        if plateau and cut.bytes != plateau[-1].bytes:
            before, plateau = plateau[-1].bytes, []
        plateau.append(cut)
        after = cuts[i + 1].bytes if i + 1 < len(cuts) else float("inf")
        if after > cut.bytes and before > cut.bytes and cut.storages:
            narrow.append(next((c for c in plateau if residual.issuperset(c.storages)), cut))
    return tuple(narrow)


def _all_cuts(graph: CostGraph) -> list[Cut]:
    """Return the cuts at which the crossing storages change; only droppable storages count."""
    last_reader = {}
    for s, readers in enumerate(graph.readers):
        producer = graph.vertices[graph.storages[s].producer]
        forward = [r for r in readers if graph.vertices[r].region == FORWARD]
        if producer.region == FORWARD and producer.recomputable and forward:
            last_reader[s] = forward[-1]
    crossing: dict[int, None] = {}
    cuts: list[Cut] = []
    for v, vertex in enumerate(graph.vertices):
        if vertex.region != FORWARD:
            continue
        for s in vertex.writes:
            if s in last_reader:
                crossing[s] = None
        for s in vertex.reads:
            if last_reader.get(s) == v:
                crossing.pop(s, None)
        storages = tuple(sorted(crossing))
        if not cuts or cuts[-1].storages != storages:
            cuts.append(Cut(v, storages, sum(graph.storages[s].bytes for s in storages)))
    return cuts
