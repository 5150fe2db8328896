"""Local search over schedules themselves, for graphs small enough to price many of them.

A keep set says for each storage whether it stays until the backward; a schedule may also hold
it for some of its uses and remake it for others. Here a plan is the copies that run before each
original. Any such choice is valid, since what a copy reads exists from its original on, and what
it holds follows from liveness. Two moves:

* *split*: what is live at the peak, but not read there, is made again just before its next use,
  together with those of its inputs that are gone by then;
* *merge*: a copy is left out, and its readers hold the instance before it.

`Refiner.fit` splits until a budget holds, by bytes saved for each second spent. `Refiner.hasten`
merges copies and lets `fit` repair what no longer fits, as long as the step becomes faster.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from tfckpt.cost.costgraph import CostGraph
from tfckpt.plan.evaluate import non_dominated
from tfckpt.plan.schedule import Resolved, Schedule, copies_before, resolve, with_copies
from tfckpt.plan.simulate import Timeline, simulate_order

Rows = tuple[frozenset[int], ...]
"""For each original the vertices that run again just before it."""

SHARES = (1.0, 0.94, 0.87)
"""Of a budget, what a first fit aims at before copies are merged again."""


_NONE: frozenset[int] = frozenset()
LOOK = 0.05
"""Evaluations that looking up a known schedule counts for: it takes time as well."""


@dataclasses.dataclass(frozen=True)
class _Point:
    """A choice of copies, priced."""

    rows: Rows
    resolved: Resolved
    timeline: Timeline

    def excess(self, budget: int) -> int:
        """Bytes above the budget, summed over the steps."""
        if self.timeline.peak_bytes <= budget:
            return 0
        return sum([live - budget for live in self.timeline.live_bytes if live > budget])


class Refiner:
    """Searches from one order of originals and remembers what it has priced.

    Complexity: each evaluation is linear in the steps and reads of a schedule.
    """

    def __init__(self, graph: CostGraph, schedule: Schedule):
        self.graph = graph
        self.order = tuple(v for v, copy in schedule if not copy)
        self.place = {v: i for i, v in enumerate(self.order)}
        self.left = 0.0  # evaluations, handed out by `climb`
        self.known: dict[Rows, _Point] = {}

    # Points.

    def point(self, rows: Rows) -> _Point:
        """Prices a choice of copies, less those that nothing reads."""
        self.left -= LOOK
        if rows not in self.known:
            self.left -= 1
            place = self.place.__getitem__
            resolved = resolve(self.graph, with_copies(
                self.order, [sorted(row, key=place) if row else () for row in rows]))
            useful = self._useful(resolved)
            if useful != rows:
                self.known[rows] = self.point(useful)
            else:
                self.known[rows] = _Point(
                    rows, resolved, simulate_order(self.graph, resolved, None))
        return self.known[rows]

    def _useful(self, resolved: Resolved) -> Rows:
        """The copies that an original needs, directly or through other copies."""
        schedule, reads, maker = resolved.schedule, resolved.reads, resolved.maker
        needed = [False] * len(schedule)
        rows: list[frozenset[int]] = []
        row: list[int] = []
        for position in range(len(needed) - 1, -1, -1):
            v, copy = schedule[position]
            if not copy:
                rows.append(frozenset(row) if row else _NONE)
                row = []
            elif needed[position]:
                row.append(v)
            else:
                continue
            for i in reads[position]:
                needed[maker[i]] = True
        rows.append(frozenset(row) if row else _NONE)
        return tuple(rows[:0:-1])

    # Moves.

    def fit(self, rows: Rows, budget: int, most: float = float("inf"),
            tabu: Sequence[tuple[int, int]] = ()) -> _Point | None:
        """Splits until the budget holds; None if no split helps or the time passes `most`.

        Args:
          tabu: (row, vertex) of copies that may not be added.
        """
        at = self.point(rows)
        while (excess := at.excess(budget)) and self.left > 0:
            best, price = None, (float("inf"), 0)
            for number, split in enumerate(self._splits(at)):
                if any(v in split[row] for row, v in tabu):
                    continue
                after = self.point(split)
                saved = excess - after.excess(budget)
                if saved > 0 and after.timeline.time < most:
                    cost = (after.timeline.time - at.timeline.time) / saved
                    if (cost, number) < price:
                        best, price = after, (cost, number)
            if best is None:
                return None
            at = best
        return None if at.excess(budget) else at

    def _splits(self, at: _Point) -> list[Rows]:
        """Every split of one instance that is live at the peak and read later."""
        graph, resolved = self.graph, at.resolved
        peak = at.timeline.peak_step
        here = frozenset(resolved.reads[peak]) | frozenset(resolved.writes[peak])
        following: dict[int, int] = {}
        last: dict[int, int] = {}
        row_of, row = [], 0
        for position, (_, copy) in enumerate(resolved.schedule):
            row_of.append(row)
            row += not copy
            for i in resolved.reads[position]:
                last[i] = position
                if position > peak:
                    following.setdefault(i, position)
        found = []
        for i, use in following.items():
            s = resolved.storage[i]
            storage = graph.storages[s]
            if (resolved.maker[i] < peak and i not in here and s in graph.droppable
                    and storage.bytes):
                for deep in (True, False):
                    made = self._closure(resolved, last, storage.producer, peak, use, deep)
                    rows = list(at.rows)
                    rows[row_of[use]] |= frozenset(made)
                    if tuple(rows) not in found:
                        found.append(tuple(rows))
        return found

    def _closure(self, resolved: Resolved, last: dict[int, int], vertex: int, peak: int,
                 use: int, deep: bool) -> list[int]:
        """A vertex and, if `deep`, those of its inputs that are not live at the peak."""
        if not deep:
            return [vertex]
        latest: dict[int, int] = {}
        for position in range(use):
            for i in resolved.writes[position]:
                latest[resolved.storage[i]] = i
        made, pending = [], [vertex]
        while pending:
            v = pending.pop()
            if v in made:
                continue
            made.append(v)
            for s in self.graph.vertices[v].reads:
                i = latest[s]
                gone = last.get(i, -1) < peak and resolved.maker[i] < peak
                if gone and s in self.graph.droppable:
                    pending.append(self.graph.storages[s].producer)
        return made

    def hasten(self, at: _Point, budget: int) -> _Point:
        """Merges copies, the costliest first, as long as that makes the step faster."""
        improved = True
        while improved and self.left > 0:
            improved = False
            for group in self._groups(at):
                if self.left <= 0:
                    break
                if not all(v in at.rows[row] for row, v in group):
                    continue
                rows = list(at.rows)
                for row, v in group:
                    rows[row] -= {v}
                after = self.fit(tuple(rows), budget, at.timeline.time, group)
                if after is not None and after.timeline.time < at.timeline.time:
                    at, improved = after, True
        return at

    def climb(self, schedule: Schedule, rungs: Sequence[float], evaluations: int) -> None:
        """Lowers the peak, then makes what fits on each rung faster.

        On each rung it starts from the fastest schedule known to fit, and from the one given,
        split until it fits: the two end in different schedules, and either may be the better.
        """
        first = self.point(tuple(copies_before(schedule)))
        self.left = evaluations // (len(rungs) + 1)
        least, most = self._lower(first).timeline.peak_bytes, first.timeline.peak_bytes
        for rung in rungs:
            self.left = evaluations // (len(rungs) + 1)
            limit = least + int(rung * (most - least))
            fitting = [at for at in self.known.values() if at.timeline.peak_bytes <= limit]
            self.hasten(min(fitting, key=_rank), limit)
            for share in SHARES:
                at = self.fit(first.rows, int(share * limit))
                if at is not None:
                    self.hasten(at, limit)

    def _lower(self, at: _Point) -> _Point:
        """Splits in steps of 2 % of the peak as long as that is possible."""
        while peak := at.timeline.peak_bytes:
            after = self.fit(at.rows, peak - max(1, peak // 50))
            if after is None:
                break
            at = after
        return at

    def _groups(self, at: _Point) -> Iterator[list[tuple[int, int]]]:
        """Copies to leave out together: one, those of a row, those of a vertex, any two."""
        copies = [(row, v) for row, made in enumerate(at.rows) for v in made]
        copies.sort(key=lambda c: (-self.graph.vertices[c[1]].time, c[0], self.place[c[1]]))
        for copy in copies:
            yield [copy]
        for kind in (0, 1):
            for key in dict.fromkeys(copy[kind] for copy in copies):
                group = [copy for copy in copies if copy[kind] == key]
                if len(group) > 1:
                    yield group
        for first, second in itertools.combinations(copies, 2):
            yield [first, second]


def front(graph: CostGraph, schedule: Schedule, rungs: Sequence[float], evaluations: int
          ) -> list[Schedule]:
    """Schedules of which none is both slower and larger than another, found from one.

    Args:
      schedule: where to start; its originals stay in their order.
      rungs: where between the least peak found and that of `schedule` a budget is tried.
      evaluations: schedules priced at most, or a few more.
    """
    refiner = Refiner(graph, schedule)
    refiner.climb(schedule, rungs, evaluations)
    return [at.resolved.schedule for at in non_dominated(refiner.known.values())]


def _rank(at: _Point) -> tuple[float, int]:
    return at.timeline.time, at.timeline.peak_bytes
