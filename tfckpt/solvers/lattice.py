"""All lower sets of a forward graph, level by level, and the single-node steps between them.

Level s consists of the lower sets of s nodes; a step adds one node whose predecessors are all in
the set. Paths of such steps lead from any lower set to any larger one that contains it, so a search
need not consider pairs of nested sets: there are as many steps as sets times the nodes that may
come next.

Source: Kusumoto et al. 2019, section 2 (lower sets, boundary) and equation (2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tfckpt.errors import PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import nodes_of, weight

LARGEST_FAMILY = 100_000
"""Lower sets that `lattice` enumerates before it refuses the graph; about two seconds."""

WORD = 62  # bits of a boundary in one integer

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Steps:
    """Single-node steps out of every lower set, int64.

    Attributes:
      first: index of the first step out of each set, and the number of steps.
      to: the set that each step leads to.
      node: the node by which the two sets differ.
    """

    first: np.ndarray
    to: np.ndarray
    node: np.ndarray

    def out_of(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all steps out of the sets `at`: for each the position in `at`, and the step.

        Args:
          at: indices of lower sets, int64; may repeat.
        """
        first = self.first[at]
        ways = self.first[at + 1] - first
        row = np.repeat(np.arange(len(at)), ways)
        return row, np.arange(len(row)) + np.repeat(first - np.cumsum(ways) + ways, ways)


