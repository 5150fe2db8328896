"""Search for loops that may be recomputed: they may run twice, and no input has changed.

A loop may read variables (see `tfckpt.capture.loops.purity`). A copy of it in the backward finds
them as the loop did if each op that may write one of them ran before the loop, or can wait for
the copy. The latter are noted here and made to wait in `tfckpt.rewrite.passes.state_writes`; where
one must run before the backward reads what the loop computed, the loop is not recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import tensorflow as tf

from tfckpt.capture.loops.lists import Kept
from tfckpt.capture.loops.open_sizes import Known
from tfckpt.capture.loops.purity import Again, may_loop_again
from tfckpt.capture.loops.segments import with_segments
from tfckpt.capture.shapes import uncaptured_inputs
from tfckpt.capture.variables import ANY, may_write
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Op, TensorId, ancestors
from tfckpt.ir.target import Target
from tfckpt.ops import record

_UNDER_XLA = ("under XLA copies are delayed at their inputs, and those of a loop may be lists, "
              "variables and numbers only")


def repeat_loops(graph: tf.Graph, operations: Sequence[tf.Operation], ops: tuple[Op, ...],
                 lists: dict[int, Kept], target: Target, fetched: Collection[TensorId],
                 known: Sequence[Known] = ()) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """Mark loops that may be recomputed as pure, and say why others may not.

    Those get their `Loop.later_writes`.

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
        again = may_loop_again(operations[i], unsure)
        if ops[i].conditional:
            again = Again("it runs in one branch only")
        waiting: tuple[str, ...] = ()
        if not again.refused and again.reads:
            wanted = frozenset((*again.reads, ANY))
            writers = [w for w, op in enumerate(operations)
                       if not wanted.isdisjoint(may_write(op, unsure))]
            again, waiting = _with_writers(ops, i, again, writers)
        if again.refused:
            refused.append(f"{ops[i].name}: the loop is not recomputed: {again.refused}")
            continue
        whole.append(i)
        found[i] = dataclasses.replace(ops[i], pure=target.repeats_loops,
                                       loop=dataclasses.replace(loop, later_writes=waiting))
    segmented, more = with_segments(operations, found, whole, fetched, not target.repeats_loops,
                                    known)
    if not target.repeats_loops:
        more = tuple(f"{segmented[i].name}: the loop is not recomputed: {_UNDER_XLA}"
                     for i in whole if not _has_segments(segmented[i])) + more
    return segmented, (*refused, *more)


def _has_segments(op: Op) -> bool:
    return op.loop is not None and op.loop.segments is not None


def without_loops(graph: Graph, reason: str) -> Graph | None:
    """Return the same graph with loops that may not be recomputed; None where none may.

    Args:
      graph: the captured step; not changed.
      reason: why, as the new lines of `Graph.refused` say it.
    """
    loops = [op.name for op in graph.ops if record(op.type).is_loop and (
        op.pure or _has_segments(op))]
    if not loops:
        return None
    ops = tuple(dataclasses.replace(
        op, pure=False, loop=op.loop and dataclasses.replace(op.loop, segments=None))
        if record(op.type).is_loop else op for op in graph.ops)
    said = tuple(f"{name}: the loop is not recomputed: {reason}" for name in loops)
    return dataclasses.replace(graph, ops=ops, refused=(*graph.refused, *said))


def _with_writers(ops: Sequence[Op], loop: int, again: Again, writers: Sequence[int]
                  ) -> tuple[Again, tuple[str, ...]]:
    """Return what becomes of a loop whose variables some ops may write.

    And the names of those of them that come later.
    """
    before = ancestors(ops, [loop])
    later = [w for w in writers if w not in before]
    reading = [i for i, op in enumerate(ops) if op.region == BACKWARD
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
