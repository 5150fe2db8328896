"""Applies edits to a live FuncGraph, in place, all or nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.edits import Clone, Create, Edits
from tfckpt.errors import RewriteError
from tfckpt.rewrite.attrs import attr_values, copy_attrs


def apply(graph: tf.Graph, edits: Edits) -> None:
    """Realises the edits in `graph`.

    New ops are created first, which is harmless if abandoned; then readers are rewired under an
    undo log.

    Raises:
      RewriteError: an edit could not be applied; the readers have been put back.
    """
    ops = {op.name: op for op in graph.get_operations()}
    undo: list[Callable[[], None]] = []
    try:
        for new in edits.added:
            ops[new.name] = _add(graph, ops, new)
        for rewire in edits.rewires:
            op = ops[rewire.op]
            before = op.inputs[rewire.index]
            undo.append(functools.partial(tf_adapter.update_input, op, rewire.index, before))
            tf_adapter.update_input(op, rewire.index, _tensor(ops, rewire.tensor))
        for control in edits.controls:
            op = ops[control.op]
            present = list(op.control_inputs)
            undo.append(functools.partial(tf_adapter.replace_control_inputs, op, present))
            tf_adapter.add_control_input(op, ops[control.control])
    except Exception as error:
        for action in reversed(undo):
            action()
        raise RewriteError(f"rewrite: {type(error).__name__}: {error}; "
                           "the graph computes what it did before") from error


def _tensor(ops: dict[str, tf.Operation], name: str) -> tf.Tensor:
    op, _, slot = name.rpartition(":")
    return ops[op].outputs[int(slot)]


def _add(graph: tf.Graph, ops: dict[str, tf.Operation], new: Create | Clone) -> tf.Operation:
    inputs = [_tensor(ops, t) for t in new.inputs]
    if isinstance(new, Clone):
        source = ops[new.source]
        op = tf_adapter.create_op(graph, source.type, inputs, [t.dtype for t in source.outputs],
                                  new.name, copy_attrs(new, tf_adapter.node_attrs(source)),
                                  source.device)
        for made, original in zip(op.outputs, source.outputs, strict=True):
            made.set_shape(original.shape)
    else:
        op = tf_adapter.create_op(graph, new.type, inputs,
                                  [tf.dtypes.as_dtype(d) for d in new.dtypes], new.name,
                                  attr_values(new.attrs), new.device)
    for control in new.controls:
        tf_adapter.add_control_input(op, ops[control])
    return op
