"""How often while loops run, at most: what their counters and conditions say."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.comparisons import changes, comparisons, handed_on
from tfckpt.capture.variables import argument, number_origin
from tfckpt.ir.edits import TRIPS
from tfckpt.ops import record


def most_iterations(loop: tf.Operation, known: Callable[[tf.Operation], tf.Operation]
                    ) -> int | None:
    """Return the most iterations of a loop; None where that is not known.

    Args:
      loop: of a live graph.
      known: returns the op with the shapes that its inputs really have.
    """
    return _Iterations(loop, known).most()


def told_iterations(loop: tf.Operation) -> int | None:
    """Return how often a loop runs that tfckpt has made; None of others.

    Args:
      loop: of a live graph.
    """
    attr = tf_adapter.node_attrs(loop).get(TRIPS)
    return None if attr is None else int(attr.i)


class _Iterations:
    """The counters of a loop, and what its condition compares them with."""

    def __init__(self, loop: tf.Operation, known: Callable[[tf.Operation], tf.Operation]) -> None:
        self.op, self.known = loop, known
        self.cond = tf_adapter.called_graph(loop, "cond")
        self.body = tf_adapter.called_graph(loop, "body")

    def most(self) -> int | None:
        """Return the most iterations that the condition allows, or None.

        Each comparison of a counter with a limit bounds them.
        """
        told = told_iterations(self.op)
        if told is not None:
            return told
        bounds = []
        for op, first, second in comparisons(self.cond):
            how = record(op.type).compares
            for counter, limit, rises in ((first, second, how[0] == "<"),
                                          (second, first, how[0] == ">")):
                bounds.append(self._bound(counter, limit, rises, inclusive=how[1:] == "="))
        return min((b for b in bounds if b is not None), default=None)

    def _bound(self, counter: tf.Tensor, limit: tf.Tensor, rises: bool, *, inclusive: bool
               ) -> int | None:
        """Return how often a counter that rises, or falls, changes until it is at the limit."""
        slot = argument(self.cond, number_origin(counter))
        step = None if slot is None else self._step(slot)
        if slot is None or not step or (step > 0) != rises:
            return None
        start, end = self._outside(slot), self._limit(limit)
        if start is None or end is None:
            return None
        return max(0, -((abs(step) // step * (start - end) - inclusive) // abs(step)))

    def _limit(self, tensor: tf.Tensor) -> int | None:
        """Return the value of a tensor of the condition that no iteration changes."""
        slot = argument(self.cond, number_origin(tensor))
        if slot is not None:
            return self._outside(slot) if self._is_passed(slot) else None
        value = known_number(tensor)
        if value is not None or tensor.graph is not self.cond:  # a branch's
            return value
        return known_number(self._cond_as_given.get_tensor_by_name(tensor.name))

    def _is_passed(self, slot: int) -> bool:
        """Return whether each iteration hands an argument on as it is."""
        return argument(self.body, handed_on(self.body.outputs[slot])) == slot

    @functools.cached_property
    def _cond_as_given(self) -> tf_adapter.FuncGraph:
        """Return the condition with the shapes of the arguments that no iteration changes."""
        return tf_adapter.called_graph(self.op, "cond", [
            given.shape if self._is_passed(slot) else here.shape
            for slot, (given, here) in enumerate(zip(
                self.known(self.op).inputs, self.cond.inputs, strict=True))])

    def _step(self, slot: int) -> int | None:
        """By how much each iteration raises a counter."""
        for counter, step, factor in changes(self.body.outputs[slot]):
            if argument(self.body, number_origin(counter)) == slot:
                value = known_number(step)
                # autograph's `for i in tf.range(...)` hands the step from iteration to iteration
                given = argument(self.body, number_origin(step)) if value is None else None
                if given is not None and self._is_passed(given):
                    value = self._outside(given)
                return None if value is None else factor * value
        return None

    def _outside(self, slot: int) -> int | None:
        """Return the value of an argument when the loop begins."""
        tensor = number_origin(self.known(self.op).inputs[slot])
        value = known_number(tensor)
        if value is None and record(tensor.op.type).is_loop:
            # the backward counts the forward's trips
            value = _Iterations(tensor.op, lambda op: op)._at_end(tensor.value_index)
        return value

    def _at_end(self, slot: int) -> int | None:
        """Return the value of a counter when the loop ends."""
        start, step, trips = self._outside(slot), self._step(slot), self.most()
        if start is None or step is None or trips is None:
            return None
        return start + step * trips


def known_number(tensor: tf.Tensor) -> int | None:
    """Return the value of an integer, where the graph tells.

    Args:
      tensor: of a live graph.
    """
    value = tf_adapter.static_value(number_origin(tensor))
    return int(value) if value is not None and value.size == 1 else None
