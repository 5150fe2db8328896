"""The decorator: `checkpoint(step)` is the step, rewritten whenever it is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfckpt.capture import tf_adapter
from tfckpt.carriers.trace_hook import Mark, Records, called_with, traces_compiled, wrap_body
from tfckpt.errors import PlanError
from tfckpt.options import Options, make_options
from tfckpt.plan.planner import AUTO
from tfckpt.report import Report


def checkpoint(fn: Callable | None = None, *, budget: object = "min", solver: str = AUTO,
               objective: str = "time", batch_size: int | None = None, free_moves: bool = True,
               fad: str | bool = False):
    """Rewrites a training step so that it needs less memory and computes the same.

    Use it bare, with options, or as a call, above `tf.function` or on a Keras `train_step`
    method. The step's graph is rewritten once for each trace.

    Args:
      fn: a `tf.function`, or a Python function that is traced inside one.
      budget: bytes of the whole device as an int or "6GiB", a fraction of the plain step's
        dynamic peak as a float in (0, 1], or "min"; or a mapping from devices to such budgets
        (see `tfckpt.device_budgets`): a single one is that of each device.
      solver: "auto", "store_all", "chen", "lcg", "acg", "exact_dp",
        "approx_dp" or "optimal".
      objective: "time" (fastest plan that fits) or "memory" (least peak).
      batch_size: what an unknown leading dimension stands for.
      free_moves: whether moves that cost no time may be used.
      fad: whether the derivative of an element-wise activation may be kept instead of the
        tensors that it is computed from (nested forward AD). False takes none: recomputation
        alone changes no bit. True takes every region that saves bytes; "auto" weighs it against
        recomputing, with solver "auto" only. A kept derivative may change rounding, by 1e-6 of a
        gradient in float32 and 1e-2 in half precision, and may be finite where the plain
        gradient overflows.

    Returns:
      A callable with the same signature and `report` (None before the first trace) and
      `reports` (by signature).

    Raises:
      PlanError: malformed options. At trace time: InfeasibleBudgetError (states the smallest
        feasible budget), CostError (unknown dimensions), or PlanError where a mapping of budgets
        lacks a device of the step or has one that does not exist.
    """
    options = make_options(budget, solver, objective, batch_size, free_moves, fad)
    if fn is None:
        return lambda function: CheckpointedStep(function, options)
    if not callable(fn):
        raise PlanError(f"plan: tfckpt.checkpoint takes a function, not {type(fn).__name__}; "
                        "options are keyword-only")
    return CheckpointedStep(fn, options)


class CheckpointedStep:
    """A training step whose traces are rewritten. Works as a function and as a method."""

    def __init__(self, fn: Any, options: Options):
        self._records = Records()
        self._is_function = tf_adapter.is_tf_function(fn)
        body = fn.python_function if self._is_function else fn
        name = getattr(body, "__name__", "step")
        mark = Mark(options, self._records, name,
                    self._is_function and tf_adapter.compiles_with_xla(fn))

        marked = wrap_body(body, mark)
        self._plain = fn
        self._fn = tf_adapter.clone_function(fn, marked) if self._is_function else marked
        # inside a compiled function: what was traced for the executor would be of no use there
        self._compiled = tf_adapter.clone_function(fn, marked) if self._is_function else marked
        functools.update_wrapper(self, body)

    @property
    def report(self) -> Report | None:
        """The latest trace's report; None before the first trace."""
        return self._records.report

    @property
    def reports(self) -> dict[str, Report]:
        """Reports by traced signature."""
        return dict(self._records.reports)

    @property
    def plain(self) -> Callable:
        """The step as it was given."""
        return self._plain

    def __call__(self, *args, **kwargs):
        return called_with(self._compiled if traces_compiled() else self._fn, *args, **kwargs)

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        return _BoundStep(self, instance)

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "_fn":
            raise AttributeError(name)
        found = getattr(self._fn, name)
        if name == "get_concrete_function":  # traces as a call does
            return functools.partial(called_with, found)
        return found


class _BoundStep(functools.partial):
    """A method: the step with its instance filled in, and the step's reports."""

    @property
    def report(self) -> Report | None:
        step: Any = self.func
        return step.report

    @property
    def reports(self) -> dict[str, Report]:
        step: Any = self.func
        return step.reports
