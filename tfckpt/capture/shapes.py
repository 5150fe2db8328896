"""Known shapes for a graph that was traced with unknown dimensions.

The graph is imported into a scratch graph in which every source (placeholder, iterator) has its
full shape, so that TensorFlow's own shape inference fills in the rest. An unknown dimension is
never counted as 1: what stays unknown is refused later, by name.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.shapes import infer_shapes_of_bodies
from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.capture.sizes.open_part import open_part
from tfckpt.capture.sizes.values import ValueSizes
from tfckpt.errors import CostError
from tfckpt.ops import Source, record
from tfckpt.ops.names import PLACEHOLDER, VAR_HANDLE

_LARGE = 1 << 24
"""Bytes of a constant whose value no shape is computed from."""
ROUNDS = 8
"""Times that ops are asked for sizes that follow from no shapes: some follow from such sizes."""
STAND_IN = 32
"""The batch size planned for where none is known and no budget is a number of bytes."""
_NO_SHAPES = frozenset((tf.resource, tf.variant, tf.string))
"""Types of tensors that take no memory of a known size."""


def has_unknown_shapes(graph: tf.Graph) -> bool:
    """Return whether any tensor that takes memory has an unknown dimension.

    Args:
      graph: FuncGraph or imported graph.
    """
    return any(not t.shape.is_fully_defined() for op in graph.get_operations()
               for t in op.outputs if t.dtype not in _NO_SHAPES)


def uncaptured_inputs(func_graph: tf_adapter.FuncGraph) -> list[tf.Tensor]:
    """Return the placeholders that stand for a call's arguments.

    Those that stand for what the function captures are left out.

    Args:
      func_graph: of a traced function.
    """
    captured = {t.name for t in func_graph.internal_captures}
    return [t for t in func_graph.inputs if t.name not in captured]


def composite_parts(func_graph: tf.Graph, inputs: Sequence[tf.Tensor]) -> frozenset[str]:
    """Return the placeholders among the inputs that are parts of ragged and sparse tensors.

    They are given by op name. Their leading dimensions are no batch: they have as many rows as
    there are values.

    Args:
      func_graph: of a traced function; any other graph tells of no composites.
      inputs: the placeholders that stand for a call's arguments, all of them and in order.

    Returns:
      No names where the signature of the function has more or fewer tensors than that.
    """
    specs = tf.nest.flatten(getattr(func_graph, "structured_input_signature", None) or ())
    parts = [not isinstance(spec, tf.TensorSpec) for spec in specs
             if isinstance(spec, tf.TypeSpec)
             for _ in tf.nest.flatten(spec, expand_composites=True)]
    if len(parts) != len(inputs):
        return frozenset()
    return frozenset(t.op.name for t, part in zip(inputs, parts, strict=True) if part)


def leaves_batch_open(graph: tf.Graph, inputs: Mapping[str, Sequence[int]], sizes: CallSizes,
                      parts: Collection[str] = ()) -> bool:
    """Return whether a leading dimension of what the graph is given stays unknown.

    Args:
      graph: FuncGraph or imported graph.
      inputs: shapes of placeholders that are known.
      sizes: of the call, for the elements of a dataset that the graph reads.
      parts: placeholders whose leading dimension is no batch.
    """
    given = {*inputs, *parts}
    for op in graph.get_operations():
        if record(op.type).source is Source.ELEMENT:
            known = sizes.element(len(op.outputs))
        elif op.type == PLACEHOLDER and op.name not in given:
            known = (None,)
        else:
            continue
        if any(shape is None and t.shape.rank and t.shape[0] is None
               for shape, t in zip(known, op.outputs, strict=True)):
            return True
    return False


def planned_shapes(graph: tf.Graph, batch_size: int | None, *, may_assume: bool,
                   sizes: CallSizes | None = None, placeholders: Sequence[tf.Tensor] = (),
                   library: Any = None,
                   told: Mapping[str, tf.TensorSpec] = MappingProxyType({}),
                   ) -> tuple[tf.Graph | None, str]:
    """Return a scratch graph with the shapes to plan for, and what open ones are taken to be.

    The latter is told in words. The scratch graph may lack ops whose shapes the graph knows.

    Args:
      graph: FuncGraph or imported graph.
      batch_size: what was said of the batch; it counts where the call tells nothing.
      may_assume: whether `STAND_IN` may be taken for a batch that nothing tells.
      sizes: of the call.
      placeholders: those that stand for what the call is made with.
      library: as for `concrete_shapes`.
      told: as for `concrete_shapes`.

    Returns:
      None and no words where every shape is known.

    Raises:
      CostError: no batch of the size that was told can pass through the graph.
    """
    if not has_unknown_shapes(graph):
        return None, ""
    sizes = sizes or CallSizes()
    inputs, parts = sizes.inputs(placeholders), composite_parts(graph, placeholders)
    batch = batch_size or sizes.batch
    numbers = {placeholders[n].op.name: number for n, number in sizes.numbers.items()}
    words = [str(sizes)] if sizes.leaves else []
    if leaves_batch_open(graph, inputs, sizes, parts):
        words = [str(sizes)] if inputs else []
        if batch is not None:
            words.append(f"a batch of {batch}")
        elif may_assume:
            batch = STAND_IN
            words.append(f"a batch of {STAND_IN}: nothing says what it is; pass batch_size=")
    known = functools.partial(concrete_shapes, graph, batch, inputs, library, sizes, parts,
                              numbers=numbers)
    found = known(told=told) if told else known(open_part(graph))
    asked, decided = ValueSizes(graph, sizes.given(graph, placeholders)), {}
    for _ in range(ROUNDS if sizes.values else 0):
        more = asked.shapes(found)
        if not more:
            break
        decided.update(more)
        found = known(told={**told, **decided})
    if asked.read_values(decided):
        words.append("sizes that this call's values decide")
    return found, ", ".join(words)


def concrete_shapes(graph: tf.Graph, batch_size: int | None, inputs: Mapping[str, Sequence[int]],
                    library: Any = None, sizes: CallSizes | None = None,
                    parts: Collection[str] = (), part: tf.compat.v1.GraphDef | None = None,
                    told: Mapping[str, tf.TensorSpec] = MappingProxyType({}),
                    numbers: Mapping[str, Any] = MappingProxyType({})) -> tf.Graph:
    """Return a scratch graph with the same op names and as many shapes known as can be.

    Args:
      graph: FuncGraph or imported graph.
      batch_size: what an unknown leading dimension of a source stands for, or None.
      inputs: full shapes of placeholders by name, from the call's real arguments.
      library: the functions that the graph calls, where it does not have them itself.
      sizes: of the call, for the elements of a dataset that the graph reads.
      parts: placeholders whose leading dimension is no batch.
      part: of the graph, where that is enough; it calls no functions.
      told: shapes of tensors that follow from no others, by name.
      numbers: what placeholders are given, by name, where that is known.

    Raises:
      CostError: no batch of that size can pass through the graph.
    """
    definition = _definition(graph) if part is None else part
    if library is not None and part is None:
        definition.library.CopyFrom(library)
    placeholders = {op.name: op for op in graph.get_operations() if op.type == PLACEHOLDER}
    for node in definition.node:
        if node.name in numbers:
            tf_adapter.make_constant(node, numbers[node.name])
        elif node.name in placeholders:
            _fix_placeholder(node, placeholders[node.name],
                             None if node.name in parts else batch_size, inputs)
        elif record(node.op).source is Source.ELEMENT:
            _fix_element(node.attr["output_shapes"].list.shape, batch_size, sizes or CallSizes())
    tf_adapter.say_shapes(definition.node, told)
    if any(record(node.op).has_bodies for node in definition.node):
        infer_shapes_of_bodies(definition, graph)
    scratch = tf.Graph()
    with scratch.as_default():
        try:
            tf.graph_util.import_graph_def(definition, name="")
        except ValueError as error:
            given = f"a batch of {batch_size}" if batch_size is not None else "these sizes"
            name = getattr(graph, "name", "the step")
            raise CostError(f"cost: {given} cannot pass through {name!r} ({_first_line(error)}); "
                            "pass the batch_size=... that it is trained with, or none") from error
    for name, spec in told.items():
        scratch.get_tensor_by_name(name).set_shape(spec.shape)
    return scratch


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _fix_element(shapes: Sequence[Any], batch_size: int | None, sizes: CallSizes) -> None:
    """Fill in what is known of a dataset's element."""
    for shape, known in zip(shapes, sizes.element(len(shapes)), strict=True):
        if known is not None and tf.TensorShape(shape).is_compatible_with(known):
            shape.CopyFrom(tf.TensorShape(known).as_proto())
        _fill(shape, batch_size)


