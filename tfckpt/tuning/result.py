"""The measurements of tuning, as values: plans that ran, and which of them is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfckpt.report.values import Front
from tfckpt.request.budget import format_bytes

PLAIN = "plain"
NEAR_MINIMUM = 1.02
"""With budget="min": how far above the smallest measured peak counts as the same, since peaks of
one and the same step scatter by so much."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A plan, and what a few of its steps took.

    Attributes:
      name: the budget that it was planned for, or "plain".
      expected_bytes: the peak that was simulated; None of the plain step.
      peak_bytes: the median of the measured peaks above what is allocated when a step begins;
        None where it did not run.
      seconds: the median of the measured steps; None where it did not run.
      failure: why it did not run, such as "out of memory"; else "".
      most_bytes: the largest of the measured peaks, which has to fit; None where the median has to:
        of the plain step, whose own median a budget may be.
    """

    name: str
    expected_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    failure: str = ""
    most_bytes: int | None = None

    @property
    def counted_bytes(self) -> int | None:
        """Return the peak that has to fit; None where it did not run."""
        return self.peak_bytes if self.most_bytes is None else self.most_bytes

    def fits(self, allowed: int | None) -> bool:
        """Return whether it ran, and its measured peaks are within some bytes.

        Args:
          allowed: bytes above what the step starts with; None for any.

        Returns:
          False where it did not run.
        """
        counted = self.counted_bytes
        return counted is not None and (allowed is None or counted <= allowed)

    def line(self, plain: Measured) -> str:
        """Return what was measured, in a line.

        Args:
          plain: what was measured of the plain step, to which peak and time are compared.

        Returns:
          The name, and peak and time, or why it did not run.
        """
        if self.peak_bytes is None or self.seconds is None:
            return f"{self.name:<16} {self.failure}"
        known = plain is not self and plain.name != self.name
        share = f" ({self.peak_bytes / plain.peak_bytes:.2f} of plain)" if (
            known and plain.peak_bytes) else ""
        slower = f", {self.seconds / plain.seconds:.2f}x" if known and plain.seconds else ""
        return (f"{self.name:<16} {format_bytes(self.peak_bytes):>10}{share}, "
                f"{1000 * self.seconds:.0f} ms{slower}")


def choice(rows: Sequence[Measured], allowed: int | None) -> Measured | None:
    """Return the fastest whose measured peaks fit; None where none does.

    Where no plan's largest peak fits, medians count.

    Args:
      rows: what was measured of the plain step and of plans.
      allowed: bytes; None for the smallest peak: what is within `NEAR_MINIMUM` of it fits.

    Returns:
      One of the rows.
    """
    ran = [row for row in rows if row.fits(None)]
    if allowed is None and ran:
        allowed = int(NEAR_MINIMUM * min(row.counted_bytes or 0 for row in ran))
    fitting = [row for row in ran if row.fits(allowed)] or [
        row for row in ran if allowed is not None and (row.peak_bytes or 0) <= allowed]
    return min(fitting, key=lambda row: (row.seconds or 0.0, row.peak_bytes or 0), default=None)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of tuning.

    Attributes:
      name: of the step.
      asked: the budget, as it was asked for.
      allowed_bytes: what a measured peak may be, above what a step starts with; None for "min".
      plain: the plain step.
      plans: those that were tried, in order; plans equal to one before are left out.
      chosen: the fastest whose measured peak fits; the plain step perhaps.
      front: the planned front.
      seconds: how long all of it took.
      complete: whether all was tried that was to be tried within the time limit.
      made: the day on which it was measured, where it was kept; "" where it was measured just now.
    """

    name: str
    asked: str
    allowed_bytes: int | None
    plain: Measured
    plans: tuple[Measured, ...]
    chosen: Measured
    front: Front
    seconds: float
    complete: bool = True
    made: str = ""

    def __str__(self) -> str:
        allowed = "" if self.allowed_bytes is None else (
            f", {format_bytes(self.allowed_bytes)} above what it starts with")
        rest = "" if self.complete else "; the time limit was over before all plans were tried"
        rest += f"; measured on {self.made} and kept" if self.made else ""
        rows = [f"  {'->' if row is self.chosen else '  '} {row.line(self.plain)}"
                f"{self._why_not(row)}" for row in (self.plain, *self.plans)]
        return "\n".join([f"tfckpt tuned {self.name} in {self.seconds:.1f} s (asked for "
                          f"{self.asked}{allowed}){rest}", *rows])

    def _why_not(self, row: Measured) -> str:
        """Return why a plan that ran could not be taken; "" where it could, or did not run."""
        if row is self.chosen or row.counted_bytes is None or row.fits(self.allowed_bytes):
            return ""
        return f", above the budget: {format_bytes(row.counted_bytes)} in a step"

    @property
    def summary(self) -> str:
        """Return what was chosen, in a line."""
        row = " ".join(self.chosen.line(self.plain).split())
        plans = "1 plan" if len(self.plans) == 1 else f"{len(self.plans)} plans"
        return (f"{self.name}: of the plain step and {plans} that ran, {row} was chosen, tuned in "
                f"{self.seconds:.0f} s")

    def plot(self, path: str) -> None:
        """Draw measured peaks and times beside the planned front into a file (png, svg, pdf).

        Args:
          path: of the file; its ending chooses the format.

        Raises:
          TfckptError: matplotlib is not installed, or the path names no kind of picture.
          OSError: the file cannot be written.
        """
        from tfckpt.report import pictures

        figure = pictures.front_figure(self.front)
        pictures.add_measured(figure, [
            (row.peak_bytes, row.seconds / self.plain.seconds - 1.0)
            for row in (self.plain, *self.plans)
            if row.peak_bytes is not None and row.seconds and self.plain.seconds])
        pictures.save(figure, path)
