"""An op's properties for later stages: attributes, and dtype, shape and bytes of its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.edits import TAKES
from tfckpt.ir.graph import Tensor
from tfckpt.ops import record

_ELSEWHERE = frozenset((tf.variant, tf.string))
"""Types of tensors whose bytes are not theirs; a set, since `==` of types is slow."""
_HANDLES = frozenset((tf.resource,))
_LARGEST_COMPARED = 1024
"""Elements of a constant that are compared to find whether they are all equal."""
_VALUES = ("float_val", "half_val", "double_val", "bool_val")
"""Fields of a constant's proto with its values one by one."""
_FEW = 8
"""Elements of a constant of integers that is looked at: axes and strides."""
_LARGEST_READ = 1 << 20
"""Elements of a constant that is looked at: TensorFlow hands out copies."""


def attrs_of(op: tf.Operation) -> dict[str, object]:
    """Return what later stages read of an op.

    Of a constant that is the value, if all its elements share it.

    Args:
      op: of a live graph.

    Returns:
      By name what the record of the op's type lists; of a few integers `integers`, one after the
      other, and `integer` where they are equal; of another constant `value`, and nothing where its
      elements differ, are too many to look at, or are of another kind. Of a loop or branches also
      `TAKES`, where that is set.
    """
    known = record(op.type)
    if known.is_constant:
        made = op.outputs[0]
        if made.dtype.is_integer and 0 < (made.shape.num_elements() or 0) <= _FEW:
            values = tuple(map(int, tf.make_ndarray(op.get_attr("value")).ravel()))
            return {"integers": values} | (
                {"integer": values[0]} if len(set(values)) == 1 else {})
        if not (made.dtype.is_floating or made.dtype.is_bool) or (
                made.shape.num_elements() or 0) > _LARGEST_READ:
            return {}
        value = _common_value(op.get_attr("value"))
        return {} if value is None else {"value": value}
    found = {key: op.get_attr(key) for key in known.attrs}
    if known.has_bodies and TAKES in (told := tf_adapter.node_attrs(op)):
        found[TAKES] = tuple(told[TAKES].list.i)
    return found


def _common_value(proto: Any) -> float | None:
    count = math.prod(dimension.size for dimension in proto.tensor_shape.dim)
    repeated = len(proto.tensor_content) == 0  # the last value given stands for the rest
    if not count or (count > _LARGEST_COMPARED and not repeated):
        return None
    if repeated and count > _LARGEST_COMPARED:
        given = {field: getattr(proto, field) for field in _VALUES}
        if max(map(len, given.values())) > 1:
            return None
        proto = type(proto)(dtype=proto.dtype, **given)
    values = tf.make_ndarray(proto).astype(float).ravel()
    return float(values[0]) if len(values) and (values == values[0]).all() else None


def results_of(op: tf.Operation, lists: Mapping[int, int],
               shapes: Sequence[tf.TensorShape] | None = None) -> tuple[Tensor, ...]:
    """Return what an op makes.

    Args:
      op: the op.
      lists: bytes of its results that are lists, by slot.
      shapes: of its results; default what its graph knows.
    """
    return tuple(_tensor(tensor, tensor.shape if shapes is None else shapes[slot],
                         lists.get(slot, 0)) for slot, tensor in enumerate(op.outputs))


def _tensor(tensor: tf.Tensor, known: tf.TensorShape, of_list: int) -> Tensor:
    dtype = tensor.dtype.base_dtype
    shape = None if known.rank is None else tuple(known.as_list())
    if dtype in _HANDLES:
        return Tensor(dtype.name, shape, of_list, _variable_bytes(tensor))
    if dtype in _ELSEWHERE:
        return Tensor(dtype.name, shape, of_list)
    if shape is None or None in shape:
        return Tensor(dtype.name, shape, None)
    return Tensor(dtype.name, shape, math.prod(shape) * dtype.size)


def _variable_bytes(handle: tf.Tensor) -> int:
    """Return the size of the variable of a handle; 0 where it is none, or unknown."""
    data = tf_adapter.handle_shape(handle)
    return 0 if data is None else (data[0].num_elements() or 0) * data[1].size
