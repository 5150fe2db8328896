"""`CostGraph`: what every vertex of a training step costs in bytes and seconds.

A vertex is one operation that allocates or reads memory that matters, together with the
trivial operations contracted into it. A *storage* is one allocation; several tensors may share
it (Identity, Reshape ...). Vertices are indexed in a topological order: the index order is the
order in which the plain step is planned to run. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tfckpt.errors import CostError
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, REGIONS, UPDATE
from tfckpt.ir.tables import Tables, tables_of

__all__ = ["BACKWARD", "FORWARD", "OTHER", "UPDATE", "CostGraph", "Storage", "Vertex",
           "check_cost_graph"]


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """One allocation.

    Attributes:
      name: tensor that allocates it.
      bytes: its size.
      producer: vertex that allocates it.
      fetched: kept until the step ends.
      tensor: (op, slot) in the captured `Graph` that allocates it.
      pieces: in how many requests of one size it is allocated: of a loop's list one for each entry.
    """

    name: str
    bytes: int
    producer: int
    fetched: bool = False
    tensor: tuple[int, int] = (-1, -1)
    pieces: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Vertex:
    """One step of work.

    Attributes:
      name: its anchor operation.
      region: forward, backward, update or other.
      time: seconds (or any unit, as long as all vertices use the same).
      reads: storages it reads, ascending.
      writes: storages it allocates, ascending.
      after: vertices it waits for besides the producers of `reads`.
      reuses: pairs (written, read): the kernel may write into the buffer of an input that dies.
      recomputable: pure and in the forward region: may run again.
      workspace: extra bytes allocated while it runs.
      pieces: in how many requests of one size these are allocated.
      cheap: moves bytes rather than computing (element-wise and the like).
      donates: storages that become part of the resident set when it runs (a variable takes
        over the buffer of its new value and frees the old one).
      ops: indices in `Graph.ops` of the anchor (first) and of what was contracted into it.
      fusible: TensorFlow may merge the op into its only reader; nothing else may wait for it,
        or the merge, and with it the rounding of the plain step, would be lost.
      join: a pass-through of several storages that does no work (IdentityN): what waits only
        for it may be released from it.
      conditional: it runs in one branch of a Switch only; nothing may wait for it.
      device: where it runs.
      reads_variables: variables (positions in `variable_bytes`) whose values it reads in their own
        memory, before they are updated.
      updates: the variable that it updates: in place, unless something still reads its value; -1
        where it updates none.
      again: whether the user asks that nothing it writes is kept from the forward pass for the
        backward.
    """

    name: str
    region: str
    time: float
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    reuses: tuple[tuple[int, int], ...] = ()
    recomputable: bool = False
    workspace: int = 0
    pieces: int = 1
    cheap: bool = False
    donates: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()
    fusible: bool = False
    join: bool = False
    conditional: bool = False
    device: str = ""
    reads_variables: tuple[int, ...] = ()
    updates: int = -1
    again: bool = False


@dataclasses.dataclass(frozen=True)
class CostGraph:
    """Vertices, storages and the bytes that are resident before the step starts.

    Attributes:
      resident_bytes: variables, fed inputs and constants.
      variable_bytes: size of each variable.
      unknown_variables: how many more there are, of unknown size and counted nowhere.
    """

    vertices: tuple[Vertex, ...]
    storages: tuple[Storage, ...]
    resident_bytes: int = 0
    name: str = ""
    variable_bytes: tuple[int, ...] = ()
    unknown_variables: int = 0

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage the vertices that read it, ascending."""
        readers: list[list[int]] = [[] for _ in self.storages]
        for index, vertex in enumerate(self.vertices):
            for storage in vertex.reads:
                readers[storage].append(index)
        return tuple(map(tuple, readers))

    @functools.cached_property
    def again(self) -> frozenset[int]:
        """Vertices that a person wants recomputed in the backward; membership only."""
        return frozenset(v for v, vertex in enumerate(self.vertices) if vertex.again)

    @functools.cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each vertex the vertices it needs, by data or otherwise, ascending."""
        return tuple(
            tuple(sorted({self.storages[s].producer for s in vertex.reads} | set(vertex.after)))
            for vertex in self.vertices
        )

    @functools.cached_property
    def tables(self) -> Tables:
        """Vertices and storages as arrays."""
        return tables_of(self)

    @functools.cached_property
    def bytes(self) -> tuple[int, ...]:
        """Return the size of each storage."""
        return tuple(storage.bytes for storage in self.storages)

    @functools.cached_property
    def fetched(self) -> frozenset[int]:
        """Return the storages that are kept until the step ends; membership only."""
        return frozenset(s for s, storage in enumerate(self.storages) if storage.fetched)

    @functools.cached_property
    def only_after(self) -> tuple[tuple[int, ...], ...]:
        """For each vertex those that it needs for no storage: for small tensors or by control."""
        return tuple(
            tuple(v for v in vertex.after if v not in made) if vertex.after else ()
            for vertex in self.vertices
            for made in ({self.storages[s].producer for s in vertex.reads},))

    @functools.cached_property
    def halves(self) -> tuple[tuple[Vertex, ...], tuple[Vertex, ...]]:
        """Return where steps overlap: each vertex as it starts, and as it ends.

        Workspace is accounted elsewhere. A vertex takes over buffers and updates variables when it
        starts; it keeps variables' values alive and donates buffers until it ends.
        """
        return (tuple(_without(v, workspace=0, reads_variables=()) for v in self.vertices),
                tuple(_without(v, workspace=0, updates=-1) for v in self.vertices))

    @functools.cached_property
    def droppable(self) -> frozenset[int]:
        """Storages that may be recomputed; membership only."""
        return frozenset(s for s, storage in enumerate(self.storages) if not storage.fetched
                         and self.vertices[storage.producer].recomputable)

    @functools.cached_property
    def residuals(self) -> tuple[int, ...]:
        """Forward storages that may be recomputed and that the backward or update reads."""
        return tuple(s for s in sorted(self.droppable) if any(
            self.vertices[reader].region in (BACKWARD, UPDATE) for reader in self.readers[s]))

    @functools.cached_property
    def total_time(self) -> float:
        """Time of the plain step: the sum over all vertices."""
        return sum(vertex.time for vertex in self.vertices)


def _without(vertex: Vertex, **none: Any) -> Vertex:
    same = all(getattr(vertex, name) == value for name, value in none.items())
    return vertex if same else dataclasses.replace(vertex, **none)


def check_cost_graph(graph: CostGraph) -> None:
    """Raise `CostError`, naming the vertex, unless the graph is well formed.

    Checked: unique vertex names, finite non-negative costs, edges that point backwards, each
    storage written by exactly its producer, reuses between a write and a read of the vertex.

    Args:
      graph: the cost graph to check; not changed.

    Raises:
      CostError: the graph is not well formed.
    """
    names: set[str] = set()
    for index, vertex in enumerate(graph.vertices):
        if vertex.name in names:
            raise CostError(f"cost: two vertices are named {vertex.name!r}; names must be unique")
        names.add(vertex.name)
        if vertex.region not in REGIONS:
            raise CostError(f"cost: vertex {vertex.name!r} has unknown region {vertex.region!r}")
        if not 0 <= vertex.time < float("inf"):
            raise CostError(f"cost: vertex {vertex.name!r} has time {vertex.time}; "
                            "it must be finite and not negative")
        if vertex.workspace < 0:
            raise CostError(f"cost: vertex {vertex.name!r} has negative workspace")
        _check_edges(graph, index, vertex)
    for index, storage in enumerate(graph.storages):
        if storage.bytes < 0:
            raise CostError(f"cost: storage {storage.name!r} has negative bytes")
        if not 0 <= storage.producer < len(graph.vertices):
            raise CostError(f"cost: storage {storage.name!r} has no producer")
        if index not in graph.vertices[storage.producer].writes:
            raise CostError(f"cost: storage {storage.name!r} is not written by "
                            f"{graph.vertices[storage.producer].name!r}, its producer")


def _check_edges(graph: CostGraph, index: int, vertex: Vertex) -> None:
    for s in (*vertex.reads, *vertex.writes):
        if not 0 <= s < len(graph.storages):
            raise CostError(f"cost: vertex {vertex.name!r} handles storage {s}, which does "
                            "not exist")
    for s in vertex.reads:
        if graph.storages[s].producer >= index:
            raise CostError(f"cost: vertex {vertex.name!r} reads {graph.storages[s].name!r} "
                            "before it is made: the graph has a cycle")
    for other in vertex.after:
        if not 0 <= other < index:
            raise CostError(f"cost: vertex {vertex.name!r} waits for a later vertex: "
                            "the graph has a cycle")
    for written, read in vertex.reuses:
        if written not in vertex.writes or read not in vertex.reads:
            raise CostError(f"cost: vertex {vertex.name!r} reuses a buffer it does not handle")
    for s in vertex.writes:
        if graph.storages[s].producer != index:
            raise CostError(f"cost: storage {graph.storages[s].name!r} has two producers")
    if not set(vertex.donates) <= set(vertex.reads):
        raise CostError(f"cost: vertex {vertex.name!r} donates a buffer it does not read")
