"""The outer loop of re-forwarding's solvers: which max term to allow.

For a bound C on the largest segment, an inner solver finds the minimum bytes g(C) of checkpoints
that respect it, and the largest segment B(C) <= C of its solution. g falls as C grows. The minimum
of g(C) + B(C) over all C is wanted.

Instead of trying every segment's cost as C, intervals of C are searched, the most promising first.
Each is shortened from above by one step of the paper, then halved: where g has few values the
steps find them, and where a whole interval can be skipped halving finds that. An interval, or a
part of it, is skipped because:
  - C in [B(C'), C'] has the solution found for C' (the paper's rule);
  - in an interval at whose ends g is the same, the lower end is better than anything inside;
  - a largest segment m in (low, high) costs at least g(high) + low + 1.

Source: Feng and Huang 2018, algorithm 1, step 7 (the first rule; the others are ours).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tfckpt.errors import PlanError


def best_max_term(under: Callable[[int], tuple[int, int]], largest: int, most: int) -> int:
    """Return the bound C that minimizes g(C) + B(C); among equals the smallest C.

    Args:
      under: C in bytes -> (g(C), B(C)); must have an answer for every C >= 0.
      largest: the largest C worth trying: the bytes of all that may be recomputed.
      most: calls of `under` that may be made.

    Raises:
      PlanError: more calls would be needed.

    Complexity: at most about three calls of `under` for each value that g takes.
    """
    best = (0, 0)
    calls = 0

    def attempt(limit: int) -> tuple[int, int]:
        nonlocal best, calls
        calls += 1
        if calls > most:
            raise PlanError(f"plan: more than {most} sizes of the largest segment come into "
                            "question, too many for lcg and acg; use auto")
        stored, term = under(limit)
        best = min(best, (stored + term, limit)) if calls > 1 else (stored + term, limit)
        return stored, term

    stored, term = attempt(largest)
    at_zero, _ = attempt(0)
    # (lower bound on the cost inside, low, high, g(low), g(high)), the ends not included.
    intervals: list[tuple[int, int, int, int, int]] = []

    def offer(low: int, high: int, at_low: int, at_high: int) -> None:
        if high - low > 1 and at_low != at_high and at_high + low + 1 < best[0]:
            heapq.heappush(intervals, (at_high + low + 1, low, high, at_low, at_high))

    offer(0, term, at_zero, stored)
    while intervals:
        bound, low, high, at_low, at_high = heapq.heappop(intervals)
        if bound >= best[0]:
            break
        at_high, high = attempt(high - 1)
        if high - low < 2 or at_low == at_high:
            continue
        middle = (low + high) // 2
        stored, term = attempt(middle)
        offer(low, term, at_low, stored)
        offer(middle, high, stored, at_high)
    return best[1]
