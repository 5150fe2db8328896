"""The values of the variables that a step may change, kept in host memory and put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfckpt.capture import tf_adapter


class Snapshot:
    """Values of variables as they were when they were added, outside any device's allocator."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[tf.Tensor, np.ndarray, tf.DType]] = {}

    def add(self, concrete: Any, arguments: Any = ()) -> None:
        """Add the variables that a concrete function captures, or is given, if they are new.

        Nothing that the function changes may have run since the first values were to be kept.

        Args:
          concrete: a concrete function; not run.
          arguments: a nest with the arguments that it is called with; `tf.Variable` leaves are
            added.
        """
        given = [leaf.handle for leaf in tf.nest.flatten(arguments)
                 if isinstance(leaf, tf.Variable)]
        self._add([*concrete.captured_inputs, *given])

    def _add(self, handles: Iterable[tf.Tensor]) -> None:
        for handle in handles:
            if handle.dtype != tf.resource or id(handle) in self._saved:
                continue
            data = tf_adapter.handle_shape(handle)
            if data is None or not tf.raw_ops.VarIsInitializedOp(resource=handle):
                continue
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=data[1])
            self._saved[id(handle)] = (handle, np.array(value.numpy()), data[1])

    def restore(self) -> None:
        """Put every value back, bit for bit, one after the other."""
        for handle, value, dtype in self._saved.values():
            with tf.device(handle.device):
                tf.raw_ops.AssignVariableOp(resource=handle, value=_in_own_memory(value, dtype))


def _in_own_memory(value: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    """Return a value in memory of the device's allocator, where variables lie.

    A constant may lie in memory of NumPy, which the allocator does not count.
    """
    made = tf.constant(value, dtype)
    try:
        return tf.raw_ops.DeepCopy(x=made)
    except (tf.errors.OpError, TypeError):  # no such kernel: strings, among others
        return made
