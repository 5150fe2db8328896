"""NodeDef attributes of new ops."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

CLONE_DROPS = frozenset({"_class", "_output_shapes", "_tfckpt_copy", "_grappler_do_not_remove"})
"""Attributes that a copy does not inherit (`_class` would tie it to the original)."""


def copy_attrs(attrs: Mapping[str, tf.compat.v1.AttrValue], in_xla: bool
               ) -> dict[str, tf.compat.v1.AttrValue]:
    """Attributes of a copy: the original's, marked, and kept out of fusions and autoclusters."""
    marked = dict(attrs)
    marked["_tfckpt_copy"] = tf.compat.v1.AttrValue(b=True)
    if not in_xla:
        marked["_XlaCompile"] = tf.compat.v1.AttrValue(b=False)
    return marked


def attr_values(attrs: Mapping[str, object]) -> dict[str, tf.compat.v1.AttrValue]:
    """Protos for the plain values in `Create.attrs`."""
    return {name: _value(value) for name, value in attrs.items()}


def _value(value: object) -> tf.compat.v1.AttrValue:
    if isinstance(value, bool):
        return tf.compat.v1.AttrValue(b=value)
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    if isinstance(value, tuple) and value[0] == "const":
        return tf.compat.v1.AttrValue(
            tensor=tf.make_tensor_proto(value[2], tf.dtypes.as_dtype(value[1])))
    if isinstance(value, tuple) and value[0] == "types":
        types = [tf.dtypes.as_dtype(name).as_datatype_enum for name in value[1:]]
        return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))
    if isinstance(value, str) and value.startswith("dtype:"):
        return tf.compat.v1.AttrValue(type=tf.dtypes.as_dtype(value[6:]).as_datatype_enum)
    raise TypeError(f"no attribute value for {value!r}")
