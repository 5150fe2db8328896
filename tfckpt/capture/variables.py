"""Search for the variables that the ops of a graph may write.

An op that runs later than it did must find its variables as they were. A variable is known by
the op that makes its handle: two handles that a function captures, or two arguments of a function
in a file, are two variables, as TensorFlow's own control dependencies have it.
"""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ops import Access, Source, record

ANY = "*"
"""A variable that may be any."""
_HANDLES = (Source.ARGUMENT, Source.HANDLE)


def only_reads(op: tf.Operation) -> bool:
    """Return whether an op only reads the variables whose handles it is given.

    Args:
      op: of any type.
    """
    return record(op.type).access in (Access.VALUE, Access.READ)


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that comes before ops which only pass it on.

    Args:
      tensor: of a live graph; returned itself where no such op makes it.
    """
    while record(tensor.op.type).passes_on:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def number_origin(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that comes before ops which leave a single number what it is.

    Args:
      tensor: as for `origin`; a cast to another dtype is such an op as well.
    """
    while record(tensor.op.type).keeps_number:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def argument(graph: tf.Graph, tensor: tf.Tensor) -> int | None:
    """Return which argument of a function a tensor of its graph is; None for no argument.

    Args:
      graph: of the function, a FuncGraph: its inputs are the arguments.
      tensor: looked for by name, so it may be of a graph with the same op names.
    """
    return next((i for i, given in enumerate(graph.inputs) if given.name == tensor.name), None)


def variable(handle: tf.Tensor, unsure: Collection[str] = ()) -> str:
    """Return what a resource tensor refers to, by name; `ANY` where that is not known.

    Args:
      handle: the tensor.
      unsure: placeholders for resources that may be the same as others.
    """
    handle = origin(handle)
    op = handle.op
    source = record(op.type).source
    if source not in _HANDLES or op.name in unsure:
        return ANY
    if source is Source.HANDLE and op.get_attr("shared_name"):
        return f"{op.get_attr('container')!r}/{op.get_attr('shared_name')!r}"
    return str(handle.name)


def may_write(op: tf.Operation, unsure: Collection[str] = ()) -> tuple[str, ...]:
    """Return the variables that an op may write, `ANY` among them if that cannot be told.

    Args:
      op: of a live graph that has the functions which it calls.
      unsure: placeholders for resources that may be the same as others.

    Returns:
      Names as `variable` gives them, without repeats; none where it writes no variable.
    """
    known = record(op.type)
    if known.runs_python:
        return (ANY,)
    if (known.does_nothing or known.passes_on or known.no_variables or only_reads(op)
            or known.source in _HANDLES):
        return ()
    called = tf_adapter.called_functions(op)
    if called and any(_writes_unseen(op, name, set()) for name in called):
        return (ANY,)
    only_read = (tf_adapter.node_attrs(op)["_read_only_resource_inputs"].list.i
                 if called and "_read_only_resource_inputs" in tf_adapter.node_attrs(op) else ())
    return tuple(dict.fromkeys(
        variable(t, unsure) for i, t in enumerate(op.inputs)
        if t.dtype == tf.resource and i not in only_read))


def _writes_unseen(op: tf.Operation, name: str, seen: set[str]) -> bool:
    """Return whether a function may write variables whose handles it is not given."""
    if name in seen:
        return False
    seen.add(name)
    function = tf_adapter.find_function(op.graph, name)
    if function is None:
        return True
    inner = [attr.func.name for node in function.node_def for attr in node.attr.values()
             if attr.HasField("func")]
    inner += [f.name for node in function.node_def for attr in node.attr.values()
              for f in attr.list.func]
    return (any(record(node.op).runs_python or record(node.op).source in (
                Source.HANDLE, Source.HANDLES) for node in function.node_def)
            or any(_writes_unseen(op, other, seen) for other in inner))
