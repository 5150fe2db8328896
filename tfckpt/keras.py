"""Keras: `checkpoint(model)` makes `compile` and `fit` train in less memory, as ever."""

from __future__ import annotations

import functools
import inspect
import weakref

import tensorflow as tf

from tfckpt.api import Mark, Records, _warn_eager, make_options, mark_tracing_graph, set_batch_hint
from tfckpt.errors import PlanError
from tfckpt.plan.planner import AUTO
from tfckpt.report import Report

_records: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def checkpoint(model, *, budget: object = "min", solver: str = AUTO, objective: str = "time",
               batch_size: int | None = None, free_moves: bool = True):
    """Has the model's training step rewritten whenever Keras traces it.

    Args:
      model: a built `keras.Model`; it is returned, with its `train_step` and `fit` wrapped.
      budget, solver, objective, batch_size, free_moves: see `tfckpt.checkpoint`. `batch_size` is
        needed only where `fit` cannot tell it (a dataset of unknown batch size).

    Raises:
      PlanError: malformed options, not a model, or a model that is not built yet.
    """
    options = make_options(budget, solver, objective, batch_size, free_moves)
    if not hasattr(model, "train_step") or not hasattr(model, "fit"):
        raise PlanError(f"plan: tfckpt.keras.checkpoint takes a keras.Model, not "
                        f"{type(model).__name__}")
    if not getattr(model, "built", False):
        raise PlanError(f"plan: model {getattr(model, 'name', '')!r} is not built yet; call "
                        "model.build(input_shape) or run it once before tfckpt.keras.checkpoint")
    records = Records()
    mark = Mark(options, records, f"{model.name}.train_step")
    _wrap(model, mark)
    _records[model] = records
    model.train_function = None  # a step traced before must be traced again
    return model


def report(model) -> Report | None:
    """The report of the model's latest trace; None before the first.

    Raises:
      PlanError: the model was never wrapped.
    """
    if model not in _records:
        raise PlanError("plan: this model was not wrapped; call tfckpt.keras.checkpoint(model)")
    return _records[model].report


def _wrap(model, mark: Mark) -> None:
    step = type(model).train_step
    fit = type(model).fit
    owner = weakref.ref(model)

    @functools.wraps(step)
    def train_step(*args, **kwargs):
        if not mark_tracing_graph(mark):
            _warn_eager(mark.name)
        return step(owner(), *args, **kwargs)

    @functools.wraps(fit)
    def fit_with_hint(*args, **kwargs):
        this = owner()
        previous = set_batch_hint(_batch_of(inspect.signature(fit), this, args, kwargs))
        try:
            return fit(this, *args, **kwargs)
        finally:
            set_batch_hint(previous)

    object.__setattr__(model, "train_step", train_step)
    object.__setattr__(model, "fit", fit_with_hint)


def _batch_of(signature, model, args, kwargs) -> int | None:
    """The batch size that a call of `fit` will train with, where it can be told."""
    try:
        bound = signature.bind(model, *args, **kwargs).arguments
    except TypeError:
        return None  # fit itself will say what is wrong
    data, size = bound.get("x"), bound.get("batch_size")
    if isinstance(data, tf.data.Dataset):
        return _dataset_batch(data)
    if hasattr(data, "__getitem__") and hasattr(data, "num_batches"):  # a keras PyDataset
        return _leading(data[0])
    count = _leading(data)
    return None if count is None else min(count, size or 32)


def _leading(data) -> int | None:
    for leaf in tf.nest.flatten(data):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    return None


def _dataset_batch(dataset: tf.data.Dataset) -> int | None:
    """The batch size of the nearest batching step behind a dataset."""
    pending = [dataset]
    while pending:
        current = pending.pop(0)
        size = getattr(current, "_batch_size", None)
        if size is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        pending.extend(current._inputs())
    return None
