"""The orders in which the ops of a body may run."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tfckpt.cost.bodies.tensors import Tensors


def oldest(tensors: Tensors, needed: Sequence[Collection[int]]) -> list[int]:
    """Return the order that takes the oldest of what is ready.

    Args:
      tensors: those of what runs.
      needed: what each op needs.
    """
    return _in_turn(needed, deque[int](), deque.append, deque.popleft)


def newest(tensors: Tensors, needed: Sequence[Collection[int]]) -> list[int]:
    """Return the order that takes the newest of what is ready.

    Args:
      tensors: those of what runs.
      needed: what each op needs.
    """
    return _in_turn(needed, deque[int](), deque.append, deque.pop)


def growing(tensors: Tensors, needed: Sequence[Collection[int]]) -> list[int]:
    """Return the order that takes of what is ready what makes memory grow most.

    So do threads that compute the terms of a gradient's sums over iterations before they add these.

    Args:
      tensors: those of what runs.
      needed: what each op needs.
    """
    left = collections.Counter(t for read in tensors.read for t in read)
    since = itertools.count()

    def growth(op: int) -> int:
        return sum(tensors.allocated[op].values()) - sum(
            tensors.size.get(t, 0) for t in tensors.read[op] if left[t] == 1)

    def add(ready: list[tuple[int, int, int]], op: int) -> None:
        heapq.heappush(ready, (-growth(op), next(since), op))

    def take(ready: list[tuple[int, int, int]]) -> int:
        while True:
            grows, _, op = heapq.heappop(ready)
            if -grows > growth(op):  # what reads the same as well has run meanwhile
                add(ready, op)
                continue
            left.subtract(tensors.read[op])
            return op

    return _in_turn(needed, [], add, take)


def _in_turn(needed: Sequence[Collection[int]], ready: Any, add: Callable[[Any, int], None],
             take: Callable[[Any], int]) -> list[int]:
    """Return ops in an order in which each comes after those that it needs."""
    readers: list[list[int]] = [[] for _ in needed]
    for op, sources in enumerate(needed):
        for source in sources:
            readers[source].append(op)
    left = [len(sources) for sources in needed]
    order = []
    for op, count in enumerate(left):
        if not count:
            add(ready, op)
    while ready:
        order.append(take(ready))
        for reader in readers[order[-1]]:
            left[reader] -= 1
            if not left[reader]:
                add(ready, reader)
    return order
