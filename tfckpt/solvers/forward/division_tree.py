"""The division tree of a computation graph: everything that may lie between two checkpoints.

An *independent segment* between vertices i and j is a set of vertices that have i before them, j
after them, and no edge to anything else. The tree takes the whole graph apart into such sets:

  - linear: every path passes certain vertices inside, the splitting vertices; the parts lie
    between one and the next;
  - branched: no splitting vertex, but parts from i to j that have nothing to do with each other;
  - complicated ("non-branched"): neither; the parts are the largest independent segments inside,
    and the vertices where they meet are the connecting vertices.

The tree is unique, and each connected independent segment of the graph is one of its segments or
what lies between two splitting vertices of a linear one. In the terms of graph theory it is the
tree of triconnected components of the graph with an edge from its first to its last vertex.

Construction. Linear and branched parts are found by series-parallel reduction (a vertex with one
edge in and one edge out is replaced by an edge, parallel edges are merged), which takes nearly
linear time and leaves nothing of a chain, a ResNet or a DenseNet. What remains is taken apart by
`tfckpt.solvers.forward.separation`, which finds the segments that hang on each pair of vertices;
they are folded from the smallest up, reducing again after each.

Source: Feng and Huang 2018, definitions 1 to 9, theorem 1, algorithms 2 to 4; Feng and Huang
2021, supplement, section 2 (independent segments). Series-parallel reduction: Valdes, Tarjan and
Lawler 1982.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tfckpt.errors import PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.reforwarding import ends
from tfckpt.solvers.forward.series_parallel import BRANCHED, COMPLICATED, EDGE, LINEAR, Piece, fold

__all__ = ["BRANCHED", "COMPLICATED", "EDGE", "LINEAR", "DivisionTree", "Part", "Segment",
           "check_division_tree", "division_tree"]

NO_SEGMENT = -1
"""`Part.segment` of an edge of the graph, with no vertex inside."""


class Part(NamedTuple):
    """A member of a division: what lies between two vertices.

    Attributes:
      source, target: its ends, node indices (-1 and n are virtual).
      segment: index of a segment of the tree; `NO_SEGMENT` for a plain edge.
    """

    source: int
    target: int
    segment: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """An independent segment and its division.

    Attributes:
      kind: `LINEAR`, `BRANCHED` or `COMPLICATED`.
      source, target: its ends, which are not part of it.
      vertices: the splitting vertices (linear, in order), none (branched), or the connecting
        vertices (complicated, ascending). Each vertex of the graph except its ends is listed by
        exactly one segment: these are the leaves of the tree.
      parts: the division. Linear: from source to target. Branched: by the lowest vertex inside,
        an edge first. Complicated: by source and target.
      bytes: of all vertices inside, those of the parts included.
    """

    kind: str
    source: int
    target: int
    vertices: tuple[int, ...]
    parts: tuple[Part, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class DivisionTree:
    """The division tree of a graph; flat, so that depth costs no recursion.

    Attributes:
      names: of the vertices of the graph.
      source, target: first and last vertex; -1 and n where virtual.
      segments: parts before what they are part of, the whole graph last. Empty if nothing lies
        between source and target.
    """

    names: tuple[str, ...]
    source: int
    target: int
    segments: tuple[Segment, ...]

    def name(self, vertex: int) -> str:
        """Return the name of a vertex, virtual ones included.

        Args:
          vertex: node index; -1 and n are the virtual ends.
        """
        if 0 <= vertex < len(self.names):
            return self.names[vertex]
        return "(start)" if vertex < 0 else "(end)"

    def __str__(self) -> str:
        """Return the tree as text: one line a segment, parts indented below, edges left out."""
        lines = []
        below = [(len(self.segments) - 1, 0)] if self.segments else []
        while below:
            index, depth = below.pop()
            segment = self.segments[index]
            inside = ", ".join(map(self.name, segment.vertices))
            lines.append("  " * depth + f"{segment.kind} {self.name(segment.source)} -> "
                         f"{self.name(segment.target)}, {segment.bytes} bytes"
                         + (f": {inside}" if inside else ""))
            below.extend((part.segment, depth + 1) for part in reversed(segment.parts)
                         if part.segment != NO_SEGMENT)
        return "\n".join(lines) or f"{self.name(self.source)} -> {self.name(self.target)}"


def division_tree(graph: ForwardGraph) -> DivisionTree:
    """Return the division tree of a graph.

    Args:
      graph: any graph. Several inputs or outputs are joined by virtual ends (see
        `tfckpt.solvers.forward.reforwarding`); without vertices the tree is empty.

    Returns:
      The division tree, which is unique, with the whole graph as its last segment.

    Raises:
      PlanError: what series-parallel reduction leaves is too large for
        `tfckpt.solvers.forward.separation.LARGEST`.

    Complexity: O((V + E) log V) where series-parallel reduction suffices. Otherwise O(v e) more
    for the v vertices and e edges that reduction leaves between two neighbouring splitting
    vertices.
    """
    source, target = ends(graph)
    if len(graph) < 2:
        return DivisionTree(graph.names, 0, max(0, len(graph) - 1), ())
    tree = DivisionTree(graph.names, source, target,
                        _flatten(graph, fold(_edges(graph, source, target), source, target)))
    check_division_tree(graph, tree)
    return tree


def check_division_tree(graph: ForwardGraph, tree: DivisionTree) -> None:
    """Raise `PlanError` unless the tree contains each edge and vertex exactly once.

    Args:
      graph: the graph that was taken apart.
      tree: its division tree.

    Raises:
      PlanError: an edge, a vertex or a segment is missing, or occurs several times.

    Complexity: O(V + E).
    """
    places = [v for segment in tree.segments for v in segment.vertices]
    inner = [v for v in range(len(graph)) if v not in (tree.source, tree.target)]
    if sorted(places) != inner:
        raise PlanError("plan: the division tree does not contain each vertex of the graph once")
    edges = sorted((p.source, p.target) for segment in tree.segments for p in segment.parts
                   if p.segment == NO_SEGMENT)
    if tree.segments and edges != sorted(_edges(graph, tree.source, tree.target)):
        raise PlanError("plan: the division tree does not contain each edge of the graph once")
    used = sorted(p.segment for segment in tree.segments for p in segment.parts
                  if p.segment != NO_SEGMENT)
    if tree.segments and used != list(range(len(tree.segments) - 1)):
        raise PlanError("plan: a segment of the division tree is part of none or of several")


def _edges(graph: ForwardGraph, source: int, target: int) -> list[tuple[int, int]]:
    """Return all edges, those of the virtual ends included."""
    edges = [(u, v) for u, after in enumerate(graph.successors) for v in after]
    if source < 0:
        edges += [(source, v) for v, needs in enumerate(graph.predecessors) if not needs]
    if target == len(graph):
        edges += [(v, target) for v, after in enumerate(graph.successors) if not after]
    return edges


def _flatten(graph: ForwardGraph, root: Piece) -> tuple[Segment, ...]:
    """Return the tree below a piece as a tuple, parts first."""
    found: list[Piece] = []
    below = [root] if root.kind != EDGE else []
    while below:
        piece = below.pop()
        found.append(piece)
        below.extend(part for part in piece.ordered_parts() if part.kind != EDGE)
    found.reverse()
    index = {id(piece): i for i, piece in enumerate(found)}
    segments: list[Segment] = []
    for piece in found:
        parts = tuple(Part(part.source, part.target, index.get(id(part), NO_SEGMENT))
                      for part in piece.ordered_parts())
        size = (sum(graph.bytes[v] for v in piece.vertices())
                + sum(segments[p.segment].bytes for p in parts if p.segment != NO_SEGMENT))
        segments.append(Segment(piece.kind, piece.source, piece.target, piece.vertices(),
                                parts, size))
    return tuple(segments)
