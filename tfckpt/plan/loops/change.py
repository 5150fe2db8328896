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
from collections.abc import Collection, Mapping, Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.edits import TRIPS, Clone, Create, Edits, Replace, Rewire, op_of, slice_attrs
from tfckpt.ir.graph import (
    BACKWARD,
    BOUND,
    COUNTER,
    FORWARD,
    Graph,
    Loop,
    Op,
    OpenList,
    Tensor,
    check_graph,
)
from tfckpt.ops import names
from tfckpt.plan.loops.segments import (
    LAST,
    SEGMENTED,
    Cut,
    Cuts,
    Role,
    comes_first,
    entry_bytes,
    extras,
    kept_slots,
    last_name,
    may_keep_last,
    new_name,
    segmentable,
)

_INT32 = "dtype:int32"


def in_segments(graph: Graph, cuts: Cuts, fixed: bool = False) -> tuple[Graph, Edits]:
    """Return the step with some loops recomputed segment by segment, and the edits that make it.

    Args:
      graph: the step.
      cuts: how each loop is cut that is changed.
      fixed: whether XLA compiles the step, each call of other sizes anew.

    Raises:
      PlanError: a loop cannot be recomputed so.
    """
    edits = Edits()
    for name, cut in cuts.items():
        loop = next((op for op in segmentable(graph) if op.name == name), None)
        if loop is None or cut.last and (fixed or not may_keep_last(loop)):
            raise PlanError(f"plan: the loop {name!r} cannot be recomputed in segments")
        graph, more = _Change(graph, loop, cut, fixed).made()
        edits = edits.then(more)
    return graph, edits


@dataclasses.dataclass(frozen=True)
class _New:
    """A new op, and what it reads and waits for, by name; or one like another, that reads others.

    Attributes:
      copied: name of the other.
      attrs: what it has besides the other's.
    """

    op: Op
    inputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    copied: str = ""
    attrs: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def create(self) -> Create | Clone:
        if self.copied:
            return Clone(self.op.name, self.copied, self.inputs, self.controls, attrs=self.attrs)
        return Create(self.op.name, self.op.type, self.inputs, self.controls,
                      tuple(t.dtype for t in self.op.outputs), self.op.attrs, self.op.device)


