"""Schedules in which the backward recomputes what a person wants recomputed (`CostGraph.again`)."""

from __future__ import annotations

from collections.abc import Collection

from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.ir.schedule import Schedule, Step


def recompute_as_asked(graph: CostGraph, schedule: Schedule, deferred: Collection[int] = ()
                       ) -> Schedule:
    """Return a schedule that keeps nothing for the backward of what is to be recomputed.

    Where a step after the forward would read what such a vertex wrote in the forward, the vertex
    runs again just before that step, after those of its inputs that are to be recomputed too. All
    else that the copy reads stays live until then.

    Args:
      graph: joint graph.
      schedule: the steps as planned without regard to what is asked.
      deferred: forward vertices that run just before their first reader.
    """
    if not graph.again:
        return schedule
    late = frozenset(deferred)
    backward = max((n for n, (v, copy) in enumerate(schedule, 1) if not copy and v not in late
                    and graph.vertices[v].region == FORWARD), default=0)
    made: list[Step] = list(schedule[:backward])
    runs = [0] * len(graph.vertices)
    for v, _ in made:
        runs[v] += 1
    fresh: set[int] = set()
    for v, _ in schedule[backward:]:
        for vertex in (*_stale(graph, v, runs, fresh), v):
            made.append((vertex, runs[vertex]))
            runs[vertex] += 1
            fresh.add(vertex)
    return tuple(made)


def _stale(graph: CostGraph, reader: int, runs: list[int], fresh: set[int]) -> list[int]:
    """Return what has to run again before a step reads it, each after what it reads itself."""
    found: list[int] = []
    seen: set[int] = set()
    stack = [(reader, False)]
    while stack:
        v, done = stack.pop()
        if done:
            found.append(v)
            continue
        if v != reader:
            if v in seen:
                continue
            seen.add(v)
            stack.append((v, True))
        producers = dict.fromkeys(graph.storages[s].producer for s in graph.vertices[v].reads)
        stack += [(p, False) for p in reversed(producers)
                  if p in graph.again and runs[p] and p not in fresh and p not in seen]
    return found
