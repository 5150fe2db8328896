"""The simulator: live bytes at every step of a schedule, the peak, and what is live there.

It sums what `tfckpt.plan.liveness.walk` says that each step allocates and frees, and counts a
step's workspace while it runs. Bytes are *dynamic*: above what is allocated when the step starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfckpt.clock import check_time
from tfckpt.cost.costgraph import CostGraph
from tfckpt.plan.liveness import walk
from tfckpt.plan.schedule import Resolved, Schedule, resolve


@dataclasses.dataclass(frozen=True)
class Live:
    """A storage instance that is live at the peak: storage index, copy, bytes."""

    storage: int
    copy: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What is live in one execution.

    Attributes:
      live_bytes: dynamic bytes live while each step runs.
      peak_bytes: their maximum.
      peak_step: first step at which it is reached.
      live_at_peak: what is live there, largest first.
      time: sum of the steps' times (the unit of `Vertex.time`).
      working: the vertex that runs there.
    """

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    live_at_peak: tuple[Live, ...]
    time: float
    working: int = -1


def simulate(graph: CostGraph, schedule: Schedule) -> Timeline:
    """Return the timeline of a schedule executed in its own order."""
    return simulate_order(graph, resolve(graph, schedule), None)


def simulate_order(graph: CostGraph, resolved: Resolved,
                   order: Sequence[int] | None) -> Timeline:
    """Return the timeline of a resolved schedule whose steps run in `order`.

    Args:
      order: positions in execution order; None as scheduled.

    Raises:
      PlanError: planning has a time limit, which is over.

    Complexity: linear in the number of steps and reads.
    """
    vertices, schedule = graph.vertices, resolved.schedule
    check_time()  # every plan comes here many times on its way
    steps = range(len(schedule)) if order is None else order
    size = [graph.bytes[s] for s in resolved.storage]
    end = [len(schedule)] * len(size)  # the last step through which each is live
    live = []
    current = 0
    for when, (vertex, made, taken, freed) in enumerate(walk(graph, resolved, order)):
        for i in made:
            current += size[i]
        if taken:
            for i in taken.values():
                current -= size[i]
                end[i] = when - 1
        live.append(current + vertex.workspace)
        for i in freed:
            current -= size[i]
            end[i] = when
    peak = max(live, default=0)
    at = live.index(peak) if peak else 0
    return Timeline(tuple(live), peak, at, _live_after(resolved, steps[:at + 1], size, end),
                    sum([vertices[schedule[p][0]].time for p in steps]),
                    schedule[steps[at]][0] if live else -1)


def _live_after(resolved: Resolved, steps: Sequence[int], size: Sequence[int],
                end: Sequence[int]) -> tuple[Live, ...]:
    """Return what is live while the last of these first steps runs, largest first."""
    storage, copy, writes = resolved.storage, resolved.copy, resolved.writes
    when = len(steps) - 1
    found = sorted([(-size[i], storage[i], copy[i])
                    for position in steps for i in writes[position] if end[i] >= when])
    return tuple([Live(s, again, -less) for less, s, again in found])
