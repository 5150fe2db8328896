"""`recursive`: checkpoints inside recomputation segments, to any depth.

With one recomputation of everything the minimum memory of a chain of n stages grows as sqrt(n).
Where a stage may run r times, room for s checkpoints is enough if C(s + r, r) >= n: a few cuts are
kept in the forward pass; in the backward pass the stages after the last one are run again, and some
of their cuts are kept as well, and so on. Let M_r(i, j) be the minimum peak of the backward of the
stages i .. j-1, where the cut before stage i is kept (and not counted) and none of them runs more
than r times. It is the minimum of

* a tape: run stage i, keep its residuals, go on after it:
  max(running it, tape_i + M_r(i+1, j), backward of i);
* a checkpoint at k: run the stages up to k, keep the cut there, do the backward of what comes after
  it, then of what comes before it:
  max(running i .. k-1, cut_k + M_r(k, j), M_(r-1)(i, k)).

Bytes and seconds may differ from stage to stage. A cut that was kept stays until the backward has
read it, so a stage is not run again for what it handed on.

Complexity: O(R n^3) for n stages and R runs, in numpy; the forward is divided into `FINE` stages
at most (`tfckpt.plan.candidates`), so the total is linear in the length of a long main path.
Optimal under this model, which prices a stage by its own peaks, among schedules that keep each
checkpoint until the backward has read it. The true peak is what the simulator finds.

Source: Griewank 1992, "Achieving logarithmic growth of temporal and spatial complexity in reverse
automatic differentiation" (treeverse); Griewank and Walther 2000, algorithm 799: "Revolve" (the
binomial bound, beta(s, r) = C(s + r, r)); Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019,
"Optimal checkpointing for heterogeneous chains" (Rotor: tapes and unequal stages; persistent
schedules).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from tfckpt.solvers.forward.forward_stages import Numbers, Stages
from tfckpt.solvers.recursion import Recursion

RUNS = 4
"""Times that a stage may run at most, the original included."""
NEVER = np.iinfo(np.int64).max // 4


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The cuts and residuals that the run before the backward of a stage keeps.

    Attributes:
      cuts: numbers of cuts.
      tapes: stages whose residuals stay.
    """

    cuts: tuple[int, ...] = ()
    tapes: tuple[int, ...] = ()


Interval = tuple[int, int, int, int, bool]
"""First stage, end, times that a stage may run, bytes left, and whether the cut before is kept."""


