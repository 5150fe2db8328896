"""The step at each position of a simulated timeline, for people to look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph
from tfckpt.ir.schedule import Plan, resolve


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One step of a timeline.

    Attributes:
      name: its op.
      region: forward, backward, update or other; of a recomputation, where it runs: backward.
      copy: 0, or the number of the recomputation.
      segment: number of recomputation segments begun so far; of a forward step, the segment that
        runs it again first, or 0.
      reads: positions of the steps that made what it reads.
    """

    name: str
    region: str
    copy: int
    segment: int
    reads: tuple[int, ...]


def ran(graph: CostGraph, plan: Plan, named: Callable[[str], str] = str) -> tuple[Ran, ...]:
    """Return the steps of a plan in the order of its timeline.

    Args:
      graph: joint graph.
      plan: of the graph; its `order` is that of the timeline.
      named: returns what people call an op, by its name.
    """
    resolved = resolve(graph, plan.schedule)
    when = {position: i for i, position in enumerate(plan.order)}
    segment, number, inside = [], 0, False  # by schedule, where segments are contiguous
    again: dict[int, int] = {}
    for vertex, copy in resolved.schedule:
        number += bool(copy) and not inside
        inside = bool(copy)
        segment.append(number)
        if copy:
            again.setdefault(vertex, number)
    result = []
    for position in plan.order:
        vertex, copy = resolved.schedule[position]
        entry = graph.vertices[vertex]
        forward = entry.region == FORWARD and not copy
        reads = sorted({when[resolved.maker[i]] for i in resolved.reads[position]})
        result.append(Ran(named(entry.name), BACKWARD if copy else entry.region, copy,
                          again.get(vertex, 0) if forward else segment[position], tuple(reads)))
    return tuple(result)
