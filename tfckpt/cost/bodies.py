"""What loops and branches allocate, besides their results, while their bodies run."""

from __future__ import annotations

from tfckpt.cost.kernel_copies import rearranged_bytes
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.ir.graph import Graph, Op, TensorId
from tfckpt.ops import record


def working_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes that an op's body, or the largest of its branches, holds at most.

    An iteration's results are counted as the loop's, and so is what its lists keep. What the
    gradient of branches holds has room in what it has read by then of what they kept.

    Args:
      graph: that the op belongs to.
      op: the op; one without a body holds nothing.
    """
    if op.branches is not None and _takes_out(graph, op):
        return 0
    return max(map(_peak, op.bodies), default=0)


def _peak(body: Graph) -> int:
    """Return the most bytes of temporary tensors that live at once, in the order of the body.

    What is taken out of a list or an optional is there before, and gone once it has been read.
    """
    root = roots(body)
    elsewhere = _counted_elsewhere(body, root)
    last = {root[source][slot]: i for i, op in enumerate(body.ops) for source, slot in op.inputs}
    size: dict[TensorId, int] = {}
    live = peak = 0
    for i, op in enumerate(body.ops):
        made = {(i, slot): t.bytes or 0 for slot, t in enumerate(op.outputs)
                if root[i][slot] == (i, slot) and (i, slot) not in elsewhere}
        dying = [t for t in dict.fromkeys(root[s][slot] for s, slot in op.inputs)
                 if last[t] == i and t in size]
        allocated = 0 if _takes_out(body, op) else sum(made.values())
        taken = _taken_over(op, made, [size[t] for t in dying])
        peak = max(peak, live + allocated - taken + working_bytes(body, op)
                   + rearranged_bytes(body, op) + op.workspace)
        size.update({t: n for t, n in made.items() if t in last})
        live += (sum(made[t] for t in made if t in last) if allocated else 0) - sum(
            map(size.pop, dying))
    return peak


def _takes_out(body: Graph, op: Op) -> bool:
    """Return whether an op hands out what is in a list or an optional."""
    return not record(op.type).lists.stacks and any(
        body.ops[i].outputs[slot].dtype == "variant" for i, slot in op.inputs)


def _taken_over(op: Op, made: dict[TensorId, int], dying: list[int]) -> int:
    """Return the bytes of a result for which the op takes over the buffer of an input that dies."""
    sizes = list(made.values())
    return sizes[0] if record(op.type).reuses_input and len(sizes) == 1 and sizes[0] in dying else 0


def _counted_elsewhere(body: Graph, root: list[tuple[TensorId, ...]]) -> frozenset[TensorId]:
    """Return what the body hands out, as it is or in a list or an optional."""
    found = {root[i][slot] for i, slot in body.fetches}
    for op in body.ops:
        known = record(op.type)
        put = op.inputs if known.wraps else () if known.lists.entry is None else (
            op.inputs[known.lists.entry],)
        found.update(root[i][slot] for i, slot in put)
    return frozenset(found - {RESIDENT})
