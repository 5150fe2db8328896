"""Which step stands at each position of a simulated timeline, for people to look at."""

from __future__ import annotations

import dataclasses

from tfckpt.cost.costgraph import BACKWARD, FORWARD, CostGraph
from tfckpt.plan.executor import ORDERS, executor_order
from tfckpt.plan.fences import fences
from tfckpt.plan.schedule import Plan
from tfckpt.plan.simulate import Resolved, Timeline, resolve, simulate_order


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One step of a timeline.

    Attributes:
      name: its op.
      region: forward, backward, update or other; of a recomputation, where it runs: backward.
      copy: 0, or the number of the recomputation.
      segment: number of recomputed stretches begun so far; of a forward step, the stretch that
        runs it again first, or 0.
      reads: positions of the steps that made what it reads.
    """

    name: str
    region: str
    copy: int
    segment: int
    reads: tuple[int, ...]


def ran(graph: CostGraph, plan: Plan, timeline: Timeline) -> tuple[Ran, ...]:
    """The steps of a plan in the order that a timeline was simulated in.

    The planner keeps the worst of several orders and not the order itself; here the order is
    found again by simulating each. Empty where none gives this timeline.
    """
    resolved = resolve(graph, plan.schedule)
    for order in _orders(graph, resolved, plan):
        if simulate_order(graph, resolved, order).live_bytes == timeline.live_bytes:
            return _steps(graph, resolved, order)
    return ()


def _orders(graph: CostGraph, resolved: Resolved, plan: Plan):
    """The orders that the planner simulates, the plan's own first."""
    yield list(range(len(resolved.schedule)))
    for await_updates in (True, False):
        found = fences(graph, resolved, await_updates=await_updates)
        for policy in ORDERS:
            yield executor_order(graph, resolved, plan.moves.released, plan.pins, found, policy)
        if not found:
            return


def _steps(graph: CostGraph, resolved: Resolved, order: list[int]) -> tuple[Ran, ...]:
    when = {position: i for i, position in enumerate(order)}
    segment, number, inside = [], 0, False  # by schedule, where stretches are contiguous
    again: dict[int, int] = {}
    for vertex, copy in resolved.schedule:
        number += bool(copy) and not inside
        inside = bool(copy)
        segment.append(number)
        if copy:
            again.setdefault(vertex, number)
    result = []
    for position in order:
        vertex, copy = resolved.schedule[position]
        entry = graph.vertices[vertex]
        forward = entry.region == FORWARD and not copy
        reads = sorted({when[resolved.maker[i]] for i in resolved.reads[position]})
        result.append(Ran(entry.name, BACKWARD if copy else entry.region, copy,
                          again.get(vertex, 0) if forward else segment[position], tuple(reads)))
    return tuple(result)
