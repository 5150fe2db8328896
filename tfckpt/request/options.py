"""`Options`: what a person asks for, checked once and the same for every front end."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from tfckpt.errors import PlanError
from tfckpt.ir.target import Target
from tfckpt.plan.names import AUTO, check_effort, check_names
from tfckpt.request.device_budgets import Budgets, parse_budgets
from tfckpt.request.policy import parse_patterns

XLA_TRIALS = 2
"""Plans that XLA compiles before one is applied to a step that it will compile."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options of a step.

    Attributes:
      budgets: that of each device.
      solver, objective, batch_size, free_moves, fad, exact, effort: as `tfckpt.checkpoint` takes
        them.
      target: what the step is planned for; None for the devices of this process.
      time_limit: seconds after which the search for a plan ends with the best found by then; None
        for no limit.
      xla_trials: how many plans XLA is asked about at most.
      op_seconds: seconds of ops by name, where they were measured.
      keep, recompute: patterns of layers and ops (`tfckpt.request.policy`).
    """

    budgets: Budgets = Budgets()
    solver: str = AUTO
    objective: str = "time"
    batch_size: int | None = None
    free_moves: bool = True
    fad: str | bool = False
    exact: bool = False
    effort: float = 1.0
    target: Target | None = None
    time_limit: float | None = None
    xla_trials: int = XLA_TRIALS
    op_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict, repr=False)
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def limited_to(self, seconds: object) -> Options:
        """Return the same options with a time limit.

        Args:
          seconds: that planning a step may take; an int or float above zero.

        Raises:
          PlanError: not a positive number of seconds.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or seconds <= 0:
            raise PlanError(f"plan: time_limit={seconds!r} must be a positive number of seconds")
        return dataclasses.replace(self, time_limit=float(seconds))


NAMES = ("budget", "solver", "objective", "batch_size", "free_moves", "fad", "exact",
         "effort", "keep", "recompute")
"""The options that every front end offers."""


def make_options(budget: object = "min", solver: str = AUTO, objective: str = "time",
                 batch_size: int | None = None, free_moves: bool = True,
                 fad: str | bool = False, xla_trials: int = XLA_TRIALS,
                 op_seconds: Mapping[str, float] | None = None,
                 target: Target | None = None, exact: bool = False,
                 effort: float = 1.0, keep: object = (), recompute: object = ()) -> Options:
    """Check options before anything is traced.

    Args:
      budget: bytes of the whole device, a fraction, "min" or "device", or a mapping from devices.
      solver: one of `tfckpt.plan.names.SOLVER_NAMES`.
      objective: "time" (fastest plan that fits) or "memory" (minimum peak).
      batch_size: what an unknown leading dimension stands for where the call does not tell.
      free_moves: whether moves that cost no time may be used.
      fad: whether derivatives of activations may be kept: "auto", True or False.
      xla_trials: how many plans XLA is asked about at most; 0 to ask it nothing.
      op_seconds: seconds of ops by name, where they were measured; None for none.
      target: what the step is planned for; None for the devices of this process.
      exact: whether only a plan is applied of which it is certain that no bit changes.
      effort: how much the search may evaluate, as a multiple of the default.
      keep: one or several patterns of layers or ops whose results are never computed again.
      recompute: one or several patterns of layers or ops of which nothing is kept for the backward
        pass.

    Raises:
      PlanError: an option is malformed; the message says what may be written.
    """
    check_names(solver, objective)
    if batch_size is not None:
        batch_size = _positive(batch_size)
    if not isinstance(free_moves, bool):
        raise PlanError(f"plan: free_moves={free_moves!r} must be True or False")
    if not isinstance(fad, bool) and fad != AUTO:
        raise PlanError(f"plan: fad={fad!r} must be {AUTO!r}, True or False")
    if not isinstance(exact, bool):
        raise PlanError(f"plan: exact={exact!r} must be True or False")
    if exact and fad is not False:
        raise PlanError(f"plan: fad={fad!r} keeps derivatives, which may change rounding; with "
                        "exact=True it must be False")
    check_effort(effort)
    trials: object = xla_trials
    if isinstance(trials, bool) or not isinstance(trials, numbers.Integral) or trials < 0:
        raise PlanError(f"plan: xla_trials={xla_trials!r} must be an int, 0 to ask XLA nothing")
    return Options(parse_budgets(budget), solver, objective, batch_size, free_moves, fad, exact,
                   float(effort), target, xla_trials=int(xla_trials),
                   op_seconds=_seconds(op_seconds), keep=parse_patterns("keep", keep),
                   recompute=parse_patterns("recompute", recompute))


def _seconds(given: Any) -> dict[str, float]:
    """Return measured seconds as a dict of its own."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
            isinstance(name, str) and isinstance(taken, numbers.Real) and float(taken) >= 0
            for name, taken in given.items()):
        raise PlanError("plan: op_seconds must map names of ops to seconds, as tfckpt.op_seconds "
                        "returns them")
    return {name: float(taken) for name, taken in given.items()}


def _positive(batch_size: object) -> int:
    """Return a batch size as an int, which NumPy's are not."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral) or (
            batch_size <= 0):
        raise PlanError(f"plan: batch_size={batch_size!r} must be a positive int")
    return int(batch_size)
