"""What TensorFlow merges or rearranges: Grappler's arithmetic optimizer and remapper, oneDNN."""

from __future__ import annotations

from tfckpt.cost.storage import PASSES_ON
from tfckpt.graph import Graph

SUMS = frozenset({"Add", "AddV2", "AddN", "Sub"})
_PRODUCTS = frozenset({"Mul", "RealDiv"})
_UNARY = frozenset({"Neg", "Square", "Sqrt", "Rsqrt", "Exp", "Expm1", "Log", "Log1p", "Tanh",
                    "Sigmoid", "Relu", "Relu6", "Elu", "Abs", "Erf", "Erfc", "Sin", "Cos", "Inv",
                    "Reciprocal", "Softplus", "Softsign", "Selu"})
_BIASED = frozenset({"BiasAdd", "Add", "AddV2", "Sub"})  # a sum of gradients is no bias
_ACTIVATIONS = _UNARY | SUMS | {"LeakyRelu", "Gelu", "Mul"}
_MERGES = {
    "Conv2D": _BIASED, "DepthwiseConv2dNative": _BIASED, "MatMul": _BIASED, "Conv3D": _BIASED,
    "BatchMatMulV2": _BIASED | {"Mul"}, "BiasAdd": _ACTIVATIONS, "Pad": frozenset({"Conv2D"}),
    **{op: SUMS | _PRODUCTS | {"Log", "Square"} for op in sorted(SUMS)},
    **{op: SUMS | _PRODUCTS for op in sorted(_PRODUCTS)},
    **{op: _UNARY for op in sorted(_UNARY)},
    "Sqrt": _UNARY | {"RealDiv", "Div", "Xdivy"}, "Exp": _UNARY | {"Sub"},
    "Sigmoid": _UNARY | {"Mul"},
    "Softmax": frozenset({"Log"}),
}
"""Op types that Grappler or oneDNN may merge into an only reader of these types (x / sqrt(y) is
made x * rsqrt(y), log(1 + x) is made log1p(x), log(softmax(x)) is made one op ...)."""
REARRANGED = SUMS | _PRODUCTS | _UNARY
"""Op types that Grappler's arithmetic optimizer rearranges."""


def merges_into_its_reader(graph: Graph, i: int, readers: list[list[int]]) -> bool:
    """Whether TensorFlow may merge an op into its only reader; `readers` as `Graph.consumers`."""
    wanted = _MERGES.get(graph.ops[i].type)
    reader = only_reader(graph, i, readers) if wanted is not None else None
    return wanted is not None and reader is not None and graph.ops[reader].type in wanted


def only_reader(graph: Graph, op: int, readers: list[list[int]]) -> int | None:
    """The only op that reads an op's results, behind pass-throughs, which TensorFlow removes."""
    found: dict[int, None] = {}
    pending: list[tuple[int, int | None]] = [(op, None)]
    seen = set(pending)
    while pending:
        i, slot = pending.pop()
        for r in readers[i]:
            if slot is not None and (i, slot) not in graph.ops[r].inputs:
                continue
            if graph.ops[r].type not in PASSES_ON:
                found[r] = None
                continue
            passed = [(r, n) for n, (source, k) in enumerate(graph.ops[r].inputs)
                      if source == i and slot in (None, k)]
            pending += [p for p in passed if p not in seen]
            seen.update(passed)
        if len(found) > 1:
            return None
    return next(iter(found), None)
