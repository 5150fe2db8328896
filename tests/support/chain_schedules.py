"""The best schedules of a small chain, by visiting every state that one can be in.

A chain of n values: forward `i` reads value i-1 and makes value i; backward `i` reads the values i
and i-1 and gradient i+1, and makes gradient i, of the size of value i. The state is which values
are in memory, how often each forward has run, and how many backwards. Values may be dropped at any
time. Nothing is imported from tfckpt.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

State = tuple[int, tuple[int, ...], int]
"""(bits of the values in memory, runs of each forward, backwards to go)."""


def least_peak(sizes: Sequence[int], runs: int) -> int:
    """Return the minimum peak in bytes where no forward runs more than `runs` times."""
    start = (0, (0,) * len(sizes), len(sizes))
    heap, best = [(0, start)], {start: 0}
    while heap:
        peak, state = heapq.heappop(heap)
        if not state[2]:
            return peak
        if peak > best[state]:
            continue
        for after, used, _ in _moves(sizes, sizes, runs, state):
            reached = max(peak, used)
            if reached < best.get(after, 1 << 60):
                best[after] = reached
                heapq.heappush(heap, (reached, after))
    raise AssertionError("a chain can always be run")


def least_time(sizes: Sequence[int], times: Sequence[int], runs: int, budget: int) -> int | None:
    """Return the minimum time of all forward runs within a budget; None where none fits."""
    start = (0, (0,) * len(sizes), len(sizes))
    heap, best = [(0, start)], {start: 0}
    while heap:
        spent, state = heapq.heappop(heap)
        if not state[2]:
            return spent
        if spent > best[state]:
            continue
        for after, used, time in _moves(sizes, times, runs, state):
            if used <= budget and spent + time < best.get(after, 1 << 60):
                best[after] = spent + time
                heapq.heappush(heap, (spent + time, after))
    return None


def _moves(sizes: Sequence[int], times: Sequence[int], runs: int, state: State
           ) -> Iterator[tuple[State, int, int]]:
    """Yield every next state, with the bytes live on the way there and the time that it takes."""
    stored, ran, left = state
    gradient = sizes[left] if left < len(sizes) else 0
    live = sum(size for i, size in enumerate(sizes) if stored >> i & 1) + gradient
    for i, size in enumerate(sizes[:left]):
        if stored >> i & 1:
            yield (stored & ~(1 << i), ran, left), 0, 0
        elif ran[i] < runs and (not i or stored >> (i - 1) & 1):
            counts = (*ran[:i], ran[i] + 1, *ran[i + 1:])
            yield (stored | 1 << i, counts, left), live + size, times[i]
    last = left - 1
    if stored >> last & 1 and (not last or stored >> (last - 1) & 1):
        yield (stored & ~(1 << last), ran, last), live + sizes[last], 0
