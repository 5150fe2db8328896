"""Kusumoto et al. 2019 with Python sets and plain definitions, for graphs of a few vertices.

A graph is (bytes, time, edges) with vertices 0 .. n-1. Nothing is imported from tfckpt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

PaperGraph = tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]]]


def successors(edges, chosen: set[int]) -> set[int]:
    """delta+ of section 2."""
    return {w for v, w in edges if v in chosen}


def predecessors(edges, chosen: set[int]) -> set[int]:
    """delta- of section 2."""
    return {v for v, w in edges if w in chosen}


def is_lower(edges, chosen: set[int]) -> bool:
    return predecessors(edges, chosen) <= chosen


def boundary(graph: PaperGraph, chosen: set[int]) -> set[int]:
    bytes_, _, edges = graph
    return predecessors(edges, set(range(len(bytes_))) - chosen) & chosen


def all_lower_sets(graph: PaperGraph) -> list[frozenset[int]]:
    """Return every lower set, the empty one included."""
    bytes_, _, edges = graph
    vertices = range(len(bytes_))
    return [frozenset(chosen) for size in range(len(bytes_) + 1)
            for chosen in itertools.combinations(vertices, size) if is_lower(edges, set(chosen))]


def ancestors_and_self(edges, vertex: int) -> frozenset[int]:
    """L^v of section 4.3, by growing until nothing changes."""
    reached = {vertex}
    while True:
        grown = reached | predecessors(edges, reached)
        if grown == reached:
            return frozenset(reached)
        reached = grown


def sequences(family: Iterable[frozenset[int]], everything: frozenset[int]
              ) -> Iterator[list[frozenset[int]]]:
    """Yield every strictly increasing sequence drawn from the family and ending in `everything`."""
    inner = sorted({s for s in family if s and s != everything}, key=lambda s: (len(s), sorted(s)))

    def extend(sequence):
        yield [*sequence, everything]
        for larger in inner:
            if not sequence or sequence[-1] < larger:
                yield from extend([*sequence, larger])

    yield from extend([])


def overhead(graph: PaperGraph, sequence: Sequence[frozenset[int]]) -> int:
    """T(V minus U_k): the left side of equation (1)."""
    _, time, _ = graph
    kept = set().union(*(boundary(graph, set(lower)) for lower in sequence))
    return sum(time[v] for v in sequence[-1] - kept)


def peak(graph: PaperGraph, sequence: Sequence[frozenset[int]]) -> int:
    """Return the maximum over i of equation (2), term by term."""
    bytes_, _, edges = graph

    def held(chosen):
        return sum(bytes_[v] for v in chosen)

    needs = []
    for i, lower in enumerate(sequence):
        kept = set().union(*(boundary(graph, set(sequence[j])) for j in range(i)))
        segment = lower - (sequence[i - 1] if i else frozenset())
        following = successors(edges, set(lower)) - lower
        beside = predecessors(edges, successors(edges, set(lower))) - lower
        needs.append(held(kept) + 2 * held(segment) + held(following) + held(beside))
    return max(needs)


def priced(graph: PaperGraph, family: Iterable[frozenset[int]]) -> list[tuple[int, int]]:
    """(overhead, peak) of every sequence over the family."""
    everything = frozenset(range(len(graph[0])))
    return [(overhead(graph, s), peak(graph, s)) for s in sequences(family, everything)]


def best(prices: Iterable[tuple[int, int]], budget: int, objective: str) -> int | None:
    """Return the smallest (time) or largest (memory) overhead that fits; None if nothing does."""
    fitting = [time for time, need in prices if need <= budget]
    if not fitting:
        return None
    return min(fitting) if objective == "time" else max(fitting)


def as_sets(masks: Iterable[int]) -> list[frozenset[int]]:
    """Bitmasks to sets."""
    return [frozenset(i for i, bit in enumerate(reversed(f"{mask:b}")) if bit == "1")
            for mask in masks]
