"""Bounds on the sequences that end in a lower set, which let `exact_dp` drop states early.

`exact_dp` works from V back to the empty set, so that for a state it knows everything that follows
and nothing that comes before. For each lower set L, one walk in the other direction finds, among
the sequences within the budget that end in L,

  1. the minimum of bytes kept;
  2. the maximum of (time kept - price * bytes kept): since at most budget - need bytes may be
     kept, the time kept is at most that maximum plus price * (budget - need), whatever the price
     (a Lagrangian bound; a good price makes it tight).

The walk keeps for every L the best value of both, though they may come from different sequences.
Therefore the bounds are not attained in general, and the walk is cheap.

Source: ours, for Kusumoto et al. 2019, section 4.2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tfckpt.solvers.lattice import WORD, Floats, Ints, Lattice, Rows, row_order

FAR = 1 << 61  # more bytes than any graph has
NEIGHBOURS = 8


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Bounds for each lower set.

    Attributes:
      bytes: the fewest bytes kept, `FAR` if the set cannot be reached; int64.
      score: the largest gain - price * bytes kept; float64, -inf if it cannot be reached.
      room: the minimum of bytes - 2 M(L) over the set and all smaller ones; int64.
      below: the largest score over the set and all smaller ones; float64.
      hope: what each slot of the boundary adds to a gain beyond its price, if that is positive;
        float64 of shape (sets, slots).
      hope_sum: its sum over all slots.
      price: gain per byte.
    """

    bytes: np.ndarray
    score: np.ndarray
    room: np.ndarray
    below: np.ndarray
    hope: np.ndarray
    hope_sum: np.ndarray
    price: float


@dataclasses.dataclass(frozen=True)
class _Walkers(Rows):
    """Walkers: lower set, slots of its boundary kept already, M of the start, bytes kept, score."""

    kept: np.ndarray
    start: np.ndarray
    bytes: np.ndarray
    score: np.ndarray


def arrival(sets: Lattice, budget: int, sign: int, price: float) -> Arrival:
    """Return bounds for sequences within a budget.

    Args:
      sets: all lower sets of the graph.
      budget: bytes that equation (2) may reach.
      sign: 1 if time kept is gained, -1 if it is lost.
      price: gain per byte, not negative.
    """
    fewest = np.full(len(sets.masks), FAR, dtype=np.int64)
    score = np.full(len(sets.masks), -np.inf)
    fewest[0] = score[0] = 0
    lowest = _lowest_end(sets)
    walkers = _launch(sets, fewest, score, np.zeros(1, dtype=np.int64))
    for begin, end in zip(sets.level[1:-1], sets.level[2:], strict=True):
        walkers = _undominated(sets, _step(sets, walkers, budget, lowest))
        _arrive(sets, walkers, budget, sign, price, fewest, score)
        reached = begin + np.flatnonzero(fewest[begin:end] < FAR)
        walkers = walkers.join(_launch(sets, fewest, score, reached))
    return _with_smaller_sets(sets, fewest, score, sign, price)


def no_bounds(sets: Lattice, price: float = 0.0) -> Arrival:
    """Return trivial bounds, which exclude nothing and are valid for every budget.

    Args:
      sets: all lower sets of the graph.
      price: gain per byte, not negative.
    """
    count = len(sets.masks)
    return _with_smaller_sets(sets, np.zeros(count, dtype=np.int64), np.full(count, np.inf), 0,
                              price)


def _with_smaller_sets(sets: Lattice, fewest: Ints, score: Floats, sign: int, price: float
                       ) -> Arrival:
    room = _over_smaller_sets(sets, np.minimum, fewest - 2 * sets.bytes)
    below = _over_smaller_sets(sets, np.maximum, score)
    hope = np.maximum(0.0, sign * sets.edge_time - price * sets.edge_bytes)
    return Arrival(fewest, score, room, below, hope, hope.sum(axis=1), price)


def _lowest_end(sets: Lattice) -> Ints:
    """Return for each set the minimum of 2 M(L) + (iii) + (iv) over itself and larger sets L."""
    lowest: Ints = 2 * sets.bytes + sets.beyond
    first, to = sets.up.first, sets.up.to
    for begin, end in zip(sets.level[-3::-1], sets.level[-2:0:-1], strict=True):
        after = np.minimum.reduceat(lowest[to[first[begin]:first[end]]],
                                    first[begin:end] - first[begin])
        lowest[begin:end] = np.minimum(lowest[begin:end], after)
    return lowest


def _over_smaller_sets(sets: Lattice, extreme: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Return for each set the minimum or maximum over itself and all smaller sets."""
    values = values.copy()
    first, to = sets.down.first, sets.down.to
    for begin, end in zip(sets.level[1:-1], sets.level[2:], strict=True):
        before = extreme.reduceat(values[to[first[begin]:first[end]]],
                                  first[begin:end] - first[begin])
        values[begin:end] = extreme(values[begin:end], before)
    return values


def _launch(sets: Lattice, fewest: Ints, score: Floats, at: Ints) -> _Walkers:
    return _Walkers(at, sets.edge[at], sets.bytes[at], fewest[at], score[at])


def _step(sets: Lattice, walkers: _Walkers, budget: int, lowest: Ints) -> _Walkers:
    """Return every walker at every set with one node more from which some end fits the budget."""
    row, step = sets.up.out_of(walkers.at)
    at = sets.up.to[step]
    fits = np.flatnonzero((walkers.bytes - 2 * walkers.start)[row] + lowest[at] <= budget)
    row, step, at = row[fits], step[fits], at[fits]
    kept = walkers.kept[row] & sets.edge[at]
    node = sets.up.node[step]  # may reuse the slot of a node that has left the boundary
    kept[np.arange(len(at)), sets.slot_word[node]] &= ~sets.slot_bit[node]
    return dataclasses.replace(walkers.take(row), at=at, kept=kept)


def _undominated(sets: Lattice, walkers: _Walkers) -> _Walkers:
    """Drop walkers that one of the few before them in sorted order dominates."""
    group = sets.group(walkers.at, walkers.kept)
    slack = walkers.bytes - 2 * walkers.start
    order = row_order(group, slack // sets.unit)
    group, size, score = group[order], walkers.bytes[order], walkers.score[order]
    keep = np.ones(len(group), dtype=bool)
    for shift in range(1, min(NEIGHBOURS, len(group))):
        keep[shift:] &= ~((group[shift:] == group[:-shift]) & (size[shift:] >= size[:-shift])
                          & (score[shift:] <= score[:-shift]))
    return walkers.take(order[keep])


def _arrive(sets: Lattice, walkers: _Walkers, budget: int, sign: int, price: float, fewest: Ints,
            score: Floats) -> None:
    """Update `fewest` and `score` with the walkers whose segment may end where they are."""
    need = (walkers.bytes + 2 * (sets.bytes[walkers.at] - walkers.start)
            + sets.beyond[walkers.at])
    walkers = walkers.take(np.flatnonzero(need <= budget))
    at = walkers.at
    new = sets.edge[at] & ~walkers.kept
    size, time = np.zeros((2, len(at)), dtype=np.int64)
    for slot in range(sets.edge_bytes.shape[1]):
        bit = new[:, slot // WORD] >> slot % WORD & 1
        size += bit * sets.edge_bytes[at, slot]
        time += bit * sets.edge_time[at, slot]
    np.minimum.at(fewest, at, walkers.bytes + size)
    np.maximum.at(score, at, walkers.score + sign * time - price * size)
