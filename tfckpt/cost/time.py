"""Analytic time of an op: the larger of arithmetic and memory traffic, in seconds.

The default rates are those of a small CPU; only their ratio steers plans. Convolutions and matrix
products count multiply-adds as two operations; every other op moves its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.ir.edits import traced
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.target import SMALL_CPU, Rates
from tfckpt.ops import Shape, record


def is_expensive(op: Op) -> bool:
    """Return whether the op computes rather than moves bytes.

    Args:
      op: of any graph; a loop, or branches, compute if an op of a body does.
    """
    if op.bodies:
        return any(is_expensive(inner) for body in op.bodies for inner in body.ops)
    return record(op.type).flops is not None


def seconds(graph: Graph, op: Op, rates: Rates = SMALL_CPU) -> float:
    """Return the run time of one op, analytic where it is not known; shapes must be known.

    A loop whose iterations are known takes as often what its body does, and of branches the longest
    counts; a workspace is written and read.

    Args:
      graph: that the op belongs to.
      op: the op.
      rates: of the device, and the seconds of ops that were measured or estimated elsewhere.
    """
    known = _told(op, rates)
    if known is not None:
        return known
    if op.bodies:
        once = max(sum(seconds(body, inner, rates) for inner in body.ops
                       if not record(inner.type).does_nothing) for body in op.bodies)
        return rates.overhead_seconds + (op.loop.trips if op.loop else 1) * once
    moved = sum(graph.ops[source].outputs[slot].bytes or 0 for source, slot in op.inputs)
    moved += sum(t.bytes or 0 for t in op.outputs) + 2 * op.workspace
    traffic = moved * record(op.type).per_byte / rates.bytes_per_second
    return rates.overhead_seconds + max(traffic, flops(graph, op) / rates.flops_per_second)


def fused_seconds(graph: Graph, ops: Sequence[int], moved: int, rates: Rates = SMALL_CPU) -> float:
    """Run time of ops that are computed in one loop: what comes in and goes out is moved once.

    Args:
      graph: the captured step.
      ops: indices of the ops.
      moved: bytes that the loop reads and writes.
      rates: how fast the device is.
    """
    if any(graph.ops[i].bodies or _told(graph.ops[i], rates) is not None
           or is_expensive(graph.ops[i]) for i in ops):
        return sum(seconds(graph, graph.ops[i], rates) for i in ops)
    return rates.overhead_seconds + moved / rates.bytes_per_second


def _told(op: Op, rates: Rates) -> float | None:
    """Return an op's seconds as `Rates.known` has them, perhaps by the op's traced name."""
    if not rates.known:
        return None
    return rates.known.get(op.name, rates.known.get(traced(op.name)))


def flops(graph: Graph, op: Op) -> float:
    """Return the floating-point operations of a convolution or matrix product; 0 for other ops.

    Args:
      graph: that the op belongs to.
      op: the op; its shapes must be known where it is one of these.

    Returns:
      A count for one run of the op.
    """
    count = record(op.type).flops
    if count is None:
        return 0.0
    inputs = [_known(graph.ops[source].outputs[slot].shape) for source, slot in op.inputs]
    return count(inputs, _known(op.outputs[0].shape), op.attrs)


def _known(shape: tuple[int | None, ...] | None) -> Shape:
    return tuple(d or 1 for d in shape) if shape is not None else ()
