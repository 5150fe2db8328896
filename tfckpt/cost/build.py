"""Builds the `CostGraph` of a captured step.

An op is an *anchor*, and becomes a vertex, when it allocates or reads memory that is not
trivially small. Every other op is contracted: what it needs, its consumers need. It is not given
to one consumer alone, since a learning rate read by every update would tie all of them to the
first. What no anchor needs costs nothing and is left out. Two ops that TensorFlow is known to
run as one (a convolution's filter and bias gradients) form one vertex, since waiting for one and
gating the other would be a cycle once they are merged.
"""

from __future__ import annotations

from tfckpt.cost.costgraph import CostGraph, Storage, Vertex, check_cost_graph
from tfckpt.cost.storage import (
    PASSES_ON,
    REUSES_INPUT,
    SHAPE_ONLY,
    is_alias,
    roots,
    storage_bytes,
)
from tfckpt.cost.time import is_expensive, seconds
from tfckpt.graph import FORWARD, Graph, TensorId

SMALL_FRACTION = 2.0e-5
"""Tensors below this fraction of all bytes the forward pass writes are trivially small."""
SMALL_BYTES = 256


def build_cost_graph(graph: Graph) -> CostGraph:
    """Prices a captured graph.

    Raises:
      CostError: the bytes of a tensor are unknown; names the tensor and the remedy.
    """
    root = roots(graph)
    sizes = storage_bytes(graph, root)
    big = _big(graph, sizes)
    reads = [_reads(op, root, big) for op in graph.ops]
    anchors = [i for i, op in enumerate(graph.ops)
               if reads[i] and not (is_alias(op) and len(op.outputs) == 1)
               or any((i, slot) in big for slot in range(len(op.outputs)))]
    partner = merged_pairs(graph)
    partner, anchors, needs = _needs(graph, anchors, partner)
    members: dict[int, tuple[int, ...]] = {anchor: (anchor,) for anchor in anchors}
    for merged, anchor in partner.items():
        members[anchor] += (merged,)
    storages, index = _storages(graph, [members[a] for a in anchors], big, root)
    readers = graph.consumers()
    vertices = tuple(_vertex(graph, members[anchor], reads, index, needs[v], readers)
                     for v, anchor in enumerate(anchors))
    variables, fed = _resident_bytes(graph)
    result = CostGraph(vertices, tuple(storages), sum(variables) + fed, graph.name, variables)
    check_cost_graph(result)
    return result


def _resident_bytes(graph: Graph) -> tuple[tuple[int, ...], int]:
    """Bytes of each variable (once, however often it is read), and of inputs and constants."""
    variables: dict[TensorId, int] = {}
    fed = 0
    for op in graph.ops:
        size = sum(t.bytes or 0 for t in op.outputs)
        if op.type == "ReadVariableOp":
            variables[op.inputs[0]] = size
        elif op.type in ("Const", "Placeholder", "_Arg"):
            fed += size
    return tuple(variables.values()), fed


def _big(graph: Graph, sizes: dict[TensorId, int]) -> dict[TensorId, int]:
    """The storages that matter."""
    total = sum(size for (i, _), size in sizes.items() if graph.ops[i].region == FORWARD)
    least = max(SMALL_BYTES, total * SMALL_FRACTION)
    return {tensor: size for tensor, size in sizes.items() if size >= least}


def _reads(op, root, big) -> list[TensorId]:
    if op.type in SHAPE_ONLY:
        return []
    found: list[TensorId] = []
    for source, slot in op.inputs:
        tensor = root[source][slot]
        if tensor in big and tensor not in found:
            found.append(tensor)
    return found


def _needs(graph: Graph, anchors: list[int], partner: dict[int, int]
           ) -> tuple[dict[int, int], list[int], list[tuple[int, ...]]]:
    """Partners, anchors without them, and for each anchor the vertices it needs, ascending.

    What a vertex needs, it needs directly or through contracted ops; needing a merged partner
    is needing the op it is merged into.
    """
    found_anchors = frozenset(anchors)
    partner = {i: j for i, j in partner.items() if j in found_anchors}
    kept = [a for a in anchors if a not in partner]
    number = {anchor: v for v, anchor in enumerate(kept)}
    through: list[frozenset[int]] = []  # what a reader of the op needs
    result: list[tuple[int, ...]] = []
    empty: frozenset[int] = frozenset()
    for i, op in enumerate(graph.ops):
        found = empty
        for source in [s for s, _ in op.inputs] + list(op.controls):
            found = found | through[source] if found else through[source]
        if i in number:
            if max(found, default=-1) >= number[i]:  # a reader stands before the merged vertex
                return _needs(graph, anchors, {})
            result.append(tuple(sorted(found)))
            through.append(frozenset((number[i],)))
        elif i in partner:
            through.append(frozenset((number[partner[i]],)))
        else:
            through.append(found)
    return partner, kept, result


