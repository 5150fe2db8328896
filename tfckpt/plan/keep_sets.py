"""Schedules from a keep set: which forward storages stay until the backward reads them.

Everything else that the backward needs is recomputed just before its first reader, from what is
kept. By default a recomputed storage is then kept until its last reader; one in `again` is
recomputed anew where two of its uses lie far apart, and so are intermediates that the backward
does not read themselves. With the union of boundaries of a lower-set sequence as keep set this
is the canonical strategy of Kusumoto et al. 2019, section 3, after liveness analysis.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.ir.costgraph import BACKWARD, UPDATE, CostGraph
from tfckpt.ir.schedule import Schedule, Step

NEAR_STEPS = 40
"""Uses of a copy at most this many planned vertices apart share it in any case."""
STILL_THERE_FRACTION = 1 / 120
"""An original used within this fraction of the step is not recomputed: the backward has just
begun, and recomputing would cost time and save nothing."""


def keep_schedule(graph: CostGraph, keep: frozenset[int], order: Sequence[int],
                  again: frozenset[int] = frozenset()) -> Schedule:
    """Return the schedule that keeps exactly `keep` of the storages that may be recomputed.

    Args:
      graph: joint graph.
      keep: storages that live from the forward to their last reader.
      order: base order (`tfckpt.simulate.order.base_order`).
      again: storages recomputed for every group of uses that lie close together.
    """
    return Ordered(graph, order).schedule(dropped(graph, keep), again)


def dropped(graph: CostGraph, keep: frozenset[int]) -> list[bool]:
    """Return for each storage whether it is recomputed when read, where `keep` is kept.

    Args:
      graph: joint graph.
      keep: storages that live from the forward to their last reader.
    """
    return [s in graph.droppable and s not in keep for s in range(len(graph.storages))]


class Ordered:
    """An order of the originals, in which schedules of any keep set are made.

    Args:
      graph, order: as for `keep_schedule`.
    """

    def __init__(self, graph: CostGraph, order: Sequence[int]) -> None:
        self.graph, vertices = graph, graph.vertices
        self.order = tuple(order)
        self.steps: list[Step] = [(v, 0) for v in self.order]
        restores = [vertices[v].region in (BACKWARD, UPDATE) for v in self.order]
        self.first = restores.index(True) if True in restores else len(restores)
        self.later = [(now, v, restores[now]) for now, v in enumerate(self.order)
                      if now >= self.first]
        self.touched = [-1] * len(graph.storages)  # before the first that may restore
        for now, v in enumerate(self.order[:self.first]):
            for s in (*vertices[v].reads, *vertices[v].writes):
                self.touched[s] = now
        residual = frozenset(graph.residuals)
        self.residual = [s in residual for s in range(len(graph.storages))]

    def schedule(self, dropped: Sequence[bool], again: frozenset[int]) -> Schedule:
        """Return the schedule that recomputes what is dropped, when it is read.

        Args:
          dropped: for each storage whether it is recomputed when read (see `dropped`).
          again: storages recomputed for every group of uses that lie close together.
        """
        return _Builder(self, dropped, again).build()


class _Builder:
    """Walks the base order and inserts what each backward vertex misses."""

    def __init__(self, ordered: Ordered, dropped: Sequence[bool], again: frozenset[int]) -> None:
        self.ordered, self.graph, self.dropped = ordered, ordered.graph, dropped
        self.brief = [gone and not stays for gone, stays in zip(
            dropped, ordered.residual, strict=True)]
        for s in again:
            self.brief[s] = dropped[s]
        self.still_there = int(len(self.graph.vertices) * STILL_THERE_FRACTION)
        self.copies = [0] * len(self.graph.vertices)
        self.touched = list(ordered.touched)  # when last made or read
        self.steps = ordered.steps[:ordered.first]
        self.now = 0

    def build(self) -> Schedule:
        """Return the whole schedule."""
        vertices, dropped = self.graph.vertices, self.dropped
        for now, v, restores in self.ordered.later:
            if restores:
                for s in vertices[v].reads:
                    if dropped[s]:
                        self.now = now
                        self._restore(s)
            else:
                for s in (*vertices[v].reads, *vertices[v].writes):
                    self.touched[s] = now
            self.steps.append((v, 0))
        return tuple(self.steps)

    def _fresh(self, storage: int) -> bool:
        """Return whether a copy exists that may be read now."""
        if self.touched[storage] < 0:
            return False
        age = self.now - self.touched[storage]
        if not self.copies[self.graph.storages[storage].producer]:
            return age <= self.still_there
        return not self.brief[storage] or age <= NEAR_STEPS

    def _restore(self, storage: int) -> None:
        """Recompute what is missing, inputs first, without recursion."""
        graph = self.graph
        stack = [storage]
        while stack:
            s = stack[-1]
            if self._fresh(s):
                self.touched[s] = self.now
                stack.pop()
                continue
            producer = graph.storages[s].producer
            missing = [r for r in graph.vertices[producer].reads
                       if self.dropped[r] and not self._fresh(r)]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            self.copies[producer] += 1
            self.steps.append((producer, self.copies[producer]))
            for r in (*graph.vertices[producer].reads, *graph.vertices[producer].writes):
                if self.dropped[r]:
                    self.touched[r] = self.now
