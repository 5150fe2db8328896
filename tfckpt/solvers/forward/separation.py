"""Finds the independent segments of a graph that series-parallel reduction cannot take apart.

A set of vertices hangs on a pair (i, j) if every path that leaves the set passes i or j. In a
graph where every vertex lies on a path from the first to the last vertex, and which has an extra
edge between these two, such sets are what is cut off by removing i and then the articulation
point j; so one depth-first search for each i finds all of them.

Source: definition 1 and algorithm 4 of Feng and Huang 2018 ask for these sets; the search with
low points is Hopcroft and Tarjan 1973.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tfckpt.errors import PlanError

__all__ = ["hanging_segments"]

LARGEST = 10_000_000
"""Vertices times edges between two splitting vertices, after reduction: a few seconds."""

Hanging = tuple[int, int, int, int]
"""(vertices inside, vertex before, vertex after, one vertex inside)."""


def hanging_segments(after: Mapping[int, Mapping[int, object]]) -> list[Hanging]:
    """Return all connected independent segments inside the blocks of a graph.

    A block consists of the vertices from one splitting vertex to the next, both included.

    Args:
      after: for each vertex its successors, all of them higher. Paths lead from the lowest vertex
        to every other one, and from every one to the highest.

    Returns:
      Segments by size, so that a segment comes after those inside it. Some are listed twice.

    Raises:
      PlanError: a block is larger than `LARGEST`.

    Complexity: O(v e) for a block of v vertices and e edges.
    """
    found: list[Hanging] = []
    for block in _blocks(after):
        edges = sum(len(after[vertex]) for vertex in block[:-1])
        if len(block) * edges > LARGEST:
            raise PlanError(
                f"plan: the {len(block)} vertices and {edges} edges that reduction leaves after "
                f"vertex {block[0]} are too many to take apart (their product may be "
                f"{LARGEST}); use auto or approx_dp")
        if len(block) > 2:
            found.extend(_hanging_in(after, block))
    return sorted(found)


def _blocks(after: Mapping[int, Mapping[int, object]]) -> Iterator[list[int]]:
    """Yield the vertices from one splitting vertex of the graph to the next, both included."""
    block: list[int] = []
    furthest = 0
    for vertex in sorted(after):
        block.append(vertex)
        if len(block) > 1 and furthest <= vertex:
            yield block
            block = [vertex]
        furthest = max((furthest, *after[vertex]))


def _hanging_in(after: Mapping[int, Mapping[int, object]], block: Sequence[int]
                ) -> Iterator[Hanging]:
    """Yield the segments of one block: what an articulation point cuts off without a vertex."""
    place = {vertex: i for i, vertex in enumerate(block)}
    last = len(block) - 1
    beside: list[list[int]] = [[] for _ in block]
    beside[0].append(last)  # first, so that the search from 0 goes to the end at once
    beside[last].append(0)
    for i, vertex in enumerate(block[:-1]):
        for other in sorted(after[vertex]):
            if (i, place[other]) != (0, last):
                beside[i].append(place[other])
                beside[place[other]].append(i)
    for removed in range(last + 1):
        root, end = (last, -1) if removed == 0 else (0, last if removed != last else -1)
        for point, child, size in _articulations(beside, removed, root, end):
            first, second = sorted((removed, point))
            yield size, block[first], block[second], block[child]


def _articulations(beside: Sequence[Sequence[int]], removed: int, root: int, end: int
                   ) -> Iterator[tuple[int, int, int]]:
    """Yield (articulation point, first vertex beyond it, number of vertices beyond it).

    What contains `end` is not reported.

    Args:
      beside: the neighbours of each vertex.
      removed: the vertex to search without.
      root: the vertex to start from.
      end: a vertex, or -1.
    """
    count = len(beside)
    number = [0] * count
    low = [0] * count
    size = [1] * count
    parent = [-1] * count
    tried = [0] * count
    number[root] = low[root] = clock = 1
    number[removed] = count + 1  # never lower than anything
    stack = [root]
    while stack:
        vertex = stack[-1]
        if tried[vertex] < len(beside[vertex]):
            other = beside[vertex][tried[vertex]]
            tried[vertex] += 1
            if not number[other]:
                clock += 1
                number[other] = low[other] = clock
                parent[other] = vertex
                stack.append(other)
            elif number[other] < low[vertex]:
                low[vertex] = number[other]
            continue
        stack.pop()
        above = parent[vertex]
        if above >= 0:
            size[above] += size[vertex]
            if low[vertex] >= number[above]:
                if vertex != end:
                    yield above, vertex, size[vertex]
            elif low[vertex] < low[above]:
                low[above] = low[vertex]
