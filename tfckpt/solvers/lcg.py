"""`lcg`: optimal checkpoints of a linear computation graph with arbitrary costs.

For a bound C on the bytes between two checkpoints, the accessibility graph has an edge (a, b)
wherever at most C bytes lie between a and b, and the cheapest checkpoints are the shortest path
through it. On a chain the vertices with an edge to b are a window that only moves forward, so the
shortest path takes O(n) with a queue of minima. `max_terms` chooses C.

With n vertices of equal cost the optimum is known: sqrt(n) checkpoints, at 2 / sqrt(n) of the cost
without checkpoints.

Source: Feng and Huang 2018, section 3, equation (1), algorithm 1; Feng and Huang 2021,
supplement, section 1.1.
Optimal: on every chain, under equation (1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tfckpt.errors import PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.reforwarding import Checkpoints, price
from tfckpt.solvers.max_terms import best_max_term

LARGEST = 50_000
"""Vertices at most: a few seconds."""

WORK = 20_000_000
"""Vertices times max terms tried at most: some ten seconds."""


def solve(graph: ForwardGraph) -> Checkpoints:
    """Return the checkpoints of a chain of minimum cost under equation (1).

    Args:
      graph: a chain of n vertices; without vertices the answer is empty.

    Raises:
      PlanError: the graph is no chain, longer than `LARGEST`, or takes more than `WORK`.

    Complexity: O(n) for each max term tried, O(n) space. Chains of 1,000 to 100,000 vertices of
    random, equal, growing and falling costs took 15 to 160 max terms, so that the whole is far
    below the O(n^2) of one max term a vertex, and the paper's O(n^4).
    """
    _check_chain(graph)
    count = len(graph)
    if count < 3:
        return price(graph, range(count))
    start, end = spans(graph.bytes, [0] * (count - 1))
    never = [0] * (count - 1)

    def under(limit: int) -> tuple[int, int]:
        stored, path = shortest_path(graph.bytes, start, end, never, limit)
        return stored, max(end[b] - start[a] for a, b in zip(path, path[1:], strict=False))

    limit = best_max_term(under, end[-1] - start[0], WORK // count)
    return price(graph, shortest_path(graph.bytes, start, end, never, limit)[1])


def spans(inside: Sequence[int], gaps: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (start, end): `end[b] - start[a]` bytes lie between positions a < b of a chain.

    Args:
      inside: bytes of each position while it is recomputed.
      gaps: bytes that lie between each position and the next.
    """
    start, end, total = [], [], 0
    for position, size in enumerate(inside):
        end.append(total)
        start.append(total + size)
        total += size + (gaps[position] if position < len(gaps) else 0)
    return start, end


def shortest_path(cost: Sequence[int], start: Sequence[int], end: Sequence[int],
                  opened: Sequence[int], limit: int) -> tuple[int, list[int]]:
    """Return the cheapest path from the first to the last position of a chain.

    No step skips more bytes than the limit, unless it leads to the next position.

    Args:
      cost: bytes of each position if it is a checkpoint. The first and the last always are, and
        are not counted.
      start: bytes up to the end of each position, as `spans` makes them.
      end: bytes before each position, as `spans` makes them.
      opened: bytes to pay for stepping from a position to the next where the gap alone exceeds
        the limit.
      limit: bytes that a step may skip.

    Returns:
      (bytes, positions on the path, both ends included). Among equals the shortest last step, so
      that a checkpoint that costs nothing is taken.

    Complexity: O(n).
    """
    last = len(cost) - 1
    best = [0] * (last + 1)
    came_from = [0] * (last + 1)
    window = deque([0])  # positions from which a step may still lead on, by increasing cost
    for position in range(1, last + 1):
        lowest = end[position] - limit
        while window and start[window[0]] < lowest:
            window.popleft()
        if window:
            origin = window[0]
            value = best[origin]
        else:
            origin = position - 1
            value = best[origin] + opened[origin]
        if position < last:
            value += cost[position]
        best[position] = value
        came_from[position] = origin
        while window and best[window[-1]] >= value:
            window.pop()
        window.append(position)
    path = [last]
    while path[-1]:
        path.append(came_from[path[-1]])
    return best[last], path[::-1]


def _check_chain(graph: ForwardGraph) -> None:
    """Raise `PlanError` for the first vertex that does not feed the next one alone."""
    last = len(graph) - 1
    for vertex, after in enumerate(graph.successors):
        if after != ((vertex + 1,) if vertex < last else ()):
            raise PlanError(f"plan: lcg takes a chain, but vertex {graph.names[vertex]!r} feeds "
                            f"{len(after)} others; use acg")
        if len(graph.predecessors[vertex]) > 1:
            raise PlanError(f"plan: lcg takes a chain, but vertex {graph.names[vertex]!r} needs "
                            f"{len(graph.predecessors[vertex])} others; use acg")
    if len(graph) > LARGEST:
        raise PlanError(f"plan: lcg takes at most {LARGEST} vertices, not {len(graph)}; use auto")
