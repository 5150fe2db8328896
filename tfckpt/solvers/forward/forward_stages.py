"""The forward pass as a sequence of stages between cuts, with what each costs to run and hold.

A cut is a place in the forward order; its storages are those made before it and read by the
forward after it. What lies between two cuts is a stage. Whoever holds the storages of a cut can
run the stages after it again, which is all that recursive checkpointing asks of a graph
(`tfckpt.solvers.recursive`). `tfckpt.solvers.forward.stage_costs` makes them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["Numbers", "Stages"]

Numbers = np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """Stages 0 .. n-1 of a forward pass; cut `m` stands before stage `m`. Bytes and seconds.

    Attributes:
      made: for each storage that may be recomputed the stage that makes it; -1 for the others.
      through: the last stage in whose forward it is read: it is in the cuts `made + 1 .. through`.
      residual: for each storage whether anything behind the forward reads it.
      seconds: of running a stage again.
      again: (n, k): at (i, o), o < k, the seconds of stage i in running the stages i .. i+o-1 for
        their residuals, where the cut behind them is held.
      cut: bytes that cross each cut, n + 1 of them; nothing crosses the first and the last.
      shared: (n + 1, n + 1): bytes that cross both of two cuts.
      inside: most bytes that running the stage holds, of what it makes itself.
      beside: the same, with the cut before it and what passes by.
      taped: as `inside`, where its residuals stay.
      taped_beside: the same, with the cut before it.
      tape: its residuals.
      handed: its residuals, and what of the next cut it makes.
      handed_beside: its residuals, and all of the next cut but residuals of earlier stages.
      backward: most bytes live in the backward of the stage, above the cut before it.
      backward_beside: the same, above the residuals of earlier stages.
      before: n + 1: bytes that wait for the backward of the stages below a cut (gradients, and
        residuals of the cut) at its beginning; of the last what is live in the forward is in
        `forward`, and this is 0.
      forward: most other bytes live in the forward of each stage in the original pass.
    """

    made: tuple[int, ...]
    through: tuple[int, ...]
    residual: tuple[bool, ...]
    seconds: Numbers
    again: Numbers
    cut: Numbers
    shared: Numbers
    inside: Numbers
    beside: Numbers
    taped: Numbers
    taped_beside: Numbers
    tape: Numbers
    handed: Numbers
    handed_beside: Numbers
    backward: Numbers
    backward_beside: Numbers
    before: Numbers
    forward: Numbers

    def __len__(self) -> int:
        return len(self.seconds)

    def running_tape(self, held: bool) -> Numbers:
        """Return bytes of running each stage for its residuals.

        Args:
          held: whether the cut before it is held, or goes once it has been read.
        """
        return self.taped if held else self.taped_beside

    def behind_tape(self, held: bool) -> Numbers:
        """Return bytes of each stage's residuals and of the cut after it.

        Args:
          held: whether the cut before it is held, or goes once it has been read.
        """
        return self.handed if held else self.handed_beside

    def behind_cut(self, held: bool) -> Numbers:
        """Return bytes of each stage's backward.

        Args:
          held: whether the cut before it is held, or goes once it has been read.
        """
        return self.backward if held else self.backward_beside
