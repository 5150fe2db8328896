"""Changes to a live graph that can be taken back, to any point in between.

TensorFlow has no such thing. What is read, awaited and returned is logged with the value it had.
A live graph cannot delete ops: those made since are hidden, so that they become no part of the
function that TensorFlow makes of the graph. Their names stay taken.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.errors import RewriteError

TRIES = 2
"""How often a change is tried to be taken back."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A state that a graph can be taken back to.

    Attributes:
      changes: how many had been logged.
      made: how many ops had been made.
      order, hidden: how the graph's ops were shown.
    """

    changes: int
    made: int
    order: tuple[str, ...]
    hidden: frozenset[str]


class LiveChanges:
    """Makes changes to a graph. Ops may be added by anyone.

    Attributes:
      graph: a FuncGraph whose trace is complete, or an imported graph.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._log: list[tuple[Hashable, Callable[[], None]]] = []
        self._broken = 0

    def point(self) -> Point:
        """Return what the graph can be taken back to from now on.

        Raises:
          RewriteError: something could not be taken back before.
        """
        self._refuse_broken()
        return Point(len(self._log), len(tf_adapter.every_operation(self.graph)),
                     *tf_adapter.how_shown(self.graph))

    def update_input(self, op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
        """Make input `index` of an op read `tensor`.

        Args:
          op: of the graph.
          index: position of the input, control inputs not counted.
          tensor: of the graph; it has the dtype of the input.
        """
        self._log.append(((op.name, index), functools.partial(
            tf_adapter.update_input, op, index, op.inputs[index])))
        tf_adapter.update_input(op, index, tensor)

    def add_control_input(self, op: tf.Operation, control: tf.Operation) -> None:
        """Make an op wait for another.

        Args:
          op: of the graph; it waits.
          control: of the graph; it is waited for.
        """
        self._log_controls(op)
        tf_adapter.add_control_input(op, control)

    def replace_control_inputs(self, op: tf.Operation, controls: Sequence[tf.Operation]) -> None:
        """Make an op wait for exactly these ops.

        Args:
          op: of the graph; it waits.
          controls: of the graph; all that the op waits for from now on, where empty nothing.
        """
        self._log_controls(op)
        tf_adapter.replace_control_inputs(op, controls)

    def _log_controls(self, op: tf.Operation) -> None:
        self._log.append(((op.name, "controls"), functools.partial(
            tf_adapter.replace_control_inputs, op, list(op.control_inputs))))

    def call(self, op: tf.Operation, attr: str, names: Sequence[str]) -> None:
        """Have an op call other functions.

        Args:
          op: of the graph, which knows the functions.
          attr: of the op, which names them.
          names: one, or as many as it calls by this attribute.
        """
        self._log.append(((op.name, attr), functools.partial(
            tf_adapter.set_functions, op, attr, tf_adapter.functions_of(op)[attr])))
        tf_adapter.set_functions(op, attr, names)

    def set_attribute(self, op: tf.Operation, attr: str, value: Any) -> None:
        """Set an attribute of an op.

        Args:
          op: of the graph.
          attr: of the op's definition, or any name that begins with "_".
          value: an AttrValue.
        """
        self._log.append(((op.name, attr), functools.partial(
            tf_adapter.set_attribute, op, attr, tf_adapter.node_attrs(op).get(attr))))
        tf_adapter.set_attribute(op, attr, value)

    def replace_results(self, attribute: str, values: Sequence[Any]) -> None:
        """Set the graph's `outputs` or `control_outputs`.

        Args:
          attribute: which of the two, "outputs" or "control_outputs".
          values: the tensors or ops that it has from now on; copied.
        """
        self._log.append((attribute, functools.partial(
            setattr, self.graph, attribute, getattr(self.graph, attribute))))
        setattr(self.graph, attribute, list(values))

    def show(self, order: Sequence[str], hidden: Sequence[str]) -> None:
        """Show the graph's ops in an order, and hide some that nothing reads or awaits.

        Args:
          order: names; those without a place come last, in the order in which they were made.
          hidden: names of ops that are hidden, besides those that are already.
        """
        _, before = tf_adapter.how_shown(self.graph)
        tf_adapter.show_operations(self.graph, order, before.union(hidden))

    def revert(self, point: Point) -> None:
        """Take everything back that has been done since a point; ops made since are hidden.

        Args:
          point: what `point` returned for this graph.

        Raises:
          RewriteError: something cannot be taken back. It is tried again when a graph is reverted
            to an earlier point.
        """
        oldest = dict(reversed(self._log[point.changes:]))  # what each was at the point
        oldest["shown"] = functools.partial(self._show_as_at, point)
        failed = [(key, undo) for key, undo in oldest.items() if not _done(undo)]
        self._log[point.changes:] = reversed(failed)
        self._broken = len(failed)
        self._refuse_broken()

    def _refuse_broken(self) -> None:
        if self._broken:
            raise RewriteError(f"rewrite: {self._broken} changes to {self.graph.name!r} cannot be "
                               "taken back; it would not train as it did")

    def _show_as_at(self, point: Point) -> None:
        made = tf_adapter.every_operation(self.graph)[point.made:]
        wanted = point.order, point.hidden.union(op.name for op in made)
        if tf_adapter.how_shown(self.graph) != wanted:
            tf_adapter.show_operations(self.graph, *wanted)


def _done(undo: Callable[[], None]) -> bool:
    for _ in range(TRIES):
        try:
            undo()
        except Exception:  # whatever TensorFlow raises: the others are taken back all the same
            continue
        return True
    return False
