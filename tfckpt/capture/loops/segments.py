"""Search for loops that can be recomputed segment by segment, while their gradient's loop runs.

TensorFlow makes of a loop and its gradient two loops: the forward's pushes what the gradient needs
onto lists, which the gradient's loop empties, last entry first. Both count their iterations in
their first variable and have a bound for them in the second. Read from their bodies:

  1. The forward's body counts in slot 0, by one. It hands slot 1 on, and its condition compares
     that with slot 0 or ignores it: so a segment may be bounded there.
  2. Every other slot is handed on as it is; or is a list that the body only pushes onto, and that
     the gradient's loop alone reads; or one in which it only sets entries, which it may do again in
     any list of that length; or a tensor, which is a state. Other lists are refused: their entries
     would have to be kept with each state.
  3. The gradient's loop counts in slot 0, from 0, as far as the number of iterations of the
     forward's in some slot says; its body uses neither otherwise. Of each list it takes one entry.
  4. A sum of three and more terms, of which several are handed to the body, is refused: Grappler
     adds in the order of names, and those of what a loop is handed depend on where it stands. Where
     one is, `tfckpt.verify.arithmetic.loop_bodies` looks.
  5. For XLA no function that the forward's body calls may be called twice, as it changes what it
     has read; and of each list the shape of the entries must be told it, or it reads bodies twice
     (`tfckpt.capture.loops.open_sizes`), and slot 1 must say how many iterations there are at most
     in a call, as its lists have room for so many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.open_sizes import Known, UntoldError, open_sizes
from tfckpt.capture.variables import argument, origin
from tfckpt.ir.graph import BACKWARD, Op, Segments
from tfckpt.ops import record

_COUNTER, _BOUND = 0, 1


class _Refusal(Exception):
    """Why a loop cannot be recomputed segment by segment."""


def with_segments(operations: Sequence[tf.Operation], ops: Sequence[Op],
                  loops: Sequence[int], fetched: Collection[tuple[int, int]],
                  calls_once: bool = False, known: Sequence[Known] = ()
                  ) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """Note how loops that may run twice can be recomputed segment by segment.

    Args:
      operations: of the graph, in the order of `ops`.
      ops: what was captured of them.
      loops: those of such loops.
      fetched: results that leave the step.
      calls_once: whether rule 5 has to be satisfied.
      known: for rule 5 what is known of shapes, for the planned sizes and for others.

    Returns:
      The ops with their `Loop.segments`, and a line for each loop that is refused.
    """
    found, refused = list(ops), []
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, op in enumerate(ops):
        for n, tensor in enumerate(op.inputs):
            readers.setdefault(tensor, []).append((i, n))
    for i in loops:
        op = ops[i]
        assert op.loop is not None
        try:
            segments = _segments(operations, ops, i, readers, fetched)
            if calls_once:
                if op.loop.bound is None and _static(operations[i].inputs[_BOUND]) is not None:
                    raise _Refusal("XLA compiles it, and nothing says how often it runs at most")
                gradient = next(op for op in operations if op.name == segments.gradient)
                _check_calls(operations[i])
                segments = dataclasses.replace(segments, open=open_sizes(
                    operations[i], gradient, segments.states, known))
        except (_Refusal, UntoldError, KeyError, ValueError, IndexError,
                tf.errors.OpError) as reason:
            refused.append(f"{op.name}: the loop is not recomputed in segments: {reason}")
            continue
        found[i] = dataclasses.replace(op, loop=dataclasses.replace(op.loop, segments=segments))
    return tuple(found), tuple(refused)


def _segments(operations: Sequence[tf.Operation], ops: Sequence[Op], i: int,
              readers: Mapping[tuple[int, int], Sequence[tuple[int, int]]],
              fetched: Collection[tuple[int, int]]) -> Segments:
    body = _Function(operations[i], "body")
    cond = _Function(operations[i], "cond")
    bounded = _check_counted(body, cond)
    states, lists, written = _slots(body)
    read_by = {slot: readers.get((i, slot), ()) for slot in lists}
    loops = sorted({reader for entries in read_by.values() for reader, _ in entries})
    if not loops:
        raise _Refusal("no loop reads its lists")
    if len(loops) > 1 or not _is_gradient(ops[loops[0]]):
        raise _Refusal(f"{ops[loops[-1]].name} reads its lists, and not its gradient's loop alone")
    (g,) = loops
    residuals = tuple(n for entries in read_by.values() for _, n in entries)
    if any(len(entries) > 1 for entries in read_by.values()):
        raise _Refusal("one of its lists is read twice")
    if ops[g].device != ops[i].device:
        raise _Refusal("its gradient's loop runs on another device")
    trips = _check_gradient(operations, ops, i, g, residuals, readers)
    idle = _Function(operations[g], "body").idle(
        [n for n in range(len(ops[g].outputs)) if readers.get((g, n)) or (g, n) in fetched
         or n in (_COUNTER, _BOUND, trips)])
    return Segments(ops[g].name, bounded, states, lists, residuals, trips, written, idle)


def _check_calls(forward: tf.Operation) -> None:
    """Raise `_Refusal` where the body calls a function, by rule 5."""
    body: Any = tf_adapter.called_graph(forward, "body")
    calls = next((op.name for op in body.get_operations() if tf_adapter.called_functions(op)), "")
    if calls:
        raise _Refusal(f"its body calls a function ({calls}), which XLA reads once")


def _is_gradient(op: Op) -> bool:
    return (record(op.type).is_loop and op.region == BACKWARD and not op.conditional
            and op.loop is not None)


def _check_counted(body: _Function, cond: _Function) -> bool:
    """Check rule 1; return whether the condition compares the counter with the bound."""
    if not body.adds_one(_COUNTER) or body.passed.get(_BOUND) != _BOUND:
        raise _Refusal("its body does not count iterations as TensorFlow's loops do")
    if body.uses(_BOUND):
        raise _Refusal("its body reads the bound of its iterations")
    compared = [op for op in cond.uses(_BOUND)
                if record(op.type).compares != "<" or cond.arguments(op) != [_COUNTER, _BOUND]]
    if compared or body.inputs[_COUNTER].dtype != body.inputs[_BOUND].dtype:
        raise _Refusal(f"its condition reads the bound of its iterations otherwise than by "
                       f"comparing it with their number: {compared[0].name if compared else ''}")
    return bool(cond.uses(_BOUND))


def _slots(body: _Function) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return states, lists and written lists of the forward's body, by rule 2 and 4."""
    body.check_sums()
    states, lists, written = [], [], []
    for slot, made in enumerate(body.outputs):
        if body.passed.get(slot) == slot:
            continue
        if made.dtype == tf.resource:
            raise _Refusal("its body exchanges variables")
        if made.dtype != tf.variant:
            states.append(slot)
            continue
        op = origin(made).op
        use = record(op.type).lists
        if use.entry is None:
            raise _Refusal(f"it hands on a list that its body makes with {op.type}")
        if use.index is None:
            if not body.is_only(slot, [op]):
                raise _Refusal(f"its body reads the list that {op.name} pushes onto")
            lists.append(slot)
        else:
            body.check_only_set(slot)
            written.append(slot)
    return tuple(states), tuple(lists), tuple(written)