@dataclasses.dataclass(frozen=True)
class Lattice:
    r"""Lower sets by size, then by value, the empty one first and V last.

    A node on a boundary occupies a *slot*. Two nodes that are on one boundary never share a
    slot, so a subset of a boundary is a few bits, however large the graph.

    Attributes:
      masks: the sets as bitmasks of nodes.
      level: index of the first set of each size, and the number of sets; n + 2 entries.
      bytes: M(L), int64.
      beyond: M(d+(L) \ L) + M(d-(d+(L)) \ L), int64: terms (iii) and (iv) of equation (2).
      edge: slots of the boundary, int64 of shape (sets, words).
      edge_bytes, edge_time: costs of the node in each slot, int64 of shape (sets, slots).
      slot_word, slot_bit: for each node the word and the bit of its slot; bit 0 if it is on no
        boundary.
      unit: greatest common divisor of all bytes, at least 1.
      down, up: the steps to the sets with one node less, and with one node more.
    """

    masks: tuple[int, ...]
    level: np.ndarray
    bytes: np.ndarray
    beyond: np.ndarray
    edge: np.ndarray
    edge_bytes: np.ndarray
    edge_time: np.ndarray
    slot_word: np.ndarray
    slot_bit: np.ndarray
    unit: int
    down: Steps
    up: Steps

    def group(self, at: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return keys, equal for two rows exactly if both the set and the slots are.

        The sets must be of one level.

        Args:
          at: index of the lower set of each row, int64.
          slots: bits of slots, int64 of shape (rows, words).

        Returns:
          One key for each row, int64.
        """
        width = int(self.edge.max(initial=0)).bit_length()
        key: Ints = at - at.min(initial=len(self.masks))
        for word in slots.T:
            if int(key.max(initial=0)).bit_length() + width > WORD:
                key = np.unique(key, return_inverse=True)[1]
                word = np.unique(word, return_inverse=True)[1]
            key = (key << int(word.max(initial=0)).bit_length()) | word
        return key


@dataclasses.dataclass(frozen=True)
class Rows:
    """A table of walkers over the lattice; its fields are columns of equal length.

    Attributes:
      at: index of the lower set at which each walker is.
    """

    at: np.ndarray

    def __len__(self) -> int:
        return len(self.at)

    def take(self, rows: np.ndarray) -> Self:
        """Return some of the rows.

        Args:
          rows: their indices, in the order that is wanted.
        """
        return type(self)(*(column[rows] for column in vars(self).values()))

    def join(self, other: Self) -> Self:
        """Return the rows of both, those of the other last.

        Args:
          other: a table with the same columns.
        """
        return type(self)(*map(np.concatenate, zip(
            vars(self).values(), vars(other).values(), strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class _LowerSet:
    """One lower set during enumeration: bitmasks, and the nodes that may come next."""

    mask: int
    edge: int  # its boundary
    fed: int  # successors of its nodes, inside or not
    ready: tuple[int, ...]


def lattice(forward: ForwardGraph, largest: int = LARGEST_FAMILY) -> Lattice:
    """Return the lower sets of a graph, enumerated level by level.

    Args:
      forward: the forward part of a step; not changed.
      largest: lower sets that are enumerated before the graph is refused.

    Raises:
      PlanError: the graph has more than `largest` lower sets.

    Complexity: O(k a w) for k sets, a nodes that may come next and a boundary of w nodes.
    """
    family, level, (smaller, larger, node) = _enumerate(forward, largest)
    slot = _slots(len(forward), [lower.edge for lower in family])
    slots = max(slot, default=-1) + 1
    edge = np.zeros((len(family), max(1, -(-slots // WORD))), dtype=np.int64)
    edge_bytes, edge_time = (np.zeros((len(family), slots), dtype=np.int64) for _ in range(2))
    for index, lower in enumerate(family):
        for on in nodes_of(lower.edge):
            edge[index, slot[on] // WORD] |= 1 << slot[on] % WORD
            edge_bytes[index, slot[on]] = forward.bytes[on]
            edge_time[index, slot[on]] = forward.time[on]
    return Lattice(
        masks=tuple(lower.mask for lower in family),
        level=np.array(level, dtype=np.int64),
        bytes=_bytes(forward, len(family), smaller, larger, node),
        beyond=_beyond(forward, family),
        edge=edge,
        edge_bytes=edge_bytes,
        edge_time=edge_time,
        slot_word=np.array([max(0, place) // WORD for place in slot], dtype=np.int64),
        slot_bit=np.array([1 << place % WORD if place >= 0 else 0 for place in slot],
                          dtype=np.int64),
        unit=max(1, math.gcd(*forward.bytes)),
        down=_steps(len(family), larger, smaller, node),
        up=_steps(len(family), smaller, larger, node),
    )


def _steps(count: int, source: Sequence[int], to: Sequence[int], node: Sequence[int]) -> Steps:
    """Return the steps ordered by the set they lead out of."""
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(np.array(source, dtype=np.int64)[order], np.arange(count + 1))
    return Steps(first, np.array(to, dtype=np.int64)[order],
                 np.array(node, dtype=np.int64)[order])


def _enumerate(forward: ForwardGraph, largest: int
               ) -> tuple[list[_LowerSet], list[int], tuple[list[int], list[int], list[int]]]:
    """Return the sets, the start of each level, and the steps as columns.

    The columns are: from, to, node added.
    """
    needs = [sum(1 << p for p in nodes) for nodes in forward.predecessors]
    feeds = [sum(1 << w for w in nodes) for nodes in forward.successors]
    frontier = [_LowerSet(0, 0, 0, tuple(v for v, mask in enumerate(needs) if not mask))]
    family, level = list(frontier), [0]
    sources: list[int] = []
    targets: list[int] = []
    nodes: list[int] = []
    while frontier:
        level.append(len(family))
        found: dict[int, _LowerSet] = {}
        larger = []
        for index, lower in enumerate(frontier, level[-2]):
            for node in lower.ready:
                mask = lower.mask | 1 << node
                sources.append(index)
                nodes.append(node)
                larger.append(mask)
                if mask not in found:
                    found[mask] = _add(forward, needs, feeds, lower, node)
            if len(family) + len(found) > largest:
                raise PlanError(
                    f"plan: exact_dp takes graphs of at most {largest} lower sets and this one, "
                    f"of {len(forward)} nodes, has more; use approx_dp")
        order = sorted(found)
        place = {mask: index for index, mask in enumerate(order, len(family))}
        targets += [place[mask] for mask in larger]
        frontier = [found[mask] for mask in order]
        family += frontier
    return family, level, (sources, targets, nodes)


def _add(forward: ForwardGraph, needs: Sequence[int], feeds: Sequence[int], lower: _LowerSet,
         node: int) -> _LowerSet:
    """Return the lower set with one node more."""
    mask = lower.mask | 1 << node
    edge = lower.edge
    for other in forward.predecessors[node]:
        if not feeds[other] & ~mask:
            edge &= ~(1 << other)
    if feeds[node]:
        edge |= 1 << node
    ready = tuple(v for v in lower.ready if v != node)
    ready += tuple(v for v in forward.successors[node] if not needs[v] & ~mask)
    return _LowerSet(mask, edge, lower.fed | feeds[node], ready)


def _slots(count: int, edges: Sequence[int]) -> list[int]:
    """Return a slot for each node, -1 where it is on no boundary.

    Slots are assigned greedily: the lowest that no earlier node on a common boundary has.
    """
    beside = [0] * count
    for edge in dict.fromkeys(edges):
        for node in nodes_of(edge):
            beside[node] |= edge
    slot = [-1] * count
    for node in range(count):
        if beside[node]:
            taken = {slot[other] for other in nodes_of(beside[node] & ((1 << node) - 1))}
            slot[node] = next(place for place in range(count) if place not in taken)
    return slot


def _bytes(forward: ForwardGraph, count: int, smaller: Sequence[int], larger: Sequence[int],
           node: Sequence[int]) -> Ints:
    """Return M(L) of each set, computed from a smaller one."""
    total = [0] * count
    for one, other, added in zip(smaller, larger, node, strict=True):
        total[other] = total[one] + forward.bytes[added]
    return np.array(total, dtype=np.int64)


def _beyond(forward: ForwardGraph, family: Sequence[_LowerSet]) -> Ints:
    """Return terms (iii) and (iv) of equation (2) of each set; few are distinct, so cached."""
    known: dict[tuple[int, int], int] = {}
    result = []
    for lower in family:
        following = lower.fed & ~lower.mask
        beside = 0
        for node in nodes_of(following):
            for other in forward.predecessors[node]:
                beside |= 1 << other
        beside &= ~lower.mask
        if (following, beside) not in known:
            known[following, beside] = (weight(forward.bytes, following)
                                        + weight(forward.bytes, beside))
        result.append(known[following, beside])
    return np.array(result, dtype=np.int64)


def row_order(*columns: np.ndarray) -> np.ndarray:
    """Return the stable order of rows by columns, the first column being the primary key.

    Columns are packed into one integer key where they fit.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    bits = 0
    for column in columns:
        low = int(column.min(initial=0))
        width = (int(column.max(initial=0)) - low).bit_length()
        bits += width
        if bits > WORD:
            return np.lexsort(columns[::-1])
        key = (key << width) | (column - low)
    return np.argsort(key, kind="stable")
