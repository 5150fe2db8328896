"""Which of the finished candidates of a step are taken, best first: for the minimum, for a budget.

Of many candidates few can be finished. Those come first that may win by the rule, as the bytes that
they need at least and their time tell (`tfckpt.plan.choosing.rules`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.target import Target
from tfckpt.plan.choosing.finished import Finished, floor_of, lowest_of
from tfckpt.plan.choosing.planned import Plain
from tfckpt.plan.choosing.rules import ROOM, TAIL, cost_of
from tfckpt.plan.evaluate import Priced, non_dominated
from tfckpt.plan.pool import Pool, few, spread

FINALISTS = 10
"""Candidates near the minimum peak that get waits and an allocator before one is chosen."""
MOST_FINALISTS, SMALL = 120, 6_000
"""... on small graphs more: the second divided by the vertices, at most the first."""


class Ranking:
    """Finishes candidates of a step in the order in which they may be taken.

    Args:
      graph: the joint cost graph.
      plain: the plain step.
      target: what the step is planned for.
      objective: "time" or "memory", see `tfckpt.plan.planner.plans_of`.
      solver: whose candidates they are, for messages.
      finish: takes a candidate, and returns it finished, the same whenever it is asked.
    """

    def __init__(self, graph: CostGraph, plain: Plain, target: Target, objective: str,
                 solver: str, finish: Callable[[Priced], Finished]) -> None:
        self.graph, self.plain, self.target = graph, plain, target
        self.objective, self.solver, self._finish = objective, solver, finish

    def floor(self, priced: Priced) -> int:
        """Return bytes that the finished plan will need at least.

        Args:
          priced: a candidate.
        """
        return floor_of(self.graph, priced, self.target)

    def _limit(self) -> int:
        """Return how many candidates are finished before one is chosen: on small graphs, all."""
        return max(min(FINALISTS, few(self.graph, FINALISTS)),
                   min(MOST_FINALISTS, SMALL // max(len(self.graph.vertices), 1)))

    def _smallest(self, pool: Pool,
                  value: Callable[[int, float], float] = lambda peak, time: peak
                  ) -> list[Finished]:
        """Return finished choices, the one of the smallest value among them, for all budgets.

        The value of a peak in bytes and a time is the peak itself by default. A choice whose floor
        has a larger one than a finished choice cannot be the smallest. Where there are too
        many, they are spread over the lower end of the front, since neighbours share the
        allocator's luck.
        """
        choices = sorted(pool.choices, key=lambda p: (value(self.floor(p), p.time), p.time))
        limit = self._limit()
        most = 1.1 * (choices[0].peak + ROOM * self.plain.timeline.peak_bytes)
        near = [p for p in choices if p.peak <= most]
        if len(near) > limit:
            return [self._finish(p)
                    for p in spread(non_dominated(near)[::-1], limit)]
        found: list[Finished] = []
        for priced in choices:
            if found:
                best = lowest_of(found, lambda peak, f: (value(peak, f.priced.time),))
                if len(found) >= limit or value(self.floor(priced), priced.time) >= value(
                        best.peak, best.priced.time):
                    break
            found.append(self._finish(priced))
        return found

    def least(self, pool: Pool) -> Iterator[Finished]:
        """Yield the smallest peak, but for a little memory that buys much time.

        Then so among the rest. Every choice that may win by that rule is finished, the likeliest
        first, up to a limit.

        Args:
          pool: candidates to choose from.
        """
        plain = self.plain.peak_bytes, self.plain.timeline.time
        room, whole, pool = ROOM * self.plain.peak_bytes, pool, self._without_tail(pool)

        def cost(peak: int, time: float) -> float:
            return cost_of(peak, time, *plain, self.objective)

        def tail(peak: int, time: float) -> float:
            return cost_of(peak, time, *plain, self.objective, TAIL)

        def least_of(entries: Sequence[Finished]) -> int:
            return lowest_of(entries, lambda peak, f: (tail(peak, f.priced.time), peak)).peak

        def chosen(entries: Sequence[Finished]) -> Finished:
            least = least_of(entries)
            most = least + room
            near = [f for f in entries if f.lowest >= least or f.peak >= least]
            return lowest_of(near, lambda peak, f: (
                peak > most, cost(peak, f.priced.time), peak, f.priced.time))

        finished = self._smallest(pool, tail)
        done = {f.priced.candidate for f in finished}
        left = sorted((p for p in pool.choices if p.candidate not in done),
                      key=lambda p: (cost(self.floor(p), p.time), p.time))
        for priced in left:
            best = chosen(finished)
            if len(finished) >= len(done) + self._limit() // 2 or (
                    cost(self.floor(priced), priced.time) > cost(best.peak, best.priced.time)):
                break
            if self.floor(priced) <= least_of(finished) + room:
                finished.append(self._finish(priced))
        for group in (finished, self._further(whole)):
            rest = list(group)
            while rest:
                best = chosen(rest)
                yield best
                rest = [f for f in rest if f is not best]

    def _without_tail(self, pool: Pool) -> Pool:
        """Return the pool without choices far below what is taken for the minimum.

        Peaks are requested bytes here. Those that an allocator counts are other ones, so that what
        is a little below may be the minimum.
        """
        plain = self.plain.timeline

        def tail(p: Priced) -> float:
            return cost_of(p.peak, p.time, plain.peak_bytes, plain.time, self.objective, TAIL)

        least = min(pool.choices, key=lambda p: (tail(p), p.peak, p.time))
        return dataclasses.replace(pool, choices=tuple(
            p for p in pool.choices if p.peak >= least.peak or tail(p) <= tail(least) + ROOM))

    def _further(self, pool: Pool) -> Iterator[Finished]:
        """Finish choices from the whole front, for callers that refused all earlier plans."""
        front = non_dominated(pool.choices)[::-1]
        for priced in spread(front, few(self.graph, FINALISTS)):
            yield self._finish(priced)

    def fitting(self, pool: Pool, budget: int, untouched: Sequence[Finished]
                ) -> Iterator[Finished]:
        """Yield the fastest plans (with objective "memory" the smallest) whose allocated peaks fit.

        A budget that the plain step meets as it is, is met by that.

        Args:
          pool: candidates to choose from.
          budget: dynamic bytes that the peak must not pass.
          untouched: the plain step as a plan, where it meets the budget; nothing else.

        Raises:
          InfeasibleBudgetError: none fits; names the smallest peak found.
        """
        usable = int(budget * self.target.safety)
        plain = list(untouched)
        found, left = False, few(self.graph, FINALISTS)
        if self.objective == "time":
            for priced in sorted(pool.choices, key=lambda p: (p.time, p.peak)):
                if plain and priced.time > plain[0].priced.time:
                    yield plain.pop()
                    found = True
                if self.floor(priced) <= usable and left:
                    if self._finish(priced).fits(usable):
                        yield self._finish(priced)
                        found = True
                    left -= found
        smallest = self._smallest(pool)
        fitting = [f for f in smallest if f.fits(usable)] + plain
        yield from sorted(fitting, key=lambda f: (f.peak, f.priced.time))
        if found or fitting:
            yield from sorted((f for f in self._further(pool) if f.fits(usable)),
                              key=lambda f: f.peak)
            return
        lowest = lowest_of(smallest, lambda peak, _: (peak,))
        needed = min(int(lowest.peak / self.target.safety) + 2, self.plain.peak_bytes)
        raise InfeasibleBudgetError(
            f"plan: no plan of solver {self.solver!r} fits {budget:,} bytes; the minimum dynamic "
            f"peak it can promise is {needed:,} bytes", needed,
            lowest.priced.time / max(self.graph.total_time, 1e-12) - 1.0)
