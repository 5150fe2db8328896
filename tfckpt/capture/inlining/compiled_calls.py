"""Calls of functions that XLA compiles by themselves, inside of a step that the executor runs.

Such a call is one op to the executor (Keras makes one of every depthwise convolution on a CPU).
What XLA allocates besides its arguments and its results is one request, whose size the compiler
alone knows: it is asked, once for each body with its shapes. Nothing runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.common.messages import waiting_for
from tfckpt.ir.hlo import temp_bytes
from tfckpt.ops import Access, Calls, record
from tfckpt.ops.names import IDENTITY

_COMPILED = "_XlaMustCompile"
_NAMES = ("forward_function_name", "backward_function_name")
"""Attributes of functions by which those that do the same may differ."""
_known: dict[tuple[object, ...], int | str] = {}


def is_compiled_call(op: tf.Operation) -> bool:
    """Return whether an op calls a function that XLA compiles by itself.

    Args:
      op: of a live graph that has the function which it calls.
    """
    if record(op.type).calls is not Calls.FUNCTION:
        return False
    if is_compiled(tf_adapter.node_attrs(op)):
        return True
    function = tf_adapter.find_function(op.graph, tf_adapter.called_function(op))
    return function is not None and is_compiled(function.attr)


def is_compiled(attrs: Any) -> bool:
    """Return whether the attributes of a call, or of a function, have XLA compile it by itself.

    Args:
      attrs: AttrValues by name.
    """
    return _COMPILED in attrs and attrs[_COMPILED].b


def call_workspace(call: tf.Operation, known: tf.Operation) -> tuple[int, str]:
    """Return the bytes that such a call allocates besides its results while it runs.

    Args:
      call: the op that calls the function.
      known: the same op in a graph in which more shapes are known.

    Returns:
      0 and a line with the reason where the compiler does not tell.
    """
    given = []
    for here, there in zip(call.inputs, known.inputs, strict=True):
        argument = _given(here, there)
        if argument is None:
            return 0, f"the size of {here.name} is not known"
        given.append(argument)
    definition = tf_adapter.find_function(call.graph, tf_adapter.called_function(call))
    device = call.device or f"/job:localhost/replica:0/task:0/device:{tf_adapter.default_device()}"
    key = _content(call.graph, definition), tuple((str(s), d.name) for s, d in given), device
    if key not in _known:
        try:
            with waiting_for(f"asking XLA what {call.name} takes, which it compiles by itself"):
                _known[key] = temp_bytes(_compiled(call, given, device))
        except (ValueError, TypeError, RuntimeError, tf.errors.OpError) as error:
            _known[key] = (str(error).strip() or type(error).__name__).splitlines()[0]
    found = _known[key]
    return (found, "") if isinstance(found, int) else (0, found)


def _given(here: tf.Tensor, there: tf.Tensor) -> tuple[tf.TensorShape, tf.DType] | None:
    """Return shape and dtype of an argument, or of the variable whose handle it is.

    None where the shape is open.
    """
    if here.dtype == tf.resource:
        stored = tf_adapter.handle_shape(here) or tf_adapter.handle_shape(there)
        return stored if stored is not None and stored[0].is_fully_defined() else None
    shape = here.shape if here.shape.is_fully_defined() else there.shape
    return (shape, here.dtype) if shape.is_fully_defined() else None


def _compiled(call: tf.Operation, given: Sequence[tuple[tf.TensorShape, tf.DType]],
              device: str) -> Any:
    """Return the HloProto of a call's function, which is given values in place of variables.

    Raises:
      ValueError, tf.errors.OpError: it cannot be compiled by itself.
    """
    body = tf_adapter.graph_called(call, tf_adapter.called_function(call), [
        tf.TensorShape(()) if t.dtype == tf.resource else shape
        for t, (shape, _) in zip(call.inputs, given, strict=True)])
    definition = body.as_graph_def()
    values = {inside.op.name: (shape, dtype) for inside, (shape, dtype) in zip(
        body.inputs, given, strict=True) if inside.dtype == tf.resource}
    for node in definition.node:
        if node.name in values:
            _make_value(node, *values[node.name])
        elif any(name.partition(":")[0] in values for name in node.input):
            _read_value(node, {name: dtype for name, (_, dtype) in values.items()})
    plain = tf_adapter.with_definition(body, definition)
    return tf_adapter.compiled_graph(plain, definition, [shape for shape, _ in given], device)


def _make_value(node: tf.compat.v1.NodeDef, shape: tf.TensorShape, dtype: tf.DType) -> None:
    """Have the placeholder of a variable stand for its value."""
    node.ClearField("attr")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(shape.as_proto())


def _read_value(node: tf.compat.v1.NodeDef, values: dict[str, tf.DType]) -> None:
    """Have what reads a variable pass its value on.

    Raises:
      ValueError: it does something else with the variable.
    """
    if record(node.op).access is not Access.VALUE:
        raise ValueError(f"it uses a variable by {node.op}")
    dtype = values[node.input[0].partition(":")[0]]
    node.op = IDENTITY
    node.ClearField("attr")
    node.attr["T"].type = dtype.as_datatype_enum


def _content(graph: tf.Graph, function: Any) -> str:
    """Return what a function and those that it calls compute, whatever they are called."""
    names = {argument.name: f"a{i}" for i, argument in enumerate(function.signature.input_arg)}
    names |= {node.name: f"n{i}" for i, node in enumerate(function.node_def)}
    digest = hashlib.sha256()

    def renamed(tensor: str) -> str:
        name, colon, slot = tensor.lstrip("^").partition(":")
        return f"{'^' * tensor.startswith('^')}{names.get(name, name)}{colon}{slot}"

    for node in function.node_def:
        digest.update(f"{node.op}({','.join(map(renamed, node.input))})".encode())
        for key in sorted(node.attr):
            if key.startswith("_") or key in _NAMES:
                continue
            value = node.attr[key]
            for called in (value.func.name, *(f.name for f in value.list.func)):
                inner = tf_adapter.find_function(graph, called) if called else None
                digest.update((_content(graph, inner) if inner is not None else called).encode())
            if not value.HasField("func") and not value.list.func:
                digest.update(f"{key}=".encode() + value.SerializeToString(deterministic=True))
    for result in function.signature.output_arg:
        digest.update(renamed(function.ret[result.name]).encode())
    return digest.hexdigest()
