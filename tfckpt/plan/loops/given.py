"""What loops over segments are given: lists of states, empty, and what tells their sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfckpt.cost.variables import handle_of
from tfckpt.ir.edits import Clone, Create, slice_attrs
from tfckpt.ir.graph import BOUND, COUNTER, FORWARD, Graph, Op, OpenList, Tensor
from tfckpt.ops import names
from tfckpt.plan.loops.segments import Cut, new_name

_INT32 = "dtype:int32"


@dataclasses.dataclass(frozen=True)
class New:
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
        """Return the edit that makes it."""
        if self.copied:
            return Clone(self.op.name, self.copied, self.inputs, self.controls, attrs=self.attrs)
        return Create(self.op.name, self.op.type, self.inputs, self.controls,
                      tuple(t.dtype for t in self.op.outputs), self.op.attrs, self.op.device)


class Given:
    """What the loops over segments are given that are made of one loop and its gradient's.

    Args:
      graph: the step.
      forward: the loop.
      cut: how it is cut.
      fixed: whether XLA compiles the step, each call of other sizes anew.
    """

    def __init__(self, graph: Graph, forward: Op, cut: Cut, fixed: bool) -> None:
        assert forward.loop is not None and forward.loop.segments is not None
        self.graph, self.forward, self.loop = graph, forward, forward.loop
        self.segments, self.fixed = forward.loop.segments, fixed
        self.cut, self.length, self.last = cut, cut.length, cut.last
        self.gradient = next(op for op in graph.ops if op.name == self.segments.gradient)
        self.count = math.ceil((self.loop.trips - self.last) / self.length)
        self.name = new_name(forward.name)
        place = graph.ops.index(self.gradient)
        self._read = frozenset(slot for i, slot in (
            *graph.fetches, *(t for op in graph.ops for t in op.inputs)) if i == place)

    def before(self) -> list[New]:
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
            kept = self.put_away(slot)
            shape = kept.shape
            known = [d for d in shape or () if d is not None]
            whole = self.fixed and shape is not None and len(known) == len(shape)
            made.append(self._shape_of(f"shape{n}", slot) if opened and slot in opened.states
                        else self._constant(f"shape{n}", known if whole else -1))
            op = Op(f"{self.name}_states{n}", names.EMPTY_LIST, (), (), (Tensor("variant", (), 0),),
                    FORWARD, True, self.forward.device,
                    {"element_dtype": f"dtype:{kept.dtype}", "shape_type": "dtype:int32"})
            made.append(New(op, (f"{self.name}_shape{n}:0", f"{self.name}_most:0")))
        return [*made, *self._told(), *(self._until() if self.last else ())]

    def _until(self) -> list[New]:
        """Return what tells up to which iteration there are segments."""
        kind = self.forward.outputs[BOUND].dtype
        number, attrs = Tensor(kind, (), 4), {"T": f"dtype:{kind}"}
        if not self.segments.bounded:
            until = self.new_op("until", names.ADD, number, ("begin", "in_segments"), attrs)
            begin = self.inputs(self.forward)[COUNTER]
            return [self._constant("in_segments", self.loop.trips - self.last, kind),
                    dataclasses.replace(until, inputs=(begin, *until.inputs[1:]))]
        before = self.new_op("before", names.SUB, number, ("bound", "last"), attrs)
        bound = self.inputs(self.forward)[BOUND]
        return [self._constant("last", self.last, kind), self._constant("none", 0, kind),
                dataclasses.replace(before, inputs=(bound, *before.inputs[1:])),
                self.new_op("until", names.MAXIMUM, number, ("before", "none"), attrs)]

    def lists_of_last(self) -> list[New]:
        """Return lists for what is in no segment: XLA makes a list as long as it may become."""
        if not self.fixed:
            return []
        made = [self._constant("room", self.last)]
        for slot in self.segments.lists:
            maker = self.graph.ops[handle_of(self.graph, self.forward.inputs[slot])[0]]
            made.append(New(
                dataclasses.replace(maker, name=f"{self.name}_last{slot}", inputs=(), controls=()),
                (self.inputs(maker)[0], f"{self.name}_room:0"), copied=maker.name))
        return made

    def put_away(self, slot: int) -> Tensor:
        """Return what is kept for each segment: a state, or the length of a list.

        Args:
          slot: of the forward's loop.
        """
        return Tensor("int32", (), 4) if slot in self.segments.sized else self.forward.outputs[slot]

    def _most(self) -> list[New]:
        """Return what counts the segments of a call: as many as its bound has room for."""
        scalar, attrs = Tensor("int32", (), 4), {"T": _INT32}
        sum_ = self.new_op("rounded", names.ADD, scalar, ("bound", "length1"), attrs)
        bound = self.inputs(self.forward)[BOUND]
        return [self._constant("length", self.length), self._constant("length1", self.length - 1),
                dataclasses.replace(sum_, inputs=(bound, *sum_.inputs[1:])),
                self.new_op("most", names.FLOOR_DIV, scalar, ("rounded", "length"), attrs)]

    def _told(self) -> list[New]:
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
            shape = self.new_op(f"{name}_shape", names.PACK,
                                 Tensor("int32", (len(sizes),), 4 * len(sizes)), sizes,
                                 {"T": _INT32, "N": len(sizes), "axis": 0})
            attrs = {"element_dtype": f"dtype:{one.dtype}", "shape_type": _INT32}
            made += [shape, New(
                dataclasses.replace(maker, name=f"{self.name}_{name}", inputs=(), controls=(),
                                    attrs=attrs, region=FORWARD),
                (f"{shape.op.name}:0", self.inputs(maker)[1]))]
        return made

    def _size(self, slot: int, d: int) -> list[New]:
        """Return what is as large as a dimension of a state."""
        return [self._constant("begin", [d]), self._constant("end", [d + 1]),
                self._constant("step", [1]),
                self.new_op("size", names.STRIDED_SLICE, Tensor("int32", (), 4),
                             (f"shape{self.segments.states.index(slot)}", "begin", "end", "step"),
                             slice_attrs("int32", shrink_axis_mask=1))]

    def _shape_of(self, what: str, slot: int) -> New:
        """Return the shape of what the forward's loop is given as a state."""
        given = self.forward.outputs[slot]
        rank = len(given.shape or ())
        made = self.new_op(what, names.SHAPE, Tensor("int32", (rank,), 4 * rank), (), {
            "T": f"dtype:{given.dtype}", "out_type": _INT32})
        return dataclasses.replace(made, inputs=(self.inputs(self.forward)[slot],))

    def new_op(self, what: str, kind: str, result: Tensor, reads: Sequence[str],
                attrs: Mapping[str, object], region: str = FORWARD) -> New:
        """Return an op of one result, on the device of the loop.

        Args:
          what: part of its name.
          kind: its type.
          result: what it makes.
          reads: names, in parts like `what`, of new ops whose first results it reads.
          attrs: as in `Create.attrs`.
          region: `FORWARD` or `BACKWARD`.
        """
        return New(Op(f"{self.name}_{what}", kind, (), (), (result,), region, True,
                       self.forward.device, attrs),
                    tuple(f"{self.name}_{name}:0" for name in reads))

    def _list(self, one: OpenList) -> str:
        return f"{'gradient' if one.gradient else 'forward'}_list{one.slot}"

    def given(self, is_gradient: bool) -> list[str]:
        """Return what a loop is given, with the lists whose entries are told.

        Args:
          is_gradient: whether it takes the place of the gradient's loop.
        """
        inputs = list(self.inputs(self.gradient if is_gradient else self.forward))
        for one in self.segments.open.lists if self.segments.open else ():
            if one.gradient == is_gradient:
                inputs[one.slot] = f"{self.name}_{self._list(one)}:0"
        if self.fixed and not is_gradient:
            for slot in self.segments.lists:
                inputs[slot] = f"{self.name}_count:0"
        if self.last and not is_gradient:
            inputs[BOUND] = f"{self.name}_until:0"
        return inputs

    def _constant(self, what: str, value: int | list[int], kind: str = "int32") -> New:
        shape = (len(value),) if isinstance(value, list) else ()
        made = Tensor(kind, shape, 4 * len(value) if isinstance(value, list) else 4)
        return New(Op(f"{self.name}_{what}", names.CONST, (), (), (made,),
                       FORWARD, True, self.forward.device,
                       {"dtype": f"dtype:{kind}", "value": ("const", kind, value)}))

    def inputs(self, op: Op) -> tuple[str, ...]:
        """Return what an op of the step reads, by name.

        Args:
          op: of the step.
        """
        return tuple(f"{self.graph.ops[s].name}:{slot}" for s, slot in op.inputs)
