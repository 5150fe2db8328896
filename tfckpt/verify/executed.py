"""Which ops really ran: the graphs TensorFlow executed after all of its own optimisations."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.errors import VerificationError
from tfckpt.ir.edits import COPY


@dataclasses.dataclass(frozen=True)
class Executed:
    """What one call executed.

    Attributes:
      ops: number of ops by type.
      copies: number of executed ops by type that tfckpt made as recomputations.
      nodes: the executed NodeDefs.
    """

    ops: dict[str, int]
    copies: dict[str, int]
    nodes: tuple

    @property
    def copy_count(self) -> int:
        """Recomputed ops that were executed."""
        return sum(self.copies.values())


def executed(fn: Callable, *args: Any, **kwargs: Any) -> Executed:
    """Run `fn(*args, **kwargs)` once and report the ops of the partition graphs that ran.

    The call has its usual side effects (variables are updated). Functions compiled by XLA do not
    appear here: see the optimized HLO for those.

    Args:
      fn: a `tf.function`, a step decorated with `tfckpt.checkpoint`, or what calls such.
      *args: positional arguments of the call.
      **kwargs: keyword arguments of the call.

    Returns:
      The executed ops, counted by type, and which of them tfckpt made as copies.

    Raises:
      VerificationError: TensorFlow recorded no graph (nothing ran as a `tf.function`).
    """
    # graphs are recorded when a function is instantiated: a fresh wrapper is each time
    wrapper = tf.function(lambda: fn(*args, **kwargs), autograph=False)
    graphs = tf_adapter.record_executed_graphs(wrapper)
    if not graphs:
        raise VerificationError("verify: no function graph was executed; is the step wrapped in "
                                "tf.function, and traced before?")
    nodes = [node for graph in graphs for node in graph.node]
    ops = collections.Counter(node.op for node in nodes)
    # a copy that TensorFlow merged with its neighbours has lost its attribute, not its name
    copies = collections.Counter(node.op for node in nodes
                                 if COPY in node.attr or _COPY.search(node.name))
    return Executed(dict(sorted(ops.items())), dict(sorted(copies.items())), tuple(nodes))


_COPY = re.compile(r"-tfckpt\d+$")
