"""Bodies of loops and branches as plain data, to be priced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.op_attributes import attrs_of, results_of
from tfckpt.capture.purity import is_pure
from tfckpt.ir.graph import FORWARD, Branches, Graph, Loop, Op
from tfckpt.ops import record


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """What is known of a loop, or of branches, in a body.

    Attributes:
      bytes: of its lists, or of what the branches keep, by slot.
      loop: what later stages read of it; None where its number of iterations is not known.
      branches: the like of branches; None where one is unlike any known.
      zeros: bytes of zeros that are made like what branches hand out, by slot.
    """

    bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    loop: Loop | None = None
    branches: Branches | None = None
    zeros: Mapping[int, int] = dataclasses.field(default_factory=dict)


def priced_body(name: str, body: tf_adapter.FuncGraph,
                shape: Callable[[tf.Tensor], tf.TensorShape],
                inner: Callable[[tf.Operation], Inner] = lambda op: Inner()) -> Graph:
    """Return a body with its ops in their order; its fetches are what it returns.

    Args:
      name: of the graph that is made.
      body: what is called.
      shape: gives as much as is known of the shape of a tensor of the body.
      inner: gives what is known of an op that is a loop or chooses between branches; of another,
        nothing.
    """
    operations = body.get_operations()
    index = {op.name: i for i, op in enumerate(operations)}
    ops = []
    for op in operations:
        known = inner(op)
        pure = is_pure(op.type, tf_adapter.is_stateful(op),
                       tuple(t.dtype.base_dtype.name for t in op.outputs))
        ops.append(Op(op.name, op.type,
                      tuple((index[t.op.name], t.value_index) for t in op.inputs), (),
                      results_of(op, known.bytes, [shape(t) for t in op.outputs]), FORWARD, pure,
                      "", {} if record(op.type).is_constant else attrs_of(op), loop=known.loop,
                      branches=known.branches))
    results = tuple((index[t.op.name], t.value_index) for t in body.outputs)
    return Graph(name, tuple(ops), results, ())
