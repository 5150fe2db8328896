"""What Grappler makes of a function's body, as a graph that can be imported.

Arguments are `_Arg` nodes and results `_Retval` nodes there, which have no gradient, no shape and
no place in a graph that is not a function's.
"""

from __future__ import annotations

import tensorflow as tf

from tfckpt.ops.names import ARG, IDENTITY, PLACEHOLDER, RETVAL, VAR_HANDLE

_SHAPES = "_output_shapes"


def importable(definition: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Return a copy with placeholders for arguments, variables for resources, and plain results.

    Args:
      definition: of a function's body, with `_Arg` and `_Retval` nodes; not changed.
    """
    copy = tf.compat.v1.GraphDef()
    copy.CopyFrom(definition)
    for node in copy.node:
        node.attr.pop("_class", None)  # places are given, and what it names may be gone
        if node.op == ARG:
            _make_importable(node)
        elif node.op == RETVAL:
            node.op = IDENTITY
            del node.attr["index"]
            node.attr.pop(_SHAPES, None)
    return copy


def _make_importable(node: tf.compat.v1.NodeDef) -> None:
    """Turn one `_Arg` into an op that says what is known of its shape."""
    attrs = {key: node.attr[key] for key in node.attr}
    shapes = {key: attrs[key].list.shape[0] if key in attrs and attrs[key].list.shape else None
              for key in ("_output_shapes", "_handle_shapes")}
    kind = attrs["T"].type
    types = list(attrs["_handle_dtypes"].list.type) if "_handle_dtypes" in attrs else []
    known = tf.compat.v1.NodeDef(name=node.name, device=node.device)
    if kind == tf.resource.as_datatype_enum and shapes["_handle_shapes"] is not None and types:
        known.op = VAR_HANDLE
        known.attr["dtype"].type = types[0]
        known.attr["shape"].shape.CopyFrom(shapes["_handle_shapes"])
        known.attr["shared_name"].s = node.name.encode()
    else:
        known.op = PLACEHOLDER
        known.attr["dtype"].type = kind
        shape = shapes["_output_shapes"]
        known.attr["shape"].shape.CopyFrom(
            tf.TensorShape(None).as_proto() if shape is None else shape)
    known.input.extend(node.input)
    node.CopyFrom(known)
