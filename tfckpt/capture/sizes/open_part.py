"""The part of a graph that has to be read again to know the shapes that its trace leaves open.

Shape inference reads a tensor's value only where it is small: a size, a list of axes. So nothing
before a large tensor of known shape has to be read; a placeholder can stand for the tensor.
"""

from __future__ import annotations

import tensorflow as tf

from tfckpt.ops import record
from tfckpt.ops.names import PLACEHOLDER

_VALUE = 64
"""Elements up to which the value of a tensor may say what a shape is."""
_STANDS_FOR = "tfckpt_known"


def open_part(graph: tf.Graph) -> tf.compat.v1.GraphDef | None:
    """Return the ops with open shapes, and what these may depend on, as a definition.

    Ops have their names; placeholders stand for the large tensors of known shape that they read.

    Args:
      graph: FuncGraph or imported graph; not changed.

    Returns:
      None where bodies of loops and functions say what shapes are, or open sizes may say how often
      a loop runs.
    """
    needed = _needed(graph.get_operations())
    if needed and any(record(op.type).is_loop for op in graph.get_operations()):
        return None
    operations = [op for op in graph.get_operations() if op in needed]
    definition = tf.compat.v1.GraphDef(versions=graph.graph_def_versions)
    stands: dict[str, str] = {}
    for op in operations:
        node = op.node_def
        if any(attr.HasField("func") or attr.list.func for attr in node.attr.values()):
            return None
        del node.input[:]
        node.attr.pop("_class", None)  # it names other ops
        for tensor in op.inputs:
            if tensor.op in needed:
                node.input.append(tensor.name)
                continue
            if tensor.name not in stands:
                stands[tensor.name] = f"{_STANDS_FOR}_{len(stands)}"
                _add_placeholder(definition, stands[tensor.name], tensor)
            node.input.append(stands[tensor.name])
        definition.node.append(node)
    return definition


def _needed(operations: list[tf.Operation]) -> set[tf.Operation]:
    """Return the ops with open shapes, and those that make small tensors for them."""
    needed: set[tf.Operation] = set()
    left = [op for op in operations
            if not all(t.shape.is_fully_defined() for t in op.outputs)]
    while left:
        op = left.pop()
        if op not in needed:
            needed.add(op)
            left += [t.op for t in op.inputs if not _is_known(t)]
    return needed


def _is_known(tensor: tf.Tensor) -> bool:
    elements = tensor.shape.num_elements()
    return elements is not None and elements > _VALUE


def _add_placeholder(definition: tf.compat.v1.GraphDef, name: str, tensor: tf.Tensor) -> None:
    node = definition.node.add()
    node.name, node.op = name, PLACEHOLDER
    node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
