"""Large-neighbourhood search over schedules, on graphs of any size.

A schedule is the copies that run before each original (`tfckpt.plan.incremental`). Two moves:

* *split*: what is live at an overfull step, but not used there, is made again just before its next
  use, together with those of its inputs that are gone by then, or without;
* *merge*: copies are left out, and their readers read the instances before them.

`Neighbourhood.fit` splits until a budget is met, by bytes saved (summed over the steps above the
budget) for each second spent. `Neighbourhood.search` frees a window: the copies of some stages, of
some vertices or a few at random are left out, and what no longer fits is repaired by `fit`, with
some noise on its prices. What is better, or as good, is kept.

Source: ours; the scheme is Shaw 1998, "Using constraint programming and local search methods to
solve vehicle routing problems", with a greedy repair as in Ropke and Pisinger 2006. Deterministic:
the random numbers have a fixed seed, limits count evaluations.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from tfckpt.common.clock import check_time
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule, copies_before
from tfckpt.plan.incremental import CopySchedule

NOISE = 0.6
"""How much the price of a split may seem to differ when a window is repaired."""
WIDTH = 24
"""Storages live at an overfull step that are tried at most, the largest."""
STEP, SMALLEST_STEP, LARGEST_STEP = 0.03, 0.001, 0.08
"""Of the peak, by how much a search for less memory tries to lower it at once: at first, at least
and at most; more after each success, less after each failure."""
FREED = 0.7
"""Share of attempts that free a window where a budget is not met; the others force a split."""
PATIENCE = 50
"""Changes tried for one budget without gain before the next budget's turn comes."""
LOWER, DOWN = 0.3, 0.3
"""Of the evaluations, what lowering the peak takes, and a first sweep over falling budgets."""
SLACK = 1e-9
"""Of the plain time: smaller differences come from adding up floats."""
Copies = tuple[tuple[int, int], ...]


