"""NodeDef attributes of new ops."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfckpt.ir.edits import COPY, PROTECTED, Clone

CLONE_DROPS = frozenset({"_class", "_output_shapes", COPY, PROTECTED})
"""Attributes that a copy does not inherit (`_class` would tie it to the original)."""


def copy_attrs(clone: Clone, source: Mapping[str, tf.compat.v1.AttrValue]
               ) -> dict[str, tf.compat.v1.AttrValue]:
    """Return the attributes of a copy: those of its source, and its own.

    Args:
      clone: the copy, as edits describe it.
      source: attributes of the op that it is a copy of; those in `CLONE_DROPS` are left out.

    Raises:
      TypeError: an attribute of the copy's own is not as in `Create.attrs`.
    """
    kept = {key: value for key, value in source.items() if key not in CLONE_DROPS}
    return {**kept, **attr_values(clone.attrs)}


def attr_values(attrs: Mapping[str, object]) -> dict[str, tf.compat.v1.AttrValue]:
    """Return protos for the plain values in `Create.attrs` and `Clone.attrs`.

    Args:
      attrs: plain values by the name of the attribute.

    Raises:
      TypeError: a value is not as in `Create.attrs`.
    """
    return {name: _value(value) for name, value in attrs.items()}


def _value(value: object) -> tf.compat.v1.AttrValue:
    if isinstance(value, bool):
        return tf.compat.v1.AttrValue(b=value)
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    if isinstance(value, tuple) and value[0] == "const":
        return tf.compat.v1.AttrValue(
            tensor=tf.make_tensor_proto(value[2], tf.dtypes.as_dtype(value[1])))
    if isinstance(value, tuple) and value[0] == "attr":
        return tf.compat.v1.AttrValue.FromString(value[1])
    if isinstance(value, tuple) and value[0] == "types":
        types = [tf.dtypes.as_dtype(name).as_datatype_enum for name in value[1:]]
        return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))
    if isinstance(value, str) and value.startswith("dtype:"):
        return tf.compat.v1.AttrValue(type=tf.dtypes.as_dtype(value[6:]).as_datatype_enum)
    raise TypeError(f"no attribute value for {value!r}")
