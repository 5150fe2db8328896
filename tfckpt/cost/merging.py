"""What TensorFlow merges or rearranges: Grappler's arithmetic optimizer and remapper, oneDNN."""

from __future__ import annotations

from tfckpt.cost.storage import PASSES_ON
from tfckpt.graph import Graph

SUMS = frozenset({"Add", "AddV2", "AddN", "Sub"})
_PRODUCTS = frozenset({"Mul", "RealDiv", "Pow"})  # x^3 is made x * x^2
_UNARY = frozenset({"Neg", "Square", "Sqrt", "Rsqrt", "Exp", "Expm1", "Log", "Log1p", "Tanh",
                    "Sigmoid", "Relu", "Relu6", "Elu", "Abs", "Erf", "Erfc", "Sin", "Cos", "Inv",
                    "Reciprocal", "Softplus", "Softsign", "Selu",
                    "Pow"})  # x^2, x^0.5, x^-0.5 and x^-1 are made unary ops
_BIASED = frozenset({"BiasAdd", "Add", "AddV2", "Sub"})  # not AddN, which sums gradients
_ACTIVATIONS = _UNARY | SUMS | {"LeakyRelu", "Gelu", "Mul"}
_CONTRACTIONS = frozenset({"Conv2D", "DepthwiseConv2dNative", "MatMul", "Conv3D", "BatchMatMulV2"})
_MERGES = {
    "Conv2D": _BIASED, "DepthwiseConv2dNative": _BIASED, "MatMul": _BIASED, "Conv3D": _BIASED,
    "BatchMatMulV2": _BIASED | {"Mul"}, "BiasAdd": _ACTIVATIONS, "Pad": frozenset({"Conv2D"}),
    **{op: SUMS | _PRODUCTS | {"Log", "Square", "Neg"} for op in sorted(SUMS)},
    **{op: SUMS | _PRODUCTS for op in sorted(_PRODUCTS)},
    **{op: _UNARY for op in sorted(_UNARY)}, "Neg": _UNARY | SUMS,
    "Sqrt": _UNARY | {"RealDiv", "Div", "Xdivy"}, "Exp": _UNARY | {"Sub"},
    "Pow": SUMS | _PRODUCTS | _UNARY | {"Div", "Xdivy"},
    "Sigmoid": _UNARY | {"Mul"},
    "Softmax": frozenset({"Log"}),
}
"""Op types that Grappler or oneDNN may merge into an only reader of these types (x / sqrt(y) is
made x * rsqrt(y), log(1 + x) is made log1p(x), a - (-b) is made a + b, log(softmax(x)) and
x * sigmoid(1 * x) are made one op ...)."""
REARRANGED = SUMS | _PRODUCTS | _UNARY
"""Op types that Grappler's arithmetic optimizer rearranges."""

FUSED_ROUNDING = {
    "MatMul": frozenset({"Tanh", "Elu", "Sigmoid"}),
    **{op: frozenset({"Elu"}) for op in ("Conv2D", "DepthwiseConv2dNative", "Conv3D")},
}
"""Activations that round otherwise in one kernel with a contraction and its bias. (With Relu and
others, and with the bias alone, the fused kernel gives the same bits.)"""


def merges_into_its_reader(graph: Graph, i: int, readers: list[list[int]]) -> bool:
    """Whether TensorFlow may merge an op into its only reader; `readers` as `Graph.consumers`."""
    wanted = REARRANGED if multiplies_by_one(graph, i) else _MERGES.get(graph.ops[i].type)
    reader = only_reader(graph, i, readers, equal=True) if wanted is not None else None
    if wanted is None or reader is None or graph.ops[reader].type not in wanted:
        return False
    return graph.ops[i].type not in _CONTRACTIONS or not _sums_alike(graph, reader)


def multiplies_by_one(graph: Graph, i: int) -> bool:
    """Whether Grappler takes an op out: 1 * x, as `silu` has before its sigmoid."""
    return graph.ops[i].type == "Mul" and any(
        graph.ops[source].attrs.get("value") == 1.0 for source, _ in graph.ops[i].inputs)


def _sums_alike(graph: Graph, op: int) -> bool:
    """Whether an op adds tensors of one shape, none of which can be a bias."""
    shapes = {graph.ops[source].outputs[slot].shape for source, slot in graph.ops[op].inputs}
    shape = next(iter(shapes)) or ()
    return (graph.ops[op].type in SUMS and len(shapes) == 1
            and any(n != 1 for n in shape[:-1]) and None not in shape)


def only_reader(graph: Graph, op: int, readers: list[list[int]],
                equal: bool = False) -> int | None:
    """The only op that reads an op's results, behind pass-throughs, which TensorFlow removes.

    Args:
      equal: whether equal products count as one, since TensorFlow keeps only one of them: x * x
        has two gradients.
    """
    found: dict[object, int] = {}
    pending: list[tuple[int, int | None]] = [(op, None)]
    seen = set(pending)
    while pending:
        i, slot = pending.pop()
        for r in readers[i]:
            if slot is not None and (i, slot) not in graph.ops[r].inputs:
                continue
            if graph.ops[r].type not in PASSES_ON:
                reader = graph.ops[r]
                key = (reader.type, tuple(sorted(reader.inputs)))
                found.setdefault(key if equal and reader.type == "Mul" else r, r)
                continue
            passed = [(r, n) for n, (source, k) in enumerate(graph.ops[r].inputs)
                      if source == i and slot in (None, k)]
            pending += [p for p in passed if p not in seen]
            seen.update(passed)
        if len(found) > 1:
            return None
    return next(iter(found.values()), None)
