"""Gives each list of zeros that a loop fills memory of its own under XLA, and has gradients' wait.

XLA makes a list that is to be filled, or to be added to, of zeros. It merges equal zeros, of the
lists of several layers and of their gradients: the zeros stay live from the first of these loops
to the last, and each loop gets a copy of them, since it writes there. So a list is filled with a
zero of its own, which no compiler can know: one that is chosen by an element of what the loop
reads (as in `tfckpt.rewrite.xla.guards`), so that the list of a gradient is made only in the
backward. No number changes.

Only loops of rewritten steps are looked at. Where sizes differ from call to call the list is as
large as XLA has been told (`tfckpt.plan.loops.change`), or as the rows that it is like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from tfckpt.ir.edits import Create, Edits, Rewire, edited, op_of, slice_attrs
from tfckpt.ir.graph import BACKWARD, Graph, Op, Tensor
from tfckpt.ops import names, record
from tfckpt.rewrite.edit_builder import FLOATS, LARGE
from tfckpt.rewrite.names import SCOPE
from tfckpt.rewrite.passes.manager import Context, Pass, Property
from tfckpt.rewrite.xla.guards import DataGuard, const


def give_memory(graph: Graph, edits: Edits, fixed: bool) -> Edits:
    """Return the edits, and a list of its own zeros for each that a loop fills.

    Args:
      graph: the captured step.
      edits: what is done to the step so far.
      fixed: whether every call has the sizes that are planned for.
    """
    added: list[Create] = []
    rewires: list[Rewire] = []
    found = _Lists(graph, edits, fixed).filled() if edits.added else ()
    for number, filled in enumerate(found, 1):
        made = _made(filled, number)
        added += made
        rewires.append(Rewire(filled.loop, filled.slot, f"{made[-1].name}:0"))
    return edits.then(Edits(tuple(added), tuple(rewires))) if added else edits


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A list of zeros that a loop fills.

    Attributes:
      loop, slot: which reads it, and as which input.
      shape, dtype: of all entries together; tensors tell sizes that are not known, each its own or
        one all of them.
      trigger, kind: what the loop reads besides, and its dtype.
    """

    loop: str
    slot: int
    shape: tuple[int | str, ...] | str
    dtype: str
    trigger: str
    kind: str


