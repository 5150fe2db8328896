"""`checkpoint(model)`: the model's training step is rewritten whenever Keras traces it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import tensorflow as tf
from absl import logging

from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.carriers.keras_layers import with_paths
from tfckpt.carriers.records import Mark, Records
from tfckpt.carriers.trace_hook import wrap_body
from tfckpt.common.messages import say
from tfckpt.errors import PlanError
from tfckpt.keras.batches import look_at_batches, require_tensorflow
from tfckpt.plan.names import AUTO
from tfckpt.report.report import Report
from tfckpt.request.options import XLA_TRIALS, Options, make_options

_records: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_Model = TypeVar("_Model")


def checkpoint(model: _Model, *, budget: object = "min", solver: str = AUTO,
               objective: str = "time", batch_size: int | None = None, free_moves: bool = True,
               fad: str | bool = False, xla_trials: int = XLA_TRIALS,
               op_seconds: Mapping[str, float] | None = None, tune: bool = False,
               exact: bool = False, effort: float = 1.0, keep: object = (),
               recompute: object = ()) -> _Model:
    """Have the model's training step rewritten whenever Keras traces it.

    Sizes that a trace leaves open are those of the first batch that Keras trains with. A batch that
    is larger by a tenth and more is planned anew when an epoch begins.

    Args:
      model: a `keras.Model`, of Keras 3 on TensorFlow or of Keras 2 (`tf_keras`); it is returned,
        with its `train_step`, `make_train_function` and `fit` wrapped. Wrapped again, it takes the
        new options.
      budget: bytes of the whole device as an int or "6GiB", a fraction of the plain step's dynamic
        peak as a float in (0, 1], "min" or "device", or a mapping from devices to these; this and
        the other options are described in full at `tfckpt.checkpoint`.
      solver: the method that plans, by name, such as "auto" or "optimal".
      objective: "time" (fastest plan that fits) or "memory" (minimum peak).
      batch_size: what an unknown leading dimension stands for where no batch tells.
      free_moves: whether moves that cost no time may be used.
      fad: False, True or "auto": whether derivatives of element-wise activations may be kept
        instead of the tensors that they are computed from.
      xla_trials: how many plans XLA compiles at most before one is applied, for a step that it
        compiles; with 0 budgets are of simulated bytes.
      op_seconds: seconds of the step's ops as `tfckpt.op_seconds` has measured them.
      tune: whether the first batch that the model trains with settles the plan: see `tfckpt.tune`,
        which then raises what it raises. Not under a strategy with several replicas.
      exact: whether only a plan is applied that is certain to compute every result and every write
        in the same arithmetic.
      effort: how much the search of "auto" may evaluate, as a multiple of the default.
      keep: names of layers or ops of which nothing is ever computed again, one or several.
      recompute: names of layers or ops of which nothing is kept for the backward pass, one or
        several.

    Returns:
      The model itself.

    Raises:
      PlanError: malformed options, not a model, or one whose step cannot be rewritten.
    """
    keep, recompute = with_paths(keep, model), with_paths(recompute, model)
    options = make_options(budget, solver, objective, batch_size, free_moves, fad,
                           xla_trials, op_seconds, exact=exact, effort=effort, keep=keep,
                           recompute=recompute)
    if isinstance(model, type) or not hasattr(model, "train_step") or not hasattr(model, "fit"):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise PlanError(f"plan: tfckpt.keras.checkpoint takes a keras.Model, not {what}")
    require_tensorflow(model)
    if _decorated(model) is not None:
        raise PlanError(f"plan: {type(model).__name__}.train_step is decorated with "
                        "tfckpt.checkpoint already; give the options there, or remove the "
                        "decorator to use tfckpt.keras.checkpoint")
    records, wrapped = Records(), cast(Any, model)
    _wrap(wrapped, options, records)
    if tune:
        records.tune = functools.partial(_tune, weakref.ref(wrapped), options)
    _records[wrapped] = records
    wrapped.train_function = None  # a step traced before must be traced again
    return model


def report(model: Any) -> Report | None:
    """Return the report of the model's latest trace; None before the first.

    Args:
      model: one that `checkpoint` wrapped, or of a class whose `train_step` is decorated.

    Returns:
      What was planned and applied at the latest trace of its step.

    Raises:
      PlanError: neither was the model wrapped, nor its `train_step` decorated.
    """
    records = records_of(model)
    if records is None:
        raise PlanError("plan: this model was not wrapped; call tfckpt.keras.checkpoint(model)")
    return records.report


def records_of(model: Any) -> Records | None:
    """Return where the reports of a model are.

    Args:
      model: one that `checkpoint` wrapped, or of a class whose `train_step` is decorated.

    Returns:
      None where the model is neither.
    """
    decorated = _decorated(model)
    return _records.get(model) if decorated is None else decorated.records_of(model)


def _decorated(model: Any) -> CheckpointedStep | None:
    found = getattr(type(model), "train_step", None)
    return found if isinstance(found, CheckpointedStep) else None


def _wrap(model: Any, options: Options, records: Records) -> None:
    step = type(model).train_step
    owner = weakref.ref(model)
    mark = Mark(options, records, f"{model.name}.train_step", holders=lambda: (owner(),))

    @functools.wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        return step(owner(), *args, **kwargs)

    object.__setattr__(model, "train_step", wrap_body(train_step, mark))
    look_at_batches(model, records)


def _tune(owner: Callable[[], Any], options: Options, batch: Any) -> None:
    """Settle a model's plan by running plans of its step on a batch.

    Raises:
      PlanError, InfeasibleBudgetError: as `tfckpt.tune`; and where several replicas train.
    """
    from tfckpt.tuning.run import note_tuned, tune

    model = owner()
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise PlanError("plan: tune=True runs plans on one device, and several replicas train this "
                        "model; leave it out")
    train_step = type(model).train_step

    def plain(data: Any) -> Any:
        return train_step(model, data)

    plain.__name__ = f"{model.name}.train_step"
    jit_compile = getattr(model, "jit_compile", False) is True
    step: Any = CheckpointedStep(tf.function(plain, jit_compile=jit_compile, reduce_retracing=True),
                                 options)
    found = tune(step, batch)
    logging.info("%s", found)
    say(found.summary)
    if found.chosen is found.plain:  # the class's own step again
        object.__delattr__(model, "train_step")
    else:
        records = _records[model]
        records.settled = functools.partial(
            note_tuned, found.asked, found.plain, found.chosen, found.allowed_bytes)
        _wrap(model, step.options, records)
