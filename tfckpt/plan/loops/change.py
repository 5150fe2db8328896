"""A step whose loops are recomputed segment by segment: as a graph to be planned, and as edits.

Of a loop of T iterations only the states before every k-th are kept. The gradient's loop goes
through the segments from the last to the first: it runs the loop over one of them again, with all
its lists, and then its own body over that. So ceil(T / k) states and k entries of the lists are
kept instead of T entries, for one more run of the loop (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", section 4.1, with segments of one length). The sum is smallest for k
near sqrt(T * state / entry). Sums go on from segment to segment, so no bit changes.

A segment may be recomputed in segments itself (section 4.2 there: recursively): then its states are
kept before each of those while its gradient is computed, and the lists of one of them. Each level
is one more run of the loop.

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
from collections.abc import Collection, Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.edits import TRIPS, Edits, Replace, Rewire, op_of
from tfckpt.ir.graph import (
    BACKWARD,
    BOUND,
    COUNTER,
    FORWARD,
    Graph,
    Loop,
    Op,
    Tensor,
    check_graph,
)
from tfckpt.ops import names
from tfckpt.plan.loops.given import Given, New
from tfckpt.plan.loops.segments import (
    LAST,
    SEGMENTED,
    Cuts,
    Role,
    comes_first,
    extras,
    held_bytes,
    kept_slots,
    last_name,
    may_keep_last,
    new_name,
    segmentable,
)


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
        if loop is None or not cut.is_valid or cut.last and not may_keep_last(loop):
            raise PlanError(f"plan: the loop {name!r} cannot be recomputed in segments")
        graph, more = _Change(graph, loop, cut, fixed).made()
        edits = edits.then(more)
    return graph, edits


class _Change(Given):
    """One loop and its gradient's, to be recomputed in segments, from the arguments of `Given`."""

    def made(self) -> tuple[Graph, Edits]:
        forward = [*self.before(), self._forward(), *self._last_forward()]
        gradient = [*self._last_gradient(), self._gradient()]
        graph, rewires = self._rebuilt(forward, gradient)
        return graph, Edits(
            tuple(new.create() for new in (*forward, *gradient)), rewires,
            dropped=(self.forward.name, self.gradient.name), replaced=tuple(
                Replace(op.name, self._renamed(op.name)) for op in (self.forward, self.gradient)))

    def _role(self, is_gradient: bool) -> Role:
        return Role(self.forward.name, self.gradient.name, self.length, self.count,
                    self.cut.within, self.segments.bounded or self.last > 0, is_gradient,
                    self.fixed, self.segments)

    def _forward(self) -> New:
        op, states = self.forward, range(len(self.segments.kept))
        lists = frozenset(self.segments.lists)
        kept = [self._empty(t) if slot in lists else t for slot, t in enumerate(op.outputs)]
        size = [self.count * (self.put_away(slot).bytes or 0) for slot in self.segments.kept]
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
        return New(new, (*self.given(False), *(f"{self.name}_states{n}:0" for n in states),
                          f"{self.name}_count:0"), self._controls(op))

    def _last_forward(self) -> list[New]:
        """Return the forward's loop over what is in no segment, which it begins where these end."""
        if not self.last:
            return []
        made, inputs = self.lists_of_last(), list(self.inputs(self.forward))
        if self.fixed:
            for slot in self.segments.lists:
                inputs[slot] = f"{self.name}_last{slot}:0"
        for slot in (*self.segments.states, *self.segments.written):
            before, inputs[slot] = inputs[slot], f"{self.name}:{slot}"
            if comes_first(before) != comes_first(self.name):
                named = f"{op_of(before)}{LAST}/{self.forward.name}_{slot}"
                kind = self.forward.outputs[slot]
                made.append(New(Op(named, names.IDENTITY, (), (), (kind,), FORWARD, True,
                                    self.forward.device, {"T": f"dtype:{kind.dtype}"}),
                                 (inputs[slot],)))
                inputs[slot] = f"{named}:0"
        return [*made, self._over_last(self.forward, inputs, self.segments.lists)]

    def _last_gradient(self) -> list[New]:
        """Return the gradient's loop over what is in no segment."""
        if not self.last:
            return []
        counter = self.forward.outputs[COUNTER]
        ran = self.new_op("ran", names.SUB, counter, (), {"T": f"dtype:{counter.dtype}"}, BACKWARD)
        inputs = [self._new(tensor) for tensor in self.inputs(self.gradient)]
        inputs[self.segments.trips] = f"{ran.op.name}:0"
        return [dataclasses.replace(ran, inputs=(
            f"{last_name(self.forward.name)}:{COUNTER}", f"{self.name}:{COUNTER}")),
                self._over_last(self.gradient, inputs, ()), *self._over()]

    def _over(self) -> list[New]:
        """Return ops that run once the gradient's loop over the last iterations has.

        They read what the step needs of it: what waits for a loop itself has all of it run, and
        keeps lists that nothing needs.
        """
        name = last_name(self.gradient.name)
        return [dataclasses.replace(self.new_op(
            f"over{slot}", names.IDENTITY, made, (), {"T": f"dtype:{made.dtype}"}, BACKWARD),
            inputs=(f"{name}:{slot}",)) for slot, made in enumerate(self.gradient.outputs)
            if slot in self._read and slot not in self._handed_on()]

    def _over_last(self, op: Op, inputs: Sequence[str], lists: Collection[int]) -> New:
        """Return a loop that runs as often as is in no segment, with lists as long as that."""
        assert op.loop is not None
        outputs = tuple(dataclasses.replace(made, bytes=math.ceil(
            (made.bytes or 0) * self.last / self.loop.trips)) if slot in lists else made
            for slot, made in enumerate(op.outputs))
        loop = dataclasses.replace(op.loop, trips=self.last, segments=None, bound=self.last,
                                   at_once=min(op.loop.at_once, self.last))
        return New(dataclasses.replace(
            op, name=last_name(op.name), inputs=(), controls=(), outputs=outputs, loop=loop,
            pure=False), tuple(inputs), self._controls(op), op.name, {TRIPS: self.last})

    def _empty(self, made: Tensor) -> Tensor:
        """Return what stands for a list that stays empty: to XLA a number, as it needs none."""
        return Tensor("int32", (), 4) if self.fixed else dataclasses.replace(made, bytes=0)

    def _held(self) -> int:
        """Return the bytes of what is kept of one segment while it runs."""
        return math.ceil(held_bytes(self.forward, self.cut.lengths))

    def _gradient(self) -> New:
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
        runs = [*[self.loop.body] * len(self.cut.lengths), op.loop.body]
        loop = Loop(op.loop.trips - self.last, _one_by_one(runs), {
            place[s]: place[r] for s, r in op.loop.shares.items() if s in place and r in place}, {
            place[s]: tuple(place[w] for w in wishes if w in place)
            for s, wishes in op.loop.takes.items() if s in place}, bound=op.loop.bound)
        inputs = [tensor if not self.last or n in self._handed_on() else
                  f"{last_name(op.name)}:{n}" for n, tensor in enumerate(self.given(True))]
        new = dataclasses.replace(
            op, name=new_name(op.name), inputs=(), controls=(), outputs=outputs, pure=False,
            loop=loop, attrs={SEGMENTED: self._role(True)}, workspace=op.workspace + self._held())
        named = (f"{self.name}:{total + states}", *(self._new(inputs[n]) for n in kept),
                 *(f"{self.name}:{total + n}" for n in range(states)),
                 *(self.given(False)[n] for n in given))
        waits = [new.op.name for new in self._over()] if self.last else [
            self.graph.ops[s].name for n in kept for s, _ in op.inputs[n:n + 1]
            if self.graph.ops[s].region == BACKWARD]
        return New(new, named, tuple(dict.fromkeys((*self._controls(op), *waits))))

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

    def _controls(self, op: Op) -> tuple[str, ...]:
        return tuple(self._renamed(self.graph.ops[c].name) for c in op.controls)

    def _renamed(self, name: str) -> str:
        """Return what is there in the place of an op, with its results."""
        if name == self.forward.name:
            return last_name(name) if self.last else new_name(name)
        return new_name(name) if name == self.gradient.name else name

    def _rebuilt(self, forward: Sequence[New], gradient: Sequence[New]
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
                read = self.inputs(op)
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


def _one_by_one(bodies: Sequence[Graph]) -> Graph:
    """Return what several bodies do one after the other, to be priced."""
    ops: list[Op] = []
    sinks: list[int] = []
    for body in bodies:
        shift = len(ops)
        ops += [dataclasses.replace(
            op, inputs=tuple((s + shift, slot) for s, slot in op.inputs),
            controls=tuple(c + shift for c in op.controls)) for op in body.ops]
        sinks += [source + shift for source, _ in body.fetches]
    return Graph(bodies[-1].name, tuple(ops), (), tuple(dict.fromkeys(sinks)))
