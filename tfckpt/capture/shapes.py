"""Known shapes for a graph that was traced with unknown dimensions.

The graph is imported into a scratch graph in which every source (placeholder, iterator) has its
full shape, so that TensorFlow's own shape inference fills in the rest. An unknown dimension is
never counted as 1: what stays unknown is refused later, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loop_shapes import tell_shapes_behind_loops
from tfckpt.ops import Source, record
from tfckpt.ops.names import PLACEHOLDER, VAR_HANDLE

_LARGE = 1 << 24
"""Bytes of a constant whose value no shape is computed from."""


def has_unknown_shapes(graph: tf.Graph) -> bool:
    """Whether any tensor that takes memory has an unknown dimension."""
    return any(not t.shape.is_fully_defined() for op in graph.get_operations()
               for t in op.outputs if t.dtype not in (tf.resource, tf.variant, tf.string))


def call_tensors(arguments: object) -> list:
    """The tensors and arrays in a nest of a call's arguments, those of composites included."""
    return [t for t in tf.nest.flatten(arguments, expand_composites=True)
            if hasattr(t, "shape") and hasattr(t, "dtype") and not isinstance(t, tf.Variable)]


def uncaptured_inputs(func_graph) -> list[tf.Tensor]:
    """The placeholders that stand for a call's arguments, not for what the function captures."""
    captured = {t.name for t in func_graph.internal_captures}
    return [t for t in func_graph.inputs if t.name not in captured]


def argument_shapes(inputs: Sequence[tf.Tensor], arguments: object) -> dict[str, Sequence[int]]:
    """Shapes of a call's real tensors, by the placeholders that stand for them.

    Args:
      inputs: the placeholders.
      arguments: a nest with all arguments; tensors of unknown shape are left out.
    """
    tensors = call_tensors(arguments)
    if len(tensors) != len(inputs):
        return {}
    found = {}
    for tensor, placeholder in zip(tensors, inputs, strict=True):
        shape = tf.TensorShape(tensor.shape)
        if shape.is_fully_defined() and placeholder.shape.is_compatible_with(shape):
            found[placeholder.op.name] = shape.as_list()
    return found


def concrete_shapes(graph: tf.Graph, batch_size: int | None,
                    inputs: Mapping[str, Sequence[int]], library=None) -> tf.Graph:
    """A scratch graph with the same op names and as many shapes known as can be.

    Args:
      graph: FuncGraph or imported graph.
      batch_size: what an unknown leading dimension of a source stands for, or None.
      inputs: full shapes of placeholders by name, from the call's real arguments.
      library: the functions that the graph calls, where it does not hold them itself.
    """
    definition = _definition(graph)
    if library is not None:
        definition.library.CopyFrom(library)
    placeholders = {op.name: op for op in graph.get_operations() if op.type == PLACEHOLDER}
    for node in definition.node:
        if node.name in placeholders:
            _fix_placeholder(node, placeholders[node.name], batch_size, inputs)
        elif record(node.op).source is Source.ELEMENT:
            for shape in node.attr["output_shapes"].list.shape:
                _fill(shape, batch_size)
    if any(record(node.op).is_loop for node in definition.node):
        tell_shapes_behind_loops(definition, graph)
    scratch = tf.Graph()
    with scratch.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return scratch


def _definition(graph: tf.Graph) -> tf.compat.v1.GraphDef:
    """The graph's definition; large constants, of which it would hold copies, by shape alone."""
    operations = graph.get_operations()
    large = {op.name for op in operations if record(op.type).is_constant and _LARGE < (
        op.outputs[0].shape.num_elements() or 0) * op.outputs[0].dtype.size}
    if not large:
        return graph.as_graph_def()
    definition = tf.compat.v1.GraphDef(versions=graph.graph_def_versions)
    for op in operations:
        node = definition.node.add()
        if op.name not in large:
            node.CopyFrom(op.node_def)
            continue
        node.name, node.op, node.device = op.name, PLACEHOLDER, op.device
        node.attr["dtype"].type = op.outputs[0].dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(op.outputs[0].shape.as_proto())
    return definition


def _fix_placeholder(node, op: tf.Operation, batch_size, inputs) -> None:
    output = op.outputs[0]
    if output.dtype == tf.resource:
        data = tf_adapter.handle_shape(output)
        if data is not None:  # a captured variable: give its reads their shape back
            to_variable(node, *data)
        return
    shape = inputs.get(node.name)
    target = node.attr["shape"].shape
    if output.shape.rank is None and shape is None:
        return
    target.CopyFrom(tf.TensorShape(shape if shape is not None else output.shape).as_proto())
    _fill(target, batch_size)


def to_variable(node, shape: tf.TensorShape, dtype: tf.DType) -> None:
    """Makes a NodeDef that stands for a resource the handle of a variable."""
    node.op = VAR_HANDLE
    node.ClearField("attr")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(shape.as_proto())
    node.attr["shared_name"].s = node.name.encode()


def _fill(shape, batch_size: int | None) -> None:
    if batch_size is not None and not shape.unknown_rank and shape.dim and shape.dim[0].size < 0:
        shape.dim[0].size = batch_size
