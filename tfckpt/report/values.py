"""The parts of a report: what is live and why, curves, the front, and what XLA said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfckpt.ir.hlo import XlaMemory
from tfckpt.request.budget import format_bytes
from tfckpt.simulate.timeline import Ran

_NAMED = 4
"""Layers that a line names."""


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """A tensor that is live at the peak.

    Attributes:
      bytes: its size.
      op: the op that made it.
      layer: the layer it belongs to.
      why: why it is live there.
    """

    bytes: int
    op: str
    layer: str
    why: str


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a person has asked for by names of layers or ops.

    Attributes:
      policy: "keep" or "recompute".
      ops: how many operations of the forward pass the names stand for.
      layers: the layers that these belong to.
    """

    policy: str
    ops: int
    layers: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.layers) - _NAMED
        return (f"{self.ops} operation{'s' * (self.ops > 1)} in {', '.join(self.layers[:_NAMED])}"
                + (f" and {more} more layers" if more > 0 else ""))


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Live bytes over a step.

    Attributes:
      live_bytes: after each operation, or each of XLA's allocations and releases.
      at_peak: what is live at the peak, largest first.
      peak_bytes: the plain or planned peak (an allocator's rounding included).
      steps: what runs, where that is known.
      by_xla: whether this is XLA's schedule of the compiled step.
    """

    live_bytes: Sequence[int]
    at_peak: tuple[LiveTensor, ...]
    peak_bytes: int
    steps: tuple[Ran, ...] = ()
    by_xla: bool = False

    @property
    def live_peak_bytes(self) -> int:
        """Return the most live bytes."""
        return max(self.live_bytes, default=0)

    @property
    def peak_step(self) -> int:
        """Return where the peak is."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__, default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class FrontPoint:
    """A plan on the front: its live peak in bytes, extra time as a fraction, its solver.

    The live peak is the most bytes of live tensors. The planned peak of a plan that is taken is
    that of the allocator, which takes more.
    """

    live_peak_bytes: int
    overhead: float
    solver: str

    def is_beaten_by(self, other: FrontPoint) -> bool:
        """Return whether another plan takes no more of both.

        Args:
          other: a plan of the same step; a plan does not beat itself.
        """
        return (other != self and other.live_peak_bytes <= self.live_peak_bytes
                and other.overhead <= self.overhead)


class Front(tuple):
    """(live peak bytes, overhead) of the plans that no other beats in both, by falling peak.

    Attributes:
      points: the same with solvers.
      others: the best plans of every solver that these beat.
      chosen: the plan that was taken, with what is live as it runs: a little more than when it was
        compared with others, as some ops wait for others now. Not always one of `points`, since the
        allocator's rounding decides between close ones. None where the step is left as it is.
      name: of the step.
      baseline_bytes: plain peak of the allocator.
    """

    points: tuple[FrontPoint, ...]
    others: tuple[FrontPoint, ...]
    chosen: FrontPoint | None
    name: str
    baseline_bytes: int

    @classmethod
    def of(cls, points: Sequence[FrontPoint], chosen: FrontPoint | None, name: str,
           baseline_bytes: int, others: Sequence[FrontPoint] = ()) -> Front:
        """Return a front of points, by falling peak.

        Args:
          points: plans that no other beats in both, by falling peak.
          chosen: the plan that was taken; None where the step is left as it is.
          name: of the step.
          baseline_bytes: plain peak of the allocator.
          others: the best plans of every solver that these beat.
        """
        front = cls((p.live_peak_bytes, p.overhead) for p in points)
        front.points, front.others, front.chosen = tuple(points), tuple(others), chosen
        front.name, front.baseline_bytes = name, baseline_bytes
        return front

    def __str__(self) -> str:
        return "\n".join(
            f"{format_bytes(p.live_peak_bytes):>10}  {100 * p.overhead:+6.1f} % time  {p.solver}"
            + " *" * (p == self.chosen) for p in self.points)

    def plot(self, path: str) -> None:
        """Draw peak against time for every solver into a file (png, svg, pdf).

        Args:
          path: of the file; its ending chooses the format.

        Raises:
          TfckptError: matplotlib is not installed.
        """
        from tfckpt.report import pictures

        pictures.save(pictures.front_figure(self), path)


RECOMPUTED = "recomputed"
"""Value of `Fate.fate`: the tensor is computed again for the backward pass."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fate:
    """How the backward gets a forward tensor that it reads: kept, recomputed or by a derivative.

    Attributes:
      layer, op: where it comes from.
      bytes: its size.
      fate: "kept", "recomputed", or "derivative": kept, and what forward AD put in place of what
        it is computed from.
      dtype, shape: of the tensor.
      asked: "keep" or "recompute" where a person asks for that; else "".
    """

    layer: str
    op: str
    bytes: int
    fate: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    asked: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePeak:
    """Peaks and budget of one of several devices.

    Attributes:
      baseline_bytes, planned_bytes: plain and planned dynamic peak; `reason` says why they agree.
      resident_bytes: variables, inputs and constants there.
      budget: as it was asked for; a size counts resident and dynamic peak together.
    """

    device: str
    baseline_bytes: int
    planned_bytes: int
    reason: str
    resident_bytes: int
    budget: str

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return (f"{format_bytes(self.planned_bytes)} of {format_bytes(self.baseline_bytes)} plain"
                f"{because}, resident {format_bytes(self.resident_bytes)}, budget {self.budget}")


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """The peaks of a step according to XLA, or to a simulation of what Grappler makes of it.

    Bytes are of XLA's temporary buffers where it compiles the step; else of the simulated peak of
    what Grappler makes of it.

    Attributes:
      before, after: the plain step, and the step as it is applied; None where neither XLA nor
        Grappler was asked.
      trials: about how many plans.
      reason: why neither was asked.
      seconds: how long the answers took.
      by_xla: whether XLA was asked.
    """

    before: XlaMemory | None = None
    after: XlaMemory | None = None
    trials: int = 0
    reason: str = ""
    seconds: float = 0.0
    by_xla: bool = True

    @property
    def peaks(self) -> tuple[int, int] | None:
        """Return the plain and the planned peak, in bytes; None where neither was asked."""
        if self.before is None or self.after is None:
            return None
        return self.before.temp_bytes, self.after.temp_bytes

    @property
    def label(self) -> str:
        """Return what a report calls it."""
        return "compiled by XLA" if self.by_xla else "as it runs"

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"not asked: {self.reason or 'it tells nothing'}; peaks here are simulated"
        what = ("XLA's temporary bytes" if self.by_xla
                else "simulated on what Grappler makes of the step")
        plans = "1 plan" if self.trials == 1 else f"{self.trials} plans"
        took = f" in {self.seconds:.1f} s" if self.by_xla else ""  # to simulate takes no time
        return f"peaks are {what}; {plans} tried{took}"
