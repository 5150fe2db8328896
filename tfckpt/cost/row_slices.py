"""Slices of whole rows: where these are aligned, TensorFlow's executor makes no copy of them.

A result lies in the memory of the tensor that it is taken from, and keeps all of it alive.
"""

from __future__ import annotations

from tfckpt.ir.graph import Graph, Op, Tensor
from tfckpt.ops import record

ALIGNED = 64
"""Bytes at whose multiples a tensor's memory must begin for TensorFlow's kernels."""
_STRIDES = 3
"""The input of a strided slice that has its strides."""


def takes_rows(graph: Graph, i: int) -> bool:
    """Return whether an op's results are rows of an input, one after the other, in its memory.

    Args:
      graph: the captured step.
      i: index of the op.
    """
    op = graph.ops[i]
    known = record(op.type)
    if known.slices is None:
        return False
    source, slot = op.inputs[known.slices]
    given = graph.ops[source].outputs[slot]
    if not given.shape or None in given.shape or given.bytes is None or not _aligned(given):
        return False
    rest = given.shape[1:]
    return bool(rest) and _along_rows(graph, op) and all(
        made.shape is not None and made.shape[-len(rest):] == rest for made in op.outputs)


def _aligned(tensor: Tensor) -> bool:
    rows = (tensor.shape or (0,))[0] or 0
    return bool(rows) and (tensor.bytes or 0) // rows % ALIGNED == 0


def _along_rows(graph: Graph, op: Op) -> bool:
    """Return whether an op takes its slices along the first axis, one row after the other."""
    if "shrink_axis_mask" in op.attrs:
        return (op.attrs["shrink_axis_mask"] in (0, 1) and not op.attrs["new_axis_mask"]
                and (op.attrs["shrink_axis_mask"] == 1 or _integer(graph, op, _STRIDES) == 1))
    if "axis" in op.attrs:
        return op.attrs["axis"] == 0
    if record(op.type).slices == 1:
        return _integer(graph, op, 0) == 0
    return len(op.outputs) == 1 or _integer(graph, op, 2) == 0


def _integer(graph: Graph, op: Op, position: int) -> object:
    return graph.ops[op.inputs[position][0]].attrs.get("integer")