def merged_pairs(graph: Graph) -> dict[int, int]:
    """Bias gradients that oneDNN computes inside the filter gradient of the same convolution."""
    filters = {op.inputs[2]: i for i, op in enumerate(graph.ops)
               if op.type in ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")}
    return {i: filters[op.inputs[0]] for i, op in enumerate(graph.ops)
            if op.type == "BiasAddGrad" and op.inputs[0] in filters}


_ADDS = frozenset({"Add", "AddV2", "AddN", "Sub"})
_PRODUCTS = frozenset({"Mul", "RealDiv"})
_UNARY = frozenset({"Neg", "Square", "Sqrt", "Rsqrt", "Exp", "Expm1", "Log", "Log1p", "Tanh",
                    "Sigmoid", "Relu", "Relu6", "Elu", "Abs", "Erf", "Erfc", "Sin", "Cos", "Inv",
                    "Reciprocal", "Softplus", "Softsign", "Selu"})
_BIASED = frozenset({"BiasAdd"}) | _ADDS
_ACTIVATIONS = _UNARY | _ADDS | {"LeakyRelu", "Gelu", "Mul"}
_MERGES = {
    "Conv2D": _BIASED, "DepthwiseConv2dNative": _BIASED, "MatMul": _BIASED, "Conv3D": _BIASED,
    "BatchMatMulV2": _BIASED | {"Mul"}, "BiasAdd": _ACTIVATIONS, "Pad": frozenset({"Conv2D"}),
    **{op: _ADDS | _PRODUCTS | {"Log", "Square"} for op in sorted(_ADDS)},
    **{op: _ADDS | _PRODUCTS for op in sorted(_PRODUCTS)},
    **{op: _UNARY for op in sorted(_UNARY)},
    "Sqrt": _UNARY | {"RealDiv", "Div", "Xdivy"}, "Exp": _UNARY | {"Sub"},
    "Sigmoid": _UNARY | {"Mul"},
    "Softmax": frozenset({"Log"}),
}
"""Op types that Grappler or oneDNN may merge into an only reader of these types (x / sqrt(y) is
made x * rsqrt(y), log(1 + x) is made log1p(x), log(softmax(x)) is made one op ...)."""
REARRANGED = _ADDS | _PRODUCTS | _UNARY
"""Op types that Grappler's arithmetic optimizer rearranges."""


def _fusible(graph: Graph, i: int, readers: list[list[int]]) -> bool:
    wanted = _MERGES.get(graph.ops[i].type)
    reader = _only_reader(graph, i, readers) if wanted is not None else None
    return wanted is not None and reader is not None and graph.ops[reader].type in wanted


def _only_reader(graph: Graph, op: int, readers: list[list[int]]) -> int | None:
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


def _storages(graph: Graph, members, big, root):
    fetched = {root[i][slot] for i, slot in graph.fetches}
    storages: list[Storage] = []
    index: dict[TensorId, int] = {}
    for v, ops in enumerate(members):
        for i in ops:
            for slot in range(len(graph.ops[i].outputs)):
                tensor = (i, slot)
                if tensor in big:
                    index[tensor] = len(storages)
                    storages.append(Storage(f"{graph.ops[i].name}:{slot}", big[tensor], v,
                                            tensor in fetched, tensor))
    return storages, index


def _vertex(graph, members, reads, index, needs, readers) -> Vertex:
    anchor = members[0]
    op = graph.ops[anchor]
    read = tuple(sorted({index[t] for i in members for t in reads[i]}))
    write = tuple(index[(i, slot)] for i in members for slot in range(len(graph.ops[i].outputs))
                  if (i, slot) in index)
    reuses = tuple((w, r) for w in write for r in read) if op.type in REUSES_INPUT else ()
    is_assign = op.type == "AssignVariableOp"
    return Vertex(
        name=op.name, region=op.region, reads=read, writes=write, after=needs,
        time=sum(seconds(graph, graph.ops[i]) for i in members),
        reuses=reuses, recomputable=op.pure and op.region == FORWARD,
        cheap=not is_expensive(op), donates=read if is_assign else (), ops=tuple(members),
        fusible=_fusible(graph, anchor, readers),
        join=op.type == "IdentityN" and len(op.inputs) > 1, device=op.device)
