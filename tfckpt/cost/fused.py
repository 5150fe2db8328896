"""Element-wise ops that XLA computes with what reads them: one vertex, with nothing in between.

XLA makes one loop of such a chain and of the reduction at its end, so that only what comes out is
ever in memory: of softmax's gradient one tensor, not three. Here an op joins the group of its
readers where all of them are in one group, and in its region. One whose readers lie in several
groups, or that the backward reads as well, stays a vertex, which may be kept; XLA may compute it
several times all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfckpt.cost.views import fuses, is_element_wise
from tfckpt.graph import Graph, TensorId
from tfckpt.ops import record


def fused_ops(graph: Graph, anchors: Sequence[int], readers: Sequence[Sequence[int]],
              root: Sequence[tuple[TensorId, ...]], fetched: Collection[TensorId]
              ) -> dict[int, int]:
    """Return for each op that XLA computes with its readers the anchor, the last of its group.

    Args:
      anchors: ops that would be vertices, ascending.
      readers: as `Graph.consumers`.
      root: the tensor whose memory each tensor lies in (`tfckpt.cost.storage.roots`).
      fetched: tensors that leave the step.
    """
    found: dict[int, int] = {}
    inside = frozenset(anchors)
    for i in reversed(anchors):
        if not is_element_wise(graph.ops[i]) or (i, 0) in fetched:
            continue
        group = _group(graph, i, inside, readers, root, found)
        if group is not None:
            found[i] = group
    return found


def _group(graph: Graph, i: int, anchors: Collection[int], readers: Sequence[Sequence[int]],
           root: Sequence[tuple[TensorId, ...]], found: Mapping[int, int]) -> int | None:
    """Return the anchor of the one group that all readers of an op belong to; None if there are
    several, or one that does not fuse."""
    group: int | None = None
    pending = [(i, 0)]
    while pending:
        tensor = pending.pop()
        for r in readers[tensor[0]]:
            reader = graph.ops[r]
            slots = [n for n, read in enumerate(reader.inputs) if read == tensor]
            known = record(reader.type)
            if not slots or known.shape_only:
                continue
            if r not in anchors and (known.aliases or root[r] == ((i, 0),)):
                pending += [(r, n) for n in slots] if known.aliases else [(r, 0)]
                continue
            if (r not in anchors or reader.region != graph.ops[i].region
                    or not fuses(graph.ops[i], reader)):
                return None
            if group not in (None, found.get(r, r)):
                return None
            group = found.get(r, r)
    return group