class Tables:
    """The minimum peaks M_r(i, j) of all intervals, and the time of the schedules that reach them.

    Arrays are indexed by run limit, first stage and number of stages (`_from`), or by run limit,
    end and number of stages (`_to`), so that all intervals of one length are plain slices.
    """

    def __init__(self, stages: Stages, runs: int = RUNS) -> None:
        self.stages, self.runs = stages, runs
        count = len(stages)
        self.peak_from = np.full((runs + 1, count + 1, count + 1), NEVER, dtype=np.int64)
        self.peak_to = self.peak_from.copy()
        self.time_from = np.zeros((runs + 1, count + 1, count + 1))
        self.time_to = self.time_from.copy()
        self.tape_peak = np.full((runs + 1, count + 1, count + 1), NEVER, dtype=np.int64)
        self.tape_time = np.zeros((runs + 1, count + 1, count + 1))
        self.elapsed = np.concatenate(([0.0], np.cumsum(stages.seconds)))
        self.advance = _advance(stages.inside, stages.beside)
        self.advance_first = _advance(stages.inside + stages.forward,
                                      stages.beside + stages.forward)
        self.cost = np.zeros((count + 1, count + 1), dtype=np.int64)  # of a cut, if one is kept
        for i in range(count):
            self.cost[i, :count + 1 - i] = stages.cut[i:] - stages.shared[i, i:]
        for length in range(1, count + 1):
            for limit in range(1, runs + 1):
                self._solve(limit, length)

    def minimum(self, runs: int) -> int:
        """Return the minimum peak of the whole, bytes.

        Args:
          runs: times that a stage may run at most, from 1 to those that the tables are made for.
        """
        return int(self.peak_from[runs, 0, len(self.stages)])

    def _solve(self, limit: int, length: int) -> None:
        count = len(self.stages)
        rows = count - length + 1
        tape = self._tape(limit, length, cut_kept=False)
        self.tape_peak[limit, :rows, length], self.tape_time[limit, :rows, length] = tape
        peak, time = self._tape(limit, length)
        if length > 1 and limit > 1:
            peaks, times = self._splits(limit, length)
            minimum = peaks.min(axis=1)
            spent = np.where(peaks <= minimum[:, None], times, np.inf).min(axis=1)
            better = (minimum < peak) | (minimum == peak) & (spent < time)
            peak, time = np.where(better, minimum, peak), np.where(better, spent, time)
        self.peak_from[limit, :rows, length] = peak
        self.peak_to[limit, length:, length] = peak
        self.time_from[limit, :rows, length] = time
        self.time_to[limit, length:, length] = time

    def _run(self, running: Numbers, length: int) -> Numbers:
        """Return bytes of running the first stage of each interval of a length."""
        stages = self.stages
        rows = len(stages) - length + 1
        run: Numbers = running[:rows] + stages.before[length:]
        if length < stages.again.shape[1]:
            run[stages.again[:rows, length] == 0] = 0  # there is nothing to run
        run[-1] = running[rows - 1] + stages.forward[rows - 1]
        return run

    def _tape(self, limit: int, length: int, cut_kept: bool = True) -> tuple[Numbers, Numbers]:
        """Return peak and time of each interval of a length if its first stage is taped.

        Args:
          limit: times that a stage may run at most.
          length: stages of each interval.
          cut_kept: whether the cut before the interval is kept; else it is freed once read.
        """
        stages = self.stages
        rows = len(stages) - length + 1
        peak = np.maximum(self._run(stages.running_tape(cut_kept), length),
                          stages.running_backward(cut_kept)[:rows])
        time = stages.seconds[:rows].copy()
        if length < stages.again.shape[1]:  # after the last stage no cut is kept
            time[:-1] = stages.again[:rows - 1, length]
        if length > 1:
            more = stages.tape[:rows] + self.tape_peak[limit, 1:rows + 1, length - 1]
            less = (stages.after_tape(cut_kept)[:rows]
                    + self.peak_from[limit, 1:rows + 1, length - 1])
            time += np.where(more <= less, self.tape_time[limit, 1:rows + 1, length - 1],
                             self.time_from[limit, 1:rows + 1, length - 1])
            peak = np.maximum(peak, np.minimum(more, less))
        return peak, time

    def _splits(self, limit: int, length: int) -> tuple[Numbers, Numbers]:
        """Return peaks and times of each interval of a length (rows) for each split (columns)."""
        stages = self.stages
        rows = len(stages) - length + 1
        run = self.advance[:rows, 1:length] + stages.before[length:, None]
        run[-1] = self.advance_first[rows - 1, 1:length]
        after = self.cost[:rows, 1:length] + self.peak_to[limit, length:, length - 1:0:-1]
        before = self.peak_from[limit - 1, :rows, 1:length]
        peaks = np.maximum(np.maximum(run, after), before)
        first = np.arange(rows)[:, None]
        times = (self.elapsed[first + np.arange(1, length)] - self.elapsed[first]
                 + self.time_to[limit, length:, length - 1:0:-1]
                 + self.time_from[limit - 1, :rows, 1:length])
        return peaks, times

    # From tables to what is kept.

    def kept(self, room: int, runs: int) -> list[Kept] | None:
        """Return what each run keeps, by the stage that it leads to; None if nothing fits.

        Each interval uses the fewest runs with which it fits, and of its splits that fit the one
        of the minimum time. The run that leads to the last stage is the original one.

        Args:
          room: bytes that the peak may reach.
          runs: times that a stage may run at most.
        """
        if self.minimum(runs) > room:
            return None
        return self.kept_in([(0, len(self.stages), runs, room, True)])

    def kept_in(self, intervals: Iterable[Interval]) -> list[Kept]:
        """Return what each run keeps in intervals that fit, by the stage that it leads to.

        Args:
          intervals: each with the bytes that its peak may reach, at least its minimum peak.

        Returns:
          An entry for each stage; empty for stages that no interval's run leads to.
        """
        count = len(self.stages)
        cuts: list[list[int]] = [[] for _ in range(count)]
        tapes: list[list[int]] = [[] for _ in range(count)]
        waiting = list(intervals)
        while waiting:
            i, j, limit, left, cut_kept = waiting.pop()
            peaks = self.peak_from if cut_kept else self.tape_peak
            limit = next(r for r in range(1, limit + 1) if peaks[r, i, j - i] <= left)
            at = self._choice(i, j, limit, left) if cut_kept else i
            if at > i:
                cuts[j - 1].append(at)
                waiting.append((i, at, limit - 1, left, True))
                waiting.append((at, j, limit, left - int(self.cost[i, at - i]), True))
                continue
            tapes[j - 1].append(i)
            if j > i + 1:
                waiting.append(self._after_tape(i, j, limit, left, cut_kept))
                if waiting[-1][-1]:
                    cuts[j - 1].append(i + 1)
        return [Kept(tuple(a), tuple(b)) for a, b in zip(cuts, tapes, strict=True)]

    def _after_tape(self, i: int, j: int, limit: int, left: int, cut_kept: bool) -> Interval:
        """Return the interval after a taped stage, and whether the cut before it is kept."""
        stages, length = self.stages, j - i - 1
        found = []
        for next_kept, taken, peaks, times in (
                (False, stages.tape[i], self.tape_peak, self.tape_time),
                (True, stages.after_tape(cut_kept)[i], self.peak_from, self.time_from)):
            room = left - int(taken)
            for r in range(1, limit + 1):
                if peaks[r, i + 1, length] <= room:
                    found.append((times[r, i + 1, length], next_kept, room))
                    break
        _, next_kept, room = min(found)
        return i + 1, j, limit, room, next_kept

    def _choice(self, i: int, j: int, limit: int, room: int) -> int:
        """Return the split of an interval, or its first stage if that is taped."""
        length, row = j - i, -1 if j == len(self.stages) else i
        best, at = np.inf, i
        peak, time = self._tape(limit, length)
        if peak[row] <= room:
            best = time[row]
        if length > 1 and limit > 1:
            peaks, times = self._one_split(limit, i, j)
            fits = np.flatnonzero(peaks <= room)
            if len(fits) and times[fits].min() < best:
                at = i + 1 + int(fits[times[fits].argmin()])
        return at

    def _one_split(self, limit: int, i: int, j: int) -> tuple[Numbers, Numbers]:
        """Return what `_splits` does, for one interval."""
        stages, length = self.stages, j - i
        run = (self.advance_first[i, 1:length] if j == len(stages) else
               self.advance[i, 1:length] + stages.before[j])
        after = self.cost[i, 1:length] + self.peak_to[limit, j, length - 1:0:-1]
        peaks = np.maximum(np.maximum(run, after), self.peak_from[limit - 1, i, 1:length])
        times = (self.elapsed[i + 1:j] - self.elapsed[i]
                 + self.time_to[limit, j, length - 1:0:-1]
                 + self.time_from[limit - 1, i, 1:length])
        return peaks, times


