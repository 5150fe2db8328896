"""Sums of the gradients of slices, as one tensor put together: a graph to be planned, and edits.

A tensor that an unrolled loop slices at every step has as many gradients as there are steps. Each
is as large as the tensor, zero outside of its slice, and one sum reads them all: n slices take n
times the tensor. Where the slices do not overlap, at most one term is not zero anywhere, so that no
order of adding gives other bits: the slices' own gradients, side by side, with a zero added (which
makes 0 of -0, as the sum does, and of numbers too small for the processor's mode) are the sum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.edits import PROTECTED, Create, Edits, Rewire
from tfckpt.ir.graph import BACKWARD, UPDATE, Graph, Op, Tensor, TensorId, check_graph
from tfckpt.ops import Access, names, record
from tfckpt.ops.slices import Slice, slice_of

WORTHWHILE = 0.05
"""Of the bytes of all tensors of a step, what its sums must save to be looked at."""
_FEWEST = 3
"""Slices of a sum that is looked at."""
_REGIONS = (BACKWARD, UPDATE)
_MARK = "-tfckpt_together"
_INT32 = "dtype:int32"
_SCALAR = bytes((7 << 3 | 2, 0))
"""An attribute that is the shape of a scalar, serialised."""


@dataclasses.dataclass(frozen=True)
class Together:
    """A sum whose terms are put side by side.

    Attributes:
      place: of the op whose result the sum is.
      slices: what each gradient is of, with the op that spreads it, in the order of the axis.
      other: a further term; None where there is none.
      gone: what nothing needs any more: the gradients that are spread, and what adds them.
    """

    place: int
    slices: tuple[tuple[Slice, int], ...]
    other: TensorId | None
    gone: frozenset[int]


def sums_of_slices(graph: Graph, cost: CostGraph) -> list[str]:
    """Return the names of sums that may be put together; none where that saves little.

    Args:
      graph: the step.
      cost: its cost graph.
    """
    found = _found(graph)
    saved = sum((len(one.slices) - 2) * (graph.ops[one.place].outputs[0].bytes or 0)
                for one in found)
    if saved < WORTHWHILE * sum(s.bytes for s in cost.storages):
        return []
    return [graph.ops[one.place].name for one in found]


def put_together(graph: Graph, sums: Iterable[str]) -> tuple[Graph, Edits]:
    """Return the step with sums of the gradients of slices put together, and the edits.

    Args:
      graph: the step.
      sums: their names.

    Raises:
      PlanError: a sum is not there, or is of something else.
    """
    known = {graph.ops[one.place].name: one for one in _found(graph)}
    new: dict[int, _New] = {}
    for name in sums:
        if name not in known:
            raise PlanError(f"plan: {name!r} is no sum of the gradients of slices")
        new[known[name].place] = _New(graph, known[name])
    return _changed(graph, new)


def _found(graph: Graph) -> list[Together]:
    readers = graph.consumers()
    awaiting: list[list[int]] = [[] for _ in graph.ops]
    for i, op in enumerate(graph.ops):
        for c in op.controls:
            awaiting[c].append(i)
    fetched = {i for i, _ in graph.fetches}
    found = []
    for place, op in enumerate(graph.ops):
        if op.region not in _REGIONS or op.conditional or place in fetched or awaiting[place]:
            continue
        terms, adding = _terms(graph, place, readers)
        of_slices = [s for s, _ in terms if record(graph.ops[s].type).slice_gradient]
        if len(of_slices) < _FEWEST:
            continue
        slices = _side_by_side(graph, op, of_slices)
        others = [tensor for tensor in terms if tensor[0] not in of_slices]
        gone = frozenset((*adding, *of_slices))
        if slices and len(others) < 2 and all(
                gone.issuperset(graph.ops[i].controls) and i not in fetched
                and graph.ops[i].device == op.device
                and (i == place or gone.issuperset((*readers[i], *awaiting[i]))) for i in gone):
            found.append(Together(place, slices, others[0] if others else None, gone))
    return found


def _terms(graph: Graph, place: int, readers: Sequence[Sequence[int]]
           ) -> tuple[Sequence[TensorId], Sequence[int]]:
    """Return the terms of the sum that an op's result is, and the ops that add them.

    Grappler makes an accumulator of large sums: each term is added when it is there.
    """
    op = graph.ops[place]
    if record(op.type).adds:
        return op.inputs, (place,)
    if record(op.type).access is not Access.DESTROY_REFERENCE:
        return (), ()
    begun = op.inputs[0][0]
    adds = [i for i in readers[begun]
            if record(graph.ops[i].type).access is Access.CHANGE_REFERENCE]
    return [graph.ops[i].inputs[1] for i in adds], [
        place, begun, *adds, *(source for source, _ in graph.ops[begun].inputs)]


def _side_by_side(graph: Graph, op: Op, of_slices: Sequence[int]
                  ) -> tuple[tuple[Slice, int], ...]:
    """Return gradients in the order of their slices; none where these are no run without gaps."""
    shape = op.outputs[0].shape
    known = [(_slice(graph, graph.ops[i], shape), i) for i in dict.fromkeys(of_slices)]
    slices = [(one, i) for one, i in known if one is not None]
    if shape is None or len(slices) != len(of_slices):
        return ()
    slices.sort(key=lambda entry: entry[0].begin)
    first, last = slices[0][0], slices[-1][0]
    size = shape[first.axis]
    if size is None or last.end > size or any(
            (one.told, one.shrunk) != (first.told, first.shrunk) for one, _ in slices) or any(
            one.end != after.begin for (one, _), (after, _) in itertools.pairwise(slices)):
        return ()
    return tuple(slices)


def _slice(graph: Graph, op: Op, shape: Sequence[int | None] | None) -> Slice | None:
    """Return what a gradient is the gradient of, as far as it says that itself."""
    given = [graph.ops[source].attrs.get("integers") for source, _ in op.inputs[:4]]
    begin, end, strides = numbers = [v if isinstance(v, tuple) else () for v in given[1:]]
    if shape is None or () in numbers:
        return None
    dims = given[0] if isinstance(given[0], tuple) else (None,) * len(shape)
    return slice_of(dims, begin, end, strides, op.attrs)


class _New:
    """The ops that take the place of a sum, one after the other, as a graph has them."""

    def __init__(self, graph: Graph, one: Together) -> None:
        self.graph, self.one = graph, one
        self.old = graph.ops[one.place]
        self.ops: list[tuple[Op, tuple[str, ...]]] = []
        made = self.old.outputs[0]
        self.kind = f"dtype:{made.dtype}"
        pieces = [graph.ops[i].inputs[4] for _, i in one.slices]
        axis = one.slices[0][0].axis
        dims = list(made.shape or ())
        whole, dims[axis] = dims[axis], one.slices[-1][0].end - one.slices[0][0].begin
        side = self._side_by_side([self._name(tensor) for tensor in pieces], dims)
        before, after = one.slices[0][0].begin, (whole or 0) - one.slices[-1][0].end
        if before or after:
            around = [(before, after) if n == axis else (0, 0) for n in range(len(dims))]
            given = self._constant("around", "int32", around, (len(dims), 2))
            side = self.add("padded", names.PAD, (side, given), made,
                            {"T": self.kind, "Tpaddings": _INT32})
        scalar = Tensor(made.dtype, (), 4)  # Grappler would take a sum with a known zero out
        zero = self._constant("zero", made.dtype, 0, ())
        hidden = self.add("hidden", names.PLACEHOLDER_WITH_DEFAULT, (zero,), scalar,
                          {"dtype": self.kind, "shape": ("attr", _SCALAR)})
        side = self.add("sum", names.ADD, (side, hidden), made, {"T": self.kind})
        if one.other is not None:
            self.add("all", names.ADD, (side, self._name(one.other)), made, {"T": self.kind})

    @property
    def last(self) -> str:
        """Return the name of the op whose result is the sum."""
        return self.ops[-1][0].name

    def _side_by_side(self, pieces: Sequence[str], dims: Sequence[int | None]) -> str:
        """Add what puts gradients of slices side by side along an axis."""
        first, _ = self.one.slices[0]
        attrs = {"N": len(pieces), "T": self.kind}
        if first.shrunk:
            return self.add("slices", names.PACK, pieces, self._tensor(dims),
                            {**attrs, "axis": first.told})
        axis = self._constant("axis", "int32", first.told, ())
        return self.add("slices", names.CONCAT, (*pieces, axis), self._tensor(dims),
                        {**attrs, "Tidx": _INT32})

    def _tensor(self, dims: Sequence[int | None]) -> Tensor:
        made = self.old.outputs[0]
        each = made.bytes and made.bytes // max(math.prod(d or 0 for d in made.shape or ()), 1)
        known = [d for d in dims if d is not None]
        return Tensor(made.dtype, tuple(dims), each * math.prod(known) if (
            each is not None and len(known) == len(dims)) else None)

    def _constant(self, called: str, dtype: str, value: object, shape: tuple[int, ...]) -> str:
        made = Tensor(dtype, shape, 4 * math.prod(shape))
        return self.add(called, names.CONST, (), made,
                        {"dtype": f"dtype:{dtype}", "value": ("const", dtype, value)})

    def _name(self, tensor: TensorId) -> str:
        return f"{self.graph.ops[tensor[0]].name}:{tensor[1]}"

    def add(self, called: str, kind: str, inputs: Sequence[str], made: Tensor,
            attrs: Mapping[str, object]) -> str:
        """Add an op, and return the name of its result.

        Args:
          called: ends its name.
          kind: its type.
          inputs: names of what it reads.
          made: its result.
          attrs: its attributes.
        """
        op = Op(f"{self.old.name}{_MARK}/{called}", kind, (), (), (made,), self.old.region, True,
                self.old.device, dict(attrs))
        self.ops.append((op, tuple(inputs)))
        return f"{op.name}:0"


def _changed(graph: Graph, new: Mapping[int, _New]) -> tuple[Graph, Edits]:
    """Return the step with sums put together, by the places where they were, and the edits."""
    gone = frozenset(i for made in new.values() for i in made.one.gone)
    last = {f"{made.old.name}:0": f"{made.last}:0" for made in new.values()}
    entries: list[tuple[Op, list[str]]] = []
    rewires, added = list[Rewire](), list[Create]()
    for i, op in enumerate(graph.ops):
        read = [f"{graph.ops[s].name}:{slot}" for s, slot in op.inputs]
        now = [last.get(tensor, tensor) for tensor in read]
        for made, given in new[i].ops if i in new else ():
            entries.append((made, [last.get(tensor, tensor) for tensor in given]))
            added.append(Create(made.name, made.type, tuple(entries[-1][1]), (),
                                (made.outputs[0].dtype,), {**made.attrs, PROTECTED: True},
                                made.device))
        if i not in gone:
            entries.append((op, now))
            rewires += [Rewire(op.name, n, tensor) for n, tensor in enumerate(now)
                        if tensor != read[n]]
    number = {op.name: n for n, (op, _) in enumerate(entries)}

    def placed(name: str) -> TensorId:
        op, _, slot = name.rpartition(":")
        return number[op], int(slot)

    result = dataclasses.replace(
        graph, ops=tuple(dataclasses.replace(
            op, inputs=tuple(map(placed, read)),
            controls=tuple(number[graph.ops[c].name] for c in op.controls))
            for op, read in entries),
        fetches=tuple((number[graph.ops[i].name], slot) for i, slot in graph.fetches),
        sinks=tuple(number[graph.ops[i].name] for i in graph.sinks if i not in gone))
    check_graph(result)
    return result, Edits(tuple(added), tuple(rewires),
                         dropped=tuple(graph.ops[i].name for i in sorted(gone)))
