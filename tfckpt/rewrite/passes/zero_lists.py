"""Gives each list of zeros that a loop fills memory of its own under XLA, and has gradients' wait.

XLA makes a list that is to be filled, or to be added to, of zeros. It merges equal zeros, of the
lists of several layers and of their gradients: the zeros stay live from the first of these loops
to the last, and each loop gets a copy of them, since it writes there. So a list is filled with a
zero of its own, which no compiler can know: one that is chosen by an element of what the loop
reads (as in `tfckpt.rewrite.xla.guards`), so that the list of a gradient is made only in the
backward. No number changes.

Only loops of rewritten steps are looked at, and only where every call has the sizes that are
planned for: the lists are made of constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from tfckpt.ir.edits import Create, Edits, Rewire, edited, op_of
from tfckpt.ir.graph import BACKWARD, Graph, Tensor
from tfckpt.ops import names, record
from tfckpt.rewrite.edit_builder import FLOATS, LARGE
from tfckpt.rewrite.names import SCOPE
from tfckpt.rewrite.passes.manager import Context, Pass, Property
from tfckpt.rewrite.xla.guards import DataGuard, const


def give_memory(graph: Graph, edits: Edits) -> Edits:
    """Return the edits, and a list of its own zeros for each that a loop fills.

    Args:
      graph: the captured step.
      edits: what is done to the step so far.
    """
    added: list[Create] = []
    rewires: list[Rewire] = []
    for number, filled in enumerate(_Lists(graph, edits).filled() if edits.added else (), 1):
        made = _made(filled, number)
        added += made
        rewires.append(Rewire(filled.loop, filled.slot, f"{made[-1].name}:0"))
    return edits.then(Edits(tuple(added), tuple(rewires))) if added else edits


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A list of zeros that a loop fills.

    Attributes:
      loop, slot: which reads it, and as which input.
      shape, dtype: of all entries together.
      trigger, kind: what the loop reads besides, and its dtype.
    """

    loop: str
    slot: int
    shape: tuple[int, ...]
    dtype: str
    trigger: str
    kind: str


class _Lists:
    """Lists of zeros in an edited graph."""

    def __init__(self, graph: Graph, edits: Edits) -> None:
        self.graph = graph
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
                shape = tuple(d for d in whole.shape or () if d is not None)
                whole_shape = len(shape) == len(whole.shape or ())
                if whole_shape and whole.dtype in FLOATS and (whole.bytes or 0) >= LARGE:
                    yield _Filled(loop, slot, shape, whole.dtype, *triggers[0])

    def _zeros(self, tensor: str) -> Tensor | None:
        """Return a tensor of all entries of a list of zeros; None of anything else."""
        made = self.index.get(op_of(tensor))
        if made is None:
            return None
        op = self.graph.ops[made]
        known = record(op.type)
        if known.lists.reserves:
            return self.stacked.get(tensor)
        if known.fills != 0.0 or not op.outputs or op.outputs[0].dtype != "variant":
            return None
        source, of = self.graph.ops[op.inputs[0][0]], op.inputs[0][1]
        while record(source.type).is_loop:  # which hands it on
            source, of = self.graph.ops[source.inputs[of][0]], source.inputs[of][1]
        if not record(source.type).lists.rows:
            return None
        rows, of = source.inputs[0]
        return self.graph.ops[rows].outputs[of]

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
        const(f"{scope}/dims", "int32", list(filled.shape)),
        const(f"{scope}/entry", "int32", list(filled.shape[1:])),
        Create(f"{scope}/fill", names.FILL, (f"{scope}/dims:0", f"{scope}/zero:0"), (), (dtype,),
               {"T": attr, "index_type": index}),
        Create(f"{scope}/list", names.LIST_OF_ROWS, (f"{scope}/fill:0", f"{scope}/entry:0"), (),
               ("variant",), {"element_dtype": attr, "shape_type": index})]


def _refusal(context: Context) -> str:
    if context.target.orders_by_control:
        return "only XLA merges zeros"
    live = getattr(context.plain, "live", None)
    if live is None:
        return "the step is not at hand"
    fed = [live.get_operation_by_name(op.name) for op in context.graph.ops if record(op.type).fed]
    if any(not tensor.shape.is_fully_defined() for op in fed for tensor in op.outputs):
        return "sizes differ from call to call"
    return ""


PASS = Pass("zero lists", lambda context, edits: give_memory(context.graph, edits),
            requires=frozenset({Property.COPIES}), refusal=_refusal)
