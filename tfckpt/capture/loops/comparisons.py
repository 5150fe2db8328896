"""Comparisons that hold as long as a loop goes on.

A condition is one of them, or several that hold together: by a logical "and", or by a branch, as
autograph makes of Python's `and`, where the other branch returns the first of them, which is false.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.variables import argument, number_origin
from tfckpt.ops import Calls, record


@dataclasses.dataclass(frozen=True)
class _Call:
    """A branch that runs, or a function, and the op that calls it."""

    op: tf.Operation
    branch: tf_adapter.FuncGraph

    def given(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Return what an argument of the branch is given; None for what it makes itself."""
        slot = argument(self.branch, tensor)
        return None if slot is None else self.op.inputs[record(self.op.type).first_argument + slot]


def comparisons(condition: tf_adapter.FuncGraph
                ) -> Iterator[tuple[tf.Operation, tf.Tensor, tf.Tensor]]:
    """Yield each comparison that holds where a condition does, and the two that it compares.

    Args:
      condition: of a loop; its first result says whether the loop goes on.

    Yields:
      The op and its operands: tensors of the condition, or of a branch of it that makes them.
    """
    pending: list[tuple[tf.Tensor, tuple[_Call, ...]]] = [(t, ()) for t in condition.outputs]
    while pending:
        tensor, calls = _outside(*pending.pop())
        op, known = tensor.op, record(tensor.op.type)
        if known.conjunction:
            pending += [(t, calls) for t in op.inputs]
        elif known.compares:
            first, second = (_outside(t, calls)[0] for t in op.inputs)
            yield op, first, second
        elif is_call(op):
            call = _called(op)
            pending.append((call.branch.outputs[tensor.value_index], (*calls, call)))
        elif known.calls is Calls.BRANCHES:
            branches = [tf_adapter.graph_called(op, name)
                        for name in tf_adapter.called_functions(op)]
            if len(branches) == 2 and op.inputs[0].dtype == tf.bool:
                holds, fails = (_Call(op, branch) for branch in branches)
                if _is_false(fails, tensor.value_index):
                    pending += [(op.inputs[0], calls),
                                (holds.branch.outputs[tensor.value_index], (*calls, holds))]


def is_call(op: tf.Operation) -> bool:
    """Return whether an op calls one function, once.

    Args:
      op: of a live graph.
    """
    calls = record(op.type).calls
    return calls is Calls.FUNCTION or calls is None and (
        tf_adapter.called_functions(op) == [op.type])


def changes(tensor: tf.Tensor) -> Iterator[tuple[tf.Tensor, tf.Tensor, int]]:
    """Yield what a body may count by: the counter, how much is added to it, and times what.

    Either of two that are added may be the counter. The sum may be in a function that a body calls.

    Args:
      tensor: what a body returns.

    Yields:
      Tensors, and -1 where the second is taken off.
    """
    made, calls = _inside(tensor)
    known = record(made.op.type)
    if (known.adds or known.subtracts) and len(made.op.inputs) == 2:
        first, second = (_outside(operand, calls)[0] for operand in made.op.inputs)
        yield first, second, -1 if known.subtracts else 1
        if known.adds:
            yield second, first, 1


def handed_on(tensor: tf.Tensor) -> tf.Tensor:
    """Return what a body returns, seen through functions that it calls and that pass it on.

    Args:
      tensor: what a body returns.
    """
    return _outside(*_inside(tensor))[0]


def _inside(tensor: tf.Tensor) -> tuple[tf.Tensor, tuple[_Call, ...]]:
    """Return what makes a tensor, looked for in the functions whose results it is."""
    calls: tuple[_Call, ...] = ()
    tensor = number_origin(tensor)
    while is_call(tensor.op):
        calls = (*calls, _called(tensor.op))
        tensor = number_origin(calls[-1].branch.outputs[tensor.value_index])
    return tensor, calls


def _called(op: tf.Operation) -> _Call:
    (name,) = tf_adapter.called_functions(op)
    return _Call(op, tf_adapter.graph_called(op, name))


def _outside(tensor: tf.Tensor, calls: tuple[_Call, ...]
             ) -> tuple[tf.Tensor, tuple[_Call, ...]]:
    """Return what makes a tensor, looked for outside of the branches that it is handed to."""
    tensor = number_origin(tensor)
    while calls and (given := calls[-1].given(tensor)) is not None:
        tensor, calls = number_origin(given), calls[:-1]
    return tensor, calls


def _is_false(call: _Call, slot: int) -> bool:
    """Return whether a branch that runs where a condition fails returns False, or the condition."""
    made = number_origin(call.branch.outputs[slot])
    given = call.given(made)
    if given is not None:
        return number_origin(given).name == number_origin(call.op.inputs[0]).name
    value = tf_adapter.static_value(made)
    return value is not None and value.size == 1 and not value.any()
