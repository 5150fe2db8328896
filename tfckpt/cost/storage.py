"""Which tensors share one allocation, and which are resident before the step starts."""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.errors import CostError
from tfckpt.graph import LOOPS, Graph, Op, TensorId

RESIDENT: TensorId = (-1, -1)
"""Root of every tensor that is allocated before the step (constants, variables, fed inputs)."""

ALIASES = frozenset({
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient",
    "PreventGradient", "EnsureShape", "Bitcast", "PlaceholderWithDefault", "TensorListFromTensor",
})
"""Hand on the memory of their first input; compute nothing."""
REFERENCES = frozenset({"Variable", "VariableV2", "TemporaryVariable"})
"""Make a reference: a buffer that changes in place."""
WRITES_REFERENCE = frozenset({"Assign", "AssignAdd", "AssignSub"})
"""Change the buffer behind their first input, and hand the reference on."""
PASSES_ON = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient"})
"""Hand on each input as it is."""
_RESIDENT = frozenset({
    "Const", "Placeholder", "VarHandleOp", "VariableV2", "ReadVariableOp", "IteratorGetNext",
    "IteratorGetNextSync", "OptionalGetValue", "_Arg", "GuaranteeConst",
})
_SOURCES = frozenset({"Placeholder", "IteratorGetNext", "IteratorGetNextSync",
                      "OptionalGetValue", "_Arg", "PlaceholderWithDefault"})
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


def storage_bytes(graph: Graph, root: Sequence[tuple[TensorId, ...]]) -> dict[TensorId, int]:
    """Bytes of every tensor that allocates memory during the step.

    A size that depends on the data (Where, Unique) is bounded by what the op reads. That is only
    done where every source of the graph has a known shape; it is never counted as 1.

    Raises:
      CostError: a source has an unknown dimension; the message names the tensor and the way out.
    """
    result: dict[TensorId, int] = {}
    bound: dict[TensorId, int] = {}
    unknown_source = next((i for i, op in enumerate(graph.ops) if op.type in _SOURCES
                           and any(t.bytes is None for t in op.outputs)), None)
    for i, op in enumerate(graph.ops):
        for slot, output in enumerate(op.outputs):
            size = output.bytes
            if size is None and op.type in SHAPE_ONLY:
                size = 0  # a few integers, however many
            elif size is None and unknown_source is not None:
                raise _unknown(graph, unknown_source)
            elif size is None:
                read = sum(bound.get(t, graph.ops[t[0]].outputs[t[1]].bytes or 0)
                           for t in op.inputs)
                size = bound[(i, slot)] = read * (8 if op.type == "Where" else 1)
            if root[i][slot] == (i, slot):
                result[(i, slot)] = size or 0
    return result


def _unknown(graph: Graph, index: int) -> CostError:
    op = graph.ops[index]
    slot = next(s for s, t in enumerate(op.outputs) if t.bytes is None)
    shape = op.outputs[slot].shape
    return CostError(
        f"cost: tensor {op.name}:{slot} of {graph.name!r} has the unknown shape "
        f"{list(shape) if shape is not None else '<unknown rank>'}; pass batch_size=... (or call "
        "the step with tensors of known shape) so that its bytes can be counted")


def roots(graph: Graph) -> list[tuple[TensorId, ...]]:
    """For each output of each op the tensor that allocates its memory, or `RESIDENT`.

    An expression of constants that Grappler folds is resident too.
    """
    result: list[tuple[TensorId, ...]] = []
    constant: list[bool] = []
    for index, op in enumerate(graph.ops):
        folded = op.type == "Const" or (
            op.pure and not op.controls and bool(op.inputs) and op.type not in SHAPE_ONLY | LOOPS
            and all(constant[source] for source, _ in op.inputs)
            and all((t.bytes or 0) <= _FOLDED_BYTES and t.bytes is not None for t in op.outputs))
        constant.append(folded)
        result.append(_op_roots(op, index, folded, result))
    return result


def _op_roots(op: Op, index: int, folded: bool,
              known: list[tuple[TensorId, ...]]) -> tuple[TensorId, ...]:
    if folded or op.type in _RESIDENT:
        return (RESIDENT,) * len(op.outputs)
    if op.type in ALIASES and len(op.inputs) >= len(op.outputs):
        sources = op.inputs[:len(op.outputs)]
        return tuple(known[source][slot] for source, slot in sources)
    if op.type in WRITES_REFERENCE or op.type == "DestroyTemporaryVariable":
        source, slot = op.inputs[0]
        return (known[source][slot],)
    slots = range(len(op.outputs))
    return tuple((index, op.loop.shares.get(slot, slot) if op.loop else slot) for slot in slots)


def is_alias(op: Op) -> bool:
    """Whether the op only passes its input's memory on."""
    return op.type in ALIASES
