"""The step in a TensorFlow without a trace hook that is known to work.

A step is traced by itself; its definition is rewritten, and imported into the graph that calls it.
What Python alone knows of a trace is lost on the way: replicas that meet in the middle of it, and
tapes that record it from outside. There the step stays as it is, with a warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.sizes.calls import call_tensors
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import Edits
from tfckpt.rewrite.appliers.imported import import_edited

Apply = Callable[[Any, Edits], None]
Rewrite = Callable[[Any, Sequence[tf.Tensor], Apply], None]


@functools.cache
def announce(problem: str) -> None:
    """Say once in a process that this route is taken, and why.

    Args:
      problem: why the trace hook is not used; the warning begins with it.
    """
    warnings.warn(f"tfckpt: {problem}; steps are traced by themselves and imported, which does not "
                  "work in the replicas of tf.distribute", stacklevel=5)


def refusal() -> str:
    """Return why what is called now cannot be imported; "" where it can."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return "no step can be imported in a replica of tf.distribute"
    if tf_adapter.is_recording():
        return "a tape around the step would not see what is imported"
    return ""


@tf.autograph.experimental.do_not_convert
def import_step(body: Callable, args: tuple, kwargs: dict, rewrite: Rewrite,
                autograph: bool) -> Any:
    """Call a step: traces it by itself and import it, rewritten, into the current graph.

    Args:
      body: the Python function of the step.
      args: the positional arguments of the call.
      kwargs: the keyword arguments of the call.
      rewrite: takes the finished FuncGraph, the tensors in it that stand for the call's, and what
        realises edits of it, which raises `RewriteError` where it could not.
      autograph: whether the body is to be converted.
    """
    def step() -> Any:  # without arguments: what it reads is captured, in whatever nest it comes
        return body(*args, **kwargs)

    graph = tf_adapter.tracing_graph()
    concrete = tf.function(step, autograph=autograph).get_concrete_function()
    inside = {id(external): placeholder for external, placeholder in zip(
        concrete.captured_inputs, concrete.graph.inputs, strict=True)}
    given = [inside.get(id(t), t) for t in call_tensors((args, kwargs))]
    results = []
    rewrite(concrete.graph, given,
            lambda _, edits: results.append(import_edited(concrete, edits, graph)))
    return results[0] if results else _unchanged(concrete, graph)


def _unchanged(concrete: Any, graph: Any) -> Any:
    """Return what the step computes as it was traced; where it cannot be imported it is called."""
    try:
        return import_edited(concrete, None, graph)
    except RewriteError as error:
        logging.warning("tfckpt: %s is called as it was traced: %s", graph.name, error)
        return concrete()
