r"""Dynamic programming over a family of lower sets; `approx_dp` takes L^v for each node v.

A state (L, t, m) says: some sequence ends in L, recomputes for time t and keeps m bytes. A step
to a larger set L' adds T(V' \ boundary(L')) to t and M(boundary(L') \ L) to m, and is allowed if
m + 2 M(V') + M(d+(L') \ L') + M(d-(d+(L')) \ L') fits the budget, V' being L' \ L.

Domination. Time-centric, a state is dropped if another of the same L has t' <= t and m' <= m.
Memory-centric looks for the largest t, so a state is kept unless another has t' >= t and
m' <= m; the rule that the paper gives (section 4.2, last paragraph) would lose the optimum.

The cost of a step is computed for all pairs of sets at once, as products of 0/1 matrices, and the
states of all sets before L' are advanced together.

Source: Kusumoto et al. 2019, algorithm 1, section 4.3 (the family), section 4.4 (memory-centric).
Limits: optimal for the family and for that paper's equations (1) and (2), which know nothing of
liveness. A graph without a node that all paths pass has few nested L^v and so few choices.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import reach_lower_sets

OBJECTIVES = ("time", "memory")

UNREACHED = np.iinfo(np.int64).max

States = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Undominated states of one set: times, and bytes kept."""

LARGEST = 2_000
"""Nodes of a graph; every pair of lower sets takes some 40 bytes, 0.2 GB in all."""

LARGEST_TOTAL = 1 << 59  # bytes of a graph, so that no sum overflows
LARGEST_BUDGET = 1 << 62


@dataclasses.dataclass(frozen=True)
class Steps:
    """The costs of every step between two sets of a family.

    Row 0 stands for the empty set, row `i + 1` and column `i` for `family[i]`.

    Attributes:
      family: the lower sets, by size, then by value; the last is V.
      allowed: whether the column contains the row and more.
      need: bytes of the step above those kept before it.
      time: time that the step adds.
      kept: bytes that the step adds to those kept.
    """

    family: tuple[int, ...]
    allowed: np.ndarray
    need: np.ndarray
    time: np.ndarray
    kept: np.ndarray


def lower_sets(forward: ForwardGraph, budget: int, *, objective: str = "time") -> tuple[int, ...]:
    """Return the best increasing sequence drawn from {L^v} and V.

    Args:
      forward: the forward part of a step; not changed.
      budget: bytes that equation (2) may reach.
      objective: "time" for the minimum recomputation, "memory" for the most (section 4.4: coarse
        segments leave the most to liveness analysis). Among equals the fewest bytes kept.

    Returns:
      Lower sets as bitmasks, increasing, the last one V; empty for a graph without nodes.

    Raises:
      PlanError: unknown objective, or more than `LARGEST` nodes.
      InfeasibleBudgetError: no sequence of the family fits.

    Complexity: O(T(V) n^2) for n nodes, vectorised; 0.1 s or so at 160 nodes.
    """
    return search(pruned_steps(forward), budget, objective=objective)


def smallest_budget(forward: ForwardGraph) -> int:
    """Return the minimum budget in bytes for which `lower_sets` has an answer.

    Args:
      forward: the forward part of a step; 0 bytes are enough for one without nodes.

    Raises:
      PlanError: more than `LARGEST` nodes, or more than `LARGEST_TOTAL` bytes.

    Complexity: O(n^2 log M(V)).
    """
    return smallest(pruned_steps(forward))


@functools.lru_cache(maxsize=8)
def pruned_steps(forward: ForwardGraph) -> Steps:
    """Return the steps between the sets L^v (section 4.3) and V.

    Args:
      forward: the forward part of a step; not changed.

    Raises:
      PlanError: more than `LARGEST` nodes, or more than `LARGEST_TOTAL` bytes.
    """
    if len(forward) > LARGEST:
        raise PlanError(f"plan: approx_dp takes at most {LARGEST} nodes, not {len(forward)}; "
                        "use auto")
    return steps_between(forward, reach_lower_sets(forward))


def steps_between(forward: ForwardGraph, masks: tuple[int, ...]) -> Steps:
    """Price the steps of any family of lower sets; V is added, the empty set is left out.

    Args:
      forward: the forward part of a step; not changed.
      masks: lower sets as bitmasks, in any order.

    Returns:
      What each step from one of these sets, or the empty set, to a larger one costs.

    Raises:
      PlanError: the graph has more than `LARGEST_TOTAL` bytes.

    Complexity: O(k^2 n) for k sets and n nodes.
    """
    if sum(forward.bytes) > LARGEST_TOTAL:
        raise PlanError(f"plan: the forward graph has more than {LARGEST_TOTAL} bytes")
    family = tuple(sorted({*masks, forward.everything} - {0},
                          key=lambda mask: (mask.bit_count(), mask)))
    count = len(forward)
    inside = _rows(family, count)
    size = np.array(forward.bytes, dtype=np.int64)
    duration = np.array(forward.time, dtype=np.int64)
    feeds = np.zeros((count, count), dtype=np.float32)
    for node, others in enumerate(forward.successors):
        feeds[node, list(others)] = 1
    outside = ~inside
    edge = inside & (outside.astype(np.float32) @ feeds.T > 0)
    following = outside & (inside.astype(np.float32) @ feeds > 0)
    beside = outside & (following.astype(np.float32) @ feeds.T > 0)
    dropped = inside & ~edge

    total = inside @ size
    rows = np.vstack([np.zeros((1, count), dtype=bool), inside])
    weights = rows.astype(np.int64)
    after_step = 2 * total + following @ size + beside @ size
    extra = rows.astype(np.float32) @ outside.T.astype(np.float32)
    smaller = rows.sum(axis=1)[:, None] < inside.sum(axis=1)[None, :]
    return Steps(
        family=family,
        allowed=(extra == 0) & smaller,
        need=after_step[None, :] - 2 * np.concatenate([[0], total])[:, None],
        time=(dropped @ duration)[None, :] - (weights * duration) @ dropped.T.astype(np.int64),
        kept=(edge @ size)[None, :] - (weights * size) @ edge.T.astype(np.int64),
    )


