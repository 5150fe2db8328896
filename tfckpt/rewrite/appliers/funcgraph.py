"""Applies edits to a live FuncGraph, in place, all or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import PROTECTED, Clone, Create, Edits
from tfckpt.ops import Source, record
from tfckpt.rewrite.appliers.attrs import attr_values, copy_attrs


def apply(graph: tf.Graph, edits: Edits, changes: LiveChanges | None = None,
          protected: bool = False) -> None:
    """Realise the edits in `graph`.

    TensorFlow appends a number to names that are taken, by ops of edits that failed before.

    Args:
      graph: a FuncGraph, traced to its end.
      edits: what is done to it; ops are named as in the graph.
      changes: of the graph, what was done to it before.
      protected: whether Grappler is to leave new ops as they are, and not to see unread ones.

    Raises:
      RewriteError: an edit could not be applied; the graph is as it was.
    """
    changes = changes or LiveChanges(graph)
    start = changes.point()
    try:
        _apply(graph, edits, changes, protected)
        if protected:
            changes.show(*_without_unread(graph, edits.dropped))
    except Exception as error:
        changes.revert(start)
        raise RewriteError(f"rewrite: {type(error).__name__}: {error}; "
                           "the graph computes what it did before") from error


def _apply(graph: tf.Graph, edits: Edits, changes: LiveChanges, protected: bool) -> None:
    ops = {op.name: op for op in tf_adapter.every_operation(graph)}
    tf_adapter.add_functions(graph, edits.functions)
    for new in edits.added:
        if protected:
            new = dataclasses.replace(new, attrs={**new.attrs, PROTECTED: True})
        ops[new.name] = _add(graph, ops, new)
    for rewire in edits.rewires:
        changes.update_input(ops[rewire.op], rewire.index, _tensor(ops, rewire.tensor))
    for control in edits.controls:
        changes.add_control_input(ops[control.op], ops[control.control])
    _replace(graph, {entry.old: ops[entry.new] for entry in edits.replaced}, ops, changes)


def _replace(graph: Any, replaced: Mapping[str, tf.Operation], ops: Mapping[str, tf.Operation],
             changes: LiveChanges) -> None:
    """Have others wait for new ops, and hide the old."""
    if not replaced:
        return
    for old in replaced:
        for waiting in tf_adapter.waiting_for(ops[old]):
            changes.replace_control_inputs(waiting, list(dict.fromkeys(
                replaced.get(c.name, c) for c in waiting.control_inputs)))
    results = tf_adapter.control_outputs(graph)
    if any(op.name in replaced for op in results):
        changes.replace_results("control_outputs", [replaced.get(op.name, op) for op in results])
    changes.show(tf_adapter.how_shown(graph)[0], _only_for(graph, replaced))


def _only_for(graph: Any, gone: Collection[str]) -> list[str]:
    """Return the ops that are replaced, and those that read them, which nothing needs."""
    found = set(gone)
    for op in graph.get_operations():
        if not found.isdisjoint(t.op.name for t in op.inputs):
            found.add(op.name)
    return sorted(found)


def _without_unread(graph: Any, dropped: Collection[str]) -> tuple[Sequence[str], list[str]]:
    """Return the ops that are shown, and those whose results nothing reads: they would run.

    Such as the accumulator of a sum that is dropped, which is stateful.
    """
    shown = graph.get_operations()
    needed: set[str] = set()
    left = [*(t.op for t in graph.outputs), *graph.control_outputs,
            *(op for op in shown if (tf_adapter.is_stateful(op) or not op.outputs)
              and op.name not in dropped)]
    while left:
        op = left.pop()
        if op.name not in needed:
            needed.add(op.name)
            left += [*(t.op for t in op.inputs), *op.control_inputs]
    return tf_adapter.how_shown(graph)[0], [op.name for op in shown if op.name not in needed and (
        record(op.type).source is not Source.ARGUMENT)]


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
