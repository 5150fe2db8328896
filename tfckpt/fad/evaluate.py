"""Evaluation of element-wise ops on numpy arrays in float64.

Used to compare the backward that TensorFlow built for a region with the derivative that would
replace it, on sample points, before anything is replaced: a custom gradient that is not the
derivative (a straight-through estimator, a clipped gradient) is thereby left alone. One sample
stands for one element. Rounding and dtypes are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfckpt.ops import Array, record
from tfckpt.ops.terms import NUMBER, TENSOR, TWO, Program


def can_evaluate(op_type: str) -> bool:
    """Return whether `evaluate` knows the op.

    Args:
      op_type: such as "Tanh".
    """
    return record(op_type).evaluate is not None


def evaluate(op_type: str, args: Sequence[Array], attrs: Mapping[str, object]) -> Array:
    """Return the op on samples; args are arrays of one length or scalars.

    Args:
      op_type: one that `can_evaluate` knows.
      args: operands of the op, in order.
      attrs: of the op; those that its function does not take are left out.

    Returns:
      A float64 array of that length, or a boolean one of a comparison.
    """
    known = record(op_type)
    assert known.evaluate is not None, f"nothing computes {op_type}"
    value: Array = known.evaluate(
        *args, **{name: attrs[name] for name in known.attrs if name in attrs})
    return value


def run(program: Program, tensors: Mapping[object, Array]) -> list[Array]:
    """Return the value of every node, given those of the tensors it reads.

    Args:
      program: nodes, each after those that it reads.
      tensors: samples of each tensor that the program reads, by (op, output).

    Returns:
      Arrays in the order of the program; scalars for numbers.
    """
    values: list[Array] = []
    for node in program:
        args = [values[i] for i in node.args]
        if node.type == TENSOR:
            values.append(tensors[node.attr("tensor")])
        elif node.type == NUMBER:
            values.append(np.asarray(node.attr("value")))
        elif node.type == TWO:
            values.append(np.where(args[0], node.attr("on"), node.attr("off")))
        else:
            values.append(evaluate(node.type, args, dict(node.attrs)))
    return values
