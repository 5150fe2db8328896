"""Convolutions, matrix products, what oneDNN computes with them, and reductions beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfckpt.ops import einsum
from tfckpt.ops.op_record import BIAS, SUM, UNARY, Convolves, Flops, OpRecord, Shape
from tfckpt.ops.registry import register


def _convolution(kernel: int | None, result: int | None, depthwise: bool = False) -> Flops:
    """Return FLOPs: two for each element of a convolution's result and of the kernel applied.

    Args:
      kernel: the input that has the shape of the kernel; None: the output has.
      result: the input that has the shape of the convolution's result; None: the output has.
      depthwise: whether each channel has kernels of its own.
    """
    def flops(inputs: Sequence[Shape], output: Shape, attrs: Mapping[str, object]) -> float:
        window = output if kernel is None else inputs[kernel]
        made = output if result is None else inputs[result]
        if not window or not made:
            return 0.0
        return 2.0 * math.prod(made) * math.prod(window[:-2]) * (1.0 if depthwise else window[-2])
    return flops


def _product(inputs: Sequence[Shape], output: Shape, attrs: Mapping[str, object]) -> float:
    left = inputs[0]
    if len(left) < 2:
        return 0.0
    inner = left[-2] if attrs.get("transpose_a") or attrs.get("adj_x") else left[-1]
    return 2.0 * math.prod(output) * inner


# Fused with a bias, and with an activation after that. With Relu and others, and with the bias
# alone, the fused kernel gives the same bits as the single ones.
_BIASED = functools.partial(OpRecord, merges_into=frozenset({BIAS}))
_FORMAT = ("data_format",)
_CONVOLUTION = functools.partial(_BIASED, rounds_with=frozenset({"Elu"}))
_BATCHED = functools.partial(OpRecord, flops=_product, multiplies_matrices=True)
_FORWARD: dict[str, Any] = {"flops": _convolution(kernel=1, result=None), "attrs": _FORMAT,
                            "convolves": Convolves(1, (0, None))}
register(
    _CONVOLUTION("Conv2D", **_FORWARD), _CONVOLUTION("Conv3D", **_FORWARD),
    _CONVOLUTION("DepthwiseConv2dNative", flops=_convolution(1, None, depthwise=True)),
    _BIASED("MatMul", flops=_product, attrs=("transpose_a",), multiplies_matrices=True,
            rounds_with=frozenset({"Tanh", "Elu", "Sigmoid"})),
    _BATCHED("BatchMatMul"),
    _BATCHED("BatchMatMulV2", attrs=("adj_x",), merges_into=frozenset({BIAS, "Mul"})),
    _BATCHED("BatchMatMulV3", attrs=("adj_x",)),
    OpRecord("Einsum", flops=einsum.computed, copies=einsum.copied, attrs=("equation",),
             multiplies_matrices=True),
    OpRecord("Pad", pads=True, merges_into=frozenset({"Conv2D"})),
    OpRecord("BiasAdd", reuses_input=True, spreads=True, kinds=frozenset({BIAS}),
             merges_into=frozenset({UNARY, SUM, "LeakyRelu", "Gelu", "Mul"})),
)

# What Grappler makes of these with a bias, and an activation after that. It is planned as it runs,
# and nothing is merged with it any more.
register(
    OpRecord("_FusedConv2D", **_FORWARD), OpRecord("_FusedConv3D", **_FORWARD),
    OpRecord("_MklNativeFusedConv2D", **_FORWARD),  # in bfloat16
    OpRecord("_FusedDepthwiseConv2dNative", flops=_convolution(1, None, depthwise=True)),
    OpRecord("_FusedMatMul", flops=_product, attrs=("transpose_a",), multiplies_matrices=True),
    _BATCHED("_MklFusedBatchMatMulV2", attrs=("adj_x",)),
)

# Gradients. Of images oneDNN computes that of a bias with that of the filter.
_OF_INPUT = functools.partial(
    OpRecord, flops=_convolution(kernel=1, result=2), attrs=_FORMAT,
    convolves=Convolves(1, (None, 2), twice=True))
_OF_FILTER = functools.partial(
    OpRecord, flops=_convolution(kernel=None, result=2), attrs=_FORMAT,
    convolves=Convolves(None, (0, 2)))
register(
    _OF_INPUT("Conv2DBackpropInput"), _OF_INPUT("Conv3DBackpropInputV2"),
    OpRecord("DepthwiseConv2dNativeBackpropInput", flops=_convolution(1, 2, depthwise=True)),
    _OF_FILTER("Conv2DBackpropFilter", filter_gradient_of=2), _OF_FILTER("Conv3DBackpropFilterV2"),
    OpRecord("DepthwiseConv2dNativeBackpropFilter",
             flops=_convolution(None, 2, depthwise=True)),
    OpRecord("BiasAddGrad", bias_gradient=True, reduces=True),
)

# Sums over a row, and what is computed of each element with them. log(softmax(x)) is made
# log_softmax(x); losses hand out the gradient of the logits as well, in the memory of these.
_OF_ROWS = functools.partial(OpRecord, reduces=True, fused_from=0)
register(
    _OF_ROWS("Softmax", reuses_input=True, per_byte=3.0, merges_into=frozenset({"Log"})),
    _OF_ROWS("LogSoftmax", reuses_input=True),
    _OF_ROWS("SoftmaxCrossEntropyWithLogits", writes_over=(1, 0)),
    _OF_ROWS("SparseSoftmaxCrossEntropyWithLogits", writes_over=(1, 0)),
)
