"""What while loops keep: lists with an entry for each iteration, which the backward reads.

A loop's gradient needs what the loop computed, so TensorFlow has the body push that onto lists.
A list is one tensor without a size; here it gets one: iterations times the bytes of an entry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfckpt.capture import tf_adapter

LOOPS = ("While", "StatelessWhile")

_ITEM = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Ops that put an entry into a list, and which of their inputs the entry is."""
_PASSES = ("Identity", "Squeeze", "Cast", "Reshape", "EnsureShape", "PreventGradient")


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a loop's lists hold when it ends.

    Attributes:
      bytes: of each output that is a list, by slot; 0 where the loop only reads the list.
      unknown: what could not be found out, in words; "" where all is known.
    """

    bytes: dict[int, int]
    unknown: str = ""


def kept_lists(loop: tf.Operation, known: Callable[[tf.Operation], tf.Operation]) -> Kept:
    """The bytes of a loop's lists.

    Args:
      loop: a While or StatelessWhile.
      known: gives an op of the graph with as much known of its shapes as can be.
    """
    try:
        return _Loop(loop, known).kept()
    except (KeyError, ValueError, TypeError, tf.errors.OpError) as error:  # a body unlike any known
        return Kept({}, f"{type(error).__name__}: {error}")


class _Loop:
    """A loop, its body and its condition."""

    def __init__(self, loop: tf.Operation, known: Callable[[tf.Operation], tf.Operation]):
        self.op, self.known = loop, known
        self.cond = tf_adapter.called_graph(loop, "cond")
        self.body = tf_adapter.called_graph(loop, "body")

    def kept(self) -> Kept:
        lists = [(slot, entry) for slot, tensor in enumerate(self.body.outputs)
                 if tensor.dtype == tf.variant and (entry := _entry(tensor)) is not None]
        if not lists:
            return Kept({})
        trips = self.trips()
        if trips is None:
            return Kept({}, "its number of iterations is not known")
        found: dict[int, int] = {}
        unknown = ""
        for slot, entry in lists:
            size = self._bytes(entry)
            if size is None:
                unknown = f"the size of {entry.name} in its body is not known"
            found[slot] = trips * (size or 0)
        return Kept(found, unknown)

    def trips(self) -> int | None:
        """The most iterations that the condition allows, or None.

        It is a conjunction; each part that compares a counter with a limit bounds them.
        """
        bounds, pending = [], list(self.cond.outputs)
        while pending:
            op = pending.pop().op
            if op.type in _PASSES or op.type == "LogicalAnd":
                pending += op.inputs
            elif op.type in ("Less", "LessEqual"):
                bounds.append(self._bound(*op.inputs, inclusive=op.type == "LessEqual"))
        return min((b for b in bounds if b is not None), default=None)

    def _bound(self, counter: tf.Tensor, limit: tf.Tensor, *, inclusive: bool) -> int | None:
        slot = _argument(self.cond, counter)
        step = None if slot is None else self._step(slot)
        if slot is None or not step or step <= 0:
            return None
        start, end = self._outside(slot), self._limit(limit)
        if start is None or end is None:
            return None
        return max(0, -((start - end - inclusive) // step))

    def _limit(self, tensor: tf.Tensor) -> int | None:
        """The value of a tensor of the condition that no iteration changes."""
        slot = _argument(self.cond, tensor)
        if slot is None:
            return _value(tensor)
        passed = _argument(self.body, self.body.outputs[slot])
        return self._outside(slot) if passed == slot else None

    def _step(self, slot: int) -> int | None:
        """By how much each iteration raises a counter."""
        op = _behind(self.body.outputs[slot]).op
        if op.type not in ("Add", "AddV2"):
            return None
        for counter, step in (tuple(op.inputs), tuple(op.inputs)[::-1]):
            if _argument(self.body, counter) == slot:
                return _value(step)
        return None

    def _outside(self, slot: int) -> int | None:
        """The value of an argument when the loop begins."""
        tensor = _behind(self.known(self.op).inputs[slot])
        value = _value(tensor)
        if value is None and tensor.op.type in LOOPS:  # the backward counts the forward's trips
            value = _Loop(tensor.op, lambda op: op)._at_end(tensor.value_index)
        return value

    def _at_end(self, slot: int) -> int | None:
        """The value of a counter when the loop ends."""
        start, step, trips = self._outside(slot), self._step(slot), self.trips()
        return None if None in (start, step, trips) else start + step * trips  # type: ignore

    @functools.cached_property
    def _inferred(self) -> tf_adapter.FuncGraph:
        """The body with the shapes that the arguments really have."""
        return tf_adapter.called_graph(self.op, "body",
                                       [t.shape for t in self.known(self.op).inputs])

    def _bytes(self, entry: tf.Tensor) -> int | None:
        """The bytes of an entry; of a list in a list, those that its own loop gives it."""
        if entry.dtype == tf.variant:
            inner = _behind(entry)
            if inner.op.type not in LOOPS:
                return 0
            kept = _Loop(inner.op, self._in_body).kept()
            return None if kept.unknown else kept.bytes.get(inner.value_index, 0)
        shape = entry.shape
        if not shape.is_fully_defined():
            shape = shape.merge_with(self._as_given(entry).shape)
        return shape.num_elements() * entry.dtype.size if shape.is_fully_defined() else None

    def _as_given(self, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor of the body, with the shape that follows from the loop's real arguments."""
        for traced, given in zip(self.body.inputs, self._inferred.inputs, strict=True):
            if traced.name == tensor.name:
                return given
        return self._in_body(tensor.op).outputs[tensor.value_index]

    def _in_body(self, op: tf.Operation) -> tf.Operation:
        try:
            return self._inferred.get_operation_by_name(op.name)
        except KeyError:
            return op


def _behind(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor behind ops that pass it on."""
    while tensor.op.type in _PASSES:
        tensor = tensor.op.inputs[0]
    return tensor


def _entry(tensor: tf.Tensor) -> tf.Tensor | None:
    """What an iteration puts into a list; None where it puts nothing there."""
    op = _behind(tensor).op
    return op.inputs[_ITEM[op.type]] if op.type in _ITEM else None


def _argument(graph: tf.Graph, tensor: tf.Tensor) -> int | None:
    """Which argument of a function a tensor is."""
    name = _behind(tensor).name
    return next((i for i, given in enumerate(graph.inputs) if given.name == name), None)


def _value(tensor: tf.Tensor) -> int | None:
    """The value of an integer, where the graph tells."""
    value = tf.get_static_value(_behind(tensor))
    return int(value) if value is not None and value.size == 1 else None
