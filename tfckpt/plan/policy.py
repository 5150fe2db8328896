"""Schedules in which the backward recomputes what a person wants recomputed (`CostGraph.again`)."""

from __future__ import annotations

from collections.abc import Collection

from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph
from tfckpt.ir.schedule import Schedule, Step


def recompute_as_asked(graph: CostGraph, schedule: Schedule, deferred: Collection[int] = ()
                       ) -> Schedule:
    """Return a schedule that keeps nothing for the backward of what is to be recomputed.

    Where a step after the forward would read what such a vertex wrote in the forward, the vertex
    runs again just before that step, after those of its inputs that are to be recomputed too. All
    else that the copy reads stays live until then. Steps of the backward that could run as soon as
    it has run in the forward (the square in GELU's derivative) wait for who reads them, since what
    they make would be kept in its place.

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
    waiting = _waiting(graph, [v for v, _ in schedule[:backward]])
    made: list[Step] = [step for step in schedule[:backward] if step[0] not in waiting]
    runs = [0] * len(graph.vertices)
    for v, _ in made:
        runs[v] += 1
    fresh: set[int] = set()
    last = [(v, 0) for v, _ in schedule[:backward] if v in waiting]  # that nothing asked for
    for v, _ in (*schedule[backward:], *last):
        if v in waiting and runs[v]:
            continue
        for vertex in (*_stale(graph, v, runs, fresh, waiting), v):
            made.append((vertex, runs[vertex]))
            runs[vertex] += 1
            fresh.add(vertex)
    return tuple(made)


def _waiting(graph: CostGraph, forward: list[int]) -> frozenset[int]:
    """Return the steps of the backward that wait for who reads them.

    Args:
      graph: joint graph.
      forward: what is planned to run before the backward, in order.
    """
    found: set[int] = set()
    for v in forward:
        if graph.vertices[v].region == BACKWARD and any(
                graph.storages[s].producer in graph.again or graph.storages[s].producer in found
                for s in graph.vertices[v].reads):
            found.add(v)
    for v in reversed(forward):  # what another step of the forward needs cannot
        if v not in found:
            found.difference_update(graph.predecessors[v])
    return frozenset(found)


def _stale(graph: CostGraph, reader: int, runs: list[int], fresh: set[int],
           waiting: Collection[int]) -> list[int]:
    """Return what has to run, perhaps again, before a step; each after what it reads itself."""
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
        producers.update(dict.fromkeys(p for p in graph.predecessors[v] if p in waiting))
        stack += [(p, False) for p in reversed(producers) if p not in seen and (
            p in graph.again and runs[p] and p not in fresh or p in waiting and not runs[p])]
    return found
