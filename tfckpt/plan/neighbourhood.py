"""Large-neighbourhood search over schedules, on graphs of any size.

A schedule is the copies that run before each original (`tfckpt.plan.incremental`). Two moves:

* *split*: what is live at an overfull step, but not used there, is made again just before its next
  use, together with those of its inputs that are gone by then, or without;
* *merge*: copies are left out, and their readers hold the instances before them.

`Neighbourhood.fit` splits until a budget holds, by bytes saved (summed over the steps above the
budget) for each second spent. `Neighbourhood.search` frees a window: the copies of some stages, of
some vertices or a few at random are left out, and what no longer fits is repaired by `fit`, with some
noise on its prices. What is better, or as good, is kept.

Source: ours; the scheme is Shaw 1998, "Using constraint programming and local search methods to
solve vehicle routing problems", with a greedy repair as in Ropke and Pisinger 2006. Deterministic: the
random numbers have a fixed seed, limits count evaluations.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from tfckpt.clock import check_time
from tfckpt.cost.costgraph import CostGraph
from tfckpt.plan.incremental import FOREVER, CopySchedule
from tfckpt.plan.schedule import Schedule, copies_before

NOISE = 0.6
"""How much the price of a split may seem to differ when a window is repaired."""
STEP = 0.02
"""Of the peak, by how much a search for less memory tries to lower it at once."""
SLACK = 1e-9
"""Of the plain time: smaller differences come from adding up floats."""
Copies = tuple[tuple[int, int], ...]


class Neighbourhood:
    """A search from one order of originals.

    Attributes:
      found: schedules worth pricing, each with its peak and time.
      left: evaluations left, of the changes that are tried.
    """

    def __init__(self, graph: CostGraph, schedule: Schedule, seed: int = 1):
        self.graph = graph
        order = [v for v, copy in schedule if not copy]
        self.state = CopySchedule(graph, order, copies_of(schedule))
        self.rng = random.Random(seed)
        self.left = 0
        self.slack = SLACK * sum(graph.vertices[v].time for v in order)
        self.found: dict[Copies, tuple[int, float]] = {}
        self.droppable = sorted(s for s in graph.droppable if graph.storages[s].bytes)

    # Where the search is.

    @property
    def peak(self) -> int:
        """Return the peak of the present schedule."""
        return int(self.state.live.max())

    def excess(self, budget: int) -> int:
        """Return the bytes above a budget, summed over the steps."""
        return int(np.maximum(self.state.live - budget, 0).sum())

    def keep(self) -> None:
        """Remember the present schedule."""
        self.found[self.copies()] = self.peak, self.state.time

    def copies(self) -> Copies:
        """Return (stage, vertex) of each copy."""
        state = self.state
        return tuple((key // state.stride, state.vertex(key)) for key in sorted(state.copies))

    def goto(self, copies: Iterable[tuple[int, int]]) -> None:
        """Make a known schedule the present one."""
        self.state = CopySchedule(self.graph, self.state.order, copies)

    # Splits.

    def fit(self, budget: int, most: float = float("inf"), tabu: Sequence[int] = (),
            noise: float = 0.0) -> bool:
        """Split until the budget holds; return whether it does.

        Args:
          most: time that the schedule must stay below.
          tabu: keys of copies that may not be added.
        """
        state = self.state
        excess = self.excess(budget)
        while excess and self.left > 0:
            best, price = None, float("inf")
            before = state.time
            for split in self._splits(budget, noise):
                if any(key in tabu for key in split):
                    continue
                mark = self._try(split)
                saved = excess - self.excess(budget)
                if saved > 0 and state.time < most:
                    cost = (state.time - before + self.slack) / saved
                    if noise:
                        cost *= self.rng.uniform(1, 1 + noise)
                    if cost < price:
                        best, price = split, cost
                state.undo(mark)
            if best is None:
                return False
            self._try(best)
            excess = self.excess(budget)
        return not excess

    def _try(self, split: Sequence[int]) -> int:
        """Add copies; return the mark to which that can be undone."""
        self.left -= 1
        mark = len(self.state.log)
        for key in split:
            self.state.add(self.state.vertex(key), key // self.state.stride)
        return mark

    def _splits(self, budget: int, noise: float) -> list[tuple[int, ...]]:
        """Return the copies of every split of one instance that is live at an overfull step.

        The step is the fullest one; with noise any that is above the budget.
        """
        state = self.state
        if noise:
            over = np.flatnonzero(state.live > budget)
            at = int(over[self.rng.randrange(len(over))])
        else:
            at = int(state.live.argmax())
        now = state.keys[at]
        vertex = self.graph.vertices[state.vertex(now)]
        here = {*vertex.reads, *vertex.writes}
        found: dict[tuple[int, ...], None] = {}
        for s in self.droppable:
            makes, uses = state.makes[s], state.uses[s]
            if not makes or makes[0] >= now or not uses or uses[-1] <= now or s in here:
                continue
            following = bisect_right(uses, now)
            use = uses[following]
            made = bisect_left(makes, use) - 1
            if makes[made] > now:
                continue  # it is made again after this step
            stage = use // state.stride
            producer = self.graph.storages[s].producer
            for deep in (True, False):
                found[self._closure(producer, stage, now, deep)] = None
        return list(found)

    def _closure(self, vertex: int, stage: int, now: int, deep: bool) -> tuple[int, ...]:
        """Return keys of a copy and, if `deep`, of those of its inputs that are gone by now."""
        state, vertices = self.state, self.graph.vertices
        made: dict[int, None] = {}
        pending = [vertex]
        while pending:
            v = pending.pop()
            key = state.key(v, stage)
            if key in made or key in state.copies:
                continue
            made[key] = None
            for s in vertices[v].reads if deep else ():
                producer = self.graph.storages[s].producer
                if vertices[producer].recomputable and not self.graph.storages[s].fetched:
                    start, last = state.instance(s, key)
                    if start < now and last < now:
                        pending.append(producer)
        return tuple(sorted(made))

    # Merges.

    def leave_out(self, keys: Iterable[int]) -> None:
        """Leave copies out, and with them those that nothing reads any more."""
        state = self.state
        pending = sorted(keys, reverse=True)
        self.left -= 1
        while pending:
            key = pending.pop(0)
            if key not in state.copies:
                continue
            v = state.vertex(key)
            state.remove(key)
            for s in self.graph.vertices[v].reads:
                start = bisect_left(state.makes[s], key) - 1
                maker = state.makes[s][start]
                if maker in state.copies and state.idle(maker):
                    pending.append(maker)

    def speed_up(self, budget: int) -> None:
        """Leave single copies out, the costliest first, where the budget still holds."""
        state = self.state
        vertices = self.graph.vertices
        for key in sorted(state.copies, key=lambda k: (-vertices[state.vertex(k)].time, k)):
            if self.left <= 0:
                return
            if key in state.copies and self._room(key, budget):
                mark = len(state.log)
                self.leave_out([key])
                if self.excess(budget):
                    state.undo(mark)

    def _room(self, key: int, budget: int) -> bool:
        """Return whether what a copy makes could be held until then from its last use before.

        Not exact where a buffer is taken over; it spares most of the attempts that must fail.
        """
        state = self.state
        for s in self.graph.vertices[state.vertex(key)].writes:
            size, spans = state.size[s], state.spans[s]
            number = next(i for i, span in enumerate(spans) if span[0] == key)
            if size and spans[number][1] > key and number:
                gap = state.live[bisect_right(state.keys, spans[number - 1][1]):
                                 bisect_left(state.keys, key)]
                if len(gap) and int(gap.max()) + size > budget:
                    return False
        return True

    # Windows.

    def search(self, budget: int, evaluations: int, lower: bool = False) -> bool:
        """Free windows and repair them until the evaluations are spent; return whether it fits.

        Where the budget holds the time is lowered, else the bytes above it.

        Args:
          lower: stop as soon as the budget holds.
        """
        check_time()
        state = self.state
        rest, self.left = self.left - evaluations, evaluations
        self.fit(budget)
        self.speed_up(budget)
        best = self.excess(budget), state.time
        while self.left > 0 and state.copies and (best[0] or not lower):
            state.log.clear()
            was = best
            self._free()
            tabu = self.tabu
            fits = self.fit(budget, float("inf") if was[0] else was[1] + self.slack, tabu, NOISE)
            if fits or was[0]:
                self.speed_up(budget)
            now = self.excess(budget), state.time
            if now[0] < was[0] or now[0] == was[0] and now[1] <= was[1] + self.slack:
                best = now
            else:
                state.undo(0)
        self.left = rest + self.left
        state.log.clear()
        return not best[0]

    def lower(self, evaluations: int, bound: int = 0) -> int:
        """Lower the peak, in ever smaller steps where that fails, and return it.

        Args:
          bound: bytes that no schedule stays below.
        """
        self.left += evaluations
        end = self.left - evaluations
        best, peak, step = self.copies(), self.peak, STEP
        while self.left > end and peak > bound:
            target = max(bound, peak - max(1, int(peak * step)))
            if self.search(target, min(self.left - end, evaluations // 6), lower=True):
                best, peak = self.copies(), self.peak
            else:
                step /= 2
                self.goto(best)
            if peak * step < 1:
                step = STEP
        self.goto(best)
        self.left = end
        return peak

    def fastest(self, budget: int) -> Schedule:
        """Return the fastest schedule found that fits, which one has to be."""
        _, _, copies = min((time, peak, copies) for copies, (peak, time) in self.found.items()
                           if peak <= budget)
        self.goto(copies)
        return self.state.schedule()

    def sweep(self, budgets: Sequence[int], evaluations: int) -> None:
        """Lower the time within each budget, from the fastest schedule known that fits.

        Where none is known it goes on from the present one.
        """
        for budget in budgets:
            fitting = [(time, peak, copies) for copies, (peak, time) in self.found.items()
                       if peak <= budget]
            if fitting and self.peak > budget or fitting and min(fitting)[0] < self.state.time:
                self.goto(min(fitting)[2])
            self.left = evaluations // len(budgets)
            self.search(budget, self.left)
            self.keep()

    def _free(self) -> None:
        """Leave out the copies of a window of stages, of some vertices, or a few at random."""
        state, rng = self.state, self.rng
        copies = sorted(state.copies)
        kind = rng.randrange(3)
        centre = rng.choice(copies)
        if kind == 0:
            width = 1 + rng.randrange(max(2, len(state.order) // 8))
            stage = centre // state.stride
            chosen = [k for k in copies if abs(k // state.stride - stage) < width]
        elif kind == 1:
            width = 1 + rng.randrange(3)
            place = centre % state.stride
            chosen = [k for k in copies if abs(k % state.stride - place) < width]
        else:
            chosen = [centre, *rng.sample(copies, min(len(copies), rng.randrange(3)))]
        if len(chosen) > 1 and rng.random() < 0.3:
            chosen = [k for k in chosen if rng.random() < 0.6] or chosen[:1]
        self.tabu = frozenset(chosen) if len(chosen) < 3 else frozenset((rng.choice(chosen),))
        self.leave_out(chosen)


def copies_of(schedule: Schedule) -> Copies:
    """Return (stage, vertex) of each copy of a schedule, each once in a stage."""
    return tuple((stage, v) for stage, row in enumerate(copies_before(schedule)) for v in sorted(row))
