"""Analytic time of an op: the larger of arithmetic and memory traffic, in seconds.

The default rates are those of a small CPU; only their ratio steers plans. Convolutions and matrix
products count multiply-adds as two operations; every other op moves its inputs and outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfckpt.graph import Graph, Op


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
      flops_per_second: floating-point operations.
      bytes_per_second: read and written.
      overhead_seconds: what any op takes.
      known: seconds by op name, of ops that somebody else has priced.
    """

    flops_per_second: float = 1.0e11
    bytes_per_second: float = 1.0e10
    overhead_seconds: float = 2.0e-6
    known: Mapping[str, float] = dataclasses.field(default_factory=dict, repr=False)


SMALL_CPU = Rates()

_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput",
                 "Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropInput",
                 "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropInputV2",
                 "Conv3DBackpropFilterV2")
_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
_GIVEN = frozenset({"Placeholder", "Const", "Identity", "NoOp"})
"""Ops in the body of a loop that do nothing in an iteration."""
_PER_BYTE = {"Erf": 6.0, "Erfc": 6.0, "Tanh": 3.0, "Exp": 2.0, "Sigmoid": 3.0, "Softmax": 3.0,
             "StatelessRandomUniformV2": 12.0, "StatelessRandomNormalV2": 20.0, "Pow": 8.0,
             "Transpose": 2.0}
"""How much slower than a plain copy some kernels move a byte."""


def is_expensive(op: Op) -> bool:
    """Whether the op computes rather than moves bytes."""
    if op.loop is not None:
        return any(map(is_expensive, op.loop.body.ops))
    return op.type in _CONVOLUTIONS or op.type in _PRODUCTS


def seconds(graph: Graph, op: Op, rates: Rates = SMALL_CPU) -> float:
    """Run time of one op, analytic where it is not known; shapes must be known.

    A loop whose iterations are known takes as often what its body does.
    """
    if op.name in rates.known:
        return rates.known[op.name]
    if op.loop is not None:
        body = op.loop.body
        once = sum(seconds(body, inner, rates) for inner in body.ops if inner.type not in _GIVEN)
        return rates.overhead_seconds + op.loop.trips * once
    moved = sum(graph.ops[source].outputs[slot].bytes or 0 for source, slot in op.inputs)
    moved += sum(t.bytes or 0 for t in op.outputs)
    traffic = moved * _PER_BYTE.get(op.type, 1.0) / rates.bytes_per_second
    return rates.overhead_seconds + max(traffic, flops(graph, op) / rates.flops_per_second)


def flops(graph: Graph, op: Op) -> float:
    """Floating-point operations of a convolution or matrix product; 0 for other ops."""
    if op.type in _CONVOLUTIONS:
        return _convolution(graph, op)
    if op.type in _PRODUCTS:
        return _product(graph, op)
    return 0.0


def _shape(graph: Graph, op: Op, position: int) -> tuple[int, ...]:
    source, slot = op.inputs[position]
    return _known(graph.ops[source].outputs[slot].shape)


def _known(shape: tuple[int | None, ...] | None) -> tuple[int, ...]:
    return tuple(d or 1 for d in shape) if shape is not None else ()


def _count(shape) -> float:
    result = 1.0
    for dimension in shape:
        result *= dimension or 1
    return result


def _convolution(graph: Graph, op: Op) -> float:
    """Spatial size of the convolution's result times the size of its kernel, times two."""
    if op.type.endswith(("BackpropFilter", "BackpropFilterV2")):
        kernel, result = _known(op.outputs[0].shape), _shape(graph, op, 2)
    elif "Backprop" in op.type:
        kernel, result = _shape(graph, op, 1), _shape(graph, op, 2)
    else:
        kernel, result = _shape(graph, op, 1), _known(op.outputs[0].shape)
    if not kernel or not result:
        return 0.0
    channels = 1.0 if op.type.startswith("Depthwise") else float(kernel[-2] or 1)
    return 2.0 * _count(result) * _count(kernel[:-2]) * channels


def _product(graph: Graph, op: Op) -> float:
    if op.type == "Einsum":
        return _einsum(graph, op)
    left = _shape(graph, op, 0)
    if len(left) < 2:
        return 0.0
    transposed = bool(op.attrs.get("transpose_a") or op.attrs.get("adj_x"))
    inner = left[-2] if transposed else left[-1]
    return 2.0 * _count(op.outputs[0].shape or ()) * inner


def _einsum(graph: Graph, op: Op) -> float:
    """Two operations for each point of the space that the labels span."""
    equation = op.attrs.get("equation", b"")
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    sizes: dict[str, int] = {}
    for position, labels in enumerate(text.split("->")[0].split(",")):
        shape = _shape(graph, op, position)
        for label, dimension in zip(reversed(labels.replace("...", "")), reversed(shape),
                                    strict=False):
            sizes[label] = dimension
    return 2.0 * _count(sizes.values())
