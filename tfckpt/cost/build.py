"""Builds the `CostGraph` of a captured step.

An op is an *anchor*, and becomes a vertex, when it allocates or reads memory that is not
trivially small. Every other op is contracted: what it needs, its consumers need. It is not given
to one consumer alone, since a learning rate read by every update would tie all of them to the
first. What no anchor needs costs nothing and is left out. Two ops that TensorFlow is known to
run as one (a convolution's filter and bias gradients) form one vertex, since waiting for one and
gating the other would be a cycle once they are merged. So do forward ops that Grappler rearranges
with their only reader (see `tfckpt.cost.rearranged_ops`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfckpt.cost.bodies.runs import written_over
from tfckpt.cost.bodies.working import requests_of, working_bytes
from tfckpt.cost.broadcasts import undoes_nothing
from tfckpt.cost.fused import fused_ops
from tfckpt.cost.kernel_copies import kernel_workspace, rearranged_bytes
from tfckpt.cost.merging import merges_into_its_reader, only_reader
from tfckpt.cost.rearranged_ops import absorbed_ops, workspace
from tfckpt.cost.storage import is_view, lent, roots, storage_bytes, unknown_variables
from tfckpt.cost.time import fused_seconds, is_expensive, seconds
from tfckpt.cost.variables import ValueUses, value_uses, variable_bytes
from tfckpt.ir.costgraph import CostGraph, Storage, Vertex, check_cost_graph
from tfckpt.ir.graph import FORWARD, KEEP, RECOMPUTE, Graph, Op, TensorId
from tfckpt.ir.target import SMALL_CPU, Fusion, Rates, Target
from tfckpt.ops import Access, Source, record

SMALL_FRACTION = 2.0e-5
"""Tensors below this fraction of all bytes the forward pass writes are trivially small."""
SMALL_BYTES = 256
_FED_OR_CONSTANT = (Source.CONSTANT, Source.ARGUMENT, Source.ELSEWHERE)
"""Sources of tensors that count as inputs or constants; elements of datasets do not."""

Roots = Sequence[tuple[TensorId, ...]]
"""For each output of each op the tensor whose memory it lies in (`tfckpt.cost.storage.roots`)."""


def cost_of(graph: Graph, target: Target, like: CostGraph | None = None) -> CostGraph:
    """Price a captured graph for what runs it.

    Args:
      graph: the captured step.
      target: what runs it.
      like: the price of a graph whose loops this one has too, those of the same names.

    Raises:
      CostError: as `build_cost_graph`.
    """
    return build_cost_graph(graph, target.rates, target.fusion, target.kernels_by,
                            settled=target.optimised, like=like)


def build_cost_graph(graph: Graph, rates: Rates = SMALL_CPU, fusion: Fusion | None = None,
                     kernels_by: str = "", settled: bool = False,
                     like: CostGraph | None = None) -> CostGraph:
    """Price a captured graph for a device.

    Args:
      graph: the captured step.
      rates: how fast the device is.
      fusion: what XLA fuses, where it compiles the step (`tfckpt.cost.fused`); None where
        Grappler and TensorFlow's executor have it.
      kernels_by: whose kernels compute convolutions and products (`Target.kernels_by`).
      settled: whether Grappler has seen the graph, so that no op merges into its reader any more.
      like: the price of a graph whose loops this one has too, those of the same names: what their
        bodies hold takes long to find.

    Raises:
      CostError: the bytes of a tensor are unknown; names the tensor and the remedy.
    """
    root = roots(graph, fusion)
    sizes = storage_bytes(graph, root)
    big = _big(graph, sizes)
    reads = [_reads(graph, op, root, big) for op in graph.ops]
    anchors = [i for i, op in enumerate(graph.ops)
               if reads[i] and not _hands_on(graph, root, i)
               or any((i, slot) in big for slot in range(len(op.outputs)))
               or op.bodies and working_bytes(graph, op) >= SMALL_BYTES]
    readers = graph.consumers()
    awaited = frozenset(source for op in graph.ops for source in op.controls)
    fetched = frozenset(root[i][slot] for i, slot in graph.fetches)
    absorbed = absorbed_ops(graph, anchors, readers, fetched) if fusion is None else (
        fused_ops(graph, anchors, readers, root, fetched, fusion.in_memory))
    absorbed = _where_nobody_waits(graph, absorbed)
    inner = {t: big.pop(t) for t in tuple(big) if t[0] in absorbed and (
        fusion is not None or only_reader(graph, t[0], readers) is not None)}
    reads = [[t for t in entry if t not in inner] for entry in reads]
    anchors = [a for a in anchors if a not in absorbed]
    partner, anchors, needs = _needs(
        graph, anchors, merged_pairs(graph) if fusion is None else {}, absorbed)
    members: dict[int, tuple[int, ...]] = {anchor: (anchor,) for anchor in anchors}
    for merged, anchor in sorted({**partner, **absorbed}.items()):
        members[anchor] += (merged,)
    merging = () if settled else frozenset(
        a for a in anchors if merges_into_its_reader(graph, a, readers))
    uses, held = value_uses(graph, readers), lent(graph, root, readers)
    storages, index = _storages(graph, [members[a] for a in anchors], big, fetched)
    loops = {op.name for op in graph.ops if op.loop is not None}
    given = {v.name: v.workspace for v in like.vertices if v.name in loops} if like else {}
    vertices = tuple(
        _vertex(graph, members[anchor], root, reads, storages, index, needs[v], merging, awaited,
                rates,
                given[graph.ops[anchor].name] if graph.ops[anchor].name in given else
                _extra(graph, root, inner, members[anchor], fusion, kernels_by), fusion,
                uses, held)
        for v, anchor in enumerate(anchors))
    variables, fed = _resident_bytes(graph)
    result = CostGraph(vertices, tuple(storages), sum(variables) + fed, graph.name, variables,
                       len(unknown_variables(graph)))
    check_cost_graph(result)
    return result


def _hands_on(graph: Graph, root: Roots, i: int) -> bool:
    """Return whether what an op makes has no memory of its own, and it takes no time."""
    op = graph.ops[i]
    known = record(op.type)
    if known.slices is not None:
        return root[i][0][0] != i
    return len(op.outputs) == 1 and (
        known.aliases or undoes_nothing(graph, i) or is_view(graph, root, i))


def _resident_bytes(graph: Graph) -> tuple[tuple[int, ...], int]:
    """Return the bytes of each variable, and of inputs and constants together."""
    fed = sum(t.bytes or 0 for op in graph.ops if record(op.type).source in _FED_OR_CONSTANT
              for t in op.outputs)
    return tuple(variable_bytes(graph).values()), fed


def _big(graph: Graph, sizes: dict[TensorId, int]) -> dict[TensorId, int]:
    """Return the storages that matter."""
    total = sum(size for (i, _), size in sizes.items() if graph.ops[i].region == FORWARD)
    smallest = max(SMALL_BYTES, total * SMALL_FRACTION)
    return {tensor: size for tensor, size in sizes.items() if size >= smallest}


def _reads(graph: Graph, op: Op, root: Roots, big: Collection[TensorId]) -> list[TensorId]:
    if record(op.type).shape_only and not _takes_a_list(graph, op):
        return []
    tensors = (root[source][slot] for source, slot in op.inputs)
    return list(dict.fromkeys(t for t in tensors if t in big))


def _takes_a_list(graph: Graph, op: Op) -> bool:
    """Return whether an op is given a list: Grappler leaves one to it of which it reads shapes."""
    return any(graph.ops[source].outputs[slot].dtype == "variant" for source, slot in op.inputs)


def _needs(graph: Graph, anchors: list[int], partner: dict[int, int], absorbed: Mapping[int, int]
           ) -> tuple[dict[int, int], list[int], list[tuple[int, ...]]]:
    """Partners, anchors without them, and for each anchor the vertices it needs, ascending.

    What a vertex needs, it needs directly or through contracted ops; needing a merged partner
    is needing the op it is merged into, and waiting for an absorbed one is waiting for the vertex
    that it is a part of.
    """
    found_anchors = frozenset(anchors)
    partner = {i: j for i, j in partner.items() if j in found_anchors}
    kept = [a for a in anchors if a not in partner]
    number = {anchor: v for v, anchor in enumerate(kept)}
    through: list[frozenset[int]] = []  # what a reader of the op needs
    part = {i: number[anchor] for i, anchor in absorbed.items() if anchor in number}
    result: list[tuple[int, ...]] = []
    empty: frozenset[int] = frozenset()
    for i, op in enumerate(graph.ops):
        found = empty
        for source in [s for s, _ in op.inputs] + list(op.controls):
            found = found | through[source] if found else through[source]
        inside = number.get(i, part.get(i))
        waits = {part[source] for source in op.controls if source in part} - {inside}
        found = found | waits if waits else found
        if i in number:
            if max(found, default=-1) >= number[i]:  # a reader stands before the merged vertex
                return _needs(graph, anchors, {}, {})
            result.append(tuple(sorted(found)))
            through.append(frozenset((number[i],)))
        elif i in partner:
            through.append(frozenset((number[partner[i]],)))
        else:
            through.append(found)
    return partner, kept, result


def _where_nobody_waits(graph: Graph, absorbed: Mapping[int, int]) -> dict[int, int]:
    """Return which ops are part of another's vertex, but for groups that break the order.

    A group stands where its last op does. Where something that stands before it waits for one of
    its ops, as what Grappler makes of shapes does, each of them is a vertex of its own.
    """
    apart = {absorbed[source] for i, op in enumerate(graph.ops) for source in op.controls
             if source in absorbed and i < absorbed[source] and absorbed.get(i) != absorbed[source]}
    return {i: anchor for i, anchor in absorbed.items() if anchor not in apart}


def merged_pairs(graph: Graph) -> dict[int, int]:
    """Return the bias gradients that oneDNN computes inside a filter gradient.

    Both are of the same convolution, and of a dtype that it may know: where the two are merged,
    nothing may delay one of them until the other has run.

    Args:
      graph: joint graph.

    Returns:
      For the index of each such bias gradient that of the filter gradient.
    """
    known = [record(op.type) for op in graph.ops]
    filters = {op.inputs[of]: i for i, op in enumerate(graph.ops)
               if (of := known[i].filter_gradient_of) is not None
               and op.outputs[0].dtype != "float64"}
    return {i: filters[op.inputs[0]] for i, op in enumerate(graph.ops)
            if known[i].bias_gradient and op.inputs[0] in filters}


def _storages(graph: Graph, members: Sequence[Sequence[int]], big: Mapping[TensorId, int],
              fetched: Collection[TensorId]) -> tuple[list[Storage], dict[TensorId, int]]:
    storages = [Storage(f"{graph.ops[i].name}:{slot}", big[i, slot], v, (i, slot) in fetched,
                        (i, slot), _entries(graph, i, slot))
                for v, ops in enumerate(members) for i in ops
                for slot in range(len(graph.ops[i].outputs)) if (i, slot) in big]
    return storages, {storage.tensor: index for index, storage in enumerate(storages)}


def _entries(graph: Graph, i: int, slot: int) -> int:
    """Return how many tensors a result is: a loop's list, what branches keep."""
    op = graph.ops[i]
    if record(op.type).lists.rows:
        source, of = op.inputs[0]
        return (graph.ops[source].outputs[of].shape or (None,))[0] or 1
    if op.outputs[slot].dtype != "variant":
        return 1
    return op.loop.trips if op.loop is not None else op.branches.pieces if op.branches else 1


