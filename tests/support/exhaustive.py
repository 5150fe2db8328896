"""Exhaustive search over every increasing sequence of lower sets: an oracle for tests.

Visits every reachable triplet (L, t, m) and drops none but exact repeats, so that no domination
rule can be wrong in it.

Source: Kusumoto et al. 2019, section 4.1.
Limits: refuses more than 12 nodes; a graph of n independent nodes has 2^n lower sets.
"""

from __future__ import annotations

from benchmarks.paper_tables.lower_set_model import is_lower_set, paper_peak
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import boundary, weight

LARGEST = 12

Triplet = tuple[int, int, int]
"""(lower set, time recomputed, bytes kept)."""


def lower_sets(forward: ForwardGraph, budget: int, *, objective: str = "time") -> tuple[int, ...]:
    """Return the best increasing sequence of lower sets under equations (1) and (2).

    Args:
      forward: the graph, at most 12 nodes.
      budget: bytes that equation (2) may reach.
      objective: "time" for the minimum recomputation, "memory" for the most. Among equals the
        fewest bytes kept.

    Returns:
      Lower sets as bitmasks, increasing, the last one V; empty for a graph without nodes.

    Raises:
      PlanError: too many nodes, or an unknown objective.
      InfeasibleBudgetError: no sequence fits.

    Complexity: exponential.
    """
    if objective not in ("time", "memory"):
        raise PlanError(f"plan: unknown objective {objective!r}; choose 'time' or 'memory'")
    if not len(forward):
        return ()
    came_from = _visit(forward, budget)
    ends = [state for state in came_from if state[0] == forward.everything]
    if not ends:
        smallest = smallest_budget(forward)
        raise InfeasibleBudgetError(
            f"plan: no sequence of lower sets fits in {budget} bytes; the minimum budget is "
            f"{smallest} bytes", smallest)
    sign = 1 if objective == "time" else -1
    state = min(ends, key=lambda end: (sign * end[1], end[2]))
    sequence = []
    while state[0]:
        sequence.append(state[0])
        state = came_from[state]
    return tuple(reversed(sequence))


def all_lower_sets(forward: ForwardGraph) -> tuple[int, ...]:
    """Return every lower set but the empty one, by size, then by value.

    Raises:
      PlanError: more than 12 nodes.
    """
    if len(forward) > LARGEST:
        raise PlanError(f"plan: exhaustive takes at most {LARGEST} nodes, not {len(forward)}; "
                        "use approx_dp")
    masks = range(1, forward.everything + 1)
    return tuple(sorted((mask for mask in masks if is_lower_set(forward, mask)),
                        key=lambda mask: (mask.bit_count(), mask)))


def smallest_budget(forward: ForwardGraph) -> int:
    """Return the minimum budget in bytes for which `lower_sets` has an answer."""
    low, high = 0, paper_peak(forward, (forward.everything,)) if len(forward) else 0
    while low < high:
        middle = (low + high) // 2
        if any(state[0] == forward.everything for state in _visit(forward, middle)):
            high = middle
        else:
            low = middle + 1
    return high


def _visit(forward: ForwardGraph, budget: int) -> dict[Triplet, Triplet]:
    """Return every triplet that fits, with the first one found to lead to it."""
    family = all_lower_sets(forward)
    start: Triplet = (0, 0, 0)
    came_from: dict[Triplet, Triplet] = {start: start}
    by_set: dict[int, list[Triplet]] = {0: [start]}
    for larger in family:
        edge = boundary(forward, larger)
        room = budget - _beyond(forward, larger)
        states: list[Triplet] = []
        for smaller in (0, *family):
            if smaller == larger or smaller & ~larger or smaller not in by_set:
                continue
            part = larger & ~smaller
            twice = 2 * weight(forward.bytes, part)
            time = weight(forward.time, part & ~edge)
            kept = weight(forward.bytes, edge & ~smaller)
            for state in by_set[smaller]:
                new = (larger, state[1] + time, state[2] + kept)
                if state[2] + twice <= room and new not in came_from:
                    came_from[new] = state
                    states.append(new)
        by_set[larger] = states
    return came_from


def _beyond(forward: ForwardGraph, mask: int) -> int:
    """Terms (iii) and (iv) of equation (2): what a lower set needs above itself."""
    following = {w for v, after in enumerate(forward.successors) if mask >> v & 1
                 for w in after if not mask >> w & 1}
    beside = {v for w in following for v in forward.predecessors[w] if not mask >> v & 1}
    return sum(forward.bytes[v] for v in following) + sum(forward.bytes[v] for v in beside)
