"""Lower sets of a forward graph, and what a sequence of them costs under the paper's model.

A lower set is a set of nodes that holds every predecessor of its members. It is written as a
Python int: bit `i` is node `i` of the `ForwardGraph`. An increasing sequence L_1 < ... < L_k = V
stands for the canonical strategy: after computing V_i = L_i \\ L_{i-1} in the forward, keep the
boundary of L_i and drop the rest; in the backward, recompute V_i from what was kept.

Source: Kusumoto et al. 2019, sections 2 and 3. Equations (1) and (2) are that paper's cost
model; what a schedule really holds is what `tfckpt.plan.simulate` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.cost.with_backward import ForwardGraph
from tfckpt.errors import PlanError

__all__ = ["boundary", "check_lower_sets", "is_lower_set", "kept_storages", "nodes_of",
           "paper_overhead", "paper_peak", "reach_lower_sets", "weight"]


LARGEST = 20_000
"""Nodes for which all L^v are listed: n^2 / 2 bits, 25 MB."""


def nodes_of(mask: int) -> list[int]:
    """The nodes in a bitmask, ascending."""
    nodes = []
    while mask:
        low = mask & -mask
        nodes.append(low.bit_length() - 1)
        mask ^= low
    return nodes


def weight(costs: Sequence[int], mask: int) -> int:
    """Sum of the costs of the nodes in a bitmask: M(S) of bytes, T(S) of times."""
    return sum(costs[node] for node in nodes_of(mask))


def _union(neighbours: Sequence[Sequence[int]], mask: int) -> int:
    """All neighbours of the nodes in a bitmask."""
    result = 0
    for node in nodes_of(mask):
        for other in neighbours[node]:
            result |= 1 << other
    return result


def is_lower_set(forward: ForwardGraph, mask: int) -> bool:
    """Whether no edge leads into the set from outside."""
    if not 0 <= mask <= forward.everything:
        return False
    return not _union(forward.predecessors, mask) & ~mask


def boundary(forward: ForwardGraph, mask: int) -> int:
    """The nodes of a lower set that some node outside needs, as a bitmask."""
    rest = forward.everything & ~mask
    return _union(forward.predecessors, rest) & mask


def reach_lower_sets(forward: ForwardGraph) -> tuple[int, ...]:
    """For each node v the lower set L^v: v and everything it depends on.

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


def check_lower_sets(forward: ForwardGraph, lower_sets: Sequence[int]) -> None:
    """Raises `PlanError` unless the sets increase strictly, are lower sets and end in V.

    The sequence of a graph without nodes is empty.
    """
    previous = 0
    for index, mask in enumerate(lower_sets):
        if not is_lower_set(forward, mask):
            raise PlanError(f"plan: set {index} of the sequence is not a lower set: "
                            "it lacks a predecessor of one of its nodes")
        if previous & ~mask or previous == mask:
            raise PlanError(f"plan: set {index} of the sequence does not contain the one before "
                            "it and more; lower sets must increase")
        previous = mask
    if previous != forward.everything:
        raise PlanError("plan: the sequence of lower sets does not end in the whole graph")


def kept_storages(forward: ForwardGraph, lower_sets: Sequence[int]) -> frozenset[int]:
    """Storages of the joint graph that the canonical strategy keeps for the backward.

    These are the storages of U_k, the union of the boundaries. Membership only: a caller that
    needs an order sorts.
    """
    kept = 0
    for mask in lower_sets:
        kept |= boundary(forward, mask)
    return frozenset(storage for node in nodes_of(kept) for storage in forward.storages[node])


def paper_overhead(forward: ForwardGraph, lower_sets: Sequence[int]) -> int:
    """Time of what the canonical strategy computes again: equation (1).

    Returns:
      T(V \\ U_k), in the unit of `ForwardGraph.time`.
    """
    total = previous = 0
    for mask in lower_sets:
        total += weight(forward.time, mask & ~previous & ~boundary(forward, mask))
        previous = mask
    return total


def paper_peak(forward: ForwardGraph, lower_sets: Sequence[int]) -> int:
    """Bytes that the canonical strategy needs in the backward: the maximum of equation (2).

    For each i: M(U_{i-1}) + 2 M(V_i) + M(d+(L_i) \\ L_i) + M(d-(d+(L_i)) \\ L_i), where d+ and d-
    are the successors and predecessors of a set.
    """
    peak = kept = previous = 0
    for mask in lower_sets:
        following = _union(forward.successors, mask) & ~mask
        beside = _union(forward.predecessors, following) & ~mask
        need = (weight(forward.bytes, kept) + 2 * weight(forward.bytes, mask & ~previous)
                + weight(forward.bytes, following) + weight(forward.bytes, beside))
        peak = max(peak, need)
        kept |= boundary(forward, mask)
        previous = mask
    return peak
