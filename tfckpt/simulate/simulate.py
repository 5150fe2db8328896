"""The simulator: live bytes at every step of a schedule, the peak, and what is live there.

It sums what each step allocates and frees (`tfckpt.simulate.liveness.Account`), and counts a step's
workspace while it runs. Bytes are *dynamic*: above what is allocated when the step starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Resolved, Schedule
from tfckpt.simulate.liveness import Account


@dataclasses.dataclass(frozen=True)
class Live:
    """A storage instance that is live at the peak: storage index, copy, bytes."""

    storage: int
    copy: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes in one execution.

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
    """Return the timeline of a schedule executed in its own order.

    Args:
      graph: joint graph.
      schedule: originals and copies.

    Raises:
      PlanError: the schedule cannot be executed.
    """
    return timeline_of(Account(graph, schedule), schedule, None)


def simulate_order(graph: CostGraph, resolved: Resolved,
                   order: Sequence[int] | None) -> Timeline:
    """Return the timeline of a resolved schedule whose steps run in `order`.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      order: positions in execution order; None as scheduled.

    Complexity: n log n in the number of steps and reads.
    """
    return timeline_of(Account(graph, resolved.schedule), resolved.schedule, order)


def timeline_of(account: Account, schedule: Schedule, order: Sequence[int] | None) -> Timeline:
    """Return the timeline of a schedule from its account.

    Args:
      account: of the schedule.
      schedule: originals and copies.
      order: positions in execution order; None as scheduled.
    """
    tables, vertex = account.tables, account.vertex
    if order is not None:
        vertex = vertex[np.array(order, dtype=np.int64)]
    time = sum([tables.time[v] for v in vertex.tolist()])
    if not len(vertex):
        return Timeline((), 0, 0, (), time)
    size = tables.bytes[account.storage]
    born, end = account.spans(order)
    grown = np.zeros(len(vertex) + 2, np.int64)
    np.add.at(grown, born, size)
    np.subtract.at(grown, end + 1, size)
    live = np.cumsum(grown)[:len(vertex)] + tables.workspace[vertex]
    at = int(live.argmax())
    there = np.flatnonzero((born <= at) & (end >= at))
    found = sorted(zip((-size[there]).tolist(), account.storage[there].tolist(),
                       [schedule[p][1] for p in account.maker[there].tolist()], strict=True))
    return Timeline(tuple(live.tolist()), int(live[at]), at,
                    tuple([Live(s, copy, -less) for less, s, copy in found]), time,
                    int(vertex[at]))
