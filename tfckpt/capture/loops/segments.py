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

What XLA asks besides stands in `tfckpt.capture.loops.compiled`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.bodies import Body, Refusal, static_number
from tfckpt.capture.loops.compiled import as_compiled
from tfckpt.capture.loops.open_sizes import Known, UntoldError
from tfckpt.capture.variables import origin
from tfckpt.ir.graph import BACKWARD, BOUND, COUNTER, Op, Segments
from tfckpt.ops import record


def with_segments(operations: Sequence[tf.Operation], ops: Sequence[Op],
                  loops: Sequence[int], fetched: Collection[tuple[int, int]],
                  compiled: bool = False, known: Sequence[Known] = ()
                  ) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """Note how loops that may run twice can be recomputed segment by segment.

    Args:
      operations: of the graph, in the order of `ops`.
      ops: what was captured of them.
      loops: those of such loops.
      fetched: results that leave the step.
      compiled: whether XLA compiles the step.
      known: for XLA what is known of shapes, for the planned sizes and for others.

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
            op = dataclasses.replace(op, loop=dataclasses.replace(op.loop, segments=segments))
            if not compiled:
                op = _with_unread(op, operations, i, ops)
            if compiled and segments.sized:
                raise Refusal(f"its body reads the length of the list in slot {segments.sized[0]}")
            if compiled:
                (g,) = (n for n, one in enumerate(ops) if one.name == segments.gradient)
                unread = [n for n in range(len(ops[g].outputs))
                          if not readers.get((g, n)) and (g, n) not in fetched]
                op = as_compiled(op, operations[i], operations[g], known, unread)
        except (Refusal, UntoldError, KeyError, ValueError, IndexError,
                tf.errors.OpError) as reason:
            refused.append(f"{op.name}: the loop is not recomputed in segments: {reason}")
            continue
        found[i] = op
    return tuple(found), tuple(refused)


def _segments(operations: Sequence[tf.Operation], ops: Sequence[Op], i: int,
              readers: Mapping[tuple[int, int], Sequence[tuple[int, int]]],
              fetched: Collection[tuple[int, int]]) -> Segments:
    body = Body(operations[i], "body")
    cond = Body(operations[i], "cond")
    bounded = _check_counted(body, cond)
    states, lists, written, sized = _slots(body)
    read_by = {slot: readers.get((i, slot), ()) for slot in lists}
    loops = sorted({reader for entries in read_by.values() for reader, _ in entries})
    if not loops:
        raise Refusal("no loop reads its lists")
    if len(loops) > 1 or not _is_gradient(ops[loops[0]]):
        raise Refusal(f"{ops[loops[-1]].name} reads its lists, and not its gradient's loop alone")
    (g,) = loops
    residuals = tuple(n for entries in read_by.values() for _, n in entries)
    if any(len(entries) > 1 for entries in read_by.values()):
        raise Refusal("one of its lists is read twice")
    if ops[g].device != ops[i].device:
        raise Refusal("its gradient's loop runs on another device")
    gradient = Body(operations[g], "body")
    trips = _check_gradient(gradient, operations, ops, i, g, residuals, readers)
    idle = gradient.idle(
        [n for n in range(len(ops[g].outputs)) if readers.get((g, n)) or (g, n) in fetched
         or n in (COUNTER, BOUND, trips)])
    return Segments(ops[g].name, bounded, states, lists, residuals, trips, written, idle,
                    sized=sized)


def _with_unread(op: Op, operations: Sequence[tf.Operation], i: int, ops: Sequence[Op]) -> Op:
    """Return a loop of the forward with the lists noted that its gradient's loop leaves out.

    They take nothing, but where other lists have their entries. An executor that waits for all of
    a loop runs all of it.
    """
    loop, segments = op.loop, op.loop.segments if op.loop else None
    assert loop is not None and segments is not None
    (g,) = (n for n, one in enumerate(ops) if one.name == segments.gradient)
    if any(tf_adapter.is_stateful(operations[n]) for n in (i, g)) or any(
            n in other.controls for other in ops for n in (i, g)):
        return op
    unread = tuple(slot for slot, n in zip(segments.lists, segments.residuals, strict=True)
                   if n in segments.idle)
    shared = {root for slot, root in loop.shares.items() if slot not in unread}
    return dataclasses.replace(op, outputs=tuple(
        dataclasses.replace(made, bytes=0) if slot in unread and slot not in shared else made
        for slot, made in enumerate(op.outputs)), loop=dataclasses.replace(
            loop, segments=dataclasses.replace(segments, unread=unread)))


def _is_gradient(op: Op) -> bool:
    return (record(op.type).is_loop and op.region == BACKWARD and not op.conditional
            and op.loop is not None)


def _check_counted(body: Body, cond: Body) -> bool:
    """Check rule 1; return whether the condition compares the counter with the bound."""
    if not body.adds_one(COUNTER) or body.passed.get(BOUND) != BOUND:
        raise Refusal("its body does not count iterations as TensorFlow's loops do")
    if body.uses(BOUND):
        raise Refusal("its body reads the bound of its iterations")
    compared = [op for op in cond.uses(BOUND)
                if record(op.type).compares != "<" or cond.arguments(op) != [COUNTER, BOUND]]
    if compared or body.inputs[COUNTER].dtype != body.inputs[BOUND].dtype:
        raise Refusal("its condition reads the bound of its iterations otherwise than by "
                      f"comparing it with their number: {compared[0].name if compared else ''}")
    return bool(cond.uses(BOUND))


def _slots(body: Body) -> tuple[tuple[int, ...], ...]:
    """Return states, lists, written lists and those of a length that is read, by rule 2 and 4."""
    body.check_sums()
    states, lists, written, sized = [], [], [], []
    for slot, made in enumerate(body.outputs):
        if body.passed.get(slot) == slot:
            continue
        if made.dtype == tf.resource:
            raise Refusal("its body exchanges variables")
        if made.dtype != tf.variant:
            states.append(slot)
            continue
        op = origin(made).op
        use = record(op.type).lists
        if use.entry is None:
            raise Refusal(f"it hands on a list that its body makes with {op.type}")
        if use.index is None:
            if not body.is_only(slot, [op]):
                raise Refusal(f"its body reads the list that {op.name} pushes onto")
            lists.append(slot)
        else:
            if body.check_only_set(slot):
                sized.append(slot)
            written.append(slot)
    return tuple(states), tuple(lists), tuple(written), tuple(sized)


def _check_gradient(body: Body, operations: Sequence[tf.Operation], ops: Sequence[Op], i: int,
                    g: int, residuals: Sequence[int],
                    readers: Mapping[tuple[int, int], Sequence[tuple[int, int]]]) -> int:
    """Check rule 3; return the slot with the number of iterations."""
    cond = Body(operations[g], "cond")
    body.check_sums()
    found = [n for n, tensor in enumerate(ops[g].inputs)
             if tensor == (i, COUNTER) and cond.uses(n)]
    if len(found) != 1:
        raise Refusal("its gradient's loop does not say how often it runs")
    (trips,) = found
    if (static_number(operations[g].inputs[COUNTER]) != 0 or not body.adds_one(COUNTER)
            or body.passed.get(trips) != trips or body.uses(trips)
            or body.passed.get(BOUND) != BOUND or body.uses(BOUND)):
        raise Refusal("its gradient's loop does not count as TensorFlow's loops do")
    for slot in (COUNTER, BOUND, trips):
        for op in cond.uses(slot):
            if record(op.type).compares != "<" or cond.arguments(op) not in (
                    [COUNTER, trips], [COUNTER, BOUND]):
                raise Refusal(f"its gradient's loop ends by {op.name}")
    if any(cond.uses(n) for n in range(len(cond.inputs)) if n not in (COUNTER, BOUND, trips)):
        raise Refusal("its gradient's loop ends by what it computes")
    for slot in residuals:
        op = origin(body.outputs[slot]).op
        if not record(op.type).lists.removes or not body.is_only(slot, [op]):
            raise Refusal(f"its gradient's loop reads list {slot} otherwise than by taking its "
                          "last entry")
    for slot in (COUNTER, *residuals):
        if readers.get((g, slot)):
            raise Refusal(f"something reads result {slot} of its gradient's loop")
    return trips
