"""The decorator: `checkpoint(step)` is the step, rewritten whenever it is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.carriers.checkpointed import BoundFunction, BoundStep, CheckpointedStep
from tfckpt.errors import PlanError
from tfckpt.plan.names import AUTO
from tfckpt.report.report import Report
from tfckpt.request.options import XLA_TRIALS, make_options

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@overload
def checkpoint(fn: Callable[_Arguments, _Result], *, budget: object = ..., solver: str = ...,
               objective: str = ..., batch_size: int | None = ..., free_moves: bool = ...,
               fad: str | bool = ..., xla_trials: int = ...,
               op_seconds: Mapping[str, float] | None = ..., exact: bool = ...,
               effort: float = ..., keep: object = ..., recompute: object = ...
               ) -> CheckpointedStep[_Arguments, _Result]: ...


@overload
def checkpoint(*, budget: object = ..., solver: str = ..., objective: str = ...,
               batch_size: int | None = ..., free_moves: bool = ..., fad: str | bool = ...,
               xla_trials: int = ..., op_seconds: Mapping[str, float] | None = ...,
               exact: bool = ..., effort: float = ..., keep: object = ..., recompute: object = ...
               ) -> _Decorator: ...


def checkpoint(fn: Callable | None = None, *, budget: object = "min", solver: str = AUTO,
               objective: str = "time", batch_size: int | None = None, free_moves: bool = True,
               fad: str | bool = False, xla_trials: int = XLA_TRIALS,
               op_seconds: Mapping[str, float] | None = None, exact: bool = False,
               effort: float = 1.0, keep: object = (), recompute: object = ()) -> Any:
    """Rewrite a training step so that it needs less memory and compute the same.

    Use it bare, with options, or as a call, above `tf.function` or on a Keras `train_step`
    method. The step's graph is rewritten once for each trace.

    Args:
      fn: a `tf.function`, or a Python function that is traced inside one.
      budget: bytes of the whole device as an int or "6GiB", a fraction of the plain step's
        dynamic peak as a float in (0, 1], "min", or "device": what the device that the step
        runs on has free when it is planned; or a mapping from devices to such budgets
        (see `tfckpt.request.device_budgets`): a single one is that of each device.
      solver: "auto", "store_all", "chen", "lcg", "acg", "exact_dp",
        "approx_dp", "recursive" or "optimal".
      objective: "time" (fastest plan that fits) or "memory" (minimum peak).
      batch_size: what an unknown leading dimension stands for where the call does not tell.
      free_moves: whether moves that cost no time may be used.
      fad: whether the derivative of an element-wise activation may be kept instead of the
        tensors that it is computed from (nested forward AD). False takes none: recomputation
        alone changes no bit. True takes every region that saves bytes; "auto" weighs it against
        recomputing, with solver "auto" only. A kept derivative may change rounding, by 1e-6 of a
        gradient in float32 and 1e-2 in half precision, and may be finite where the plain
        gradient overflows.
      xla_trials: for a step that XLA compiles: how many plans it compiles at most before one is
        applied, so that a budget means compiled bytes, and fractions are of the compiled plain
        step's temporary ones. That takes a compilation each and one of the plain step; where none
        fits, one more of the plan of the minimum peak. With 0 nothing is asked, and budgets are of
        simulated bytes.
      op_seconds: what `tfckpt.op_seconds` has measured of this step on this machine; plans are then
        priced with these times where the executor runs the step, and else with those that are
        expected of the device.
      exact: whether only a plan is applied of which it is certain that it computes every result
        and every write with the same kernels from the same operands in the same order
        (`report.identical` is True then). Each plan is compared when the step is traced, which
        takes about as long again as the trace. A step of which that cannot be known, because XLA
        compiles it or because it does not run on one CPU, is left as it is. Without it, the applied
        plan is compared while the step trains.
      effort: how much the search of "auto" may evaluate, as a multiple of the default, which is in
        proportion to the step. More takes longer and usually finds better plans. Counted, not
        timed: all processes agree.
      keep: names of layers or ops of the forward pass, one or several, of which none is ever
        computed again. A name stands for whole parts of op names between slashes: "dense_1" for
        every op of that layer, "block?/conv*/Relu" for some; the report lists both.
        `tfckpt.saved_tensors` shows names.
      recompute: such names as well: nothing of these is kept for the backward pass, which computes
        it again where it reads it (but for what may not run twice, such as random numbers). All
        else is planned as before, and no plan is applied that does not lower the peak.

    Returns:
      A callable with the same signature and `report` (None before the first trace) and
      `reports` (by signature); as a method of a class, those of each object.

    Raises:
      PlanError: malformed options, or what is no function. At the first trace, before anything has
        trained: InfeasibleBudgetError (states the smallest feasible budget), CostError (bytes are
        asked for, and sizes are unknown), or PlanError where a mapping of budgets lacks a device
        of the step or has one that does not exist, or where a name in `keep` or `recompute` matches
        nothing.
    """
    options = make_options(budget, solver, objective, batch_size, free_moves, fad, xla_trials,
                           op_seconds, exact=exact, effort=effort, keep=keep, recompute=recompute)
    if fn is None:
        return lambda function: CheckpointedStep(_checked(function), options)
    return CheckpointedStep(_checked(fn), options)


def _checked(fn: Any) -> Any:
    """Return what is to be decorated.

    Raises:
      PlanError: it is no function that can be traced; the message says what to write instead.
    """
    kind = type(fn).__name__
    if hasattr(fn, "train_step") and hasattr(fn, "fit"):
        what = "a class" if isinstance(fn, type) else f"a model ({kind})"
        raise PlanError(f"plan: tfckpt.checkpoint takes a training step, not {what}; write "
                        "model = tfckpt.keras.checkpoint(model, ...) before model.compile(...), "
                        "or put the decorator on the model's train_step method")
    if hasattr(fn, "trainable_weights") and hasattr(fn, "call"):
        raise PlanError(f"plan: tfckpt.checkpoint takes a training step, not a layer ({kind}): "
                        "which layers' results are recomputed it decides by itself")
    if isinstance(fn, CheckpointedStep):
        raise PlanError(f"plan: {fn.__name__} is decorated with tfckpt.checkpoint already; "
                        f"{fn.__name__}.plain is the step without it: decorate that to have other "
                        "options")
    if isinstance(fn, tf.types.experimental.ConcreteFunction):
        raise PlanError("plan: tfckpt.checkpoint takes the tf.function, not a concrete function "
                        "that it has been traced to")
    if tf_adapter.is_tf_function(inspect.getattr_static(type(fn), "__call__", None)):
        raise PlanError(f"plan: what trains is {kind}.__call__, a tf.function; decorate that "
                        "method, or pass it: tfckpt.checkpoint(....__call__)")
    if isinstance(fn, staticmethod | classmethod | property):
        raise PlanError(f"plan: tfckpt.checkpoint takes the function below @{kind}; put "
                        f"@{kind} above @tfckpt.checkpoint")
    body = fn.python_function if tf_adapter.is_tf_function(fn) else fn
    if isinstance(body, type) or not callable(fn):
        raise PlanError(f"plan: tfckpt.checkpoint takes a function, not {_named(fn)}; "
                        "options are keyword-only")
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
        raise PlanError("plan: tfckpt.checkpoint takes a function that TensorFlow can trace, not "
                        f"a coroutine or generator ({getattr(body, '__name__', kind)})")
    return fn


def _named(fn: Any) -> str:
    return f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__


def report_of(step: Any) -> Report | None:
    """Return the latest report of a step or Keras model; None before the first trace.

    Args:
      step: what `tfckpt.checkpoint` or `tfckpt.keras.checkpoint` returned, a `tf.function` over a
        decorated function, or a model whose `train_step` is decorated.

    Returns:
      The report of what was traced last; None before the first trace.

    Raises:
      PlanError: it is none of these.
    """
    if tf_adapter.is_tf_function(step) and not isinstance(step, BoundFunction):
        step = step.python_function
    if isinstance(step, CheckpointedStep | BoundStep | BoundFunction):
        return step.report
    if hasattr(step, "train_step"):
        from tfckpt import keras

        return keras.report(step)
    raise PlanError(f"plan: {step!r} has no report; pass a step that tfckpt.checkpoint decorated, "
                    "or a model")


class _Decorator(Protocol):
    """The decorator that `checkpoint` returns when it gets options alone."""

    def __call__(self, fn: Callable[_Arguments, _Result], /
                 ) -> CheckpointedStep[_Arguments, _Result]: ...