class _Lists:
    """Lists of zeros in an edited graph."""

    def __init__(self, graph: Graph, edits: Edits, fixed: bool) -> None:
        self.graph, self.fixed = graph, fixed
        self.index = {op.name: i for i, op in enumerate(graph.ops)}
        self.tensors, _, self.kinds = edited(graph, edits)
        self.sources = {op.name: op.source for op in edits.clones}
        self.stacked, self.known = self._stacked(), _known(graph)

    def filled(self) -> Iterator[_Filled]:
        """Yield the lists of zeros that loops read."""
        for loop, read in self.tensors.items():
            if not record(self.kinds[loop]).is_loop:
                continue
            triggers = list(self._triggers(read))
            for slot, tensor in enumerate(read):
                whole = self._zeros(tensor)
                if whole is None or not triggers:
                    continue
                shape = self._shape(tensor, whole)
                if shape and whole.dtype in FLOATS and (whole.bytes or 0) >= LARGE:
                    yield _Filled(loop, slot, shape, whole.dtype, *triggers[0])

    def _shape(self, tensor: str, whole: Tensor) -> tuple[int | str, ...] | str:
        """Return the shape of a list of zeros; none where it is not known in every call."""
        name = op_of(tensor)
        if name not in self.index:
            entry, length = self.tensors[name]
            return (length, *self.tensors[op_of(entry)])
        shape = tuple(d for d in whole.shape or () if d is not None)
        if self.fixed:
            return shape if len(shape) == len(whole.shape or ()) else ()
        source = self._rows(self.graph.ops[self.index[name]])
        return f"{self.graph.ops[source[0]].name}:{source[1]}" if source else ()

    def _zeros(self, tensor: str) -> Tensor | None:
        """Return a tensor of all entries of a list of zeros; None of anything else."""
        made = self.index.get(op_of(tensor))
        if made is None:  # a new one, whose shape is told
            told = record(self.kinds.get(op_of(tensor), "")).lists.reserves
            return self.stacked.get(tensor) if told else None
        op = self.graph.ops[made]
        if record(op.type).lists.reserves:
            return self.stacked.get(tensor)
        source = self._rows(op)
        return self.graph.ops[source[0]].outputs[source[1]] if source else None

    def _rows(self, op: Op) -> tuple[int, int] | None:
        """Return the tensor that a list of zeros has the shape of; None where nothing says it."""
        if record(op.type).fills != 0.0 or not op.outputs or op.outputs[0].dtype != "variant":
            return None
        source, of = self.graph.ops[op.inputs[0][0]], op.inputs[0][1]
        while record(source.type).is_loop:  # which hands it on
            source, of = self.graph.ops[source.inputs[of][0]], source.inputs[of][1]
        return source.inputs[0] if record(source.type).lists.rows else None

    def _stacked(self) -> dict[str, Tensor]:
        """Return what is stacked of a list that a loop has filled, by the list it was given."""
        found = {}
        for name, read in self.tensors.items():
            if record(self.kinds[name]).lists.stacks and name in self.index:
                loop, _, slot = read[0].rpartition(":")
                if record(self.kinds[loop]).is_loop:
                    given = self.tensors[loop][int(slot)]
                    found[given] = self.graph.ops[self.index[name]].outputs[0]
        return found

    def _triggers(self, read: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield what a loop reads that the step computes, the last first: those of the backward."""
        found = []
        for tensor in read:
            name = op_of(tensor)
            rows = name in self.kinds and record(self.kinds[name]).lists.rows
            if rows:
                tensor = self.tensors[name][0]
            i = self.index.get(self.sources.get(op_of(tensor), op_of(tensor)))
            if i is None or self.known[i]:
                continue
            op = self.graph.ops[i]
            dtype = op.outputs[int(tensor.rpartition(":")[2])].dtype
            if dtype in FLOATS:
                found.append((op.region == BACKWARD, rows, i, tensor, dtype))
        for _, _, _, tensor, dtype in sorted(found, reverse=True):
            yield tensor, dtype


def _known(graph: Graph) -> list[bool]:
    """Return for each op whether it makes the same in every call, such as zeros."""
    found: list[bool] = []
    for op in graph.ops:
        known = record(op.type)
        fixed = known.shape_only or known.fills is not None or bool(op.inputs) and all(
            found[source] for source, _ in op.inputs)
        found.append(known.is_constant or op.pure and known.source is None and fixed)
    return found


def _made(filled: _Filled, number: int) -> list[Create]:
    """Return ops that make a list of zeros, the list last."""
    scope, dtype = f"{SCOPE}/zeros_{number}", filled.dtype
    guard = DataGuard(scope, filled.trigger, filled.kind)
    attr, index = f"dtype:{dtype}", "dtype:int32"
    return [
        *guard.trigger_ops(), const(f"{scope}/other", dtype, number),  # else equal ones are merged
        const(f"{scope}/none", dtype, 0),
        Create(f"{scope}/zero", names.SELECT, (f"{scope}/armed:0", f"{scope}/other:0",
                                               f"{scope}/none:0"), (), (dtype,), {"T": attr}),
        *_sizes(scope, filled),
        Create(f"{scope}/fill", names.FILL, (f"{scope}/dims:0", f"{scope}/zero:0"), (), (dtype,),
               {"T": attr, "index_type": index}),
        Create(f"{scope}/list", names.LIST_OF_ROWS, (f"{scope}/fill:0", f"{scope}/entry:0"), (),
               ("variant",), {"element_dtype": attr, "shape_type": index})]


def _sizes(scope: str, filled: _Filled) -> list[Create]:
    """Return ops that make the shape of all entries, and that of one."""
    index = "dtype:int32"
    dims, entry, shape = f"{scope}/dims", f"{scope}/entry", filled.shape
    if isinstance(shape, str):
        return [Create(dims, names.SHAPE, (shape,), (), ("int32",),
                       {"T": f"dtype:{filled.dtype}", "out_type": index}),
                *(const(f"{entry}_{n}", "int32", [n]) for n in (0, 1)),
                Create(entry, names.STRIDED_SLICE,
                       (f"{dims}:0", *(f"{entry}_{n}:0" for n in (1, 0, 1))), (), ("int32",),
                       slice_attrs("int32", end_mask=1))]
    made = []
    for name, sizes in ((dims, shape), (entry, shape[1:])):
        told = tuple(d for d in sizes if isinstance(d, str))
        made.append(Create(name, names.PACK, told, (), ("int32",),
                           {"T": index, "N": len(told), "axis": 0}) if told
                    else const(name, "int32", list(sizes)))
    return made


def _zero_lists(context: Context, edits: Edits) -> Edits:
    live = getattr(context.plain, "live", None)
    assert live is not None
    fed = [live.get_operation_by_name(op.name) for op in context.graph.ops if record(op.type).fed]
    fixed = all(tensor.shape.is_fully_defined() for op in fed for tensor in op.outputs)
    return give_memory(context.graph, edits, fixed)


def _refusal(context: Context) -> str:
    if context.target.orders_by_control:
        return "only XLA merges zeros"
    return "" if getattr(context.plain, "live", None) is not None else "the step is not at hand"


PASS = Pass("zero lists", _zero_lists, requires=frozenset({Property.COPIES}), refusal=_refusal)
