"""The order in which a backward is run with less memory than in that of the tape.

* *branchwise*: tapes interleave parallel branches; taking the ready vertex that adds the fewest
  bytes finishes one branch before the next is begun;
* *early*: what a loss of its own allows runs before the forward goes on (one critic on two batches,
  auxiliary losses), so that its activations are gone by then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph
from tfckpt.ir.schedule import Moves
from tfckpt.simulate.order import Emitter


class BranchwiseOrder:
    """Orders under the same moves, whatever is dropped: their forward is the same.

    The forward of a later backward pass, which follows from an earlier one, waits until that is
    done, as long as it adds more bytes than what is left of it.

    Args:
      graph: joint graph.
      moves: the free moves of the plan.
      waiting: backward vertices that run only when asked for (see `tfckpt.simulate.order.idle`).
      early: whether the backward begins wherever it can, before the forward goes on.
    """

    def __init__(self, graph: CostGraph, moves: Moves, waiting: frozenset[int],
                 early: bool = False) -> None:
        start = self._start = Emitter(graph, moves, waiting)
        apart = start.late | start.joins
        follows = _follow_backward(graph)
        members = [v for v, vertex in enumerate(graph.vertices) if v not in apart and (
            vertex.region == BACKWARD or vertex.region == FORWARD and follows[v])]
        forward = [v for v, vertex in enumerate(graph.vertices)
                   if v not in apart and vertex.region == FORWARD and not follows[v]]
        self._forward = forward if early else []
        for v in () if early else forward:
            start.emit(v)
        start.changed.clear()
        self._member = [False] * len(graph.vertices)
        for v in members:
            self._member[v] = True
        self._first = [] if early else [v for v in members if start.ready(v)]
        self._bytes = [storage.bytes for storage in graph.storages]
        self._written = [sum(self._bytes[s] for s in vertex.writes) for vertex in graph.vertices]
        self._untouched = [s for s in range(len(graph.storages)) if not start.touched[s]]
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def order(self, dropped: Sequence[bool]) -> tuple[int, ...]:
        """Return vertices in order; of ready backward ones the one that adds the fewest bytes.

        Args:
          dropped: for each storage whether it must be recomputed before its first backward reader;
            what the forward reads counts as made there in any case.
        """
        choice = tuple([s for s in self._untouched if dropped[s]])
        if choice not in self._known:
            self._known[choice] = self._ordered(dropped)
        return self._known[choice]

    def _ordered(self, dropped: Sequence[bool]) -> tuple[int, ...]:
        emitter, outside = self._start.copy(), list(self._member)  # backward, not found ready yet
        growth: dict[int, int] = {}  # of what is ready
        heap: list[tuple[int, int]] = []  # of it the latest, and what it was before
        price = self._pricer(emitter, dropped, growth, heap)
        emit = _emitting(emitter, outside, growth, price)
        for v in self._first:
            outside[v] = False
            price(v)
        for following in (*self._forward, None):
            if following is not None:
                emit(following)
            while heap:
                grown, ready = heapq.heappop(heap)
                if growth.get(ready) == grown:
                    del growth[ready]
                    emit(ready)
        return emitter.finish()

    def _pricer(self, emitter: Emitter, dropped: Sequence[bool], growth: dict[int, int],
                heap: list[tuple[int, int]]) -> Callable[[int], None]:
        """Return what notes the bytes that a ready vertex adds now, where they have changed."""
        size, written, vertices = self._bytes, self._written, emitter.graph.vertices
        unread, touched = emitter.unread, emitter.touched

        def price(v: int) -> None:
            total = written[v]
            for s in vertices[v].reads:
                if dropped[s] and not touched[s]:
                    total += size[s]
                if unread[s] == 1:
                    total -= size[s]
            if growth.get(v) != total:
                growth[v] = total
                heapq.heappush(heap, (total, v))

        return price


def _emitting(emitter: Emitter, outside: list[bool], growth: Mapping[int, int],
              price: Callable[[int], None]) -> Callable[[int], None]:
    """Return what emits a vertex, and prices what that makes ready, or changes the price of.

    Args:
      emitter: emits.
      outside: for each vertex whether it has not been found ready; changed.
      growth: of what is ready, what it adds.
      price: notes what a ready vertex adds.
    """
    readers, ready, readers_of = emitter.readers, emitter.ready, emitter.graph.readers

    def emit(v: int) -> None:
        before = len(emitter.order)
        emitter.emit(v)
        for u in emitter.order[before:]:
            for r in readers[u]:
                if outside[r] and ready(r):
                    outside[r] = False
                    price(r)
        for s in emitter.changed:
            for r in readers_of[s]:
                if r in growth:
                    price(r)
        emitter.changed.clear()

    return emit


def _follow_backward(graph: CostGraph) -> list[bool]:
    """Return which vertices need, directly or not, one of the backward or of the update."""
    found: list[bool] = []
    for needed in graph.predecessors:
        found.append(any(found[p] or graph.vertices[p].region in (BACKWARD, UPDATE)
                         for p in needed))
    return found