def _advance(inside: Numbers, beside: Numbers) -> Numbers:
    """Return bytes of running the stages i .. i+o-1, at (i, o), where the cut before i is kept."""
    count = len(inside)
    found = np.zeros((count + 1, count + 1), dtype=np.int64)
    for i in range(count):
        most = np.maximum.accumulate(np.concatenate((inside[i:i + 1], beside[i + 1:])))
        found[i, 1:count + 1 - i] = most
    return found


def recursion(stages: Stages, kept: list[Kept]) -> Recursion:
    """Return the storages that runs keep, in the terms of the joint graph.

    Args:
      stages: of the forward of the joint graph.
      kept: what runs keep, by the stage that each leads to.
    """
    count = len(stages)
    crossing: list[list[int]] = [[] for _ in range(count + 1)]
    inside: list[list[int]] = [[] for _ in range(count)]
    for s, (made, through) in enumerate(zip(stages.made, stages.through, strict=True)):
        if made >= 0:
            if stages.residual[s]:
                inside[made].append(s)
            for cut in range(made + 1, through + 1):
                crossing[cut].append(s)
    return Recursion(stages.made, stages.through, tuple(
        frozenset([*(s for cut in run.cuts for s in crossing[cut]),
                   *(s for stage in run.tapes for s in inside[stage])]) for run in kept))
