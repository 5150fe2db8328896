"""The cost of a sequence of lower sets under the model of Kusumoto et al. 2019, and a checker.

Sequences are written as in `tfckpt.solvers.forward.lower_sets`. Equations (1) and (2) are that
paper's cost model; for the memory that a schedule really takes see `tfckpt.simulate.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfckpt.errors import PlanError
from tfckpt.solvers import chen
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import boundary, union, weight


def is_lower_set(forward: ForwardGraph, mask: int) -> bool:
    """Return whether no edge leads into the set from outside."""
    if not 0 <= mask <= forward.everything:
        return False
    return not union(forward.predecessors, mask) & ~mask


def check_lower_sets(forward: ForwardGraph, lower_sets: Sequence[int]) -> None:
    """Raise `PlanError` unless the sets increase strictly, are lower sets and end in V.

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
    """Return bytes that the canonical strategy needs in the backward: the maximum of equation (2).

    For each i: M(U_{i-1}) + 2 M(V_i) + M(d+(L_i) \\ L_i) + M(d-(d+(L_i)) \\ L_i), where d+ and d-
    are the successors and predecessors of a set.
    """
    peak = kept = previous = 0
    for mask in lower_sets:
        following = union(forward.successors, mask) & ~mask
        beside = union(forward.predecessors, following) & ~mask
        need = (weight(forward.bytes, kept) + 2 * weight(forward.bytes, mask & ~previous)
                + weight(forward.bytes, following) + weight(forward.bytes, beside))
        peak = max(peak, need)
        kept |= boundary(forward, mask)
        previous = mask
    return peak


def segmentations(forward: ForwardGraph, growth: float = 0.01) -> Iterator[tuple[int, ...]]:
    """Yield what `chen.lower_sets` returns as its budget b grows from 0 until one segment is left.

    Appendix B of Kusumoto et al. 2019 names no b; Chen et al. 2016 search for the best. A
    caller prices each of these and takes the one it likes: any b gives one of them, or one that
    a b at most `growth` larger gives.

    Complexity: O(log(M(V)) / growth) times O(n + edges).
    """
    found: tuple[int, ...] = ()
    budget = 0
    while len(forward) and len(found) != 1:
        previous, found = found, chen.lower_sets(forward, budget)
        if found != previous:
            yield found
        sizes = [weight(forward.bytes, mask & ~before)
                 for before, mask in zip((0, *found), found, strict=False)]
        # no smaller b gives another answer than this one
        fullest = min((size for size in sizes if size > budget), default=0)
        budget = max(fullest, int(budget * (1 + growth)))
