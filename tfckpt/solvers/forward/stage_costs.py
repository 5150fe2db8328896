"""`stages_of`: divides a forward pass into stages and prices each.

Of a long main path only some cuts are taken, so that the stages have about the same number of
bytes: a stage ends where few bytes cross. What is live while a stage runs, or its backward, is
taken from one simulation of the plain step in the planned order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.ir.schedule import resolve
from tfckpt.simulate.simulate import simulate_order
from tfckpt.solvers.forward.forward_stages import Numbers, Stages
from tfckpt.solvers.forward.side_chains import side_chains_first
from tfckpt.solvers.recursion import turning_point

__all__ = ["stages_of"]

NEAR = 16
"""Stages before a kept cut whose vertices are priced one by one."""
FAR_STAGES, FAR_PART = 4, 8
"""A read of the backward is early if a later one needs a stage that is higher by more than
max(FAR_STAGES, stages // FAR_PART)."""
NEGLIGIBLE = 20
"""Early reads are kept as long as they are less than 1/20 of all residual bytes."""


def stages_of(graph: CostGraph, order: Sequence[int], limit: int) -> Stages:
    """Return the stages of a graph whose originals run in `order`.

    Args:
      graph: joint graph.
      order: every vertex but released joins (`tfckpt.simulate.order.base_order`).
      limit: stages at most, about.

    Complexity: O(V log V + n^2) for n stages, and one simulation.
    """
    return _Builder(graph, order).build(limit)


class _Builder:
    """Builds `Stages` from the places of each storage in the order and in the forward pass."""

    def __init__(self, graph: CostGraph, order: Sequence[int]) -> None:
        self.graph, self.order = graph, order
        vertices = graph.vertices
        count = len(graph.storages)
        self.turn = turning_point(graph, order)
        self.ahead = side_chains_first(
            graph, [v for v in order[:self.turn] if vertices[v].region == FORWARD])
        self.place = {v: f for f, v in enumerate(self.ahead)}
        self.maker = np.full(count, -1)  # place in the forward pass
        self.reader = np.full(count, -1)  # the last one there
        self.late = np.full(count, -1)  # the last reader after the forward, in the order
        self.last = np.full(count, -1)  # the last of all, or the end for what is fetched
        self.born = np.full(count, -1)
        self.bytes = np.array([s.bytes for s in graph.storages], dtype=np.int64)
        for position, v in enumerate(order):
            for s in vertices[v].writes:
                self.born[s] = self.last[s] = position
                if s in graph.droppable and v in self.place:
                    self.maker[s] = self.reader[s] = self.place[v]
            for s in vertices[v].reads:
                self.last[s] = position
                if v in self.place:
                    self.reader[s] = max(self.reader[s], self.place[v])
                elif position >= self.turn:
                    self.late[s] = position
        for s, storage in enumerate(graph.storages):
            if storage.fetched:
                self.last[s] = len(order)
        self.free = np.flatnonzero(self.maker >= 0)  # storages that may be recomputed
        self.taped = self.free[self.late[self.free] >= 0]

    def build(self, limit: int) -> Stages:
        ends, made, through = self._divided(limit)
        if self._keep_early(len(ends), through):
            ends, made, through = self._divided(limit)
        count = len(ends)
        cut, shared = _crossing(count, made, through, self.bytes)
        other = self._other_bytes()
        forward = np.zeros(count, dtype=np.int64)
        position_of = {v: position for position, v in enumerate(self.order)}
        for number, span in enumerate(_spans(ends)):
            forward[number] = max(other[position_of[v]] for v in self.ahead[slice(*span)])
        backward, backward_beside, before = self._backward(count, made, through, other)
        seconds, again = self._seconds(ends, made, through)
        inside, beside, taped, taped_beside, tape, handed, handed_beside = self._running(
            ends, made, through)
        return Stages(tuple(made.tolist()), tuple(through.tolist()),
                      tuple((self.late >= 0).tolist()), seconds, again, cut, shared, inside, beside,
                      taped, taped_beside, tape, handed, handed_beside, backward, backward_beside,
                      before, forward)

    def _divided(self, limit: int) -> tuple[list[int], Numbers, Numbers]:
        """Return (last place of each stage, `made`, `through`)."""
        ends = self._ends(limit)
        stage_at = np.repeat(np.arange(len(ends)), [b - a for a, b in _spans(ends)])
        made = np.full(len(self.bytes), -1)
        through = np.full(len(self.bytes), -1)
        made[self.free] = stage_at[self.maker[self.free]]
        through[self.free] = stage_at[self.reader[self.free]]
        return ends, made, through

    def _keep_early(self, count: int, through: Numbers) -> bool:
        """Exempt storages that the backward reads long before their stage's turn.

        Backward vertices that depend on labels or shapes alone can run before any gradient is
        there. What they read would ask for an early stage first. These storages are small, so they
        are kept in any case.

        Returns:
          Whether there were any.
        """
        free = frozenset(self.free.tolist())
        highest, early = 0, set[int]()  # the highest stage that is asked for from here on
        far = max(FAR_STAGES, count // FAR_PART)
        for v in reversed(self.order[self.turn:]):
            asked = [(int(through[s]), s) for s in self.graph.vertices[v].reads if s in free]
            early.update(s for stage, s in asked if stage < highest - far)
            highest = max([highest, *(stage for stage, _ in asked)])
        left = self.bytes[self.taped].sum() // NEGLIGIBLE
        kept = []
        for s in sorted(early, key=lambda s: (self.bytes[s], s)):
            left -= self.bytes[s]
            if left >= 0:
                kept.append(s)
        self.maker[kept] = self.reader[kept] = -1
        self.free = np.setdiff1d(self.free, kept)
        self.taped = np.setdiff1d(self.taped, kept)
        return bool(kept)

    def _ends(self, limit: int) -> list[int]:
        """Return the places in the forward pass after which a stage ends; the last is among them.

        Each is the narrowest place within one of `limit` equal parts of the residuals' bytes; of
        equally narrow ones that whose storages the backward reads anyway, then the last.
        """
        places = len(self.ahead)
        if not places:
            return []
        crossing = self._alive(self.free, self.maker, self.reader, places)
        unread = self.free[self.late[self.free] < 0]
        extra = self._alive(unread, self.maker, self.reader, places)
        weight = np.zeros(places, dtype=np.int64)
        np.add.at(weight, self.maker[self.taped], self.bytes[self.taped])
        if not weight.any():
            weight += 1
        changed = np.zeros(places, dtype=bool)  # what crosses is not what crossed before
        passed = self.free[self.reader[self.free] > self.maker[self.free]]
        changed[self.maker[passed]] = changed[self.reader[passed]] = True
        part = (np.cumsum(weight) - 1) * limit // int(weight.sum())
        best: dict[int, tuple[int, int, int]] = {}
        for place in range(places - 1):
            if changed[place]:
                key = (int(crossing[place]), int(extra[place]), -place)
                number = int(part[place]) if places > limit else place
                if number not in best or key < best[number]:
                    best[number] = key
        return sorted(-key[2] for key in best.values()) + [places - 1]

    def _alive(self, storages: Numbers, start: Numbers, stop: Numbers, length: int) -> Numbers:
        """Return bytes of storages that are made at or before each place and read after it."""
        change = np.zeros(length + 1, dtype=np.int64)
        np.add.at(change, start[storages], self.bytes[storages])
        np.add.at(change, stop[storages], -self.bytes[storages])
        return np.cumsum(change)[:length]

    def _other_bytes(self) -> Numbers:
        """Return live bytes at each position of the order, without droppable storages."""
        steps = tuple((v, 0) for v in self.order)
        length = len(self.order)
        live = simulate_order(self.graph, resolve(self.graph, steps), None).live_bytes
        droppable = self._alive(self.free, self.born, np.minimum(self.last + 1, length), length)
        rest: Numbers = np.maximum(np.array(live, dtype=np.int64) - droppable, 0)
        return rest

    def _seconds(self, ends: Sequence[int], made: Numbers, through: Numbers
                 ) -> tuple[Numbers, Numbers]:
        """Return (seconds, again) of each stage."""
        spans = _spans(ends)
        seconds = np.array([sum(self._time(f) for f in range(*span)) for span in spans])
        again = np.repeat(seconds[:, None], NEAR + 1, axis=1)
        for cut in range(1, len(ends)):
            wanted: set[int] = set()  # storages that have to be made again
            for stage in range(cut - 1, max(cut - NEAR, 0) - 1, -1):
                again[stage, cut - stage] = self._needed(spans[stage], cut, made, through, wanted)
                if again[stage, cut - stage] == seconds[stage] > 0:
                    break  # as if nothing were kept
        return seconds, again

    def _needed(self, span: tuple[int, int], cut: int, made: Numbers, through: Numbers,
                wanted: set[int]) -> float:
        """Return seconds of what a stage runs for its residuals and for the storages in `wanted`.

        Adds to `wanted` what these vertices read of earlier stages.
        """
        total = 0.0
        for place in range(span[1] - 1, span[0] - 1, -1):
            vertex = self.graph.vertices[self.ahead[place]]
            if any(s in wanted or self.late[s] >= 0 and through[s] < cut for s in vertex.writes):
                total += self._time(place)
                wanted.update(s for s in vertex.reads if 0 <= made[s] < cut and through[s] < cut)
        return total

    def _time(self, place: int) -> float:
        vertex = self.graph.vertices[self.ahead[place]]
        return vertex.time if vertex.recomputable else 0.0

    def _running(self, ends: Sequence[int], made: Numbers, through: Numbers
                 ) -> tuple[Numbers, ...]:
        """Return (inside, beside, taped, taped_beside, tape, handed, handed_beside) by stage."""
        limits = np.array([*ends, 0])[made]
        crosses = through > made
        residual = self.late >= 0
        own = np.where(crosses, limits, self.reader)
        kept = np.where(crosses | residual, limits, self.reader)
        # a residual that crosses the cut after its stage was kept there
        again = self.free[~(residual & crosses)[self.free]]
        earlier = self.free[crosses[self.free]]
        inside = self._most(ends, [(self.free, self.maker, own)], made)
        beside = self._most(ends, [(self.free, self.maker, self.reader)])
        taped = self._most(ends, [(again, self.maker, kept)], made)
        wide = self._most(ends, [(again, self.maker, kept),
                                 (earlier, limits + 1, np.where(residual, -1, self.reader))])
        tape, handed, passing = np.zeros((3, len(ends) + 1), dtype=np.int64)
        np.add.at(tape, made[self.taped], self.bytes[self.taped])
        stays = self.free[(residual | crosses)[self.free]]
        np.add.at(handed, made[stays], self.bytes[stays])
        brief = earlier[~residual[earlier]]  # passes stages after the one that made it
        np.add.at(passing, made[brief] + 1, self.bytes[brief])
        np.add.at(passing, through[brief], -self.bytes[brief])
        return (inside, beside, taped, np.maximum(taped, wide), tape[:-1], handed[:-1],
                handed[:-1] + np.cumsum(passing)[:-1])

    def _most(self, ends: Sequence[int], lifetimes: Sequence[tuple[Numbers, Numbers, Numbers]],
              made: Numbers | None = None) -> Numbers:
        """Return the peak of the forward of each stage, bytes.

        Args:
          ends: place in the forward pass of the last vertex of each stage.
          lifetimes: storages, and the first and last place at which each is live.
          made: stage that makes each storage, so that a buffer is reused only within one stage;
            None if it may be reused by any stage.
        """
        row = np.array([self.graph.vertices[v].workspace for v in self.ahead], dtype=np.int64)
        stop = np.full(len(self.bytes), -1)
        for storages, first, last in lifetimes:
            alive = storages[last[storages] >= first[storages]]
            row += self._alive(alive, first, last + 1, len(row) + 1)[:len(row)]
            stop[alive] = np.maximum(stop[alive], last[alive])
        for place, v in enumerate(self.ahead):
            taken: set[int] = set()
            for written, read in self.graph.vertices[v].reuses:
                if (stop[read] == place and self.maker[read] >= 0 and not {written, read} & taken
                        and self.bytes[written] == self.bytes[read]
                        and (made is None or made[read] == made[written])):
                    taken |= {written, read}
                    row[place] -= self.bytes[read]
        return np.array([int(row[a:b].max()) for a, b in _spans(ends)], dtype=np.int64)

    def _backward(self, count: int, made: Numbers, through: Numbers, other: Numbers
                  ) -> tuple[Numbers, Numbers, Numbers]:
        """Return (backward, backward_beside, before) of stages and cuts.

        What crosses the cut before a stage is counted with that cut, not here. The part of it that
        the previous stage made is freed once the backward has read it, since only that stage could
        still need it; these bytes are deducted.
        """
        backward = np.zeros(count, dtype=np.int64)
        before = np.zeros(count + 1, dtype=np.int64)
        waiting = self._waiting()
        # bytes still to be read, by the stage that made it, and of them what crosses to the next
        tape, passed = np.zeros((2, count + 1), dtype=np.int64)
        crosses = through > made
        np.add.at(tape, made[self.taped], self.bytes[self.taped])
        np.add.at(passed, made[self.taped], self.bytes[self.taped] * crosses[self.taped])
        whole = passed.copy()
        leaving = sorted(self.taped.tolist(), key=lambda s: -self.late[s])
        now = count
        for position, stage in self._turns(count, through):
            while leaving and self.late[leaving[-1]] < position:
                s = leaving.pop()
                tape[made[s]] -= self.bytes[s]
                passed[made[s]] -= self.bytes[s] * crosses[s]
            for cut in range(now, stage, -1):  # the backward of the stages before this cut begins
                if cut < count:
                    crossing = self.taped[(made[self.taped] < cut) & (cut <= through[self.taped])
                                          & (self.late[self.taped] >= position)]
                    before[cut] = (waiting[position] + tape[cut:].sum()
                                   + self.bytes[crossing].sum())
            now = min(now, stage)
            gone = whole[stage - 1] - passed[stage - 1]  # of stage 0 none: the last entry is empty
            backward[stage] = max(backward[stage], other[position] + tape[stage:].sum() - gone)
        brief = np.zeros(count + 1, dtype=np.int64)
        unread = self.free[(self.late[self.free] < 0) & crosses[self.free]]
        np.add.at(brief, made[unread] + 1, self.bytes[unread])
        return np.maximum(backward - brief[:count], 0), backward, before

    def _turns(self, count: int, through: Numbers) -> list[tuple[int, int]]:
        """Return (position, stage whose residuals it needs) of each step after the forward."""
        now, found = count - 1, []
        free = set(self.free.tolist())
        for position in range(self.turn, len(self.order)):
            v = self.order[position]
            asked = [int(through[s]) for s in self.graph.vertices[v].reads if s in free]
            now = max((stage for stage in asked if stage < now), default=now)
            found.append((position, now))
        return found

    def _waiting(self) -> Numbers:
        """Return bytes made before each position and read at it or later.

        Storages that may be recomputed are left out.
        """
        fixed = np.setdiff1d(np.arange(len(self.bytes)), self.free)
        fixed = fixed[self.born[fixed] >= 0]
        change = np.zeros(len(self.order) + 2, dtype=np.int64)
        np.add.at(change, self.born[fixed] + 1, self.bytes[fixed])
        np.add.at(change, self.last[fixed] + 1, -self.bytes[fixed])
        return np.cumsum(change)


def _crossing(count: int, made: Numbers, through: Numbers, size: Numbers
              ) -> tuple[Numbers, Numbers]:
    """Return the bytes that cross each cut, and those that cross both of each two cuts."""
    change = np.zeros((count + 2, count + 2), dtype=np.int64)
    passing = np.flatnonzero((made >= 0) & (through > made))
    first, last, weight = made[passing] + 1, through[passing] + 1, size[passing]
    for rows, columns, sign in ((first, first, 1), (first, last, -1), (last, first, -1),
                                (last, last, 1)):
        np.add.at(change, (rows, columns), sign * weight)
    shared = change.cumsum(axis=0).cumsum(axis=1)[:count + 1, :count + 1]
    return shared.diagonal().copy(), shared


def _spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *(end + 1 for end in ends)]))
