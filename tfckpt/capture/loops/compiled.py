"""What XLA asks of a loop that is recomputed segment by segment, and what it spares.

Asked: of each list XLA must be told the shape of the entries, or it reads bodies twice
(`tfckpt.capture.loops.open_sizes`), and how many iterations there are at most, as lists have room
for so many.

Spared, as the gradient's body is the rewriter's own:

  1. Where the forward's body sets an entry of a list, the gradient's takes that entry of the list's
     gradient and puts zeros there. XLA copies the whole list in each iteration for that, since it
     is read as well. Where no two iterations set the same entry, nothing reads the zeros.
  2. What is the same in each iteration, such as a kernel that the body reads from its variable, has
     an entry for each in XLA. The gradient's loop is given it once instead.
  3. Entries that are read for their shapes alone, of which a trace that leaves sizes open has many,
     take no memory in XLA, which knows the shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import tensorflow as tf

from tfckpt.capture.loops.bodies import Body, Refusal, static_number
from tfckpt.capture.loops.open_sizes import Known, open_sizes
from tfckpt.capture.loops.purity import is_pure_op
from tfckpt.capture.variables import only_reads, origin
from tfckpt.ir.graph import BOUND, Op
from tfckpt.ops import record

MOST_OPS = 16
"""Ops of a body of which an entry that is the same in each iteration is made, at most."""


def as_compiled(op: Op, forward: tf.Operation, gradient: tf.Operation, known: Sequence[Known],
                unread: Collection[int]) -> Op:
    """Return a loop that XLA compiles, with what holds of its segments there.

    Args:
      op: the forward's loop; it has `Segments`.
      forward: the same in the live graph.
      gradient: the loop of its gradient.
      known: what is known of shapes, for the planned sizes and for others.
      unread: results of the gradient's loop that nothing reads.

    Raises:
      Refusal: XLA cannot run a segment again.
      UntoldError: XLA would have to infer the shape of the entries of a list.
    """
    assert op.loop is not None and op.loop.segments is not None
    if op.loop.bound is None and static_number(forward.inputs[BOUND]) is not None:
        raise Refusal("XLA compiles it, and nothing says how often it runs at most")
    segments = op.loop.segments
    bodies = Body(forward, "body"), Body(gradient, "body")
    lists = dict(zip(segments.residuals, segments.lists, strict=True))
    outputs = list(op.outputs)
    for residual, slot in lists.items():
        if _is_read_for_its_shape(bodies[1], residual):
            outputs[slot] = dataclasses.replace(outputs[slot], bytes=0)
    segments = dataclasses.replace(
        segments, open=open_sizes(forward, gradient, segments.states, known),
        read_once=tuple(n for n in _read_once(*bodies, lists) if n in unread),
        invariant=tuple(n for n in segments.lists if _is_invariant(bodies[0], n)))
    return dataclasses.replace(op, outputs=tuple(outputs),
                               loop=dataclasses.replace(op.loop, segments=segments))


def _read_once(forward: Body, gradient: Body, lists: dict[int, int]) -> Iterator[int]:
    """Yield arguments of the gradient's body that are lists as in 1.

    Args:
      forward: the body of the forward's loop.
      gradient: that of the gradient's loop.
      lists: arguments of it that are emptied, and what they are of the forward's body.
    """
    for slot, made in enumerate(gradient.outputs):
        write = origin(made).op
        use = record(write.type).lists
        if use.entry is None or use.index is None or gradient.arguments(write)[0] != slot:
            continue
        index = origin(write.inputs[use.index])
        popped = gradient.arguments(index.op)[0] if record(index.op.type).lists.removes else None
        reads = [op for op in gradient.uses(slot) if op is not write]
        if popped in lists and _counts(forward, lists[popped]) and all(
                _reads(op, index.name) for op in reads) and (
                slot not in gradient.passed.values()):
            yield slot


def _counts(body: Body, slot: int) -> bool:
    """Return whether a list is appended an argument that each iteration adds one to."""
    counter = body.slots.get(_pushed(body, slot).name)
    return counter is not None and body.adds_one(counter)


def _pushed(body: Body, slot: int) -> tf.Tensor:
    """Return what a body appends to a list."""
    push = origin(body.outputs[slot]).op
    return origin(push.inputs[record(push.type).lists.entry])


def _reads(op: tf.Operation, index: str) -> bool:
    """Return whether an op reads an entry of a list, which one a tensor of some name says."""
    where = record(op.type).lists.reads
    return where is not None and origin(op.inputs[where]).name == index


def _is_invariant(body: Body, slot: int) -> bool:
    """Return whether what a body appends to a list is the same in each iteration, as in 2."""
    seen: set[str] = set()
    pending = [_pushed(body, slot)]
    while pending:
        tensor = origin(pending.pop())
        argument = body.slots.get(tensor.name)
        if argument is not None:
            if body.passed.get(argument) != argument or tensor.dtype == tf.variant:
                return False
            continue
        if tensor.op.name in seen:
            continue
        seen.add(tensor.op.name)
        if len(seen) > MOST_OPS or not (only_reads(tensor.op) or is_pure_op(tensor.op)):
            return False
        pending += tensor.op.inputs
    return True


def _is_read_for_its_shape(body: Body, residual: int) -> bool:
    """Return whether of what the gradient's body takes from a list it needs the shape, as in 3."""
    pop = origin(body.outputs[residual]).op
    return all(record(op.type).shape_only or record(op.type).folded_by_shape
               for op in body.graph.get_operations() if not record(op.type).passes_on
               and any(origin(read).op is pop for read in op.inputs))
