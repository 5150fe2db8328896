"""Feng and Huang 2018 by definition, for graphs of a few vertices: sets as bitmasks.

A graph is (bytes, edges) with vertices 0 .. n-1 and edges from lower to higher. Nothing is
imported from tfckpt. Vertex `v` is bit `v + 1`; bits 0 and n + 1 are the virtual ends, which
stand alone without an edge where the graph has real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Graph:
    """Bits of what comes directly before and after each bit, and of all ends."""

    def __init__(self, bytes_: Sequence[int], edges: Sequence[tuple[int, int]]):
        count = len(bytes_)
        self.bytes = [0, *bytes_, 0]
        pairs = [(u + 1, v + 1) for u, v in edges]
        sources = [v for v in range(1, count + 1) if all(end != v for _, end in pairs)]
        targets = [v for v in range(1, count + 1) if all(start != v for start, _ in pairs)]
        self.source = sources[0] if len(sources) == 1 else 0
        self.target = targets[0] if len(targets) == 1 else count + 1
        if not self.source:
            pairs += [(0, v) for v in sources]
        if self.target > count:
            pairs += [(v, count + 1) for v in targets]
        self.before = [0] * (count + 2)
        self.after = [0] * (count + 2)
        for u, v in pairs:
            self.before[v] |= 1 << u
            self.after[u] |= 1 << v
        ends = (self.source, self.target)
        self.inner = [v for v in range(1, count + 1) if v not in ends]
        self.ends = 1 << self.source | 1 << self.target

    def weigh(self, mask: int) -> int:
        return sum(size for v, size in enumerate(self.bytes) if mask >> v & 1)

    def subsets(self) -> Iterator[int]:
        """Yield every set of inner vertices."""
        for choice in range(1 << len(self.inner)):
            yield sum(1 << v for i, v in enumerate(self.inner) if choice >> i & 1)

    def grow(self, mask: int, within: int, beside: Sequence[Sequence[int]]) -> int:
        """`mask` and what is reached from it over `beside` without leaving `within`."""
        while True:
            reached = mask
            for v in range(len(self.bytes)):
                if mask >> v & 1:
                    for neighbours in beside:
                        reached |= neighbours[v] & within
            if reached == mask:
                return mask
            mask = reached


def cost(graph: Graph, stored: int) -> int | None:
    """Equation (1) for checkpoints `stored`, ends included.

    None if what lies between is not made of segments with one checkpoint on each side.
    """
    rest = sum(1 << v for v in graph.inner) & ~stored
    largest = 0
    while rest:
        segment = graph.grow(rest & -rest, rest, (graph.before, graph.after))
        before = after = 0
        for v in graph.inner:
            if segment >> v & 1:
                before |= graph.before[v] & stored
                after |= graph.after[v] & stored
        if before.bit_count() != 1 or after.bit_count() != 1:
            return None
        largest = max(largest, graph.weigh(segment))
        rest &= ~segment
    return graph.weigh(stored) + largest


def least_cost(bytes_: Sequence[int], edges: Sequence[tuple[int, int]],
               must_store: Sequence[int] = ()) -> int:
    """Return the minimum of equation (1) over all sets of checkpoints."""
    graph = Graph(bytes_, edges)
    forced = sum(1 << v + 1 for v in set(must_store))
    costs = (cost(graph, stored | graph.ends) for stored in graph.subsets()
             if not forced & ~(stored | graph.ends))
    return min(c for c in costs if c is not None)


def connected_closed_sets(bytes_: Sequence[int], edges: Sequence[tuple[int, int]]
                          ) -> set[tuple[int, int, tuple[int, ...]]]:
    """(i, j, vertices) of every connected closed set with a vertex inside: definition 1."""
    graph = Graph(bytes_, edges)
    everything = (1 << len(graph.bytes)) - 1
    below = [graph.grow(1 << v, everything, (graph.after,)) for v in range(len(graph.bytes))]
    found = set()
    for inside in graph.subsets():
        if not inside:
            continue
        if graph.grow(inside & -inside, inside, (graph.before, graph.after)) != inside:
            continue
        members = [v for v in graph.inner if inside >> v & 1]
        around = 0
        for v in members:
            around |= (graph.before[v] | graph.after[v]) & ~inside
        if around.bit_count() != 2:
            continue
        i, j = (v for v in range(len(graph.bytes)) if around >> v & 1)
        if all(below[i] >> v & 1 and below[v] >> j & 1 for v in members):
            found.add((i - 1, j - 1, tuple(v - 1 for v in members)))
    return found
