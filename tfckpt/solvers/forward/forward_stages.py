"""The forward pass as a sequence of stages between cuts, with the time and memory of each.

A cut is a place in the forward order; its storages are those made before it and read by the
forward after it. What lies between two cuts is a stage. From the storages of a cut alone, the
stages after it can be run again, which is all that recursive checkpointing asks of a graph
(`tfckpt.solvers.recursive`). `tfckpt.solvers.forward.stage_costs` builds the stages of a step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["Numbers", "Stages"]

Numbers = np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """Stages 0 .. n-1 of a forward pass; cut `m` stands before stage `m`.

    Arrays have one entry a stage, in bytes, unless stated otherwise.

    Attributes:
      made: for each storage that may be recomputed the stage that makes it; -1 for the others.
      through: for each storage the last stage in whose forward it is read: it crosses the cuts
        `made + 1 .. through`.
      residual: for each storage whether anything after the forward reads it.
      seconds: time of running the stage again.
      again: (n, k): at (i, o), o < k, the seconds of stage i in running the stages i .. i+o-1 for
        their residuals, where the cut after them is kept.
      cut: bytes that cross each cut, n + 1 of them; nothing crosses the first and the last.
      shared: (n + 1, n + 1): bytes that cross both of two cuts.
      inside: most bytes live while the stage runs, of storages that it makes itself.
      beside: the same, with the cut before it and what passes by.
      taped: as `inside`, where its residuals stay.
      taped_beside: the same, with the cut before it.
      tape: its residuals.
      handed: its residuals, and what of the next cut it makes.
      handed_beside: its residuals, and all of the next cut but residuals of earlier stages.
      backward: most bytes live in the backward of the stage, above the cut before it.
      backward_beside: the same, above the residuals of earlier stages.
      before: for each of the n + 1 cuts the bytes (gradients, and residuals that cross the cut)
        that are live when the backward of the stages before it begins; 0 for the last cut, where
        `forward` has what is live.
      forward: most other bytes live in the forward of the stage in the original pass.
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

    def running_tape(self, cut_kept: bool) -> Numbers:
        """Return bytes of running each stage for its residuals.

        Args:
          cut_kept: whether the cut before it is kept; else it is freed once it has been read.
        """
        return self.taped if cut_kept else self.taped_beside

    def after_tape(self, cut_kept: bool) -> Numbers:
        """Return bytes of each stage's residuals and of the cut after it.

        Args:
          cut_kept: whether the cut before it is kept; else it is freed once it has been read.
        """
        return self.handed if cut_kept else self.handed_beside

    def running_backward(self, cut_kept: bool) -> Numbers:
        """Return bytes of each stage's backward.

        Args:
          cut_kept: whether the cut before it is kept; else it is freed once it has been read.
        """
        return self.backward if cut_kept else self.backward_beside
