"""The plan: an execution schedule with repeats, and its checker.

A schedule covers the joint graph (forward, backward, update). A step `(vertex, copy)` runs the
vertex for the `copy`-th time after the original, which is copy 0; it reads the latest copy of
each input that ran before it. When a tensor is freed follows from liveness, never from the
solver.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import CostGraph

Step = tuple[int, int]
Schedule = tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Moves:
    """Free moves: they cost no time and change no number.

    Attributes:
      deferred: vertices that are ready at the start of the step, or in the forward pass, and are
        placed just before their first reader.
      released: pass-through joins that are bypassed, so that what they kept together is freed
        one by one.
    """

    deferred: tuple[int, ...] = ()
    released: tuple[int, ...] = ()


NO_MOVES = Moves()


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """A control barrier before a recomputation segment.

    Attributes:
      position: first step of the segment.
      awaits: positions of steps that must have run.
      gates: positions of the segment's steps that may not run before.
    """

    position: int
    awaits: tuple[int, ...]
    gates: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """A control edge: the step `waiting` may not run before the step `awaited` has."""

    waiting: Step
    awaited: Step


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is needed to replay what was planned (see `tfckpt.simulate.check.check_plan`).

    Attributes:
      schedule: the steps.
      moves: the free moves that it relies on.
      fences: one before each recomputation segment, in the order of the schedule. Each awaits
        the one before it, too.
      waits: single wait edges, in the order of the schedule.
      order: positions of the schedule in the order in which the plan's timeline executes them.
      await_updates: whether fences and waits may await update steps.
      alternatives: names of the ops at which the forward-AD regions begin whose derivatives are
        kept; the plan is one of the graph in which they were taken.
      solver: which proposal it comes from.
    """

    schedule: Schedule
    moves: Moves = NO_MOVES
    fences: tuple[Fence, ...] = ()
    waits: tuple[Wait, ...] = ()
    order: tuple[int, ...] = ()
    await_updates: bool = True
    alternatives: tuple[str, ...] = ()
    solver: str = ""

    @property
    def recomputed(self) -> tuple[Step, ...]:
        """Return the steps that run a vertex again."""
        return tuple(step for step in self.schedule if step[1] > 0)


def plain_plan(graph: CostGraph) -> Plan:
    """Return every vertex once, as the graph orders them, without joins: TensorFlow drops them.

    Args:
      graph: cost graph of the joint graph.
    """
    joins = tuple(v for v, vertex in enumerate(graph.vertices) if vertex.join)
    schedule = tuple((v, 0) for v in range(len(graph.vertices)) if v not in joins)
    return Plan(schedule, Moves(released=joins), order=tuple(range(len(schedule))))


def check_schedule(graph: CostGraph, schedule: Schedule, released: tuple[int, ...] = ()) -> None:
    """Raise `PlanError` unless the schedule can be executed and computes the whole step.

    Checked: copies of a vertex appear as 0, 1, 2 ...; only recomputable vertices repeat; every
    read finds an earlier copy; every predecessor has run; every vertex that is not a released
    join runs.

    Args:
      graph: cost graph of the joint graph.
      schedule: the steps, in the order in which they run.
      released: vertices of joins that are bypassed: they need not run, and nothing waits for them.

    Raises:
      PlanError: the schedule cannot be executed, or leaves a vertex out; the message names it.
    """
    ran = [0] * len(graph.vertices)
    joins = frozenset(released)
    for vertex, copy in schedule:
        if not 0 <= vertex < len(ran):
            raise PlanError(f"plan: vertex {vertex} does not exist")
        entry = graph.vertices[vertex]
        if copy != ran[vertex]:
            raise PlanError(f"plan: copy {copy} of {entry.name!r} is scheduled when {ran[vertex]} "
                            "copies have run")
        if copy and not entry.recomputable:
            raise PlanError(f"plan: {entry.name!r} may not run twice")
        for other in graph.predecessors[vertex]:
            if not ran[other] and other not in joins:
                raise PlanError(f"plan: {entry.name!r} is scheduled before "
                                f"{graph.vertices[other].name!r}, which it needs")
        ran[vertex] += 1
    for vertex, count in enumerate(ran):
        if not count and vertex not in joins:
            raise PlanError(f"plan: {graph.vertices[vertex].name!r} is never scheduled")


def with_copies(originals: Sequence[int], rows: Iterable[Iterable[int]]) -> Schedule:
    """Return the schedule of originals, each after the copies of the vertices in its row.

    Args:
      originals: vertices, in the order in which they first run.
      rows: for each original the vertices that run again just before it, in this order.

    Raises:
      ValueError: there are not as many rows as originals.
    """
    count: collections.Counter[int] = collections.Counter()
    steps: list[Step] = []
    for original, row in zip(originals, rows, strict=True):
        for v in row:
            count[v] += 1
            steps.append((v, count[v]))
        steps.append((original, 0))
    return tuple(steps)


def copies_before(schedule: Schedule) -> list[frozenset[int]]:
    """Return for each original the vertices that run again between it and the one before it.

    Args:
      schedule: the steps, in the order in which they run.

    Returns:
      A row for each original, in the order of the schedule; copies after the last are in none.
    """
    rows: list[frozenset[int]] = []
    waiting: list[int] = []
    for v, copy in schedule:
        if copy:
            waiting.append(v)
        else:
            rows.append(frozenset(waiting))
            waiting = []
    return rows


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A schedule with every read bound to one instance of its storage.

    Attributes:
      schedule: the steps.
      reads, writes: instance indices for each step.
      storage, copy, maker: for each instance its storage, copy number and producing step.
    """

    schedule: Schedule
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    storage: tuple[int, ...]
    copy: tuple[int, ...]
    maker: tuple[int, ...]


def resolve(graph: CostGraph, schedule: Schedule) -> Resolved:
    """Return the schedule with each read bound to the latest instance made before it.

    Args:
      graph: cost graph of the joint graph.
      schedule: the steps, in the order in which they run.

    Raises:
      PlanError: a step reads a storage that nothing has made yet.
    """
    latest = [-1] * len(graph.storages)
    reads, writes = [], []
    storage: list[int] = []
    maker: list[int] = []
    vertices, count = graph.vertices, 0
    for position, (index, _) in enumerate(schedule):
        vertex = vertices[index]
        bound = tuple([latest[s] for s in vertex.reads])
        if -1 in bound:
            missing = vertex.reads[bound.index(-1)]
            raise PlanError(f"plan: {vertex.name!r} reads {graph.storages[missing].name!r} "
                            "before anything has made it")
        reads.append(bound)
        made = vertex.writes
        first = count
        for s in made:
            latest[s] = count
            count += 1
            maker.append(position)
        storage += made
        writes.append(tuple(range(first, count)))
    return Resolved(schedule, tuple(reads), tuple(writes), tuple(storage),
                    tuple([schedule[p][1] for p in maker]), tuple(maker))
