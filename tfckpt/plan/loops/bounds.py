"""What no plan of a graph stays below, whatever it computes again: so it may not have to be made.

While a vertex runs, its own inputs and results are there, and so is whatever is made before it and
read after it in every order, unless that is computed again in between. So at each vertex a plan
pays for each such storage its bytes, or the time of what makes it; at any price of time in bytes it
pays no less than the smaller of the two (weak duality; a vertex that makes several pays for each by
its share of their bytes). The largest such sum of all vertices bounds both together, and divided by
the price the time within a budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tfckpt.ir.costgraph import CostGraph

PRICES = tuple(10.0 ** (n / 8) for n in range(-20, 21))
"""Prices of time at which the least time within a budget is asked for, times an average one."""
LARGEST = 1_500
"""Vertices of a graph of which more is said than the time of the plain step."""
_ROUNDING = 1 - 1e-9
"""Sums of these bounds are rounded otherwise than those of plans."""


class Bounds:
    """Lower bounds of what plans of a graph take, under any free moves.

    Args:
      graph: joint graph.
      smallest: bytes of the smallest request that an allocator counts.
    """

    def __init__(self, graph: CostGraph, smallest: int = 0) -> None:
        self._graph, self._smallest = graph, smallest
        self.time = graph.total_time * _ROUNDING
        donated = frozenset(s for v in graph.vertices for s in v.donates)
        self._bytes = np.array([0 if s.bytes < smallest or n in donated else s.bytes
                                for n, s in enumerate(graph.storages)], np.float64)
        made = np.zeros(len(graph.vertices))
        np.add.at(made, np.array([s.producer for s in graph.storages], np.int64), self._bytes)
        self._seconds = np.array([
            graph.vertices[s.producer].time * size / max(made[s.producer], 1.0)
            if n in graph.droppable else math.inf
            for n, (s, size) in enumerate(zip(graph.storages, self._bytes, strict=True))])

    @functools.cached_property
    def peak(self) -> float:
        """Return bytes that no plan stays below."""
        return float(self._most([np.where(np.isinf(self._seconds), self._bytes, 0.0)])[0])

    def weighed(self, price: float) -> float:
        """Return what no plan stays below in bytes, and time at a price, together.

        Args:
          price: bytes that a unit of time is worth.
        """
        return price * self.time + float(self._most([self._paid(price)])[0]) if price else self.peak

    def time_within(self, budget: int) -> float:
        """Return a time that no plan within a budget stays below; infinite where there is none.

        Args:
          budget: bytes.
        """
        if self.peak > budget:
            return math.inf
        again = float(self._seconds[np.isfinite(self._seconds)].sum())
        total = float(self._bytes.sum())
        if not again or not total:
            return self.time
        prices = np.array(PRICES) * (total / again)
        over = self._most([self._paid(price) for price in prices]) - budget
        return self.time + float((over / prices).max(initial=0.0))

    def _paid(self, price: float) -> NDArray[np.float64]:
        return np.minimum(self._bytes, price * self._seconds)

    def _most(self, paid: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the most that is live at a vertex, for each way in which storages are paid."""
        if not 0 < len(self._graph.vertices) <= LARGEST:
            return np.zeros(len(paid))
        there = self._across @ np.array(paid).T + self._working[:, None]
        return np.asarray(there.max(axis=0)) * _ROUNDING

    @functools.cached_property
    def _working(self) -> NDArray[np.float64]:
        return np.array(list(self._own()))

    def _own(self) -> Iterator[float]:
        """Yield what each vertex needs by itself, buffers that it takes over counted once."""
        for vertex in self._graph.vertices:
            own = sum(self._bytes[s] for s in sorted({*vertex.reads, *vertex.writes}))
            taken = min(sum(self._bytes[s] for s in dict.fromkeys(ends))
                        for ends in zip(*vertex.reuses, strict=True)) if vertex.reuses else 0.0
            yield own - taken + (vertex.workspace if vertex.workspace >= self._smallest else 0)

    @functools.cached_property
    def _across(self) -> NDArray[np.float64]:
        """Return for each vertex which storages are made before and read after it in every order.

        A join makes nothing wait, since it may be bypassed.
        """
        graph, count = self._graph, len(self._graph.vertices)
        joins = frozenset(v for v, vertex in enumerate(graph.vertices) if vertex.join)
        before = np.zeros((count, count), bool)
        for v, needed in enumerate(graph.predecessors):
            for p in needed if v not in joins else ():
                if p not in joins:
                    before[v] |= before[p]
                    before[v, p] = True
        across = np.zeros((count, len(graph.storages)))
        for s, storage in enumerate(graph.storages):
            readers = [r for r in graph.readers[s] if r not in joins]
            after = before[readers].any(axis=0) if not storage.fetched else np.ones(count, bool)
            across[:, s] = after & before[:, storage.producer]
        for v, vertex in enumerate(graph.vertices):
            across[v, [*vertex.reads, *vertex.writes]] = 0.0
        return across
