r"""Dynamic programming over all lower sets, by walking from set to set one node at a time.

The search goes from V back to the empty set. A state (L, n, g) says: what follows L can be done
if n bytes are left beyond those kept at L, and keeps values worth time g. It follows from a
segment V' = L' \ L and a state (L', n', g'):

  n = max(2 M(V') + (iii) + (iv) of L', n' + M(boundary(L') \ L)),
  g = g' + T(boundary(L') \ L).

At the empty set n is the peak of equation (2), and the time recomputed, equation (1), is
T(V) - g. Since n and g do not depend on the budget, the minimum n is the smallest budget.

One step from every L' to every smaller L would be a step for each pair of nested sets. Instead
*walkers* (partial segments) leave L' and drop one node at a time. At a set X, a walker stores what
its n and g will depend on:

  1. the nodes of boundary(L') that are still in X: those dropped have been added to n' and g';
  2. 2 M(L') + (iii) + (iv), n' and g' so far.

Walkers that agree in X and (1) differ only in (2), and a walker is dropped if another is no worse
in all of (2). Far from L' nothing is left of (1), and many states L' lead to few walkers;
this is what makes tens of thousands of lower sets feasible. One level of the lattice (all lower
sets of one size) is advanced at a time, vectorised.

Domination. A state is dropped if another of the same L has no larger n and, time-centric, no
smaller g; memory-centric wants the most recomputation, so there it is no *larger* g (the rule of
section 4.2 would lose the memory-centric optimum).

Bounds. A state is also dropped if no sequence that ends in L fits into the budget together with
its n, or if even the best such sequence would give a worse result than one already known
(`exact_bounds`).

Source: Kusumoto et al. 2019, section 4.2 (the states, domination), section 4.4 (memory-centric).
Direction, walkers and bounds are ours; the paper goes through all pairs of sets, in O(T(V) k^2)
for k sets.
Limits: optimal under that paper's equations (1) and (2), which know nothing of liveness. The
number of lower sets doubles with every independent branch; a graph with too many is refused.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.solvers import approx_dp
from tfckpt.solvers.approx_dp import LARGEST_BUDGET, LARGEST_TOTAL, OBJECTIVES
from tfckpt.solvers.exact_bounds import Arrival, arrival, no_bounds
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import boundary, weight
from tfckpt.solvers.lattice import WORD, Ints, Lattice, Rows, lattice, row_order

LARGEST_FRONT = 8_000_000
"""Walkers on one level before the search gives up; about 1 GB."""

NEIGHBOURS = 16
"""Earlier walkers, in sorted order, that a walker is compared with."""

BEAM = 10_000
"""Walkers a level in the search for a first sequence, which makes the bounds tighter."""


def lower_sets(forward: ForwardGraph, budget: int, *, objective: str = "time") -> tuple[int, ...]:
    """Return the best increasing sequence of lower sets under equations (1) and (2).

    Args:
      forward: the forward part of a step; not changed.
      budget: bytes that equation (2) may reach.
      objective: "time" for the minimum recomputation, "memory" for the most (section 4.4). Among
        equals the minimum peak of equation (2).

    Returns:
      Lower sets as bitmasks, increasing, the last one V; empty for a graph without nodes.

    Raises:
      PlanError: unknown objective, or more lower sets or states than the limits allow; the
        message names `approx_dp`.
      InfeasibleBudgetError: no sequence fits.

    Complexity: for k lower sets with boundaries of w nodes at most 2^w k pairs of X and (1) (see
    the module's docstring), and for each pair as many walkers as combinations of time and bytes
    that the bounds cannot exclude. `benchmarks.paper_tables.kusumoto` prints the seconds it takes.
    """
    if objective not in OBJECTIVES:
        raise PlanError(f"plan: unknown objective {objective!r}; choose one of {OBJECTIVES}")
    if not len(forward):
        return ()
    sets = _lattice(forward)
    budget = min(budget, LARGEST_BUDGET)
    problem, incumbent = _problem(forward, sets, budget, objective)
    history = _search(problem, incumbent)
    if not len(history[-1]):
        minimum = smallest_budget(forward)
        raise InfeasibleBudgetError(
            f"plan: no sequence of lower sets fits in {budget} bytes; the minimum budget for this "
            f"solver is {minimum} bytes", minimum)
    return _trace_back(sets, history)


@functools.lru_cache(maxsize=16)
def smallest_budget(forward: ForwardGraph) -> int:
    """Return the minimum budget in bytes for which `lower_sets` has an answer.

    No binary search is needed: see the module's docstring.

    Args:
      forward: the forward part of a step; 0 bytes are enough for one without nodes.

    Raises:
      PlanError: more lower sets or states than the limits allow.
    """
    if not len(forward):
        return 0
    sets = _lattice(forward)
    problem = _Problem(forward, sets, approx_dp.smallest_budget(forward), 0, no_bounds(sets))
    return int(_search(problem)[-1].need.min())


@functools.lru_cache(maxsize=4)
def _lattice(forward: ForwardGraph) -> Lattice:
    if sum(forward.bytes) > LARGEST_TOTAL:
        raise PlanError(f"plan: the forward graph has more than {LARGEST_TOTAL} bytes")
    return lattice(forward)


@dataclasses.dataclass(frozen=True)
class _States(Rows):
    """Walkers, or states in which a segment begins: one row each, int64.

    Attributes:
      edge: slots of the boundary at which the segment ends that are still in the set, shape
        (rows, words).
      end: 2 M(L') + (iii) + (iv) of the set L' at which the segment ends.
      need: bytes needed beyond those kept before.
      gain: the value to maximize: time kept, or its negative if recomputation is wanted.
      origin: number of the state that the walker has left.
    """

    edge: np.ndarray
    end: np.ndarray
    need: np.ndarray
    gain: np.ndarray
    origin: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The inputs of one search; `sign` is 1 to maximize the time kept, -1 to minimize it, or 0."""

    forward: ForwardGraph
    sets: Lattice
    budget: int
    sign: int
    arrival: Arrival


def _problem(forward: ForwardGraph, sets: Lattice, budget: int, objective: str
             ) -> tuple[_Problem, float]:
    """Return the problem with its bounds, and the gain of a sequence found by a beam search.

    The gain is -inf if no sequence was found.
    """
    sign = 1 if objective == "time" else -1
    price = _price(forward, budget) if sign > 0 else 0.0
    problem = _Problem(forward, sets, budget, sign, no_bounds(sets, price))
    history = _search(problem, beam=BEAM)
    if not len(history[-1]):
        return dataclasses.replace(problem, arrival=arrival(sets, budget, sign, price)), -np.inf
    if sign > 0:
        kept = 0
        for mask in _trace_back(sets, history):
            kept |= boundary(forward, mask)
        price = _price(forward, weight(forward.bytes, kept))
    return (dataclasses.replace(problem, arrival=arrival(sets, budget, sign, price)),
            float(history[-1].gain.max()))


def _price(forward: ForwardGraph, room: int) -> float:
    """Return the time that the last byte saves if nodes are kept in order of time per byte."""
    nodes = sorted((v for v in range(len(forward)) if forward.bytes[v]),
                   key=lambda v: (-forward.time[v] / forward.bytes[v], v))
    for node in nodes:
        room -= forward.bytes[node]
        if room < 0:
            return forward.time[node] / forward.bytes[node]
    return 0.0


def _search(problem: _Problem, known_gain: float = -np.inf, beam: int | None = None
            ) -> list[_States]:
    """Advance all walkers level by level.

    Args:
      problem: the lattice, the budget, the objective and its bounds.
      known_gain: states that cannot lead to this gain are dropped.
      beam: walkers to keep on a level, the most promising; None for all.

    Returns:
      The undominated states of each level, V first, the empty set last.
    """
    sets, forward = problem.sets, problem.forward
    size = np.array(forward.bytes, dtype=np.int64)
    time = problem.sign * np.array(forward.time, dtype=np.int64)
    zero = np.zeros(1, dtype=np.int64)
    begun = _States(zero + len(sets.masks) - 1, sets.edge[-1:], zero, zero, zero, zero - 1)
    walkers = begun.take(zero[:0])
    history = [begun]
    known = 1
    for _ in range(len(forward)):
        walkers = walkers.join(_launch(sets, begun, known - len(begun)))
        walkers = _step(problem, walkers, size, time, known_gain)
        walkers = _undominated_walkers(sets, walkers)
        if beam is not None and len(walkers) > beam:
            promise = walkers.gain - problem.arrival.price * walkers.need
            walkers = walkers.take(np.sort(np.argsort(-promise, kind="stable")[:beam]))
        begun = _begin(problem, walkers, known_gain)
        history.append(begun)
        known += len(begun)
    return history


def _launch(sets: Lattice, begun: _States, number: int) -> _States:
    """Return walkers that leave the states; these are numbered from `number`."""
    at = begun.at
    return dataclasses.replace(begun, edge=sets.edge[at], end=2 * sets.bytes[at] + sets.beyond[at],
                               origin=number + np.arange(len(at)))


def _step(problem: _Problem, walkers: _States, size: Ints, time: Ints, known_gain: float
          ) -> _States:
    """Return every walker to every set with one node less.

    Those that can no longer begin a segment within the budget are left out.
    """
    sets, budget = problem.sets, problem.budget
    row, step = sets.down.out_of(walkers.at)
    if len(row) > LARGEST_FRONT:
        raise PlanError(f"plan: exact_dp would keep {len(row)} states at once, more than "
                        f"{LARGEST_FRONT}; use approx_dp, or a smaller budget")
    at = sets.down.to[step]
    fits = np.flatnonzero(walkers.end[row] + problem.arrival.room[at] <= budget)
    row, at, node = row[fits], at[fits], sets.down.node[step[fits]]
    edge, end = walkers.edge[row], walkers.end[row]
    word, bit = sets.slot_word[node], sets.slot_bit[node]
    every = np.arange(len(row))
    leaves = (edge[every, word] & bit) != 0
    edge[every, word] &= ~bit
    # 2 M(V') grows by more than n' does with every node dropped, so the smaller n' is no worse.
    need = np.maximum(walkers.need[row] + leaves * size[node], end - 2 * sets.bytes[at])
    gain = walkers.gain[row] + leaves * time[node]
    rows = np.flatnonzero((need <= budget)
                          & _promising(problem, at, edge, need, gain, known_gain))
    return _States(at[rows], edge[rows], end[rows], need[rows], gain[rows],
                   walkers.origin[row[rows]])


def _promising(problem: _Problem, at: Ints, edge: Ints, need: Ints, gain: Ints, known_gain: float
               ) -> NDArray[np.bool_]:
    """Return whether each walker may still lead to `known_gain`, a whole number or -inf."""
    if known_gain == -np.inf:
        return np.ones(len(at), dtype=bool)
    arrived = problem.arrival
    bound = gain - arrived.price * need + arrived.below[at]
    spare = known_gain - 0.5 - arrived.price * problem.budget
    promising: NDArray[np.bool_] = bound + arrived.hope_sum[at] >= spare
    rows = np.flatnonzero(promising)
    at, edge, bound = at[rows], edge[rows], bound[rows]
    for slot in range(arrived.hope.shape[1]):
        bound += (edge[:, slot // WORD] >> slot % WORD & 1) * arrived.hope[at, slot]
    promising[rows] = bound >= spare
    return promising


def _undominated_walkers(sets: Lattice, walkers: _States) -> _States:
    """Drop walkers that another one at the same set, with the same nodes kept, dominates.

    Sorted by bytes, a walker can only be dominated by an earlier one. It is compared with the
    nearest `NEIGHBOURS` alone, so that some dominated walkers survive: this takes time, but the
    result stays optimal.
    """
    group = sets.group(walkers.at, walkers.edge)
    order = row_order(group, walkers.need // sets.unit, -walkers.gain)
    group, gain, end = group[order], walkers.gain[order], walkers.end[order]
    keep = np.ones(len(group), dtype=bool)
    for shift in range(1, min(NEIGHBOURS, len(group))):
        keep[shift:] &= ~((group[shift:] == group[:-shift]) & (gain[shift:] <= gain[:-shift])
                          & (end[shift:] >= end[:-shift]))
    return walkers.take(order[keep])


def _begin(problem: _Problem, walkers: _States, known_gain: float) -> _States:
    """Return the undominated states of the walkers whose segment may begin where they are."""
    arrived, budget = problem.arrival, problem.budget
    rows = np.flatnonzero(walkers.need <= budget - arrived.bytes[walkers.at])
    if known_gain > -np.inf:
        bound = (walkers.gain + arrived.score[walkers.at]
                 + arrived.price * (budget - walkers.need))[rows]
        rows = rows[bound >= known_gain - 0.5]  # gains are whole numbers
    walkers = walkers.take(rows)
    order = np.lexsort((-walkers.gain, walkers.need, walkers.at))
    at, gain = walkers.at[order], walkers.gain[order]
    if not len(at):
        return walkers
    span = 2 * int(np.abs(gain).max()) + 1
    best = np.maximum.accumulate(gain + (at - at[0]) * span)
    keep = np.ones(len(at), dtype=bool)
    keep[1:] = best[1:] > best[:-1]
    return walkers.take(order[keep])


def _trace_back(sets: Lattice, history: list[_States]) -> tuple[int, ...]:
    """Return the sequence of lower sets from the best state of the empty set on."""
    at = np.concatenate([states.at for states in history])
    origin = np.concatenate([states.origin for states in history])
    last = history[-1]
    number = len(at) - len(last) + int(np.lexsort((last.need, -last.gain))[0])
    sequence = []
    while origin[number] >= 0:
        number = int(origin[number])
        sequence.append(sets.masks[at[number]])
    return tuple(sequence)
