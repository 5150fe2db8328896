"""May a loop, or one of several branches, run twice? Only if all that their functions do may.

Both are copied whole. They may read variables that a function captures (Keras' recurrent layers
do): whoever copies them sees to it that nothing writes these in between, see
`tfckpt.rewrite.passes.state_writes`.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.purity import is_pure
from tfckpt.capture.variables import ANY, argument, only_reads, origin, variable
from tfckpt.ops import Calls, record


@dataclasses.dataclass(frozen=True)
class Again:
    """The answer to whether an op may run twice.

    Attributes:
      refused: why it may not; "" where it may.
      reads: the variables that it reads, as `tfckpt.capture.variables.variable` names them.
    """

    refused: str = ""
    reads: tuple[str, ...] = ()


def may_run_again(op: tf.Operation, unsure: frozenset[str] = frozenset()) -> Again:
    """Return whether a loop or branches may run twice, by the ops in the functions.

    Args:
      op: of a type that has bodies.
      unsure: see `tfckpt.capture.variables.variable`.
    """
    try:
        arguments = _read_by_all(op)
        if _exchanges_variables(op):
            raise _Refusal("its body exchanges variables")
        for tensor in op.inputs:
            if tensor.dtype == tf.variant and not _is_counted(tensor):
                raise _Refusal(f"it reads {tensor.op.name}, and the content of that is not known")
        reads = tuple(dict.fromkeys(variable(op.inputs[i], unsure) for i in sorted(arguments)))
        if ANY in reads:
            raise _Refusal("it is not known which variables its body reads")
        return Again("", reads)
    except (_Refusal, KeyError, ValueError, tf.errors.OpError) as reason:
        return Again(str(reason))


def _exchanges_variables(op: tf.Operation) -> bool:
    """Return whether a loop hands on another variable than it was given, or a branch any."""
    if not record(op.type).is_loop:
        return any(tensor.dtype == tf.resource for tensor in op.outputs)
    body = tf_adapter.called_graph(op, "body")
    return any(tensor.dtype == tf.resource and argument(body, origin(tensor)) != slot
               for slot, tensor in enumerate(body.outputs))


def reads_counted_list(op: tf.Operation) -> bool:
    """Return whether every list that an op reads is one whose bytes are known.

    Args:
      op: of a live graph; one that reads no list passes.
    """
    return all(map(_is_counted, (t for t in op.inputs if t.dtype == tf.variant)))


def _is_counted(made: tf.Tensor) -> bool:
    """Return whether the bytes of a list are known.

    Those of a first entry, as `tf.scan` puts there, need not be.
    """
    op = origin(made).op
    known = record(op.type)
    if known.lists.index is not None:
        return record(origin(op.inputs[0]).op.type).lists.begins
    return known.is_loop or known.lists.begins or known.lists.rows


class _Refusal(Exception):
    """Why a loop may not run twice."""


def _read_by_all(call: tf.Operation) -> set[int]:
    """Return which inputs of a call are handles of variables that its functions read.

    Raises:
      _Refusal: a function does what must not be done twice.
    """
    found: set[int] = set()
    for name in tf_adapter.called_functions(call):
        graph = tf_adapter.graph_called(call, name)
        found |= {record(call.type).first_argument + i for i in _read(graph)}
    return found


def _read(graph: tf.Graph) -> set[int]:
    """Return which arguments of a function are handles of variables that it reads.

    Raises:
      _Refusal: as `_read_by_all`.
    """
    handles: list[tf.Tensor] = []
    for op in graph.get_operations():
        known = record(op.type)
        if known.calls not in (None, Calls.DATASET):
            handles += [op.inputs[i] for i in sorted(_read_by_all(op))]
        elif only_reads(op):
            handles += [t for t in op.inputs if t.dtype == tf.resource]
        elif not (known.does_nothing or known.passes_on or is_pure_op(op)):
            raise _Refusal(f"its body has {op.name} ({op.type}) in it, which must not run twice")
    arguments = {argument(graph, origin(handle)) for handle in handles}
    if None in arguments:
        raise _Refusal("its body reads a variable that is no argument")
    return {a for a in arguments if a is not None}


def is_pure_op(op: tf.Operation) -> bool:
    """Return whether an op may run twice by itself, lists that it makes or reads counted as values.

    Args:
      op: of a loop's body; one that calls functions is not looked into.
    """
    dtypes = tuple(t.dtype.name for t in op.outputs)
    if record(op.type).holds_values:
        dtypes = tuple(dtype for dtype in dtypes if dtype != "variant")
    return (not tf_adapter.called_functions(op)
            and is_pure(op.type, tf_adapter.is_stateful(op), dtypes))