def _donors(members: Sequence[int], reads: Sequence[Sequence[TensorId]],
            index: Mapping[TensorId, int]) -> list[int]:
    """Return what a group reads whose buffers its result may have: what its first op alone does.

    What ops after that read is there while the group allocates, or when it has.
    """
    first = min(members)
    later = {t for i in members if i != first for t in reads[i]}
    return sorted(index[t] for t in reads[first] if t not in later and t in index)


def _reuses(op: Op, root: Roots, index: Mapping[TensorId, int], own: int, read: Sequence[int],
            write: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of what a kernel writes and whose buffer it may take, first wish first."""
    if record(op.type).reuses_input:
        return tuple((w, r) for w in write for r in read)
    takes = {} if op.loop is None else op.loop.takes
    wishes = dict.fromkeys([(slot, n) for slot, ns in takes.items() for n in ns]
                           + written_over(op))
    pairs = [((own, slot), root[op.inputs[n][0]][op.inputs[n][1]]) for slot, n in wishes]
    return tuple((index[w], index[r]) for w, r in pairs if w in index and r in index)


def _sums_rows(graph: Graph, root: Roots, members: Sequence[int]) -> bool:
    """Return whether ops read, through views alone, what sums over rows and is read first."""
    pending = [source for i in members for source, _ in graph.ops[i].inputs]
    seen: set[int] = set()
    while pending:
        i = pending.pop()
        if i in seen or not (record(graph.ops[i].type).aliases or is_view(graph, root, i)):
            continue
        if record(graph.ops[i].type).fused_from is not None:
            return True
        seen.add(i)
        pending += [source for source, _ in graph.ops[i].inputs]
    return False


def _extra(graph: Graph, root: Roots, inner: Mapping[TensorId, int], members: Sequence[int],
           fusion: Fusion | None, kernels_by: str) -> int:
    """Return the bytes that an op, or a group, allocates besides its results while it runs."""
    if fusion is not None:
        heavy = record(graph.ops[members[0]].type).multiplies_matrices
        return fusion.workspace_bytes if heavy else 0
    taken = max(kernel_workspace(graph, graph.ops[i], kernels_by) for i in members)
    taken += max(rearranged_bytes(graph, graph.ops[i]) for i in members)
    if len(members) > 1:
        return taken + workspace(graph, root, inner, members)
    return taken + graph.ops[members[0]].workspace + working_bytes(
        graph, graph.ops[members[0]], kernels_by)


def _vertex(graph: Graph, members: Sequence[int], root: Roots, reads: Sequence[Sequence[TensorId]],
            storages: Sequence[Storage], index: Mapping[TensorId, int], needs: tuple[int, ...],
            merging: Collection[int], awaited: Collection[int], rates: Rates, extra: int,
            fusion: Fusion | None, uses: ValueUses, held: frozenset[int]) -> Vertex:
    anchor = members[0]
    op = graph.ops[anchor]
    known = record(op.type)
    write = tuple(sorted(index[(i, slot)] for i in members
                         for slot in range(len(graph.ops[i].outputs)) if (i, slot) in index))
    read = tuple(sorted({index[t] for i in members for t in reads[i]} - set(write)))
    cheap = not any(is_expensive(graph.ops[i]) for i in members)
    in_place = (cheap or not known.reuses_input) and not (
        fusion and (known.evaluate is None or _sums_rows(graph, root, members)))
    donors = read if fusion else _donors(members, reads, index)
    reuses = _reuses(op, root, index, anchor, donors, write) if in_place else ()
    time = sum(seconds(graph, graph.ops[i], rates) for i in members)
    if fusion is not None and fusion.repeats:  # a GPU, which waits for memory in such loops
        moved = sum(storages[s].bytes for s in read + write)
        time = fused_seconds(graph, members, moved, rates)
    asked = {graph.ops[i].policy for i in members}
    recomputable = (op.pure and op.region == FORWARD and KEEP not in asked
                    and held.isdisjoint(members))
    return Vertex(
        name=op.name, region=op.region, reads=read, writes=write, after=needs, time=time,
        reuses=reuses, recomputable=recomputable, workspace=extra,
        pieces=requests_of(op, extra),
        cheap=cheap, donates=read if known.access is Access.ASSIGN else (), ops=tuple(members),
        fusible=anchor in merging,
        join=known.joins and len(op.inputs) > 1 and anchor not in awaited,
        conditional=any(graph.ops[i].conditional for i in members), device=op.device,
        reads_variables=tuple(sorted({v for i in members for v in uses.reads.get(i, ())})),
        updates=next((uses.updates[i] for i in members if i in uses.updates), -1),
        again=recomputable and RECOMPUTE in asked)
