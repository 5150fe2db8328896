"""The errors tfckpt raises: each names the stage, the op or file, and what to change."""

from __future__ import annotations


class TfckptError(Exception):
    """Base class of every error that tfckpt raises on purpose."""


class CaptureError(TfckptError):
    """The training step could not be read as a graph."""


class CostError(TfckptError):
    """The graph could not be priced (unknown dimensions, inconsistent costs)."""


class PlanError(TfckptError):
    """No valid plan could be made (unknown solver, malformed budget, invalid schedule)."""


class InfeasibleBudgetError(PlanError):
    """The budget lies below the minimum peak that any plan reaches.

    Attributes:
      smallest_bytes: smallest feasible dynamic peak in bytes: above what the step starts with,
        whatever unit the budget was given in.
      overhead: planned extra time of the plan of that peak, as a fraction of the plain step; None
        where it is not known.
      budget: what to pass instead, which the message names as well: a fraction of the plain peak
        where one was asked for, else bytes, of the whole device from a front end and dynamic ones
        from a solver, or "min".
    """

    def __init__(self, message: str, smallest_bytes: int, overhead: float | None = None,
                 budget: float | str | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes, self.overhead = smallest_bytes, overhead
        self.budget = smallest_bytes if budget is None else budget

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.smallest_bytes, self.overhead, self.budget)


class RewriteError(TfckptError):
    """The plan could not be realised in the graph; the graph is left as it was."""


class VerificationError(TfckptError):
    """A check of the rewritten step failed, or the means to measure it are missing."""


def unreadable(path: str, error: OSError) -> CaptureError:
    """Return what is raised where an input cannot be read.

    Args:
      path: of the input, as it was given.
      error: what the operating system says.
    """
    return CaptureError(f"capture: {path!r} cannot be read: {error.strerror}; check the path and "
                        "its permissions")
