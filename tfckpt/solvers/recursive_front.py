"""The fastest recursive schedules for every budget at once: what the original run keeps.

`recursive.Tables` has the minimum peak of each interval of stages; here bytes that a budget has
left over are used to save time. Let T(i, m) be the minimum time of running stages again, of the
stages i .. n-1, where the cut before stage i is kept (and not counted) and m bytes are left. It is
the minimum of

* a tape of stage i: T(i+1, m - tape_i);
* a checkpoint at k: T(k, m - cut_k) + the time of the stages i .. k-1, run again with as few runs
  as m bytes allow (their minimum peak at one, two ... more runs is in the tables).

The intervals between checkpoints take the schedules of their minimum peaks, not the fastest that
fit: with at most two runs, where an interval is run again as a whole, both are the same, and no
schedule that keeps each checkpoint until the backward has read it is faster. Bytes are counted in
`SLOTS` equal parts of the largest budget, rounded.

Complexity: O(R n^2 SLOTS) for n stages and R runs, in numpy.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for
heterogeneous chains" (Rotor): the recursion over persistent schedules of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tfckpt.solvers.forward.forward_stages import Numbers, Stages
from tfckpt.solvers.recursion import Recursion
from tfckpt.solvers.recursive import RUNS, Kept, Tables, recursion

SLOTS = 400
SCARCE = 3
"""Memory is scarce below so many times the minimum peak at two runs."""


class Times:
    """T(i, m) for all m up to a budget.

    Args:
      most: bytes of the largest budget.
      runs: times that a stage may run at most.
    """

    def __init__(self, tables: Tables, most: int, runs: int) -> None:
        self.tables, self.runs = tables, runs
        count = len(tables.stages)
        self.unit = max(most / SLOTS, 1e-9)
        self.rooms = np.arange(SLOTS + 1) * self.unit
        # of the stages from each on; index 0: its cut is freed once it has been read, 1: it is kept
        self.time = np.full((2, count + 1, SLOTS + 1), np.inf)
        # whether the next cut is kept after a tape
        self.next_kept = np.zeros((2, count + 1, SLOTS + 1), dtype=bool)
        self.split = np.zeros((count + 1, SLOTS + 1), dtype=np.int32)
        self.time[:, count] = 0.0
        for i in range(count - 1, -1, -1):
            for cut_kept in (False, True):
                self._tape(i, cut_kept)
            self._splits(i)

    def _tape(self, i: int, cut_kept: bool) -> None:
        stages = self.tables.stages
        time = np.zeros(SLOTS + 1)
        if i + 1 < len(stages):
            freed = self._less(self.time[0, i + 1], int(stages.tape[i]))
            kept = self._less(self.time[1, i + 1], int(stages.after_tape(cut_kept)[i]))
            time = np.minimum(freed, kept)
            self.next_kept[int(cut_kept), i] = kept < freed
        needed = max(stages.running_tape(cut_kept)[i] + stages.forward[i],
                     stages.running_backward(cut_kept)[i])
        self.time[int(cut_kept), i] = np.where(self.rooms >= needed, time, np.inf)
        self.split[i] = i

    def _splits(self, i: int) -> None:
        tables, rooms = self.tables, self.rooms
        time, split = self.time[1, i], self.split[i]
        for k in range(i + 1, len(tables.stages)):
            length = k - i
            minimum = tables.advance_first[i, length]
            again = np.full(SLOTS + 1, np.inf)
            for runs in range(self.runs - 1, 0, -1):
                fits = rooms >= max(minimum, tables.peak_from[runs, i, length])
                again[fits] = tables.time_from[runs, i, length]
            found = self._less(self.time[1, k], int(tables.cost[i, length])) + again
            better = found < time
            time[better] = found[better]
            split[better] = k

    def _slots(self, size: int) -> int:
        return min(round(size / self.unit), SLOTS + 1)

    def _less(self, time: Numbers, size: int) -> Numbers:
        """Return `time` for budgets that are smaller by `size` bytes."""
        taken = self._slots(size)
        return np.concatenate((np.full(taken, np.inf), time[:SLOTS + 1 - taken]))

    def of(self, room: int) -> float:
        """Return the time spent on running stages again within so many bytes.

        It is infinite where no schedule fits.

        Args:
          room: bytes that the peak may reach.
        """
        return float(self.time[1, 0, min(int(room / self.unit), SLOTS)])

    def rooms_for(self, slowest: float, count: int) -> list[int]:
        """Return about `count` budgets, ascending, whose times fall evenly from below `slowest`.

        Args:
          slowest: seconds that the times must stay below; infinite for no limit.
          count: budgets that are wanted; there may be fewer.

        Returns:
          Bytes; empty where no time is below `slowest`.
        """
        time = self.time[1, 0]
        better = np.flatnonzero((time[1:] < time[:-1]) & (time[1:] < slowest)) + 1
        if not len(better):
            return []
        first, last = time[better[0]], time[better[-1]]
        wanted = np.linspace(first, last, count)
        chosen = {int(better[time[better] <= most + 1e-12][0]) for most in wanted}
        return [math.ceil(slot * self.unit) for slot in sorted(chosen)]

    def kept(self, room: int) -> list[Kept] | None:
        """Return what each run keeps within so many bytes (`Tables.kept`); None if nothing fits.

        Args:
          room: bytes that the peak may reach.
        """
        tables, stages = self.tables, self.tables.stages
        count = len(stages)
        if not np.isfinite(self.of(room)):
            return None
        left = min(int(room / self.unit), SLOTS)
        cuts: list[int] = []
        tapes: list[int] = []
        inner = []
        i, cut_kept = 0, True
        while i < count:
            k = int(self.split[i, left]) if cut_kept else i
            if k > i:
                cuts.append(k)
                inner.append((i, k, self.runs - 1, int(left * self.unit), True))
                left -= self._slots(int(tables.cost[i, k - i]))
                i = k
                continue
            tapes.append(i)
            next_kept = bool(self.next_kept[int(cut_kept), i, left])
            taken = (stages.after_tape(cut_kept) if next_kept else stages.tape)[i]
            left -= self._slots(int(taken))
            i, cut_kept = i + 1, next_kept
            if cut_kept and i < count:
                cuts.append(i)
        found = tables.kept_in(inner)
        return [*found[:-1], Kept(tuple(cuts), tuple(tapes))]


def proposals(fine: Stages, coarse: Stages, count: int, runs: int = RUNS
              ) -> Iterator[Recursion]:
    """Yield the schedules of the minimum peaks, and the fastest for about `count` budgets.

    Budgets are dense where memory is scarce, from the minimum peak at `runs` runs to that of
    keeping everything.

    Args:
      fine: stages for the minimum peaks, which take the cube of their number.
      coarse: stages for all budgets, which take more for each: `fine`, or fewer.
      count: budgets, about.
      runs: times that a stage may run at most.
    """
    if not len(fine):
        return
    tables = Tables(fine, runs)
    for limit in range(2, runs + 1):
        if tables.minimum(limit) < tables.minimum(limit - 1):
            yield recursion(fine, tables.kept(tables.minimum(limit), limit) or [])
    if coarse is not fine:
        tables = Tables(coarse, runs)
    slowest = np.inf
    for most in (min(SCARCE * tables.minimum(2), tables.minimum(1)), tables.minimum(1)):
        times = Times(tables, most, runs)
        for room in times.rooms_for(slowest, count // 2):
            kept = times.kept(room)
            if kept is not None:
                slowest = times.of(room)
                yield recursion(coarse, kept)
