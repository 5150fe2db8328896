"""Broadcasts that did not happen, and what undoes them all the same.

Where shapes are open when a step is traced, a gradient is summed over the axes that are found at
run time, and reshaped: Reshape(Sum(gradient, axes), shape). Between tensors of one shape there are
no axes. TensorFlow then removes both ops, if it can tell, and the kernels pass their input on.
"""

from __future__ import annotations

from tfckpt.ir.graph import Graph, TensorId
from tfckpt.ops import Broadcast, record


def undoes_nothing(graph: Graph, i: int) -> bool:
    """Return whether an op passes its first input on, since it undoes a broadcast within a shape.

    That is so for the sizes that the graph was captured with; for others it may add.

    Args:
      graph: joint graph.
      i: index of the op.
    """
    op = graph.ops[i]
    part = record(op.type).broadcast
    if part is Broadcast.RESHAPE:
        source = op.inputs[0][0]
        return record(graph.ops[source].type).broadcast is Broadcast.SUM and undoes_nothing(
            graph, source)
    if part is not Broadcast.SUM or len(op.inputs) < 2:
        return False
    axes, operand = op.inputs[1]
    if record(graph.ops[axes].type).broadcast is not Broadcast.AXES:
        return False
    shape = _shape_read(graph, graph.ops[axes].inputs[operand])
    source, slot = op.inputs[0]
    gradient = graph.ops[source].outputs[slot].shape
    return shape is not None and None not in shape and shape == gradient


def _shape_read(graph: Graph, tensor: TensorId) -> tuple[int | None, ...] | None:
    """Return the shape in a shape tensor; None where no op takes it from another tensor."""
    op = graph.ops[tensor[0]]
    if record(op.type).broadcast is not Broadcast.SHAPE:
        return None
    source, slot = op.inputs[0]
    return graph.ops[source].outputs[slot].shape
