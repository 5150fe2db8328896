"""Effects of a step that cannot be undone, found in the graph before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.errors import PlanError
from tfckpt.ops import OpRecord, Source, record


def refuse_lasting(graph: Any, name: str) -> None:
    """Return if all that a run of the graph changes can be put back.

    Args:
      graph: of the step's concrete function; functions that it calls are looked at, too.
      name: of the step, for the message.

    Raises:
      PlanError: names the op and what to do.
    """
    lasting = next(_lasting(graph), None)
    if lasting is not None:
        raise PlanError(
            f"plan: {name} cannot be tuned: a run of {lasting.name} ({lasting.type}) cannot be "
            "undone; move it out of the step, or give a budget and do not tune")


def draws_numbers(graph: Any) -> bool:
    """Return whether an op draws random numbers from a generator of its own.

    Args:
      graph: of the step's concrete function; functions that it calls are looked at, too.
    """
    return any(record(op.type).draws for op in _every_op(graph))


def _lasting(graph: Any) -> Iterator[tf.Operation]:
    """Yield the ops whose effects stay."""
    for tensor in graph.inputs:  # arguments and captured tensors alike
        if tensor.dtype == tf.resource and tf_adapter.handle_shape(tensor) is None:
            # a table, an iterator, a queue
            yield from (op for op in tensor.consumers() if not _looks_up(record(op.type)))
    for op in _every_op(graph):
        known = record(op.type)
        if known.runs_python or tf_adapter.is_stateful(op) and not (
                known.transient or known.draws or known.source is Source.ARGUMENT
                or tf_adapter.called_functions(op)
                or any(t.dtype == tf.resource for t in op.inputs)):
            yield op


def _looks_up(known: OpRecord) -> bool:
    """Return whether an op reads a resource that is no variable, and leaves it as it is."""
    return known.no_variables and known.repeatable and not known.writes and (
        known.source is not Source.ELEMENT)


def _every_op(graph: Any, seen: set[str] | None = None) -> Iterator[tf.Operation]:
    """Yield the ops of a graph and of all functions that it calls."""
    seen = set() if seen is None else seen
    for op in graph.get_operations():
        yield op
        for name in tf_adapter.called_functions(op):
            if name not in seen:
                seen.add(name)
                yield from _every_op(tf_adapter.graph_called(op, name), seen)
