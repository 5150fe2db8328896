"""The cost of a set of checkpoints if the backward recomputes everything between them.

The model of re-forwarding: the forward stores the checkpoints V_R only. Without them the graph
falls into *segments*, the connected components of what is left. The backward takes one segment
at a time, recomputes it from the checkpoint before it and keeps all of it meanwhile. The cost is

    sum of the bytes of V_R + the bytes of the largest segment.

Both ends of the graph are checkpoints and are counted. A graph of several inputs or outputs gets
a virtual end of 0 bytes, written as vertex -1 or vertex n; its real inputs or outputs are then
free to be recomputed.

The paper makes two assumptions. Each segment lies between two checkpoints only, one before and
one after it. And an operation of several inputs needs none of their values for its gradient (an
addition, a concatenation), so that branches that meet in it are segments of their own; for other
operations the inputs must be stored (`inputs_to_store`).

Source: Feng and Huang 2018, "Cutting down training memory by re-forwarding", equation (1),
section 4.1 (assumptions), definition 1 (closed sets: here segments and unions of them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from tfckpt.errors import PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph

__all__ = ["Checkpoints", "ends", "inputs_to_store", "price", "segments", "splitting_vertices"]


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A set V_R and its two terms of equation (1).

    Attributes:
      vertices: node indices, ascending; virtual ends are left out.
      stored: bytes of these vertices.
      max_term: bytes of the largest segment between them.
    """

    vertices: tuple[int, ...]
    stored: int
    max_term: int

    @property
    def cost(self) -> int:
        """Equation (1), in bytes."""
        return self.stored + self.max_term


def ends(graph: ForwardGraph) -> tuple[int, int]:
    """Return the vertex before and the vertex after everything.

    Each is real where it is unique; else they are -1 and n.

    Args:
      graph: the forward part of a step; not changed.
    """
    sources = [v for v, needs in enumerate(graph.predecessors) if not needs]
    targets = [v for v, after in enumerate(graph.successors) if not after]
    return (sources[0] if len(sources) == 1 else -1,
            targets[0] if len(targets) == 1 else len(graph))


def splitting_vertices(graph: ForwardGraph) -> tuple[int, ...]:
    """Return the vertices that every path from the first to the last vertex passes, ascending.

    Real ends are among them. Complexity: O(V + E).

    Args:
      graph: the forward part of a step; not changed.

    Source: Feng and Huang 2018, definition 3, algorithm 2.
    """
    found = []
    # The last vertex that an edge from before leads to; an edge beyond a vertex bypasses it.
    furthest = max((v for v, needs in enumerate(graph.predecessors) if not needs), default=0)
    for vertex, after in enumerate(graph.successors):
        if furthest <= vertex:
            found.append(vertex)
        furthest = max((furthest, *after)) if after else len(graph)
    return tuple(found)


def inputs_to_store(graph: ForwardGraph, needs_inputs: Iterable[int]) -> frozenset[int]:
    """Return vertices to store because the gradient of an op of several inputs needs them.

    Args:
      graph: the forward part of a step; not changed.
      needs_inputs: vertices made by such an operation (a product of two tensors, for example).

    Raises:
      PlanError: no such vertex.

    Source: Feng and Huang 2018, section 4.1 (how to do without the second assumption).
    """
    found: set[int] = set()
    for vertex in needs_inputs:
        if not 0 <= vertex < len(graph):
            raise PlanError(f"plan: vertex {vertex} is said to need its inputs, but the graph "
                            f"has vertices 0 to {len(graph) - 1}")
        if len(graph.predecessors[vertex]) > 1:
            found.update(graph.predecessors[vertex])
    return frozenset(found)


def segments(graph: ForwardGraph, vertices: Collection[int]
             ) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return the segments that checkpoints leave.

    Args:
      graph: the forward part of a step; not changed.
      vertices: the checkpoints; both ends must be among them, unless virtual.

    Returns:
      (source, target, vertices recomputed together) of each, by the lowest vertex. Edges from
      checkpoint to checkpoint make no segment.

    Raises:
      PlanError: an end is missing, a vertex does not exist, or a segment has more than two
        checkpoints around it; the message names a vertex to store.

    Complexity: O(V + E).
    """
    count = len(graph)
    source, target = ends(graph)
    stored = [False] * count
    for vertex in vertices:
        if not 0 <= vertex < count:
            raise PlanError(f"plan: checkpoint {vertex} is no vertex; the graph has vertices "
                            f"0 to {count - 1}")
        stored[vertex] = True
    for end in (source, target):
        if 0 <= end < count and not stored[end]:
            raise PlanError(f"plan: {graph.names[end]!r} is an end of the graph and must be a "
                            "checkpoint")
    found = []
    seen = list(stored)
    for first in range(count):
        if not seen[first]:
            members = _component(graph, stored, seen, first)
            found.append((*_around(graph, stored, members, source, target), members))
    return tuple(found)


def price(graph: ForwardGraph, vertices: Collection[int]) -> Checkpoints:
    """Return a set of checkpoints with its two terms of equation (1).

    Args:
      graph: the forward part of a step; not changed.
      vertices: the checkpoints; both ends must be among them, unless virtual.

    Raises:
      PlanError: as `segments`.
    """
    chosen = tuple(sorted(set(vertices)))
    largest = max((sum(graph.bytes[v] for v in members)
                   for _, _, members in segments(graph, chosen)), default=0)
    return Checkpoints(chosen, sum(graph.bytes[v] for v in chosen), largest)


def _component(graph: ForwardGraph, stored: Sequence[bool], seen: list[bool], first: int
               ) -> tuple[int, ...]:
    """Return the vertices connected with `first` without a checkpoint between, ascending."""
    seen[first] = True
    members = [first]
    for vertex in members:
        for other in (*graph.predecessors[vertex], *graph.successors[vertex]):
            if not seen[other]:
                seen[other] = True
                members.append(other)
    return tuple(sorted(members))


def _around(graph: ForwardGraph, stored: Sequence[bool], members: Sequence[int], source: int,
            target: int) -> tuple[int, int]:
    """Return the checkpoint before and the checkpoint after a segment."""
    before = {p for v in members for p in graph.predecessors[v] if stored[p]}
    after = {s for v in members for s in graph.successors[v] if stored[s]}
    if any(not graph.predecessors[v] for v in members):
        before.add(source)
    if any(not graph.successors[v] for v in members):
        after.add(target)
    if len(before) > 1 or len(after) > 1:
        raise PlanError(f"plan: the segment around {graph.names[members[0]]!r} has "
                        f"{len(before)} checkpoints before it and {len(after)} after it, not one "
                        "each; store it too, or leave out what is inside it")
    return min(before), min(after)
