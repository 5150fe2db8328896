"""A step whose loops are recomputed segment by segment: as a graph to be planned, and as edits.

Of a loop of T iterations only the states before every k-th are kept. The gradient's loop goes
through the segments from the last to the first: it runs the loop over one of them again, with all
its lists, and then its own body over that. So ceil(T / k) states and k entries of the lists are
kept instead of T entries, for one more run of the loop (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", section 4.1, with segments of one length). The sum is smallest for k
near sqrt(T * state / entry). Sums go on from segment to segment, so no bit changes.

Both loops become loops over segments, which call the bodies that there were:

    forward's inputs:   those there were, a list for each state, and for each length of a list that
                        is read (`Segments.kept`), the number of segments so far (0)
    forward's results:  the same; the old lists stay empty
    gradient's inputs:  the segments left; those there were, but for the old lists; the lists of
                        states; what the forward's loop is given and does not hand on as a state
    gradient's results: the same

Under XLA the gradient's body is given what each iteration has alike in the place of a list of it.

Nothing here imports TensorFlow: which functions the new loops call is filled in by
`tfckpt.rewrite.loops.segments`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.edits import Create, Edits, Replace, Rewire, op_of, slice_attrs
from tfckpt.ir.graph import BACKWARD, BOUND, FORWARD, Graph, Loop, Op, OpenList, Tensor, check_graph
from tfckpt.ops import names
from tfckpt.plan.loops.segments import (
    SEGMENTED,
    Lengths,
    Role,
    entry_bytes,
    extras,
    kept_slots,
    new_name,
    segmentable,
)

_INT32 = "dtype:int32"


def in_segments(graph: Graph, lengths: Lengths, fixed: bool = False) -> tuple[Graph, Edits]:
    """Return the step with some loops recomputed segment by segment, and the edits that make it.

    Args:
      graph: the step.
      lengths: iterations of a segment, for each loop that is changed.
      fixed: whether XLA compiles the step, each call of other sizes anew.

    Raises:
      PlanError: a loop cannot be recomputed so.
    """
    edits = Edits()
    for name in lengths:
        loop = next((op for op in segmentable(graph) if op.name == name), None)
        if loop is None:
            raise PlanError(f"plan: the loop {name!r} cannot be recomputed in segments")
        graph, more = _Change(graph, loop, lengths[name], fixed).made()
        edits = edits.then(more)
    return graph, edits


@dataclasses.dataclass(frozen=True)
class _New:
    """A new op, and what it reads and waits for, by name."""

    op: Op
    inputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()

    def create(self) -> Create:
        return Create(self.op.name, self.op.type, self.inputs, self.controls,
                      tuple(t.dtype for t in self.op.outputs), self.op.attrs, self.op.device)


class _Change:
    """One loop and its gradient's, of a graph, to be recomputed in segments of a length."""

    def __init__(self, graph: Graph, forward: Op, length: int, fixed: bool) -> None:
        assert forward.loop is not None and forward.loop.segments is not None
        self.graph, self.forward, self.loop = graph, forward, forward.loop
        self.segments, self.length, self.fixed = forward.loop.segments, length, fixed
        self.gradient = next(op for op in graph.ops if op.name == self.segments.gradient)
        self.count = math.ceil(self.loop.trips / length)
        self.name = new_name(forward.name)

    def made(self) -> tuple[Graph, Edits]:
        before, forward, gradient = self._before(), self._forward(), self._gradient()
        graph, rewires = self._rebuilt(before, forward, gradient)
        return graph, Edits(
            tuple(new.create() for new in (*before, forward, gradient)), rewires,
            dropped=(self.forward.name, self.gradient.name), replaced=(
                Replace(self.forward.name, forward.op.name),
                Replace(self.gradient.name, gradient.op.name)))

    def _role(self, is_gradient: bool) -> Role:
        return Role(self.forward.name, self.gradient.name, self.length, self.count, is_gradient,
                    self.fixed, self.segments)

    def _before(self) -> list[_New]:
        """Return the lists of states, empty, and what they are made of."""
        bound = self.loop.bound
        made = [self._constant("count", 0)]
        if bound is None and self.fixed:
            made += self._most()
        else:  # -1: as many as there are
            made.append(self._constant(
                "most", -1 if bound is None else math.ceil(bound / self.length)))
        opened = self.segments.open
        for n, slot in enumerate(self.segments.kept):
            kept = self._put_away(slot)
            shape = kept.shape
            known = [d for d in shape or () if d is not None]
            whole = self.fixed and shape is not None and len(known) == len(shape)
            made.append(self._shape_of(f"shape{n}", slot) if opened and slot in opened.states
                        else self._constant(f"shape{n}", known if whole else -1))
            op = Op(f"{self.name}_states{n}", names.EMPTY_LIST, (), (), (Tensor("variant", (), 0),),
                    FORWARD, True, self.forward.device,
                    {"element_dtype": f"dtype:{kept.dtype}", "shape_type": "dtype:int32"})
            made.append(_New(op, (f"{self.name}_shape{n}:0", f"{self.name}_most:0")))
        return [*made, *self._told()]

    def _put_away(self, slot: int) -> Tensor:
        """Return what is kept for each segment: a state, or the length of a list."""
        return Tensor("int32", (), 4) if slot in self.segments.sized else self.forward.outputs[slot]

    def _most(self) -> list[_New]:
        """Return what counts the segments of a call: as many as its bound has room for."""
        scalar, attrs = Tensor("int32", (), 4), {"T": _INT32}
        sum_ = self._new_op("rounded", names.ADD, scalar, ("bound", "length1"), attrs)
        bound = self._inputs(self.forward)[BOUND]
        return [self._constant("length", self.length), self._constant("length1", self.length - 1),
                dataclasses.replace(sum_, inputs=(bound, *sum_.inputs[1:])),
                self._new_op("most", names.FLOOR_DIV, scalar, ("rounded", "length"), attrs)]

    def _told(self) -> list[_New]:
        """Return the lists whose entries have an open size, and what tells it."""
        opened = self.segments.open
        if opened is None or not opened.lists:
            return []
        made = [] if opened.size is None else self._size(*opened.size)
        by_name = {op.name: op for op in self.graph.ops}
        for one in opened.lists:
            if not one.gradient and one.slot in self.segments.lists:
                continue  # a number stands for it
            name, maker = self._list(one), by_name[one.maker]
            sizes = []
            for n, size in enumerate(one.dims):
                if size >= 0:
                    made.append(self._constant(f"{name}_{n}", size))
                sizes.append("size" if size < 0 else f"{name}_{n}")
            shape = self._new_op(f"{name}_shape", names.PACK,
                                 Tensor("int32", (len(sizes),), 4 * len(sizes)), sizes,
                                 {"T": _INT32, "N": len(sizes), "axis": 0})
            attrs = {"element_dtype": f"dtype:{one.dtype}", "shape_type": _INT32}
            made += [shape, _New(
                dataclasses.replace(maker, name=f"{self.name}_{name}", inputs=(), controls=(),
                                    attrs=attrs, region=FORWARD),
                (f"{shape.op.name}:0", self._inputs(maker)[1]))]
        return made

    def _size(self, slot: int, d: int) -> list[_New]:
        """Return what is as large as a dimension of a state."""
        return [self._constant("begin", [d]), self._constant("end", [d + 1]),
                self._constant("step", [1]),
                self._new_op("size", names.STRIDED_SLICE, Tensor("int32", (), 4),
                             (f"shape{self.segments.states.index(slot)}", "begin", "end", "step"),
                             slice_attrs("int32", shrink_axis_mask=1))]

    def _shape_of(self, what: str, slot: int) -> _New:
        """Return the shape of what the forward's loop is given as a state."""
        given = self.forward.outputs[slot]
        rank = len(given.shape or ())
        made = self._new_op(what, names.SHAPE, Tensor("int32", (rank,), 4 * rank), (), {
            "T": f"dtype:{given.dtype}", "out_type": _INT32})
        return dataclasses.replace(made, inputs=(self._inputs(self.forward)[slot],))

    def _new_op(self, what: str, kind: str, result: Tensor, reads: Sequence[str],
                attrs: Mapping[str, object]) -> _New:
        return _New(Op(f"{self.name}_{what}", kind, (), (), (result,), FORWARD, True,
                       self.forward.device, attrs),
                    tuple(f"{self.name}_{name}:0" for name in reads))

    def _list(self, one: OpenList) -> str:
        return f"{'gradient' if one.gradient else 'forward'}_list{one.slot}"

    def _given(self, is_gradient: bool) -> list[str]:
        """Return what a loop is given, with the lists whose entries are told."""
        inputs = list(self._inputs(self.gradient if is_gradient else self.forward))
        for one in self.segments.open.lists if self.segments.open else ():
            if one.gradient == is_gradient:
                inputs[one.slot] = f"{self.name}_{self._list(one)}:0"
        if self.fixed and not is_gradient:
            for slot in self.segments.lists:
                inputs[slot] = f"{self.name}_count:0"
        return inputs

    def _constant(self, what: str, value: int | list[int]) -> _New:
        shape = (len(value),) if isinstance(value, list) else ()
        made = Tensor("int32", shape, 4 * len(value) if isinstance(value, list) else 4)
        return _New(Op(f"{self.name}_{what}", names.CONST, (), (), (made,),
                       FORWARD, True, self.forward.device,
                       {"dtype": "dtype:int32", "value": ("const", "int32", value)}))

    def _forward(self) -> _New:
        op, states = self.forward, range(len(self.segments.kept))
        lists = frozenset(self.segments.lists)
        kept = [self._empty(t) if slot in lists else t for slot, t in enumerate(op.outputs)]
        size = [self.count * (self._put_away(slot).bytes or 0) for slot in self.segments.kept]
        outputs = (*kept, *(Tensor("variant", (), size[n]) for n in states),
                   Tensor("int32", (), 4))
        left = {slot: root for slot, root in self.loop.shares.items()
                if slot not in lists and root not in lists}
        loop = Loop(self.loop.trips, self.loop.body, left, {
            slot: takes for slot, takes in self.loop.takes.items() if slot not in lists},
            bound=self.loop.bound, arguments=self.loop.arguments)
        new = dataclasses.replace(
            op, name=self.name, inputs=(), controls=(), outputs=outputs, loop=loop,
            attrs={SEGMENTED: self._role(False)}, workspace=op.workspace + self._held())
        return _New(new, (*self._given(False), *(f"{self.name}_states{n}:0" for n in states),
                          f"{self.name}_count:0"), self._controls(op))

    def _empty(self, made: Tensor) -> Tensor:
        """Return what stands for a list that stays empty: to XLA a number, as it needs none."""
        return Tensor("int32", (), 4) if self.fixed else dataclasses.replace(made, bytes=0)

    def _held(self) -> int:
        """Return the bytes of the lists of one segment."""
        return math.ceil(self.length * entry_bytes(self.forward))

    def _gradient(self) -> _New:
        op, states = self.gradient, len(self.segments.kept)
        total = len(self.forward.outputs)
        kept = kept_slots(self.segments, len(op.outputs))
        given = extras(self.segments, total)
        outputs = (Tensor("int32", (), 4), *(op.outputs[n] for n in kept),
                   *(Tensor("variant", (), 0) for _ in range(states)),
                   *(self._empty(self.forward.outputs[n]) if n in self.segments.lists else
                     dataclasses.replace(self.forward.outputs[n], bytes=0) for n in given))
        assert op.loop is not None
        place = {old: new + 1 for new, old in enumerate(kept)}
        loop = Loop(op.loop.trips, _both(self.loop.body, op.loop.body), {
            place[s]: place[r] for s, r in op.loop.shares.items() if s in place and r in place}, {
            place[s]: tuple(place[w] for w in wishes if w in place)
            for s, wishes in op.loop.takes.items() if s in place}, bound=op.loop.bound)
        inputs = self._given(True)
        new = dataclasses.replace(
            op, name=new_name(op.name), inputs=(), controls=(), outputs=outputs, pure=False,
            loop=loop, attrs={SEGMENTED: self._role(True)}, workspace=op.workspace + self._held())
        named = (f"{self.name}:{total + states}", *(self._new(inputs[n]) for n in kept),
                 *(f"{self.name}:{total + n}" for n in range(states)),
                 *(self._given(False)[n] for n in given))
        waits = [self.graph.ops[s].name for n in kept for s, _ in op.inputs[n:n + 1]
                 if self.graph.ops[s].region == BACKWARD]
        return _New(new, named, tuple(dict.fromkeys((*self._controls(op), *waits))))

    def _new(self, tensor: str) -> str:
        """Return what a tensor is called once the forward's loop has given way."""
        return tensor if op_of(tensor) != self.forward.name else (
            f"{self.name}:{tensor.rpartition(':')[2]}")

    def _inputs(self, op: Op) -> tuple[str, ...]:
        return tuple(f"{self.graph.ops[s].name}:{slot}" for s, slot in op.inputs)

    def _controls(self, op: Op) -> tuple[str, ...]:
        return tuple(self._renamed(self.graph.ops[c].name) for c in op.controls)

    def _renamed(self, name: str) -> str:
        return new_name(name) if name in (self.forward.name, self.gradient.name) else name

    def _rebuilt(self, before: Sequence[_New], forward: _New, gradient: _New
                 ) -> tuple[Graph, tuple[Rewire, ...]]:
        """Return the graph with the new loops in the places of the old.

        What reads them is rewired.
        """
        place = {old: new + 1 for new, old in enumerate(
            kept_slots(self.segments, len(self.gradient.outputs)))}

        def moved(tensor: str) -> str:
            name, _, slot = tensor.rpartition(":")
            if name != self.gradient.name:
                return self._new(tensor)
            return f"{gradient.op.name}:{place[int(slot)]}"

        entries: list[tuple[Op, tuple[str, ...], tuple[str, ...]]] = []
        rewires: list[Rewire] = []
        for op in self.graph.ops:
            if op.name == self.forward.name:
                entries += [(n.op, n.inputs, n.controls) for n in (*before, forward)]
            elif op.name == self.gradient.name:
                entries.append((gradient.op, gradient.inputs, gradient.controls))
            else:
                read = self._inputs(op)
                entries.append((op, tuple(map(moved, read)), self._controls(op)))
                rewires += [Rewire(op.name, n, moved(t)) for n, t in enumerate(read)
                            if moved(t) != t]
        index = {op.name: n for n, (op, _, _) in enumerate(entries)}
        ops = tuple(dataclasses.replace(
            op, inputs=tuple((index[op_of(t)], int(t.rpartition(":")[2])) for t in inputs),
            controls=tuple(index[c] for c in controls)) for op, inputs, controls in entries)

        def fetched(i: int, slot: int) -> tuple[int, int]:
            name, _, number = moved(f"{self.graph.ops[i].name}:{slot}").rpartition(":")
            return index[name], int(number)

        result = dataclasses.replace(
            self.graph, ops=ops, fetches=tuple(fetched(*t) for t in self.graph.fetches),
            sinks=tuple(index[self._renamed(self.graph.ops[i].name)] for i in self.graph.sinks))
        check_graph(result)
        return result, tuple(rewires)


def _both(first: Graph, second: Graph) -> Graph:
    """Return what two bodies do one after the other, to be priced."""
    shift = len(first.ops)
    return Graph(second.name, (*first.ops, *(dataclasses.replace(
        op, inputs=tuple((s + shift, slot) for s, slot in op.inputs),
        controls=tuple(c + shift for c in op.controls)) for op in second.ops)), (), ())
