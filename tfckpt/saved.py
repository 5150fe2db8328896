"""Tensors that a training step keeps for its backward pass: the question before every plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfckpt.api import checkpoint
from tfckpt.capture import tf_adapter
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.errors import PlanError
from tfckpt.report.report import Report
from tfckpt.report.values import RECOMPUTED, Fate
from tfckpt.request.budget import format_bytes


@dataclasses.dataclass(frozen=True)
class SavedTensors:
    """The tensors that a step keeps from its forward pass for its backward pass.

    Attributes:
      tensors: largest first; of each its layer, op, dtype, shape and bytes.
      recomputed: those that the backward pass reads and computes again, largest first.
    """

    tensors: tuple[Fate, ...]
    recomputed: tuple[Fate, ...] = ()

    @property
    def bytes(self) -> int:
        """Return the bytes of all that is kept; not all of it exists at once."""
        return sum(tensor.bytes for tensor in self.tensors)

    def __str__(self) -> str:
        rows = [f"{format_bytes(t.bytes):>10}  {_kind(t):<28}  {t.layer:<34}  "
                f"{t.op.rpartition('/')[2]}" for t in self.tensors]
        title = f"{len(rows)} tensors, {format_bytes(self.bytes)}, saved for the backward pass"
        if self.recomputed:
            title += (f"; {len(self.recomputed)}, "
                      f"{format_bytes(sum(t.bytes for t in self.recomputed))}, are recomputed")
        return "\n".join([title, *rows])


def saved_tensors(step: Any, *args: Any, **kwargs: Any) -> SavedTensors:
    """Return what a training step saves for its backward pass; nothing runs.

    Like JAX's `print_saved_residuals`: print it. The step is traced for it.

    Args:
      step: a `tf.function`, or what `tfckpt.checkpoint` made of one: then what its plan saves; or
        a Keras model that `tfckpt.keras.checkpoint` wrapped and that has trained a batch.
      *args: positional arguments of one call; only their dtypes and shapes count.
      **kwargs: keyword arguments of that call.

    Returns:
      The tensors that are kept and those that are recomputed, with their bytes.

    Raises:
      PlanError: it is no such function, or it computes no gradient.
      CostError: a size is not known.
    """
    if hasattr(step, "train_step"):
        return _of_model(step)
    decorated = isinstance(step, CheckpointedStep)
    if not decorated and not tf_adapter.is_tf_function(step):
        raise PlanError("plan: saved_tensors takes a tf.function, what tfckpt.checkpoint made of "
                        f"one, or a wrapped model, not {type(step).__name__}")
    ours: Any = step if decorated else checkpoint(
        tf_adapter.clone_function(step, step.python_function), solver="store_all", xla_trials=0)
    ours.get_concrete_function(*args, **kwargs)
    report = ours.report
    if report is None:
        raise PlanError("plan: saved_tensors takes a training step; this one computes no gradient")
    return _of(report)


def _of_model(model: Any) -> SavedTensors:
    """Return what the step of a Keras model saves as it was traced last."""
    from tfckpt import keras

    report = keras.report(model)
    if report is None:
        raise PlanError("plan: saved_tensors takes a model that has trained: call fit, or "
                        "train_on_batch, with a batch first")
    return _of(report)


def _of(report: Report) -> SavedTensors:
    return SavedTensors(tuple(f for f in report.fates if f.fate != RECOMPUTED),
                        tuple(f for f in report.fates if f.fate == RECOMPUTED))


def _kind(tensor: Fate) -> str:
    shape = ",".join("?" if n is None else str(n) for n in tensor.shape)
    return f"{tensor.dtype}[{shape}]"
