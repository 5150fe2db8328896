"""`acg`: optimal checkpoints of an arbitrary computation graph, on its division tree.

For a bound C on the largest segment, a segment of the tree that fits C is left alone: it is
recomputed as a whole and needs no checkpoint inside. One that does not fit is opened:

  - branched: each part is solved on its own;
  - complicated: its connecting vertices become checkpoints and its parts are solved;
  - linear: parts that do not fit are opened, and what lies between them is a chain of splitting
    vertices, of which the shortest path in the accessibility graph keeps the cheapest (`lcg`).

Parts come before the segment that they belong to, so one pass solves the tree. `max_terms`
chooses C.

Source: Feng and Huang 2018, section 4, algorithm 5; Feng and Huang 2021, supplement, section 3.
Two details that the text leaves open follow from its cost (the brute force of the tests agrees):
parallel branches between two checkpoints count as segments of their own, also where their sum
would fit C, and so a single branch's cost is a possible max term.
Optimal: on every graph, under equation (1) and the two assumptions in
`tfckpt.solvers.forward.reforwarding`. The second can be lifted for chosen vertices
(`needs_inputs`); the answer is then optimal among those that store their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfckpt.errors import PlanError
from tfckpt.solvers.forward.division_tree import (
    BRANCHED,
    LINEAR,
    NO_SEGMENT,
    DivisionTree,
    division_tree,
)
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.reforwarding import Checkpoints, inputs_to_store, price
from tfckpt.solvers.lcg import shortest_path, spans
from tfckpt.solvers.max_terms import best_max_term

__all__ = ["LARGEST", "solve", "solve_under"]

LARGEST = 20_000
"""Vertices at most: a few seconds, if they can be taken apart without a search."""

WORK = 10_000_000
"""Vertices times max terms tried at most: some ten seconds."""


def solve(graph: ForwardGraph, *, needs_inputs: Iterable[int] = (),
          tree: DivisionTree | None = None) -> Checkpoints:
    """Return the checkpoints of minimum cost under equation (1).

    Args:
      graph: any graph; without vertices the answer is empty.
      needs_inputs: vertices made by an operation whose gradient needs the values of its inputs,
        as a product's does. Where it has several, they are all stored (and counted).
      tree: the graph's division tree, if it is at hand.

    Raises:
      PlanError: more than `LARGEST` vertices or more than `WORK` to do, a graph too entangled for
        `division_tree`, or `needs_inputs` names no vertex.

    Complexity: that of `division_tree`, and O(V + E) for each max term tried: some dozens as a
    rule, and in the worst case known to us (skip connections nested in each other, where each
    pair of checkpoints saves just what it costs) one or two a vertex. The paper's is O(V^4).
    """
    solver = _prepare(graph, needs_inputs, tree)
    limit = best_max_term(solver.under, solver.recomputable, WORK // max(1, len(graph)))
    return price(graph, solver.checkpoints(limit))


def solve_under(graph: ForwardGraph, max_term: int, *, needs_inputs: Iterable[int] = (),
                tree: DivisionTree | None = None) -> Checkpoints:
    """Return the fewest bytes of checkpoints for which no segment exceeds `max_term` bytes.

    Args:
      graph: any graph; without vertices the answer is empty.
      max_term: bytes that a segment may have.
      needs_inputs: vertices made by an operation whose gradient needs the values of its inputs.
      tree: the graph's division tree, if it is at hand.

    Raises:
      PlanError: as `solve`, or `max_term` is negative.
    """
    if max_term < 0:
        raise PlanError(f"plan: acg takes bytes for the largest segment, not {max_term}")
    solver = _prepare(graph, needs_inputs, tree)
    return price(graph, solver.checkpoints(min(max_term, solver.recomputable)))


def _prepare(graph: ForwardGraph, needs_inputs: Iterable[int], tree: DivisionTree | None
             ) -> _OnTree:
    if len(graph) > LARGEST:
        raise PlanError(f"plan: acg takes at most {LARGEST} vertices, not {len(graph)}; use auto")
    return _OnTree(graph, tree or division_tree(graph), inputs_to_store(graph, needs_inputs))


class _OnTree:
    """Solves a division tree under one bound after the other.

    Lists have one entry a segment of the tree, and a last one (0) for plain edges, which
    `NO_SEGMENT` (-1) indexes.

    Attributes:
      whole: bytes of all its vertices; more than the graph has if one of them must be stored.
      largest: bytes of the largest segment if none of its vertices is a checkpoint. Less than
        `whole` for branches.
      recomputable: bytes of all vertices of the graph.
    """

    def __init__(self, graph: ForwardGraph, tree: DivisionTree, must_store: frozenset[int]) -> None:
        self.graph, self.tree = graph, tree
        total = sum(graph.bytes)
        inside = [total + 1 if v in must_store else size for v, size in enumerate(graph.bytes)]
        self.recomputable = total
        self.whole = [0] * (len(tree.segments) + 1)
        self.largest = [0] * (len(tree.segments) + 1)
        self.spans: list[tuple[list[int], list[int], list[int]]] = []
        for index, segment in enumerate(tree.segments):
            gaps = [self.whole[part.segment] for part in segment.parts]
            self.whole[index] = sum(inside[v] for v in segment.vertices) + sum(gaps)
            self.largest[index] = (max(gaps) if segment.kind == BRANCHED else self.whole[index])
            if segment.kind == LINEAR:
                own = [0, *(graph.bytes[v] for v in segment.vertices), 0]
                chain = [0, *(inside[v] for v in segment.vertices), 0]
                self.spans.append((own, *spans(chain, gaps)))
            else:
                self.spans.append(([], [], []))

    def under(self, limit: int) -> tuple[int, int]:
        """Return the bytes of checkpoints, without the graph's ends, and of the largest segment."""
        stored, largest, _ = self._solve(limit)
        return (stored[-2], largest[-2]) if self.tree.segments else (0, 0)

    def checkpoints(self, limit: int) -> list[int]:
        """Return the checkpoints under a bound, the graph's real ends included."""
        _, _, paths = self._solve(limit)
        found = {v for v in (self.tree.source, self.tree.target) if 0 <= v < len(self.graph)}
        below = [len(self.tree.segments) - 1]
        while below:
            index = below.pop()
            if index == NO_SEGMENT or self.largest[index] <= limit:
                continue
            segment = self.tree.segments[index]
            if segment.kind == LINEAR:
                path = paths[index]
                found.update(segment.vertices[position - 1] for position in path[1:-1])
                below.extend(segment.parts[a].segment
                             for a, b in zip(path, path[1:], strict=False) if b == a + 1)
            else:
                found.update(segment.vertices)
                below.extend(part.segment for part in segment.parts)
        return sorted(found)

    def _solve(self, limit: int) -> tuple[list[int], list[int], dict[int, list[int]]]:
        """Return for each segment, its ends stored, what is best under a bound.

        Returns:
          (bytes of checkpoints, bytes of the largest segment left, path taken if it is linear).
        """
        stored = [0] * len(self.whole)
        largest = list(self.largest)
        paths: dict[int, list[int]] = {}
        for index, segment in enumerate(self.tree.segments):
            if self.largest[index] <= limit:
                continue
            opened = [stored[part.segment] for part in segment.parts]
            if segment.kind == LINEAR:
                own, start, end = self.spans[index]
                stored[index], path = shortest_path(own, start, end, opened, limit)
                largest[index] = max(
                    largest[segment.parts[a].segment] if b == a + 1 else end[b] - start[a]
                    for a, b in zip(path, path[1:], strict=False))
                paths[index] = path
            else:
                stored[index] = sum(opened) + sum(self.graph.bytes[v] for v in segment.vertices)
                largest[index] = max(largest[part.segment] for part in segment.parts)
        return stored, largest, paths
