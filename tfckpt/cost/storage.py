"""Tensors that share one allocation, and tensors that are resident before the step starts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from tfckpt.cost.broadcasts import undoes_nothing
from tfckpt.cost.row_slices import takes_rows
from tfckpt.cost.views import RESIDENT, Views, is_element_wise
from tfckpt.errors import CostError
from tfckpt.ir.graph import Graph, Loop, Op, Tensor, TensorId
from tfckpt.ir.target import Fusion
from tfckpt.ops import Access, record

__all__ = ["RESIDENT", "is_view", "roots", "storage_bytes", "unknown_variables"]


_ON_ITS_REFERENCE = (Access.ASSIGN_REFERENCE, Access.CHANGE_REFERENCE, Access.DESTROY_REFERENCE)
_FOLDED_BYTES = 100 * 1024
"""Grappler folds constant expressions up to this size."""


def storage_bytes(graph: Graph, root: Sequence[tuple[TensorId, ...]]) -> dict[TensorId, int]:
    """Return bytes of every tensor that allocates memory during the step.

    A size that depends on the data (Where, Unique) is bounded by what the op reads (`_Bounds`).
    That is only done where every source of the graph has a known shape; it is never counted as 1.
    Variables of unknown shape are no obstacle where nothing else depends on them.

    Args:
      graph: joint graph.
      root: for each output of each op the tensor that allocates its memory, or `RESIDENT`.

    Returns:
      Bytes by the tensor that allocates.

    Raises:
      CostError: a source has an unknown dimension; the message names the tensor and the way out.
    """
    result: dict[TensorId, int] = {}
    bounds = _Bounds(graph)
    unknown_source = next((i for i, op in enumerate(graph.ops) if record(op.type).fed
                           and any(t.bytes is None for t in op.outputs)), None)
    unknown_variable = next(iter(unknown_variables(graph)), None)
    for i, op in enumerate(graph.ops):
        for slot, output in enumerate(op.outputs):
            size = output.bytes
            if size is None and record(op.type).shape_only:
                size = 0  # a few integers, however many
            elif size is None and unknown_source is not None:
                raise _unknown(graph, unknown_source)
            elif size is None and unknown_variable is not None and root[i][slot] != RESIDENT:
                raise _depends_on(graph, unknown_variable, i)
            elif size is None:
                size = bounds.add((i, slot))
            if root[i][slot] == (i, slot):
                result[(i, slot)] = size or 0
    return result


class _Bounds:
    """Bounds on the bytes of tensors whose sizes depend on data.

    1. What an op makes is no larger than what it reads, times its `growth`; if it is element-wise,
       than the largest of that; of a list all entries together, whatever shape it is said that
       they have.
    2. Where an op reads a tensor of unknown size, an unknown dimension of its result is no longer
       than that of what it reads: of the longest, if it is element-wise, else of all together. By
       the first rule alone, bounds would double with each op that reads two such tensors.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._bytes: dict[TensorId, int] = {}
        self._length: dict[TensorId, int] = {}  # of one unknown dimension

    def add(self, tensor: TensorId) -> int:
        """Bound a tensor; those that its op reads have been bounded before."""
        op = self._graph.ops[tensor[0]]
        known, result = record(op.type), op.outputs[tensor[1]]
        read = op.inputs[:1] if known.lists.stacks else op.inputs
        sizes = [self._read(t) for t in read]
        size = known.growth * (max(sizes, default=0) if known.evaluate is not None and not
                               self._spreads(op, result) else sum(sizes))
        lengths = [self._length[t] for t in op.inputs if t in self._length]
        dimensions = result.shape or (None,)
        one = _width(result.dtype) * math.prod(d for d in dimensions if d is not None)
        if lengths and result.shape is not None:
            length = max(lengths) if known.evaluate is not None else sum(lengths)
            size = min(size, one * length ** dimensions.count(None))
        self._bytes[tensor] = size
        self._length[tensor] = size // max(one, 1)
        return size

    def _spreads(self, op: Op, result: Tensor) -> bool:
        """Return whether an element-wise op may make more than what it reads: it repeats some."""
        shapes = [self._graph.ops[i].outputs[slot].shape for i, slot in op.inputs]
        return any(shape is not None and result.shape is not None and any(
            here == 1 != made for here, made in zip(shape[::-1], result.shape[::-1], strict=False))
            for shape in shapes if shape)

    def _read(self, tensor: TensorId) -> int:
        index, slot = tensor
        return self._bytes.get(tensor, self._graph.ops[index].outputs[slot].bytes or 0)