class Neighbourhood:
    """A search from one order of originals, begun at a schedule.

    Attributes:
      found: schedules worth pricing, each with its peak and time.
      left: evaluations left, of the changes that are tried.
    """

    def __init__(self, graph: CostGraph, schedule: Schedule, seed: int = 1) -> None:
        self.graph = graph
        order = [v for v, copy in schedule if not copy]
        self.state = CopySchedule(graph, order, copies_of(schedule))
        self.rng = random.Random(seed)
        self.left = 0
        self.slack = SLACK * sum(graph.vertices[v].time for v in order)
        self.found: dict[Copies, tuple[int, float]] = {}
        self.droppable = sorted(s for s in graph.droppable if graph.storages[s].bytes
                                and self.state.makes[s])

    # Where the search is.

    @property
    def peak(self) -> int:
        """Return the peak of the present schedule."""
        return int(self.state.live.max())

    def excess(self, budget: int) -> int:
        """Return the bytes above a budget, summed over the steps.

        Args:
          budget: dynamic bytes that no step should pass.
        """
        return int(np.maximum(self.state.live - budget, 0).sum())

    def keep(self) -> None:
        """Remember the present schedule."""
        self.found[self.copies()] = self.peak, self.state.time

    def copies(self) -> Copies:
        """Return (stage, vertex) of each copy."""
        state = self.state
        return tuple((key // state.stride, state.vertex(key)) for key in sorted(state.copies))

    def goto(self, copies: Iterable[tuple[int, int]]) -> None:
        """Make a known schedule the present one, copy by copy; each is a change.

        Args:
          copies: (stage, vertex) of each copy, as `copies` or `copies_of` returns them.
        """
        state = self.state
        wanted = {state.key(v, stage): (v, stage) for stage, v in copies}
        gone = [key for key in state.copies if key not in wanted]
        come = [made for key, made in wanted.items() if key not in state.copies]
        self.left -= 1 + len(gone) + len(come)
        for key in gone:
            state.remove(key)
        for v, stage in come:
            state.add(v, stage)
        state.log.clear()

    # Splits.

    def fit(self, budget: int, most: float = float("inf"), tabu: Collection[int] = (),
            noise: float = 0.0) -> bool:
        """Split until the budget is met; return whether it is.

        Args:
          budget: dynamic bytes that no step may pass.
          most: time that the schedule must stay below.
          tabu: keys of copies that may not be added.
          noise: by what fraction the price of a split is raised at random, at most.
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
        # what is read here may go only where its buffer would be taken over
        here = {*vertex.reads, *vertex.writes} - {r for _, r in vertex.reuses}
        across: list[tuple[int, int]] = []
        for s in self.droppable:
            uses = state.uses[s]
            if uses and uses[-1] > now > state.makes[s][0] and s not in here:
                use = uses[bisect_right(uses, now)]
                makes = state.makes[s]
                if makes[bisect_left(makes, use) - 1] < now:
                    across.append((s, use))
        if len(across) > WIDTH:  # the largest; with noise any of twice as many
            across.sort(key=lambda entry: -state.size[entry[0]])
            across = self.rng.sample(across[:2 * WIDTH], WIDTH) if noise else across[:WIDTH]
        found: dict[tuple[int, ...], None] = {}
        for s, use in across:
            producer = self.graph.storages[s].producer
            for deep in (True, False):
                found[self._closure(producer, use // state.stride, now, deep)] = None
            early = self._while_inputs_live(producer, now, use)
            if early is not None:
                found[(early,)] = None
        return list(found)

    def _while_inputs_live(self, vertex: int, now: int, use: int) -> int | None:
        """Return the key of a copy in the last stage at which all its inputs are live.

        None where that is not between the two steps.
        """
        state = self.state
        end = min((state.instance(s, use)[1] for s in self.graph.vertices[vertex].reads
                   if not self.graph.storages[s].fetched), default=use)
        if not now < end < use or end // state.stride == use // state.stride:
            return None
        key = state.key(vertex, end // state.stride)
        return key if now < key < use and key not in state.copies else None

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
        """Leave copies out, and with them those that nothing reads any more.

        Args:
          keys: of the copies; those that are not there are passed over.
        """
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
        """Leave single copies out, the costliest first, where the budget is still met.

        Args:
          budget: dynamic bytes that no step may pass.
        """
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
        """Return whether there is room to keep what a copy makes from its last use until then.

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
        """Free windows and repair them until that is of no more use; return whether it fits.

        It ends when the evaluations are spent, or `PATIENCE` of them since it was last of use.

        Where the budget is met the time is lowered, else the bytes above it.

        Args:
          budget: dynamic bytes that no step may pass.
          evaluations: changes that may be tried.
          lower: stop as soon as the budget is met.

        Raises:
          OutOfTimeError: planning has a time limit, which is over.
        """
        check_time()
        state = self.state
        rest, self.left = self.left - evaluations, evaluations - 1
        self.fit(budget)
        self.speed_up(budget)
        best = self.excess(budget), state.time
        since = self.left
        while self.left > max(0, since - PATIENCE) and (best[0] or state.copies and not lower):
            state.log.clear()
            if state.copies and (not best[0] or self.rng.random() < FREED):
                tabu = self._free()
            else:
                self._force(budget)
                tabu = frozenset()
            most = float("inf") if best[0] else best[1] + self.slack
            if self.fit(budget, most, tabu, NOISE) or best[0]:
                self.speed_up(budget)
            now = self.excess(budget), state.time
            if now[0] < best[0] or now[0] == best[0] and now[1] <= best[1] + self.slack:
                if not now[0] and now != best:
                    self.keep()
                if now[0] < best[0] or now[1] < best[1] - self.slack:
                    since = self.left
                best = now
            else:
                state.undo(0)
        state.log.clear()
        self.left = rest + self.left
        return not best[0]

    def lower(self, evaluations: int, bound: int = 0) -> int:
        """Lower the peak, in ever smaller steps where that fails, and return it.

        Args:
          evaluations: changes that may be tried.
          bound: bytes that no schedule stays below.

        Raises:
          OutOfTimeError: planning has a time limit, which is over.
        """
        self.left += evaluations
        end = self.left - evaluations
        best, peak, step = self.copies(), self.peak, STEP
        while self.left > end and peak > bound:
            target = max(bound, peak - max(1, int(peak * step)))
            if self.search(target, min(self.left - end, evaluations // 6), lower=True):
                best, peak = self.copies(), self.peak
                step = min(1.3 * step, LARGEST_STEP)
            else:
                step /= 2
                self.goto(best)
            if step < SMALLEST_STEP:
                step = STEP  # other windows, this time
        self.goto(best)
        self.left = end
        return peak

    def fastest(self, budget: int) -> Schedule:
        """Return the fastest schedule found that fits, which one has to be.

        Args:
          budget: dynamic bytes that no step may pass.
        """
        _, _, copies = min((time, peak, copies) for copies, (peak, time) in self.found.items()
                           if peak <= budget)
        self.goto(copies)
        return self.state.schedule()

    def sweep(self, budgets: Sequence[int], evaluations: int) -> None:
        """Lower the time within each budget, from the fastest schedule known that fits.

        Where none is known it goes on from the present one.

        Args:
          budgets: dynamic bytes that no step may pass, in the order in which they are tried.
          evaluations: changes that may be tried, shared evenly among the budgets.

        Raises:
          OutOfTimeError: planning has a time limit, which is over.
        """
        for budget in budgets:
            fitting = [(time, peak, copies) for copies, (peak, time) in self.found.items()
                       if peak <= budget]
            if fitting and self.peak > budget or fitting and min(fitting)[0] < self.state.time:
                self.goto(min(fitting)[2])
            self.left = evaluations // len(budgets)
            self.search(budget, self.left)
            self.keep()

    def _free(self) -> frozenset[int]:
        """Leave out the copies of a window of stages, of some vertices, or a few at random.

        Returns:
          Keys of those that may not come back at once.
        """
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
        self.leave_out(chosen)
        return frozenset(chosen) if len(chosen) < 3 else frozenset((rng.choice(chosen),))

    def _force(self, budget: int) -> None:
        """Split something at an overfull step whatever that does elsewhere: for `fit` to repair."""
        splits = [split for split in self._splits(budget, NOISE) if split]
        self.left -= not splits
        if splits:
            self._try(self.rng.choice(splits))


def front(graph: CostGraph, starts: Sequence[Schedule], rungs: Sequence[float],
          evaluations: int) -> list[Schedule]:
    """Return schedules of which none is both slower and larger than another.

    Args:
      graph: joint graph.
      starts: schedules known before, over the same originals in the same order, at least one.
      rungs: where between the smallest and the largest peak a budget is tried, ascending.
      evaluations: changes that are tried, or a few more.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    search = Neighbourhood(graph, starts[0])
    for start in starts:
        search.goto(copies_of(start))
        search.keep()
    low, high = (pick(search.found, key=search.found.__getitem__) for pick in (min, max))
    most = search.found[high][0]
    search.goto(low)
    smallest = search.lower(int(evaluations * LOWER), working_set(graph))
    search.keep()
    budgets = [smallest + int(rung * (most - smallest)) for rung in (0.0, *rungs)]
    search.goto(high)
    search.sweep(budgets[::-1], int(evaluations * DOWN))
    search.sweep(budgets, int(evaluations * (1 - LOWER - DOWN)))
    found = []
    fastest = float("inf")
    for copies, (_, time) in sorted(search.found.items(), key=lambda entry: entry[1]):
        if time < fastest:
            fastest = time
            search.goto(copies)
            found.append(search.state.schedule())
    return found


def working_set(graph: CostGraph) -> int:
    """Return bytes that no schedule stays below: the most that one vertex needs by itself.

    What it reads and writes is there while it runs, but for buffers that are taken over and what
    a donor may have handed over before.

    Args:
      graph: joint graph.
    """
    donated = {s for v in graph.vertices for s in v.donates}
    most = 0
    for vertex in graph.vertices:
        size = {s: graph.storages[s].bytes for s in (*vertex.reads, *vertex.writes)
                if s not in donated}
        over = {r for _, r in vertex.reuses}
        saved = min(sum(size.get(s, 0) for s in over),
                    sum(size.get(w, 0) for w in {w for w, _ in vertex.reuses}))
        most = max(most, sum(size.values()) + vertex.workspace - saved)
    return most


def copies_of(schedule: Schedule) -> Copies:
    """Return (stage, vertex) of each copy of a schedule, each once in a stage.

    Args:
      schedule: originals and copies.
    """
    return tuple((stage, v) for stage, row in enumerate(copies_before(schedule)) for v in
    sorted(row))