def _check_gradient(operations: Sequence[tf.Operation], ops: Sequence[Op], i: int, g: int,
                    residuals: Sequence[int],
                    readers: Mapping[tuple[int, int], Sequence[tuple[int, int]]]) -> int:
    """Check rule 3; return the slot with the number of iterations."""
    body, cond = _Function(operations[g], "body"), _Function(operations[g], "cond")
    body.check_sums()
    found = [n for n, tensor in enumerate(ops[g].inputs)
             if tensor == (i, _COUNTER) and cond.uses(n)]
    if len(found) != 1:
        raise _Refusal("its gradient's loop does not say how often it runs")
    (trips,) = found
    if (_static(operations[g].inputs[_COUNTER]) != 0 or not body.adds_one(_COUNTER)
            or body.passed.get(trips) != trips or body.uses(trips)
            or body.passed.get(_BOUND) != _BOUND or body.uses(_BOUND)):
        raise _Refusal("its gradient's loop does not count as TensorFlow's loops do")
    for slot in (_COUNTER, _BOUND, trips):
        for op in cond.uses(slot):
            if record(op.type).compares != "<" or cond.arguments(op) not in (
                    [_COUNTER, trips], [_COUNTER, _BOUND]):
                raise _Refusal(f"its gradient's loop ends by {op.name}")
    if any(cond.uses(n) for n in range(len(cond.inputs)) if n not in (_COUNTER, _BOUND, trips)):
        raise _Refusal("its gradient's loop ends by what it computes")
    for slot in residuals:
        op = origin(body.outputs[slot]).op
        if not record(op.type).lists.removes or not body.is_only(slot, [op]):
            raise _Refusal(f"its gradient's loop reads list {slot} otherwise than by taking its "
                           "last entry")
    for slot in (_COUNTER, *residuals):
        if readers.get((g, slot)):
            raise _Refusal(f"something reads result {slot} of its gradient's loop")
    return trips