class _Change:
    """One loop and its gradient's, of a graph, to be recomputed in segments."""

    def __init__(self, graph: Graph, forward: Op, cut: Cut, fixed: bool) -> None:
        assert forward.loop is not None and forward.loop.segments is not None
        self.graph, self.forward, self.loop = graph, forward, forward.loop
        self.segments, self.fixed = forward.loop.segments, fixed
        self.length, self.last = cut
        self.gradient = next(op for op in graph.ops if op.name == self.segments.gradient)
        self.count = math.ceil((self.loop.trips - self.last) / self.length)
        self.name = new_name(forward.name)
        place = graph.ops.index(self.gradient)
        self._read = frozenset(slot for i, slot in (
            *graph.fetches, *(t for op in graph.ops for t in op.inputs)) if i == place)

    def made(self) -> tuple[Graph, Edits]:
        forward = [*self._before(), self._forward(), *self._last_forward()]
        gradient = [*self._last_gradient(), self._gradient()]
        graph, rewires = self._rebuilt(forward, gradient)
        return graph, Edits(
            tuple(new.create() for new in (*forward, *gradient)), rewires,
            dropped=(self.forward.name, self.gradient.name), replaced=tuple(
                Replace(op.name, self._renamed(op.name)) for op in (self.forward, self.gradient)))

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
        return [*made, *self._told(), *(self._end() if self.last else ())]

    def _end(self) -> list[_New]:
        """Return what tells up to which iteration there are segments."""
        kind = self.forward.outputs[BOUND].dtype
        number, attrs = Tensor(kind, (), 4), {"T": f"dtype:{kind}"}
        before = self._new_op("before", names.SUB, number, ("bound", "last"), attrs)
        bound = self._inputs(self.forward)[BOUND]
        return [self._constant("last", self.last, kind), self._constant("none", 0, kind),
                dataclasses.replace(before, inputs=(bound, *before.inputs[1:])),
                self._new_op("end", names.MAXIMUM, number, ("before", "none"), attrs)]

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
                attrs: Mapping[str, object], region: str = FORWARD) -> _New:
        return _New(Op(f"{self.name}_{what}", kind, (), (), (result,), region, True,
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
        if self.last and not is_gradient:
            inputs[BOUND] = f"{self.name}_end:0"
        return inputs

    def _constant(self, what: str, value: int | list[int], kind: str = "int32") -> _New:
        shape = (len(value),) if isinstance(value, list) else ()
        made = Tensor(kind, shape, 4 * len(value) if isinstance(value, list) else 4)
        return _New(Op(f"{self.name}_{what}", names.CONST, (), (), (made,),
                       FORWARD, True, self.forward.device,
                       {"dtype": f"dtype:{kind}", "value": ("const", kind, value)}))

    def _forward(self) -> _New:
        op, states = self.forward, range(len(self.segments.kept))
        lists = frozenset(self.segments.lists)
        kept = [self._empty(t) if slot in lists else t for slot, t in enumerate(op.outputs)]
        size = [self.count * (self._put_away(slot).bytes or 0) for slot in self.segments.kept]
        outputs = (*kept, *(Tensor("variant", (), size[n]) for n in states),
                   Tensor("int32", (), 4))
        left = {slot: root for slot, root in self.loop.shares.items()
                if slot not in lists and root not in lists}
        loop = Loop(self.loop.trips - self.last, self.loop.body, left, {
            slot: takes for slot, takes in self.loop.takes.items() if slot not in lists},
            bound=None if self.loop.bound is None else self.loop.bound - self.last,
            arguments=self.loop.arguments)
        new = dataclasses.replace(
            op, name=self.name, inputs=(), controls=(), outputs=outputs, loop=loop,
            pure=op.pure and not self.last, attrs={SEGMENTED: self._role(False)},
            workspace=op.workspace + self._held())
        return _New(new, (*self._given(False), *(f"{self.name}_states{n}:0" for n in states),
                          f"{self.name}_count:0"), self._controls(op))

    def _last_forward(self) -> list[_New]:
        """Return the forward's loop over what is in no segment, which it begins where these end."""
        if not self.last:
            return []
        made, inputs = list[_New](), list(self._inputs(self.forward))
        for slot in (*self.segments.states, *self.segments.written):
            before, inputs[slot] = inputs[slot], f"{self.name}:{slot}"
            if comes_first(before) != comes_first(self.name):
                named = f"{op_of(before)}{LAST}/{self.forward.name}_{slot}"
                kind = self.forward.outputs[slot]
                made.append(_New(Op(named, names.IDENTITY, (), (), (kind,), FORWARD, True,
                                    self.forward.device, {"T": f"dtype:{kind.dtype}"}),
                                 (inputs[slot],)))
                inputs[slot] = f"{named}:0"
        return [*made, self._over_last(self.forward, inputs, self.segments.lists)]

    def _last_gradient(self) -> list[_New]:
        """Return the gradient's loop over what is in no segment."""
        if not self.last:
            return []
        counter = self.forward.outputs[COUNTER]
        ran = self._new_op("ran", names.SUB, counter, (), {"T": f"dtype:{counter.dtype}"}, BACKWARD)
        inputs = [self._new(tensor) for tensor in self._inputs(self.gradient)]
        inputs[self.segments.trips] = f"{ran.op.name}:0"
        return [dataclasses.replace(ran, inputs=(
            f"{last_name(self.forward.name)}:{COUNTER}", f"{self.name}:{COUNTER}")),
                self._over_last(self.gradient, inputs, ()), *self._over()]

    def _over(self) -> list[_New]:
        """Return ops that run once the gradient's loop over the last iterations has.

        They read what the step needs of it: what waits for a loop itself has all of it run, and
        keeps lists that nothing needs.
        """
        name = last_name(self.gradient.name)
        return [dataclasses.replace(self._new_op(
            f"over{slot}", names.IDENTITY, made, (), {"T": f"dtype:{made.dtype}"}, BACKWARD),
            inputs=(f"{name}:{slot}",)) for slot, made in enumerate(self.gradient.outputs)
            if slot in self._read and slot not in self._handed_on()]

    def _over_last(self, op: Op, inputs: Sequence[str], lists: Collection[int]) -> _New:
        """Return a loop that runs as often as is in no segment, with lists as long as that."""
        assert op.loop is not None
        outputs = tuple(dataclasses.replace(made, bytes=math.ceil(
            (made.bytes or 0) * self.last / self.loop.trips)) if slot in lists else made
            for slot, made in enumerate(op.outputs))
        loop = dataclasses.replace(op.loop, trips=self.last, segments=None, bound=self.last)
        return _New(dataclasses.replace(
            op, name=last_name(op.name), inputs=(), controls=(), outputs=outputs, loop=loop,
            pure=False), tuple(inputs), self._controls(op), op.name, {TRIPS: self.last})

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
        loop = Loop(op.loop.trips - self.last, _both(self.loop.body, op.loop.body), {
            place[s]: place[r] for s, r in op.loop.shares.items() if s in place and r in place}, {
            place[s]: tuple(place[w] for w in wishes if w in place)
            for s, wishes in op.loop.takes.items() if s in place}, bound=op.loop.bound)
        inputs = [tensor if not self.last or n in self._handed_on() else
                  f"{last_name(op.name)}:{n}" for n, tensor in enumerate(self._given(True))]
        new = dataclasses.replace(
            op, name=new_name(op.name), inputs=(), controls=(), outputs=outputs, pure=False,
            loop=loop, attrs={SEGMENTED: self._role(True)}, workspace=op.workspace + self._held())
        named = (f"{self.name}:{total + states}", *(self._new(inputs[n]) for n in kept),
                 *(f"{self.name}:{total + n}" for n in range(states)),
                 *(self._given(False)[n] for n in given))
        waits = [new.op.name for new in self._over()] if self.last else [
            self.graph.ops[s].name for n in kept for s, _ in op.inputs[n:n + 1]
            if self.graph.ops[s].region == BACKWARD]
        return _New(new, named, tuple(dict.fromkeys((*self._controls(op), *waits))))

    def _handed_on(self) -> frozenset[int]:
        """Return the slots of the gradient's loop that its iterations hand on as they are."""
        op = self.gradient
        assert op.loop is not None
        return frozenset((
            COUNTER, BOUND, self.segments.trips, *self.segments.idle,
            *(n for n, made in enumerate(op.outputs) if made.dtype == "resource"),
            *(n for n, argument in enumerate(op.loop.arguments)
              if op.loop.body.fetches[n] == (argument, 0))))

    def _new(self, tensor: str) -> str:
        """Return what a tensor is called once the forward's loop has given way."""
        name, _, slot = tensor.rpartition(":")
        return tensor if name != self.forward.name else f"{self._renamed(name)}:{slot}"

    def _inputs(self, op: Op) -> tuple[str, ...]:
        return tuple(f"{self.graph.ops[s].name}:{slot}" for s, slot in op.inputs)

    def _controls(self, op: Op) -> tuple[str, ...]:
        return tuple(self._renamed(self.graph.ops[c].name) for c in op.controls)

    def _renamed(self, name: str) -> str:
        """Return what is there in the place of an op, with its results."""
        if name == self.forward.name:
            return last_name(name) if self.last else new_name(name)
        return new_name(name) if name == self.gradient.name else name

    def _rebuilt(self, forward: Sequence[_New], gradient: Sequence[_New]
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
            return f"{self._renamed(name)}:{place[int(slot)]}"

        entries: list[tuple[Op, tuple[str, ...], tuple[str, ...]]] = []
        rewires: list[Rewire] = []
        for op in self.graph.ops:
            if op in (self.forward, self.gradient):
                entries += [(n.op, n.inputs, n.controls)
                            for n in (forward if op is self.forward else gradient)]
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
