"""Element-wise ops that XLA computes with what reads them: one vertex, with nothing in between.

XLA makes one loop of such a chain and of the reduction at its end, so that only what comes out is
ever in memory: of softmax's gradient one tensor, not three. Here an op joins the group of its
readers where all of them are in one group, and in its region. One whose readers lie in several
groups, or that the backward reads as well, stays a vertex, which may be kept; XLA may compute it
several times all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfckpt.cost.views import fuses, is_element_wise, is_written, read_through
from tfckpt.ir.graph import Graph, TensorId
from tfckpt.ops import record


def fused_ops(graph: Graph, anchors: Sequence[int], readers: Sequence[Sequence[int]],
              root: Sequence[tuple[TensorId, ...]], fetched: Collection[TensorId],
              in_memory: Mapping[str, int]) -> dict[int, int]:
    """Return for each op that XLA computes with its readers the anchor, the last of its group.

    Args:
      graph: the captured step.
      anchors: ops that would be vertices, ascending.
      readers: as `Graph.consumers`.
      root: the tensor whose memory each tensor lies in (`tfckpt.cost.storage.roots`).
      fetched: tensors that leave the step.
      in_memory: names of ops that are known to be computed by themselves, and their elements.
    """
    found: dict[int, int] = {}
    inside = frozenset(anchors)
    for i in reversed(anchors):
        op = graph.ops[i]
        if not is_element_wise(op) or (i, 0) in fetched or is_written(op, in_memory):
            continue
        group = _group(graph, i, inside, readers, root, found)
        if group is not None:
            found[i] = group
    return found


def _group(graph: Graph, i: int, anchors: Collection[int], readers: Sequence[Sequence[int]],
           root: Sequence[tuple[TensorId, ...]], found: Mapping[int, int]) -> int | None:
    """Return the anchor of the one group that all readers of an op are in.

    None if they are in several, or one of them is in none.
    """
    op = graph.ops[i]
    _, consumers = read_through(graph, readers, (i, 0), lambda r: r not in anchors and (
        record(graph.ops[r].type).aliases or root[r] == ((i, 0),)))
    if not all(r in anchors and graph.ops[r].region == op.region and fuses(op, graph.ops[r])
               for r in consumers):
        return None
    groups = {found.get(r, r) for r in consumers}
    return groups.pop() if len(groups) == 1 else None