def _static(tensor: tf.Tensor) -> int | None:
    value = tf_adapter.static_value(origin(tensor))
    return int(value) if value is not None and value.size == 1 else None


class _Function:
    """A function of a loop: what it hands on, and what uses its arguments."""

    def __init__(self, loop: tf.Operation, attr: str) -> None:
        graph: Any = tf_adapter.called_graph(loop, attr)
        self.graph, self.inputs, self.outputs = graph, list(graph.inputs), list(graph.outputs)
        self._slot = {tensor.name: n for n, tensor in enumerate(self.inputs)}
        self.passed = {slot: found for slot, made in enumerate(self.outputs)
                       if (found := argument(graph, origin(made))) is not None}
        self._uses: dict[int, list[tf.Operation]] = {}
        for op in graph.get_operations():
            if record(op.type).passes_on:
                continue
            for n in dict.fromkeys(self.arguments(op)):
                if n is not None:
                    self._uses.setdefault(n, []).append(op)

    def arguments(self, op: tf.Operation) -> list[int | None]:
        """Return which argument each input of an op is; None for those that are none."""
        return [self._slot.get(origin(tensor).name) for tensor in op.inputs]

    def uses(self, slot: int) -> list[tf.Operation]:
        """Return the ops that read an argument, those that pass it on left out."""
        return self._uses.get(slot, [])

    def is_only(self, slot: int, ops: Sequence[tf.Operation]) -> bool:
        """Return whether an argument is used by some ops alone, and handed on nowhere."""
        return ([op.name for op in self.uses(slot)] == [op.name for op in ops]
                and slot not in self.passed.values())

    def adds_one(self, slot: int) -> bool:
        """Return whether an argument is handed on with one added to it."""
        op = origin(self.outputs[slot]).op
        return (record(op.type).adds and len(op.inputs) == 2
                and any(self._slot.get(origin(one).name) == slot and _static(other) == 1
                        for one, other in (tuple(op.inputs), tuple(op.inputs)[::-1])))

    def check_only_set(self, slot: int) -> None:
        """Raise `_Refusal` unless entries of a list are set, and nothing else reads it."""
        chain: list[tf.Operation] = []
        tensor = origin(self.outputs[slot])
        while self._slot.get(tensor.name) != slot:
            use = record(tensor.op.type).lists
            if use.entry is None or use.index is None:
                raise _Refusal(f"its body reads the list that it hands on in slot {slot}")
            chain.append(tensor.op)
            tensor = origin(tensor.op.inputs[0])
        readers = [op for op in self.graph.get_operations()
                   if not record(op.type).passes_on
                   for read in op.inputs if any(origin(read).op is made for made in chain)]
        handed = [n for n, made in enumerate(self.outputs)
                  if any(origin(made).op is one for one in chain)]
        if (not self.is_only(slot, chain[-1:]) or handed != [slot]
                or [op.name for op in readers] != [op.name for op in reversed(chain[:-1])]):
            raise _Refusal(f"its body reads the list that it hands on in slot {slot}")

    def idle(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Return the slots that are handed on, and those from which no wanted result follows.

        However often the body runs.
        """
        needed, left = set(wanted), list(wanted)
        while left:
            seen: set[str] = set()
            pending = [self.outputs[left.pop()]]
            while pending:
                tensor = pending.pop()
                slot = self._slot.get(tensor.name)
                if slot is not None and slot not in needed:
                    needed.add(slot)
                    left.append(slot)
                if tensor.op.name not in seen:
                    seen.add(tensor.op.name)
                    pending += tensor.op.inputs
        return tuple(n for n in range(len(self.outputs))
                     if n not in needed or self.passed.get(n) == n)

    def check_sums(self) -> None:
        """Raise `_Refusal` for a sum as in rule 4."""
        for op in self.graph.get_operations():
            if record(op.type).adds and len(op.inputs) > 2 and sum(
                    n is not None for n in self.arguments(op)) > 1:
                raise _Refusal(f"its body adds several things that it is handed ({op.name}), in an "
                               "order that depends on names")
