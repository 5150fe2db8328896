"""A step with loops whose gradients compute entries again: as a graph to be planned, and as edits.

Both loops are replaced, the forward's by one that hands some lists on as they are:

    forward's inputs and results:  those there were
    gradient's inputs:             those there were; what its copies read of what the forward's loop
                                   is given and every iteration hands on as it is
    gradient's results:            the same

One iteration of each runs at a time, so that what one computes again is there once. Nothing here
imports TensorFlow: the functions are filled in by `tfckpt.rewrite.loops.entries`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfckpt.cost.storage import origin
from tfckpt.errors import PlanError
from tfckpt.ir.edits import Create, Edits, Replace, Rewire
from tfckpt.ir.graph import FORWARD, Graph, Op, Tensor, TensorId, check_graph, depth_first_order
from tfckpt.ops.names import PLACEHOLDER
from tfckpt.plan.loops.entries import Bodies
from tfckpt.plan.loops.segments import AGAIN, PREFIX, SEGMENTED, Again, segmentable

_Key = tuple[str, int]
"""An op of a body in the making: of which body, or what it is given, and its number there."""


def with_entries_again(graph: Graph, slots: Mapping[str, Sequence[int]]) -> tuple[Graph, Edits]:
    """Return the step with gradients of loops that compute entries again, and the edits.

    Args:
      graph: the step.
      slots: lists that are not filled, by the name of the forward's loop.

    Raises:
      PlanError: a loop cannot be changed so.
    """
    edits = Edits()
    for name, chosen in slots.items():
        loop = next((op for op in segmentable(graph) if op.name == name), None)
        if loop is None or not chosen:
            raise PlanError(f"plan: entries of the loop {name!r} cannot be computed again")
        graph, more = _Change(graph, loop, tuple(chosen)).made()
        edits = edits.then(more)
    return graph, edits


class _Change:
    """One loop and its gradient's, some of whose entries are computed again."""

    def __init__(self, graph: Graph, forward: Op, slots: tuple[int, ...]) -> None:
        self.graph, self.slots = graph, slots
        self.bodies = Bodies(graph, forward)
        self.forward, self.gradient = forward, self.bodies.gradient
        self.again, self.given = self.bodies.needed(slots)
        segments = self.bodies.segments
        self.shares = self._shared()
        self.emptied = {segments.residuals[segments.lists.index(slot)]: slot for slot in slots}

    def made(self) -> tuple[Graph, Edits]:
        new = {op.name: made for op, made in ((self.forward, self._forward()),
                                              (self.gradient, self._gradient()))}
        renamed = {name: op.name for name, op in new.items()}

        def now(tensor: str) -> str:
            name, _, slot = tensor.rpartition(":")
            return f"{renamed.get(name, name)}:{slot}"

        ops, rewires, added = [], list[Rewire](), list[Create]()
        for op in self.graph.ops:
            read = [f"{self.graph.ops[s].name}:{slot}" for s, slot in op.inputs]
            made = new.get(op.name)
            inputs = op.inputs
            if made is None:
                rewires += [Rewire(op.name, n, now(t)) for n, t in enumerate(read) if now(t) != t]
            else:
                if op is self.gradient:
                    inputs = (*inputs, *(self.forward.inputs[slot] for slot in self.given))
                    read += [f"{self.graph.ops[s].name}:{slot}"
                             for s, slot in inputs[len(read):]]
                controls = tuple(renamed.get(name, name) for name in (
                    self.graph.ops[c].name for c in op.controls))
                added.append(Create(made.name, made.type, tuple(map(now, read)), controls,
                                    tuple(t.dtype for t in made.outputs), made.attrs, op.device))
            ops.append(dataclasses.replace(made or op, inputs=inputs, controls=op.controls))
        result = dataclasses.replace(self.graph, ops=tuple(ops))
        check_graph(result)
        return result, Edits(
            tuple(added), tuple(rewires), dropped=tuple(new),
            replaced=tuple(Replace(old, now_) for old, now_ in renamed.items()))

    def _role(self, is_gradient: bool) -> Again:
        return Again(self.forward.name, self.gradient.name, self.slots, tuple(self.given),
                     is_gradient, self.bodies.segments)

    def _forward(self) -> Op:
        """Return the forward's loop, which hands some lists on as they are."""
        op, loop = self.forward, self.forward.loop
        assert loop is not None
        body = loop.body
        fetches = tuple((loop.arguments[slot], 0) if slot in self.slots else tensor
                        for slot, tensor in enumerate(body.fetches))
        entries = dict.fromkeys(self.bodies.entry[slot] for slot in self.slots)
        held = sum(body.ops[i].outputs[slot].bytes or 0 for i, slot in entries
                   if i not in self.bodies.given)  # until an iteration is over
        return dataclasses.replace(
            op, name=op.name + AGAIN, attrs={SEGMENTED: self._role(False)}, pure=False,
            outputs=tuple(dataclasses.replace(made, bytes=self._bytes(slot))
                          for slot, made in enumerate(op.outputs)),
            workspace=op.workspace + held,
            loop=dataclasses.replace(
                loop, body=dataclasses.replace(body, fetches=fetches), segments=None, at_once=1,
                shares=self.shares,
                takes={s: takes for s, takes in loop.takes.items() if s not in self.slots}))

    def _shared(self) -> dict[int, int]:
        """Return which lists have the entries of others, where some are not filled."""
        loop = self.forward.loop
        assert loop is not None
        found: dict[int, int] = {}
        first: dict[int, int] = {}
        for slot, root in sorted(loop.shares.items()):
            if slot in self.slots:
                continue
            if root in self.slots and root not in first:
                first[root] = slot
            else:
                found[slot] = first.get(root, root)
        return found

    def _bytes(self, slot: int) -> int | None:
        """Return what the forward's loop has in a slot; the first of several lists has it all."""
        loop = self.forward.loop
        assert loop is not None
        if slot in self.slots:
            return 0
        root = loop.shares.get(slot, slot)
        return self.forward.outputs[
            slot if slot in self.shares or root not in self.slots else root].bytes

    def _gradient(self) -> Op:
        """Return the gradient's loop, whose body computes entries again."""
        op, loop = self.gradient, self.gradient.loop
        assert loop is not None
        body, arguments = self._body(loop.body, loop.arguments)
        outputs = (*(dataclasses.replace(made, bytes=0) if slot in self.emptied else made
                     for slot, made in enumerate(op.outputs)),
                   *(dataclasses.replace(self.forward.outputs[slot], bytes=0)
                     for slot in self.given))
        kind = self.forward.type if self.given else op.type  # it may read variables
        return dataclasses.replace(
            op, name=op.name + AGAIN, type=kind, attrs={SEGMENTED: self._role(True)}, pure=False,
            outputs=outputs,
            loop=dataclasses.replace(loop, body=body, arguments=arguments, at_once=1))

    def _body(self, body: Graph, arguments: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
        """Return the gradient's body with copies of the forward's ops, and its arguments."""
        first, pop = self.bodies.first, self.bodies.pop
        gone = {pop[slot]: slot for slot in self.slots}
        taken = {self.bodies.entry[slot]: (("was", place), 1) for slot, place in pop.items()
                 if slot not in self.slots}
        given = {i: n for i, n in self.bodies.given.items() if n in self.given}
        emptied = {pop[slot]: arguments[residual] for residual, slot in self.emptied.items()}

        def again(tensor: TensorId) -> tuple[_Key, int]:
            at = origin(first, tensor)
            if at in taken:
                return taken[at]
            return (("given", given[at[0]]), 0) if at[0] in given else (("again", at[0]), at[1])

        def as_before(tensor: TensorId) -> tuple[_Key, int]:
            if tensor[0] not in gone:
                return ("was", tensor[0]), tensor[1]
            if tensor[1] == 0:
                return ("was", emptied[tensor[0]]), 0
            return again(self.bodies.entry[gone[tensor[0]]])

        read: dict[_Key, list[tuple[_Key, int]]] = {
            ("was", i): [as_before(t) for t in op.inputs] for i, op in enumerate(body.ops)
            if i not in gone}
        ops: dict[_Key, Op] = {("was", i): op for i, op in enumerate(body.ops)}
        for n in self.given:
            made = self.forward.outputs[n]
            ops["given", n] = Op(f"{PREFIX}given_{n}", PLACEHOLDER, (), (), (
                Tensor(made.dtype, made.shape, made.bytes),), FORWARD, False)
            read["given", n] = []
        for i in self.again:
            ops["again", i] = dataclasses.replace(
                first.ops[i], name=f"{PREFIX}{first.ops[i].name}")
            read["again", i] = [again(t) for t in first.ops[i].inputs]
        order = depth_first_order(
            [*(("was", i) for i in arguments), *(("given", n) for n in self.given), *read],
            lambda key: [source for source, _ in reversed(read[key])])
        number = {key: n for n, key in enumerate(order)}
        made_ops = tuple(dataclasses.replace(ops[key], controls=(), inputs=tuple(
            (number[source], slot) for source, slot in read[key])) for key in order)
        fetches = [as_before(tensor) for tensor in body.fetches]
        fetches += [(("given", n), 0) for n in self.given]
        return (Graph(body.name, made_ops, tuple((number[k], slot) for k, slot in fetches), ()),
                (*(number["was", i] for i in arguments), *(number["given", n]
                                                           for n in self.given)))