def _width(dtype: str) -> int:
    """Return the bytes of an element, by the bits in the name of its type."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _unknown(graph: Graph, index: int) -> CostError:
    op = graph.ops[index]
    slot = next(s for s, t in enumerate(op.outputs) if t.bytes is None)
    shape = op.outputs[slot].shape
    said = list(shape) if shape is not None else "<unknown rank>"
    if shape and None in shape[1:]:  # of which a batch size says nothing
        return CostError(
            f"cost: tensor {op.name}:{slot} of {graph.name!r} has the unknown shape {said}; call "
            "the step with tensors of known shape (or trace it with a size for each dimension but "
            "the first) so that its bytes can be counted")
    return CostError(
        f"cost: tensor {op.name}:{slot} of {graph.name!r} has the unknown shape {said}; pass "
        "batch_size=... (or call the step with tensors of known shape) so that its bytes can be "
        "counted")


def unknown_variables(graph: Graph) -> list[int]:
    """Return the handles of the variables of which not even the rank is known, ascending.

    A graph in a file has no shapes of the variables that its trace captured.

    Args:
      graph: joint graph.

    Returns:
      Indices of ops.
    """
    return sorted({op.inputs[0][0] for op in graph.ops if record(op.type).access is Access.VALUE
                   and any(t.bytes is None and t.shape is None for t in op.outputs)})


def _depends_on(graph: Graph, variable: int, reader: int) -> CostError:
    return CostError(
        f"cost: variable {graph.ops[variable].name!r} of {graph.name!r} has an unknown shape, and "
        f"{graph.ops[reader].name!r} depends on it; write the graph with "
        "graph.as_graph_def(add_shapes=True), or save the step as a SavedModel, so that its bytes "
        "can be counted")


def roots(graph: Graph, fusion: Fusion | None = None, counted: Collection[int] = ()
          ) -> list[tuple[TensorId, ...]]:
    """For each output of each op the tensor that allocates its memory, or `RESIDENT`.

    An expression of constants that Grappler folds is resident too. What XLA computes again in each
    op that reads it has the memory of what it is computed from (`tfckpt.cost.views`).

    Args:
      graph: the captured step.
      fusion: what XLA fuses, where it compiles the step; else lists hold no copies.
      counted: ops whose results are not resident, though those of such ops are: states of a loop.
    """
    result: list[tuple[TensorId, ...]] = []
    constant: list[bool] = []
    views = Views(graph, fusion.in_memory) if fusion is not None and fusion.repeats else None
    for index, op in enumerate(graph.ops):
        known = record(op.type)
        folded = known.is_constant or (
            op.pure and not op.controls and bool(op.inputs)
            and not (known.shape_only or known.has_bodies)
            and all(constant[source] for source, _ in op.inputs)
            and all((t.bytes or 0) <= _FOLDED_BYTES and t.bytes is not None for t in op.outputs))
        constant.append(folded)
        if fusion is None and takes_rows(graph, index):
            source, slot = op.inputs[known.slices or 0]
            result.append((result[source][slot],) * len(op.outputs))
            continue
        copies = known.lists.rows and bool(op.outputs[0].bytes)  # each row, unless XLA compiles it
        aliases = known.aliases and not copies or undoes_nothing(graph, index)
        found = _op_roots(op, index, folded, aliases, index in counted, result)
        if fusion is None and op.loop is not None:
            found = tuple(RESIDENT if _lists_variables(op.loop, slot) else own
                          for slot, own in enumerate(found))
            found = tuple(_of_input(graph, index, slot, result) or own
                          for slot, own in enumerate(found))
        if views is not None:
            found = tuple(views.root_of((index, slot), result) if own == (index, slot) else own
                          for slot, own in enumerate(found))
        result.append(found)
    return result


def is_view(graph: Graph, root: Sequence[tuple[TensorId, ...]], index: int) -> bool:
    """Return whether XLA computes an op again in each op that reads it, so that it has no memory.

    Args:
      graph: the captured step.
      root: as `roots` returns it.
      index: of the op.
    """
    op = graph.ops[index]
    known = record(op.type)
    if known.fused_from is not None:
        return any(own[0] != index for own in root[index])
    return is_element_wise(op) and not known.aliases and root[index][0] not in (
        (index, 0), RESIDENT)


def _op_roots(op: Op, index: int, folded: bool, aliases: bool, counted: bool,
              known: list[tuple[TensorId, ...]]) -> tuple[TensorId, ...]:
    this = record(op.type)
    if folded or this.resident and not counted:
        return (RESIDENT,) * len(op.outputs)
    if aliases and len(op.inputs) >= len(op.outputs):
        sources = op.inputs[:len(op.outputs)]
        return tuple(known[source][slot] for source, slot in sources)
    if this.access in _ON_ITS_REFERENCE:
        source, slot = op.inputs[0]
        return (known[source][slot],)
    own = [(index, op.shares.get(slot, slot)) for slot in range(len(op.outputs))]
    for slot in _handed_on(op):
        source, number = op.inputs[slot]
        own[slot] = known[source][number]
    return tuple(own)


def _handed_on(op: Op) -> list[int]:
    """Return which results of a loop lie in the memory of its inputs: no iteration changes them."""
    if op.loop is None or not op.loop.arguments:
        return []
    return [slot for slot in range(len(op.loop.body.fetches)) if is_handed_on(op.loop, slot)]


def _of_input(graph: Graph, index: int, slot: int, root: Sequence[tuple[TensorId, ...]]
              ) -> TensorId | None:
    """Return in whose memory a loop's list of the entries of a list lies; None for other results.

    It has to be as large: a list of which not all is counted says nothing.
    """
    op = graph.ops[index]
    if op.loop is None or slot not in op.loop.entries:
        return None
    source, number = op.inputs[op.loop.entries[slot]]
    own = root[source][number]
    there = None if own == RESIDENT else graph.ops[own[0]].outputs[own[1]].bytes
    return own if (there or 0) >= (op.outputs[slot].bytes or 0) else None


def lent(graph: Graph, root: Sequence[tuple[TensorId, ...]], readers: Sequence[Sequence[int]]
         ) -> frozenset[int]:
    """Return ops whose lists lie in those of a loop's entries that are read: membership only.

    A copy of such a list would be other memory, and free nothing while the loop's own is there.

    Args:
      graph: the captured step.
      root: as `roots` returns it.
      readers: as `graph.consumers` returns it.
    """
    return frozenset(
        root[i][slot][0] for i, op in enumerate(graph.ops) if op.loop is not None
        for slot in op.loop.entries if root[i][slot][0] != i and any(
            (i, slot) in graph.ops[reader].inputs for reader in readers[i]))


def _lists_variables(loop: Loop, slot: int) -> bool:
    """Return whether a loop's result is a list of variables' values, or of rows of them."""
    body, found = loop.body, False
    if slot >= len(body.fetches):
        return False
    source, _ = origin(body, body.fetches[slot])
    while (entry := record(body.ops[source].type).lists.entry) is not None:
        if not _is_variable(body, body.ops[source].inputs[entry]):
            return False
        found, (source, _) = True, origin(body, body.ops[source].inputs[0])
    return found


def _is_variable(body: Graph, tensor: TensorId) -> bool:
    """Return whether a tensor lies in the memory of a variable."""
    source, slot = tensor
    while (known := record(body.ops[source].type)).aliases or takes_rows(body, source):
        source, slot = body.ops[source].inputs[slot if known.aliases else known.slices or 0]
    return known.access is Access.VALUE


def is_handed_on(loop: Loop, slot: int) -> bool:
    """Return whether iterations hand on what they are handed, as it is.

    Args:
      loop: its arguments are known.
      slot: of the loop.
    """
    return origin(loop.body, loop.body.fetches[slot])[0] == loop.arguments[slot]


def origin(body: Graph, tensor: TensorId) -> TensorId:
    """Return the tensor that ops only pass on up to this one.

    Args:
      body: what an iteration does.
      tensor: of the body.
    """
    while (op := body.ops[tensor[0]]).inputs and record(op.type).passes_on:
        tensor = op.inputs[tensor[1] if len(op.inputs) > tensor[1] else 0]
    return tensor
