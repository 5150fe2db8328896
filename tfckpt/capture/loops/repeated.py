"""Search for loops and branches that may be recomputed: they may run twice, with the same inputs.

A loop may read variables (see `tfckpt.capture.loops.purity`). A copy of it in the backward finds
them as the loop did if each op that may write one of them ran before the loop, or can wait for
the copy. The latter are noted here and made to wait in `tfckpt.rewrite.passes.state_writes`; where
one must run before the backward reads what the loop computed, the loop is not recomputed. The same
holds of branches, of which one runs (`tf.cond`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture.loops.lists import Kept
from tfckpt.capture.loops.open_sizes import Known
from tfckpt.capture.loops.purity import Again, may_run_again
from tfckpt.capture.loops.segments import with_segments
from tfckpt.capture.shapes import uncaptured_inputs
from tfckpt.capture.variables import ANY, may_write
from tfckpt.ir.edits import traced
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Op, TensorId, ancestors
from tfckpt.ir.target import Target
from tfckpt.ops import record

_UNDER_XLA = ("under XLA copies are delayed at their inputs, and those of a loop may be lists, "
              "variables and numbers only")


def repeat_loops(graph: tf.Graph, operations: Sequence[tf.Operation], ops: tuple[Op, ...],
                 lists: dict[int, Kept], target: Target, fetched: Collection[TensorId],
                 known: Sequence[Known] = ()) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """Mark loops that may be recomputed as pure, and say why others may not.

    Those get their `Op.later_writes`.

    Args:
      graph: a FuncGraph, or an imported graph.
      operations: of the graph, in the order of `ops`.
      ops: what was captured of them.
      lists: what each loop keeps.
      target: what the step is planned for.
      fetched: results that leave the step.
      known: what is known of shapes, for the planned sizes and for others, where XLA has to be
        told open ones.

    Returns:
      The ops, and a line for each loop that is not counted, or not recomputed.
    """
    refused = [f"{ops[i].name}: what the loop keeps for each iteration is not counted: "
               f"{kept.unknown}" for i, kept in lists.items() if kept.unknown]
    found, whole = list(ops), []
    unsure = _unsure(graph)
    for i, kept in lists.items():
        loop = kept.loop
        if (loop is None or ops[i].region != FORWARD or kept.unknown
                or not any(kept.bytes.values())):
            continue
        again, waiting = _again(operations, ops, i, unsure)
        if again.refused:
            refused.append(f"{ops[i].name}: the loop is not recomputed: {again.refused}")
            continue
        whole.append(i)
        found[i] = dataclasses.replace(ops[i], pure=target.repeats_loops, later_writes=waiting)
    segmented, more = with_segments(operations, found, whole, fetched, not target.repeats_loops,
                                    known)
    if not target.repeats_loops:
        more = tuple(f"{segmented[i].name}: the loop is not recomputed: {_UNDER_XLA}"
                     for i in whole if not _has_segments(segmented[i])) + more
    return segmented, (*refused, *more)


def repeat_branches(graph: tf.Graph, operations: Sequence[tf.Operation], ops: tuple[Op, ...],
                    target: Target) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """Mark branches that may be recomputed as pure, and say why others may not.

    Those get their `Op.later_writes`.

    Args:
      graph: a FuncGraph, or an imported graph.
      operations: of the graph, in the order of `ops`.
      ops: what was captured of them.
      target: what the step is planned for.

    Returns:
      The ops, and a line for each reason why branches are not recomputed.
    """
    kept = {i: size for i, op in enumerate(ops) if record(op.type).chooses
            and op.branches is not None and op.region == FORWARD and (size := _kept_bytes(op))}
    found, why = list(ops), dict[str, list[int]]()
    unsure = _unsure(graph)
    for i in kept:
        again, waiting = _again(operations, ops, i, unsure)
        reason = again.refused or ("" if target.repeats_loops else _UNDER_XLA)
        if reason:
            why.setdefault(reason, []).append(i)
        else:
            found[i] = dataclasses.replace(ops[i], pure=True, later_writes=waiting)
    return tuple(found), tuple(
        f"{_first_and_more(ops, numbers, kept)}: branches are not recomputed, and what they keep "
        f"for the gradient stays: {reason}" for reason, numbers in why.items())


def _kept_bytes(op: Op) -> int:
    """Return the bytes that branches keep, results that they return among them."""
    kept = {op.shares.get(slot, slot) for slot, tensor in enumerate(op.outputs)
            if tensor.dtype == "variant"}
    return sum(op.outputs[slot].bytes or 0 for slot in sorted(kept))


def _first_and_more(ops: Sequence[Op], numbers: Sequence[int], kept: Mapping[int, int]) -> str:
    """Return the name of the op that keeps most, and how many others there are."""
    largest = traced(ops[max(numbers, key=lambda i: kept[i])].name)
    return largest + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")


def _again(operations: Sequence[tf.Operation], ops: Sequence[Op], index: int,
           unsure: frozenset[str]) -> tuple[Again, tuple[str, ...]]:
    """Return whether a loop or branches may run twice, and which writes have to wait for it."""
    again = may_run_again(operations[index], unsure)
    if ops[index].conditional:
        again = Again("it runs in one branch only")
    if again.refused or not again.reads:
        return again, ()
    wanted = frozenset((*again.reads, ANY))
    writers = [w for w, op in enumerate(operations)
               if not wanted.isdisjoint(may_write(op, unsure))]
    return _with_writers(ops, index, again, writers)


def _has_segments(op: Op) -> bool:
    return op.loop is not None and op.loop.segments is not None


def without_loops(graph: Graph, reason: str) -> Graph | None:
    """Return the same graph with loops and branches that may not be recomputed.

    Args:
      graph: the captured step; not changed.
      reason: why, as the new lines of `Graph.refused` say it.

    Returns:
      None where none may be recomputed as it is.
    """
    repeated = [op for op in graph.ops if record(op.type).has_bodies and (
        op.pure or _has_segments(op))]
    if not repeated:
        return None
    ops = tuple(dataclasses.replace(
        op, pure=False, loop=op.loop and dataclasses.replace(op.loop, segments=None))
        if record(op.type).has_bodies else op for op in graph.ops)
    said = tuple(f"{op.name}: the loop is not recomputed: {reason}" if op.loop is not None else
                 f"{traced(op.name)}: branches are not recomputed: {reason}" for op in repeated)
    return dataclasses.replace(graph, ops=ops, refused=(*graph.refused, *said))


def _with_writers(ops: Sequence[Op], loop: int, again: Again, writers: Sequence[int]
                  ) -> tuple[Again, tuple[str, ...]]:
    """Return what becomes of a loop or branches whose variables some ops may write.

    And the names of those of them that come later. What hands a result out of the step has waited
    for all writes, and is no part of the backward.
    """
    before = ancestors(ops, [loop])
    later = [w for w in writers if w not in before]
    read = {source for op in ops for source, _ in op.inputs}
    reading = [i for i, op in enumerate(ops) if op.region == BACKWARD
               and (i in read or not record(op.type).passes_on)
               and any(source == loop for source, _ in op.inputs)]
    needed = ancestors(ops, reading)
    for w in later:
        if w in needed or ops[w].region in (FORWARD, BACKWARD):
            return Again(f"{ops[w].name} may write a variable that the loop reads before the "
                         "backward does"), ()
    return again, tuple(ops[w].name for w in later)


def _unsure(graph: tf.Graph) -> frozenset[str]:
    """Arguments of a traced function that may be variables which it captures as well."""
    if not getattr(graph, "captures", None):
        return frozenset()
    return frozenset(t.op.name for t in uncaptured_inputs(graph) if t.dtype == tf.resource)
