"""Folds a graph, piece by piece, into one edge; what was folded is its division tree.

`Piece` is the mutable tree under construction; `tfckpt.solvers.forward.division_tree` makes a value
of it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from tfckpt.solvers.forward.separation import hanging_segments

__all__ = ["BRANCHED", "COMPLICATED", "EDGE", "LINEAR", "Piece", "fold"]

EDGE = "edge"
LINEAR = "linear"
BRANCHED = "branched"
COMPLICATED = "complicated"


@dataclasses.dataclass(eq=False, slots=True)
class Piece:
    """An edge of the folded graph and all that it stands for.

    Attributes:
      lowest: the lowest vertex inside, which orders branches; -2 for an edge.
      parts: in order (linear) or in any order.
    """

    kind: str
    source: int
    target: int
    lowest: int
    parts: deque[Piece]

    def ordered_parts(self) -> list[Piece]:
        """Return the parts, in the order that `Segment.parts` states."""
        if self.kind == BRANCHED:
            return sorted(self.parts, key=lambda part: part.lowest)
        if self.kind == COMPLICATED:
            return sorted(self.parts, key=lambda part: (part.source, part.target))
        return list(self.parts)

    def vertices(self) -> tuple[int, ...]:
        """Return the splitting or connecting vertices."""
        if self.kind == BRANCHED:
            return ()
        inside = {part.target: None for part in self.ordered_parts()}
        inside.pop(self.target, None)
        return tuple(inside if self.kind == LINEAR else sorted(inside))


def fold(edges: Iterable[tuple[int, int]], source: int, target: int) -> Piece:
    """Return the division tree of a graph, as a piece from its source to its target.

    Args:
      edges: from lower to higher vertices; each vertex lies on a path from source to target.
      source: the lowest vertex, which has no predecessor.
      target: the highest vertex, which has no successor.
    """
    folded = _Folded(source, target)
    for u, v in sorted(edges):
        folded.add(Piece(EDGE, u, v, -2, deque()))
    folded.reduce(sorted(folded.after))
    for _, first, last, vertex in hanging_segments(folded.after):
        if vertex in folded.before:  # else it was folded with a smaller segment
            folded.fold_complicated(first, last, vertex)
            folded.reduce([first, last])
    return folded.after[source][target]


def _series(left: Piece, right: Piece) -> Piece:
    """Return two pieces in a row as one; the parts of the shorter linear one join the longer."""
    lowest = min(piece for piece in (left.lowest, right.lowest, left.target) if piece != -2)
    if left.kind == LINEAR and (right.kind != LINEAR or len(left.parts) >= len(right.parts)):
        parts = left.parts
        parts.extend(right.parts if right.kind == LINEAR else (right,))
    elif right.kind == LINEAR:
        parts = right.parts
        parts.extendleft(reversed(left.parts) if left.kind == LINEAR else (left,))
    else:
        parts = deque((left, right))
    return Piece(LINEAR, left.source, right.target, lowest, parts)


def _parallel(one: Piece, other: Piece) -> Piece:
    """Return two pieces between the same ends as one; parts of branched ones are joined."""
    if len(one.parts) < len(other.parts):
        one, other = other, one
    if one.kind != BRANCHED and other.kind == BRANCHED:
        one, other = other, one
    parts = one.parts if one.kind == BRANCHED else deque((one,))
    parts.extend(other.parts if other.kind == BRANCHED else (other,))
    return Piece(BRANCHED, one.source, one.target, min(one.lowest, other.lowest), parts)


class _Folded:
    """A graph whose edges are pieces.

    Attributes:
      after: for each vertex the piece to each of its successors.
      before: for each vertex its predecessors, as the keys of a dict.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.after: dict[int, dict[int, Piece]] = {target: {}}
        self.before: dict[int, dict[int, None]] = {source: {}}

    def add(self, piece: Piece) -> None:
        after = self.after.setdefault(piece.source, {})
        if piece.target in after:
            piece = _parallel(after[piece.target], piece)
        after[piece.target] = piece
        self.before.setdefault(piece.target, {})[piece.source] = None

    def inside(self, vertex: int) -> bool:
        return vertex not in (self.source, self.target)

    def remove(self, vertex: int) -> None:
        for other in self.before.pop(vertex):
            del self.after[other][vertex]
        for other in self.after.pop(vertex):
            del self.before[other][vertex]

    def reduce(self, doubtful: list[int]) -> None:
        """Reduce series and parallel edges, starting from vertices that may be reducible."""
        queue = deque(doubtful)
        while queue:
            vertex = queue.popleft()
            if vertex not in self.before or not self.inside(vertex):
                continue
            if len(self.before[vertex]) > 1 or len(self.after[vertex]) > 1:
                continue
            (first,), (last,) = self.before[vertex], self.after[vertex]
            piece = _series(self.after[first][vertex], self.after[vertex][last])
            self.remove(vertex)
            if last in self.after[first]:
                queue.extend((first, last))
            self.add(piece)

    def fold_complicated(self, first: int, last: int, vertex: int) -> None:
        """Fold the vertices that paths from `vertex` reach without passing `first` or `last`."""
        members = [vertex]
        seen = {vertex, first, last}
        for member in members:
            for other in (*self.before[member], *self.after[member]):
                if other not in seen:
                    seen.add(other)
                    members.append(other)
        parts = {id(piece): piece for member in members for piece in (
            *self.after[member].values(),
            *(self.after[other][member] for other in self.before[member]))}
        for member in members:
            self.remove(member)
        lowest = min([p.lowest for p in parts.values() if p.kind != EDGE] + members)
        self.add(Piece(COMPLICATED, first, last, lowest, deque(parts.values())))
