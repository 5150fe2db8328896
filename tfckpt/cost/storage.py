"""Which tensors share one allocation, and which are resident before the step starts."""

from __future__ import annotations

from tfckpt.errors import CostError
from tfckpt.graph import Graph, Op, TensorId

RESIDENT: TensorId = (-1, -1)
"""Root of every tensor that is allocated before the step (constants, variables, fed inputs)."""

_ALIASES = frozenset({
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient",
    "PreventGradient", "EnsureShape", "Bitcast", "PlaceholderWithDefault",
})
_RESIDENT = frozenset({
    "Const", "Placeholder", "VarHandleOp", "VariableV2", "ReadVariableOp", "IteratorGetNext",
    "IteratorGetNextSync", "OptionalGetValue", "_Arg", "GuaranteeConst",
})
SHAPE_ONLY = frozenset({"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"})
"""Read only the shape: they run as soon as their input exists and hold nothing."""

_FOLDED_BYTES = 100 * 1024
"""Grappler folds constant expressions up to this size."""

REUSES_INPUT = frozenset({
    "Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "Neg", "Square", "Sqrt", "Rsqrt",
    "Exp", "Expm1", "Log", "Log1p", "Sigmoid", "Tanh", "Softplus", "Softsign", "Erf", "Erfc",
    "Sin", "Cos", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Abs", "Sign", "Reciprocal", "Inv",
    "Minimum", "Maximum", "Pow", "BiasAdd", "AddN", "ReluGrad", "Relu6Grad", "LeakyReluGrad",
    "EluGrad", "SeluGrad", "SigmoidGrad", "TanhGrad", "RsqrtGrad", "SqrtGrad", "ReciprocalGrad",
    "SoftplusGrad", "SoftsignGrad", "SquaredDifference", "Softmax", "LogSoftmax", "SelectV2",
    "FloorDiv", "FloorMod", "LogicalAnd", "LogicalOr", "LogicalNot", "Xdivy", "Xlogy",
})
"""Element-wise kernels that call `forward_input_or_allocate_output`."""


def tensor_bytes(graph: Graph, tensor: TensorId) -> int:
    """Size of a tensor in bytes.

    Raises:
      CostError: a dimension is unknown; the message names the tensor and the way out.
    """
    op = graph.ops[tensor[0]]
    output = op.outputs[tensor[1]]
    if op.type in SHAPE_ONLY:
        return output.bytes or 0  # a few integers, however many
    if output.bytes is None:
        raise CostError(
            f"cost: tensor {op.name}:{tensor[1]} of {graph.name!r} has the unknown shape "
            f"{list(output.shape) if output.shape is not None else '<unknown rank>'}; pass "
            "batch_size=... (or call the step with tensors of known shape) so that its bytes "
            "can be counted")
    return output.bytes


def roots(graph: Graph) -> list[tuple[TensorId, ...]]:
    """For each output of each op the tensor that allocates its memory, or `RESIDENT`.

    An expression of constants that Grappler folds is resident too.
    """
    result: list[tuple[TensorId, ...]] = []
    constant: list[bool] = []
    for index, op in enumerate(graph.ops):
        folded = op.type == "Const" or (
            op.pure and not op.controls and bool(op.inputs) and op.type not in SHAPE_ONLY
            and all(constant[source] for source, _ in op.inputs)
            and all((t.bytes or 0) <= _FOLDED_BYTES and t.bytes is not None for t in op.outputs))
        constant.append(folded)
        result.append(_op_roots(op, index, folded, result))
    return result


def _op_roots(op: Op, index: int, folded: bool,
              known: list[tuple[TensorId, ...]]) -> tuple[TensorId, ...]:
    if folded or op.type in _RESIDENT:
        return (RESIDENT,) * len(op.outputs)
    if op.type in _ALIASES and len(op.inputs) >= len(op.outputs):
        sources = op.inputs[:len(op.outputs)]
        return tuple(known[source][slot] for source, slot in sources)
    return tuple((index, slot) for slot in range(len(op.outputs)))


def is_alias(op: Op) -> bool:
    """Whether the op only passes its input's memory on."""
    return op.type in _ALIASES
