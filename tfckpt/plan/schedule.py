"""The plan: an execution schedule with repeats, and its checker.

A schedule covers the joint graph (forward, backward, update). A step `(vertex, copy)` runs the
vertex for the `copy`-th time after the original, which is copy 0; it reads the latest copy of
each input that ran before it. When a tensor is freed follows from liveness, never from the
solver.
"""

from __future__ import annotations

import dataclasses

from tfckpt.cost.costgraph import CostGraph
from tfckpt.errors import PlanError

Step = tuple[int, int]
Schedule = tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Moves:
    """Free moves: they cost no time and change no number.

    Attributes:
      deferred: vertices that are ready at the start of the step, or in the forward pass, and are
        placed just before their first reader.
      released: pass-through joins that are bypassed, so that what they held together is freed
        one by one.
    """

    deferred: tuple[int, ...] = ()
    released: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A control edge that keeps a step from running before its turn."""

    held: Step
    trigger: Step


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule, the free moves it relies on, the pins that hold it, and its solver."""

    schedule: Schedule
    moves: Moves = Moves()
    pins: tuple[Pin, ...] = ()
    solver: str = ""

    @property
    def recomputed(self) -> tuple[Step, ...]:
        """The steps that run a vertex again."""
        return tuple(step for step in self.schedule if step[1] > 0)


def plain_plan(graph: CostGraph) -> Plan:
    """Every vertex once, in the order of the graph, but for joins, which TensorFlow removes."""
    joins = tuple(v for v, vertex in enumerate(graph.vertices) if vertex.join)
    return Plan(tuple((v, 0) for v in range(len(graph.vertices)) if v not in joins),
                Moves(released=joins))


def check_schedule(graph: CostGraph, schedule: Schedule, released: tuple[int, ...] = ()) -> None:
    """Raises `PlanError` unless the schedule can be executed and computes the whole step.

    Checked: copies of a vertex appear as 0, 1, 2 ...; only recomputable vertices repeat; every
    read finds an earlier copy; every predecessor has run; every vertex that is not a released
    join runs.
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
