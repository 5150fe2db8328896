r"""Lower sets of a forward graph, as bitmasks.

A lower set is a set of nodes that contains every predecessor of its members. It is written as a
Python int: bit `i` is node `i` of the `ForwardGraph`. An increasing sequence L_1 < ... < L_k = V
stands for the canonical strategy: after computing V_i = L_i \ L_{i-1} in the forward, keep the
boundary of L_i and drop the rest; in the backward, recompute V_i from what was kept.

Source: Kusumoto et al. 2019, sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.errors import PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph

__all__ = ["boundary", "kept_storages", "nodes_of", "reach_lower_sets", "union", "weight"]


LARGEST = 20_000
"""Nodes for which all L^v are listed: n^2 / 2 bits, 25 MB."""


def nodes_of(mask: int) -> list[int]:
    """Return the nodes in a bitmask, ascending.

    Args:
      mask: bitmask of nodes, not negative.
    """
    nodes = []
    while mask:
        low = mask & -mask
        nodes.append(low.bit_length() - 1)
        mask ^= low
    return nodes


def weight(costs: Sequence[int], mask: int) -> int:
    """Return the sum of the costs of the nodes in a bitmask: M(S) of bytes, T(S) of times.

    Args:
      costs: of each node.
      mask: bitmask of nodes.
    """
    return sum(costs[node] for node in nodes_of(mask))


def union(neighbours: Sequence[Sequence[int]], mask: int) -> int:
    """Return all neighbours of the nodes in a bitmask, as a bitmask.

    Args:
      neighbours: of each node: its successors, or its predecessors.
      mask: bitmask of nodes.
    """
    result = 0
    for node in nodes_of(mask):
        for other in neighbours[node]:
            result |= 1 << other
    return result


def boundary(forward: ForwardGraph, mask: int) -> int:
    """Return the nodes of a lower set that some node outside needs, as a bitmask.

    Args:
      forward: the forward part of a step; not changed.
      mask: the lower set as a bitmask.
    """
    rest = forward.everything & ~mask
    return union(forward.predecessors, rest) & mask


def reach_lower_sets(forward: ForwardGraph) -> tuple[int, ...]:
    """Return for each node v the lower set L^v: v and everything it depends on.

    Args:
      forward: the forward part of a step; not changed.

    Returns:
      Bitmasks, by node.

    Raises:
      PlanError: more than `LARGEST` nodes.

    Source: Kusumoto et al. 2019, section 4.3 (the pruned family).
    """
    if len(forward) > LARGEST:
        raise PlanError(f"plan: the lower sets of at most {LARGEST} nodes are listed, not of "
                        f"{len(forward)}; use auto")
    reach: list[int] = []
    for node, needs in enumerate(forward.predecessors):
        mask = 1 << node
        for other in needs:
            mask |= reach[other]
        reach.append(mask)
    return tuple(reach)


def kept_storages(forward: ForwardGraph, lower_sets: Sequence[int]) -> frozenset[int]:
    """Return the storages of the joint graph that the canonical strategy keeps for the backward.

    These are the storages of U_k, the union of the boundaries. Membership only: a caller that
    needs an order sorts.

    Args:
      forward: the forward part of a step; not changed.
      lower_sets: bitmasks of an increasing sequence, the last one V.
    """
    kept = 0
    for mask in lower_sets:
        kept |= boundary(forward, mask)
    return frozenset(storage for node in nodes_of(kept) for storage in forward.storages[node])
