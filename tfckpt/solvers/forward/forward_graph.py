"""`ForwardGraph`: the recomputable forward part of a step, as the papers' solvers see it.

The papers on recomputation price a graph of forward values only: a vertex is one value with
`M_v` bytes and `T_v` time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

TIME_UNITS = 4096
"""Times that are not small integers are scaled to about this total: a DP is indexed by time."""

LARGEST_KEPT_TOTAL = 65536


@dataclasses.dataclass(frozen=True)
class ForwardGraph:
    """The recomputable forward part of a step: one node is one unit of keep-or-recompute.

    Nodes are indexed in a topological order: every edge goes from a lower to a higher index.
    All tuples have one entry a node.

    Attributes:
      names: unique names.
      bytes: `M_v`, the bytes of the node's `storages`.
      time: `T_v`, integers, in a unit of their own (see `integer_times`).
      successors: nodes that need this one, ascending.
      predecessors: nodes that this one needs, ascending.
      members: vertices of the joint `CostGraph` that were merged into the node, ascending.
      storages: storages of the joint `CostGraph` that the node hands on to other nodes or to
        the backward, ascending; keeping the node means keeping these.

    Source: Kusumoto et al. 2019, section 2 (the graph G, `M_v` and `T_v`).
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    time: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]
    storages: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def everything(self) -> int:
        """V as a bitmask: bit `i` is node `i`."""
        return (1 << len(self.names)) - 1


def integer_times(times: Sequence[float]) -> tuple[int, ...]:
    """Return times as integers.

    Small integers (total at most 65,536) stay what they are; anything else is scaled to a total
    of about 4,096 units, where a positive time becomes at least 1 and zero stays zero.

    Args:
      times: not negative, in any unit.
    """
    total = math.fsum(times)
    if total <= LARGEST_KEPT_TOTAL and all(float(time).is_integer() for time in times):
        return tuple(int(time) for time in times)
    scale = TIME_UNITS / total
    return tuple(max(1, round(time * scale)) if time > 0 else 0 for time in times)


def neighbours(count: int, edges: Iterable[tuple[int, int]]
               ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return successors and predecessors of each node, ascending; loops are left out.

    Args:
      count: nodes of the graph.
      edges: (from, to) as node indices; may repeat.
    """
    successors: list[set[int]] = [set() for _ in range(count)]
    predecessors: list[set[int]] = [set() for _ in range(count)]
    for u, v in edges:
        if u != v:
            successors[u].add(v)
            predecessors[v].add(u)
    return (tuple(tuple(sorted(nodes)) for nodes in successors),
            tuple(tuple(sorted(nodes)) for nodes in predecessors))