def _rows(family: tuple[int, ...], count: int) -> NDArray[np.bool_]:
    """Return the sets as a boolean matrix of one row each."""
    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in family), np.uint8)
    packed = packed.reshape(len(family), width)
    return np.unpackbits(packed, axis=1, bitorder="little", count=count).astype(bool)


def smallest(steps: Steps) -> int:
    """Return the minimum budget in bytes for which `search` has an answer.

    Args:
      steps: of a family of lower sets; 0 bytes are enough for an empty one.
    """
    if not steps.family:
        return 0
    high = int(steps.need[0, -1])  # one segment
    low = int(np.where(steps.allowed, steps.need, UNREACHED).min())
    while low < high:
        middle = (low + high) // 2
        if _fits(steps, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _fits(steps: Steps, budget: int) -> bool:
    """Return whether some sequence fits; per set only the fewest kept bytes matter."""
    size = len(steps.family)
    fewest = np.full(size + 1, UNREACHED)
    fewest[0] = 0
    room = budget - steps.need
    for column in range(size):
        before = fewest[:-1]
        rows = np.flatnonzero(steps.allowed[:-1, column] & (before <= room[:-1, column]))
        if len(rows):
            fewest[column + 1] = (before[rows] + steps.kept[rows, column]).min()
    return bool(fewest[size] < UNREACHED)


def search(steps: Steps, budget: int, *, objective: str = "time") -> tuple[int, ...]:
    """Return the best sequence by algorithm 1 over the family of `steps`; see `lower_sets`.

    Args:
      steps: of a family of lower sets.
      budget: bytes that equation (2) may reach.
      objective: "time" for the minimum recomputation, "memory" for the most.

    Raises:
      PlanError: unknown objective.
      InfeasibleBudgetError: no sequence of the family fits.
    """
    if objective not in OBJECTIVES:
        raise PlanError(f"plan: unknown objective {objective!r}; choose one of {OBJECTIVES}")
    if not steps.family:
        return ()
    budget = min(budget, LARGEST_BUDGET)
    states = _forward_pass(steps, budget, objective)
    if len(states[-1][0]) == 0:
        minimum = smallest(steps)
        raise InfeasibleBudgetError(
            f"plan: no sequence of lower sets fits in {budget} bytes; the minimum budget for this "
            f"solver is {minimum} bytes", minimum)
    return _trace_back(steps, budget, states)


def _forward_pass(steps: Steps, budget: int, objective: str) -> list[States]:
    """Return for each set (the empty one first) its undominated states: times and bytes kept.

    The best state comes first.
    """
    size = len(steps.family)
    capacity = 1024
    time, kept, owner = (np.zeros(capacity, dtype=np.int64) for _ in range(3))
    used = 1
    states = [(time[:1].copy(), kept[:1].copy())]
    best = np.full(int(steps.time[0].max()) + 1, UNREACHED)
    room = budget - steps.need
    for column in range(size):
        allowed = np.where(steps.allowed[:, column], room[:, column], -1)
        rows = np.flatnonzero(kept[:used] <= allowed[owner[:used]])
        source = owner[rows]
        reached = time[rows] + steps.time[source, column]
        best.fill(UNREACHED)
        np.minimum.at(best, reached, kept[rows] + steps.kept[source, column])
        front = _front(best, objective)
        states.append((front, best[front]))
        total = used + len(front)
        if total > capacity:
            capacity = 2 * total
            time, kept, owner = (np.resize(a, capacity) for a in (time, kept, owner))
        time[used:total], kept[used:total], owner[used:total] = front, best[front], column + 1
        used = total
    return states


def _front(best: NDArray[np.int64], objective: str) -> NDArray[np.int64]:
    """Return the times whose state no other dominates, the best time first."""
    values = best if objective == "time" else best[::-1]
    lowest = np.minimum.accumulate(values)
    keep = np.flatnonzero(np.concatenate([values[:1] < UNREACHED, lowest[1:] < lowest[:-1]]))
    return keep if objective == "time" else len(best) - 1 - keep


def _trace_back(steps: Steps, budget: int, states: list[States]) -> tuple[int, ...]:
    """Return the sequence that leads to the best state of V; the smallest predecessor on a tie."""
    column = len(steps.family) - 1
    time, kept = int(states[-1][0][0]), int(states[-1][1][0])
    sequence = []
    while column >= 0:
        sequence.append(steps.family[column])
        for row in range(column + 1):
            if not steps.allowed[row, column]:
                continue
            t, m = time - int(steps.time[row, column]), kept - int(steps.kept[row, column])
            if m + int(steps.need[row, column]) > budget:
                continue
            times, bytes_kept = states[row]
            if np.any((times == t) & (bytes_kept == m)):
                time, kept, column = t, m, row - 1
                break
        else:
            raise AssertionError("a state without a predecessor")
    return tuple(reversed(sequence))
