"""The captured step as TensorFlow has it, to be asked what Grappler makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import question as grappler
from tfckpt.rewrite.passes.manager import Node

Optimised = Mapping[str, Node] | None
"""Function that gives Grappler's result for a graph, by name; None where it refuses it."""
Ask = Callable[[], Optimised]


class LiveStep:
    """A traced graph that is not edited yet (see `tfckpt.rewrite.passes.manager.PlainStep`).

    Args:
      wanted: the ops that run of a graph which is no function's, by name.
      known: takes the step and what asks Grappler about it, and gives its answer, or what it has
        answered before.
    """

    def __init__(self, live: tf.Graph, wanted: Sequence[str] = (),
                 known: Callable[[LiveStep, Ask], Optimised] = lambda _, ask: ask()) -> None:
        self.live, self.wanted, self._known = live, wanted, known

    def attributes(self, op: str) -> Hashable:
        """Return the attributes of an op, but for what says nothing of what it computes.

        Args:
          op: name of an op of the captured step.

        Returns:
          (name, serialised value) of each attribute, sorted by name.
        """
        attrs = tf_adapter.node_attrs(self.live.get_operation_by_name(op))
        return tuple((key, attrs[key].SerializeToString()) for key in sorted(attrs)
                     if key not in ("_output_shapes", "_class"))

    def is_stateful(self, op: str) -> bool:
        """Return whether an op is registered as stateful.

        Args:
          op: name of an op of the captured step.
        """
        return tf_adapter.is_stateful(self.live.get_operation_by_name(op))

    def optimised(self) -> Optimised:
        """Return what Grappler makes of the graph; it is asked once."""
        return self._optimised

    @functools.cached_property
    def _optimised(self) -> Optimised:
        return self._known(self, self._ask)

    def _ask(self) -> Optimised:
        try:
            found = grappler.question(self.live, self.wanted).answer()
        except (ValueError, tf.errors.OpError):  # it would leave the step as it is
            return None
        return {node.name: Node(node.name, node.op, tuple(node.input)) for node in found.node}