def _definition(graph: tf.Graph) -> tf.compat.v1.GraphDef:
    """Return the graph's definition, to infer shapes by.

    Large constants, which it would copy, are given by shape alone; and no node says with which it
    shares a device, as the graph of a loaded function has other names for some.
    """
    operations = graph.get_operations()
    large = {op.name for op in operations if record(op.type).is_constant and (
        op.outputs[0].shape.num_elements() or 0) * op.outputs[0].dtype.size > _LARGE}
    if not large:
        definition = graph.as_graph_def()
        for node in definition.node:
            node.attr.pop("_class", None)
        return definition
    definition = tf.compat.v1.GraphDef(versions=graph.graph_def_versions)
    for op in operations:
        node = definition.node.add()
        if op.name not in large:
            node.CopyFrom(op.node_def)
            node.attr.pop("_class", None)
            continue
        node.name, node.op, node.device = op.name, PLACEHOLDER, op.device
        node.attr["dtype"].type = op.outputs[0].dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(op.outputs[0].shape.as_proto())
    return definition


def _fix_placeholder(node: tf.compat.v1.NodeDef, op: tf.Operation, batch_size: int | None,
                     inputs: Mapping[str, Sequence[int]]) -> None:
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


def to_variable(node: tf.compat.v1.NodeDef, shape: tf.TensorShape, dtype: tf.DType) -> None:
    """Make a NodeDef that stands for a resource the handle of a variable.

    Args:
      node: changed in place; it keeps its name, by which the variable is shared.
      shape: of the variable.
      dtype: of the variable's elements.
    """
    node.op = VAR_HANDLE
    node.ClearField("attr")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(shape.as_proto())
    node.attr["shared_name"].s = node.name.encode()


def _fill(shape: Any, batch_size: int | None) -> None:
    if batch_size is not None and not shape.unknown_rank and shape.dim and shape.dim[0].size < 0:
        shape.dim[0].size = batch_size
