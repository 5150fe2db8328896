"""The bytes that loops and branches hold while they run, and in how many requests."""

from __future__ import annotations

import functools
from typing import cast

from tfckpt.cost.bodies.orders import growing, newest, oldest
from tfckpt.cost.bodies.runs import Runs, running, several, states
from tfckpt.cost.bodies.tensors import Tensors, peak, takes_out
from tfckpt.cost.kernel_copies import kernel_workspace, rearranged_bytes
from tfckpt.ir.edits import TAKES
from tfckpt.ir.graph import FORWARD, Graph, Op
from tfckpt.ops import record


def working_bytes(graph: Graph, op: Op, kernels_by: str = "") -> int:
    """Return the bytes that an op's body, or the largest of its branches, holds at most.

    An iteration's results are counted as the loop's, and so is what its lists keep. Iterations that
    wait for little of what the one before computes run at the same time; in the forward they do so
    before the lists are full, and count as far as they hold more than what fills these. Together
    they hold no more than each by itself where nothing that it takes out of lists is gone yet: what
    becomes of an entry waits until others have theirs. What the gradient of branches holds has room
    in what it has read by then of what they kept; more than that counts. A state is there, as the
    iteration before has left it, until it is read for the last time, and then as this one hands it
    on: a loop's result has the memory of what it begins with, and the rest counts here.

    Args:
      graph: that the op belongs to.
      op: the op; one without a body holds nothing.
      kernels_by: whose kernels compute convolutions and products (`Target.kernels_by`).
    """
    told = cast("tuple[int, ...]", op.attrs.get(TAKES, ()))[-len(op.bodies):]  # no condition's
    begins = states(op)
    handed = sum(op.outputs[slot].bytes or 0 for slot in begins)
    given = () if op.loop is None else op.loop.arguments
    most = max((takes + handed if takes else _held(Runs(body, kernels_by, given, begins))
                for body, takes in zip(
                    op.bodies, told or (0,) * len(op.bodies), strict=True)), default=0)
    if op.loop is not None and op.loop.at_once > 1 and given:
        count = op.loop.at_once
        together = _held(Runs(op.loop.body, kernels_by, given, begins, count,
                              op.region == FORWARD))
        alone = _held(Runs(op.loop.body, kernels_by, among=True))  # and states, old and new
        most = max(most, min(together, count * alone + 2 * handed))
    if record(op.type).chooses and takes_out(graph, op):
        most -= sum(graph.ops[i].outputs[slot].bytes or 0 for i, slot in op.inputs
                    if graph.ops[i].outputs[slot].dtype == "variant")
    return max(most - handed, 0)


def requests_of(op: Op, taken: int) -> int:
    """Return in how many requests an op's bodies allocate what they take, at least.

    Args:
      op: of a graph; one without bodies allocates all at once.
      taken: bytes.
    """
    if not op.bodies:
        return 1
    return max(1 if op.loop is None else op.loop.trips, taken // max(_largest(op), 1))


def _largest(op: Op) -> int:
    """Return the bytes of the largest tensor that an op's bodies make."""
    return max((max(_largest(inner), inner.workspace, *(t.bytes or 0 for t in inner.outputs))
                for body in op.bodies for inner in body.ops if inner.outputs), default=0)


@functools.lru_cache(maxsize=256)
def _held(runs: Runs) -> int:
    """Return the bytes that a body holds at most, or several iterations of it, states included."""
    runs = running(runs)
    body, count = runs.body, len(runs.body.ops)
    extra = [_extra(body, op, runs.kernels_by) for op in body.ops]
    if runs.at_once == 1:
        return peak(body, Tensors(runs, among=runs.among), extra, range(count))
    orders = (oldest, newest) if runs.fills else (oldest, newest, growing)
    together, needed, of = several(runs)
    tensors, extra = Tensors(together, runs.fills), [extra[i] for i in of]
    return max(peak(together.body, tensors, extra, order(tensors, needed)) for order in orders)


def _extra(body: Graph, op: Op, kernels_by: str) -> int:
    """Return the bytes that an op of a body allocates besides its results while it runs."""
    return (working_bytes(body, op, kernels_by) + rearranged_bytes(body, op)
            + kernel_workspace(body, op, kernels_by) + op.workspace)
