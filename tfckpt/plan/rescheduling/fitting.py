"""A schedule that splits make smaller and merges faster.

A schedule is the copies that run before each original
(`tfckpt.plan.rescheduling.incremental`). Two moves:

* *split*: what is live at an overfull step, but not used there, is made again just before its next
  use, together with those of its inputs that are gone by then, or without; or these are made stages
  before, where there is room for what they need;
* *merge*: copies are left out, and their readers read the instances before them.

`Fitter.fit` splits until a budget is met, by bytes saved (summed over the steps above the budget)
for each second spent; `Fitter.speed_up` merges while it is met. Deterministic: the random numbers
have a fixed seed, limits count evaluations.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule, copies_before
from tfckpt.plan.rescheduling.incremental import CopySchedule

WIDTH = 24
"""Storages live at an overfull step that are tried at most, the largest."""
SLACK = 1e-9
"""Of the plain time: smaller differences come from adding up floats."""
AHEAD = 150
"""Originals up to which a split with inputs made ahead is always tried. In larger graphs, where
evaluations are few for each, it is tried as much less often."""
ANYWHERE = 0.5
"""Share of the inputs made ahead, with noise, that are made in any stage and not the emptiest."""
AT_ONCE = 0.1
"""Changes for each original from which a schedule is made anew, and not change by change."""
Copies = tuple[tuple[int, int], ...]


class Fitter:
    """A schedule that splits and merges change, one order of originals kept.

    Attributes:
      left: evaluations left, of the changes that are tried.
      ahead: whether inputs of copies may be made ahead of these.
    """

    def __init__(self, graph: CostGraph, schedule: Schedule, seed: int = 1, ahead: bool = True
                 ) -> None:
        self.graph, self.ahead = graph, ahead
        order = [v for v, copy in schedule if not copy]
        self.state = CopySchedule(graph, order, copies_of(schedule))
        self.rng = random.Random(seed)
        self.left = 0
        self.slack = SLACK * sum(graph.vertices[v].time for v in order)
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

    def copies(self) -> Copies:
        """Return (stage, vertex) of each copy."""
        state = self.state
        return tuple((key // state.stride, state.vertex(key)) for key in sorted(state.copies))

    def goto(self, copies: Iterable[tuple[int, int]]) -> None:
        """Make a known schedule the present one; each copy that comes or goes is a change.

        Args:
          copies: (stage, vertex) of each copy, as `copies` or `copies_of` returns them.
        """
        state = self.state
        wanted = {state.key(v, stage): (v, stage) for stage, v in copies}
        gone = [key for key in state.copies if key not in wanted]
        come = [made for key, made in wanted.items() if key not in state.copies]
        self.left -= 1 + len(gone) + len(come)
        if len(gone) + len(come) > AT_ONCE * len(state.order):
            missing = set(gone)
            state.become([*(key for key in state.copies if key not in missing),
                          *(state.key(v, stage) for v, stage in come)])
            return
        for key in gone:
            state.remove(key)
            state.log.clear()
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
        excess = self.excess(budget)
        while excess and self.left > 0:
            if not self._split(budget, excess, most, tabu, noise):
                return False
            excess = self.excess(budget)
        return not excess

    def _split(self, budget: int, excess: int, most: float, tabu: Collection[int], noise: float
               ) -> bool:
        """Add the cheapest split for each byte that it saves; return whether there is one.

        Tried are those alone whose bound is below the price of the cheapest so far.
        """
        state = self.state
        before, mark, price = state.time, len(state.log), float("inf")
        best: Sequence[int] = ()
        tried: Sequence[int] = ()
        for bound, split, factor in self._by_price(budget, tabu, noise):
            if bound >= price:
                break
            state.undo(mark)
            self._try(split)
            tried, saved = split, excess - self.excess(budget)
            if saved > 0 and state.time < most:
                cost = factor * (state.time - before + self.slack) / saved
                if cost < price:
                    best, price = split, cost
        if best is not tried:
            state.undo(mark)
            self._try(best)
        return bool(best)

    def _by_price(self, budget: int, tabu: Collection[int], noise: float
                  ) -> list[tuple[float, tuple[int, ...], float]]:
        """Return a lower bound of each split's price, the split, and what noise multiplies by.

        The likeliest come first; each counts as tried, since the bound is the better part of that.
        """
        state, vertices = self.state, self.graph.vertices
        splits = [split for split in self._splits(budget, noise)
                  if split and not any(key in tabu for key in split)]
        self.left -= len(splits)
        above = state.live > budget
        count = np.concatenate(((0,), np.cumsum(above))).tolist()
        most = np.concatenate(((0,), np.cumsum(np.where(above, state.live - budget, 0)))).tolist()
        found = []
        for number, split in enumerate(splits):
            factor = self.rng.uniform(1, 1 + noise) if noise else 1.0
            saved = self._most_saved(split, count, most)
            if saved > 0:
                time = sum(vertices[state.vertex(key)].time for key in split)
                found.append((factor * (time + self.slack) / saved, number, factor))
        return [(bound, splits[number], factor) for bound, number, factor in sorted(found)]

    def _most_saved(self, split: Sequence[int], count: Sequence[int], most: Sequence[int]) -> int:
        """Return the excess that a split saves at most.

        What a copy makes need not be live since its last use; what it reads has to be until then.

        Args:
          split: keys of copies that are not there.
          count: before each step, how many steps are above the budget.
          most: before each step, by how many bytes they are above it, together.
        """
        state, vertices = self.state, self.graph.vertices
        keys, size = state.keys, state.size
        saved = above = 0
        read: dict[int, int] = {}
        made: set[int] = set()
        for key in split:
            vertex = vertices[state.vertex(key)]
            read.update((s, key) for s in vertex.reads if size[s] and s not in made)
            made.update(vertex.writes)
            end = bisect_left(keys, key)
            for s in vertex.writes:
                if size[s]:
                    begin = bisect_left(keys, state.last_use(s, key))
                    saved += size[s] * (count[end] - count[begin])
                    above += most[end] - most[begin]
        for s, key in read.items():
            if not self.graph.storages[s].fetched:
                last = state.instance(s, key)[1]
                if last < key:
                    saved -= size[s] * (count[bisect_left(keys, key)]
                                        - count[bisect_right(keys, last)])
        return min(saved, above)

    def _try(self, split: Sequence[int]) -> None:
        for key in split:
            self.state.add(self.state.vertex(key), key // self.state.stride)

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
        fullest = self._most_live()
        for s, use in across:
            producer = self.graph.storages[s].producer
            for deep in (True, False):
                found[self._closure(producer, use // state.stride, now, deep)] = None
            early = self._while_inputs_live(producer, now, use)
            if early is not None:
                found[(early,)] = None
            if self.ahead and self.rng.random() * len(state.order) < AHEAD:
                found[self._inputs_ahead(producer, now, use, fullest, noise)] = None
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

    def _inputs_ahead(self, vertex: int, now: int, use: int, fullest: np.ndarray, noise: float
                      ) -> tuple[int, ...]:
        """Return a copy before the next use, and one of each input that is gone, stages before.

        They are made in the emptiest stage, with noise in any, and with what they need; nothing
        where no stage is between, or all inputs are there.
        """
        state = self.state
        begin, end = now // state.stride + 1, use // state.stride
        gone = [s for s in self.graph.vertices[vertex].reads if self._is_gone(s, use, now)]
        if begin >= end or not gone:
            return ()
        stage = self.rng.randrange(begin, end) if noise and self.rng.random() < ANYWHERE else (
            begin + int(fullest[begin:end].argmin()))
        made = {key: None for s in gone for key in self._closure(
            self.graph.storages[s].producer, stage, now, True)}
        last = state.key(vertex, end)
        return tuple(sorted((*made, *(() if last in state.copies else (last,)))))

    def _most_live(self) -> np.ndarray:
        """Return the most bytes that are live in each stage."""
        state = self.state
        begins = np.searchsorted(state.keys, np.arange(len(state.order)) * state.stride)
        return np.maximum.reduceat(state.live, begins)

    def _is_gone(self, s: int, at: int, now: int) -> bool:
        """Return whether what a step reads is unused since another, and can be made again."""
        storage = self.graph.storages[s]
        if storage.fetched or not self.graph.vertices[storage.producer].recomputable:
            return False
        start, last = self.state.instance(s, at)
        return start < now and last < now

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
                if self._is_gone(s, key, now):
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


def copies_of(schedule: Schedule) -> Copies:
    """Return (stage, vertex) of each copy of a schedule, each once in a stage.

    Args:
      schedule: originals and copies.
    """
    return tuple((stage, v) for stage, row in enumerate(copies_before(schedule)) for v in
    sorted(row))
