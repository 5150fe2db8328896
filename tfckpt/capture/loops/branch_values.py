"""What branches do, and what they keep for their gradients.

A branch hands out what its gradient reads, each value in an optional, since the other branches have
none of it. An optional has no shape: its bytes are those of the value that the branch puts into it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.priced import priced_body
from tfckpt.capture.variables import origin
from tfckpt.ir.edits import traced
from tfckpt.ir.graph import FORWARD, Graph, Op
from tfckpt.ops import Calls, record


def kept_by_branches(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation]
                     ) -> dict[int, int]:
    """Return the bytes of what an op's branches keep, by the slot of its results.

    One branch runs, whichever: that which keeps most counts. What the branch was given, returns, or
    has put into another optional, takes no memory of its own; nor is a value counted whose size is
    not known.

    Args:
      op: of any type; other than branches keep nothing.
      known: returns the op with the shapes that its inputs really have.
    """
    calls = record(op.type)
    slots = [k for k, tensor in enumerate(op.outputs) if tensor.dtype == tf.variant]
    if calls.calls is not Calls.BRANCHES or not slots:
        return {}
    shapes = [tensor.shape for tensor in known(op).inputs[calls.first_argument:]]
    found = dict.fromkeys(slots, 0)
    for name in tf_adapter.called_functions(op):
        branch = tf_adapter.graph_called(op, name)
        inferred = functools.cache(functools.partial(tf_adapter.graph_called, op, name, shapes))
        counted = {origin(tensor).ref() for tensor in (*branch.inputs, *branch.outputs)}
        kept = dict.fromkeys(slots, 0)
        for slot in slots:
            for tensor in _wrapped(branch.outputs[slot]):
                if tensor.ref() not in counted:
                    counted.add(tensor.ref())
                    kept[slot] += _bytes(tensor, inferred)
        found = max(found, kept, key=lambda sizes: sum(sizes.values()))
    return found


def branches_of(op: tf.Operation, known: Callable[[tf.Operation], tf.Operation]
                ) -> tuple[Graph, ...]:
    """Return what each branch of an op does, as plain data; nothing for what does not branch.

    Args:
      op: of any type.
      known: returns the op with the shapes that its inputs really have.
    """
    calls = record(op.type)
    if calls.calls is not Calls.BRANCHES:
        return ()
    shapes = [tensor.shape for tensor in known(op).inputs[calls.first_argument:]]
    found = []
    try:
        for name in tf_adapter.called_functions(op):
            inferred = functools.cache(functools.partial(
                tf_adapter.graph_called, op, name, shapes))
            found.append(priced_body(name, tf_adapter.graph_called(op, name),
                                     functools.partial(_shape, inferred=inferred)))
    except (KeyError, ValueError, TypeError, tf.errors.OpError):  # a branch unlike any known
        return ()
    return tuple(found)


def not_recomputed(ops: Iterable[Op]) -> tuple[str, ...]:
    """Return a line about the ops whose branches keep something for their gradients, if any.

    Args:
      ops: as they were captured.
    """
    kept = {op.name: sum(t.bytes or 0 for t in op.outputs if t.dtype == "variant") for op in ops
            if record(op.type).calls is Calls.BRANCHES and op.region == FORWARD}
    names = sorted((name for name, size in kept.items() if size), key=lambda name: -kept[name])
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"{traced(names[0])}{more}: branches are not recomputed, and what they keep for the "
            "gradient stays",)


def _wrapped(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return what is in an optional; nothing where it is empty, or is none."""
    optional = origin(tensor).op
    return [origin(value) for value in optional.inputs] if record(optional.type).wraps else []


def _bytes(tensor: tf.Tensor, inferred: Callable[[], tf.Graph]) -> int:
    """Return the size of a tensor; 0 where it is not known, or not that of numbers."""
    shape = _shape(tensor, inferred)
    return math.prod(shape.as_list()) * tensor.dtype.size if shape.is_fully_defined() else 0


def _shape(tensor: tf.Tensor, inferred: Callable[[], tf.Graph]) -> tf.TensorShape:
    """Return what is known of a tensor's shape, in the trace and from what the branch is given.

    Args:
      tensor: of a branch as it was traced.
      inferred: returns the branch with the shapes that it is given, but for those of variables.
    """
    shape: tf.TensorShape = tensor.shape
    if shape.is_fully_defined():
        return shape
    other = inferred().get_operation_by_name(tensor.op.name).outputs[tensor.value_index].shape
    return shape.merge_with(other) if shape.is_compatible_with(other) else shape
