"""Placement of fences in a schedule, so that an executor cannot recompute too early.

Before each run of copies (a *segment*) stands one fence. It awaits the leaves of everything
scheduled earlier in the backward, that is the steps whose results nothing scheduled earlier
reads, and gates the segment's entry steps, those that read no copy of their own segment. Each
fence also awaits the one before it, so a window of leaves is enough. All edges follow the
schedule, hence no fence can close a cycle.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph
from tfckpt.ir.graph import REGIONS
from tfckpt.ir.schedule import NO_MOVES, Fence, Moves, Plan, Resolved, Schedule, resolve


def fenced(graph: CostGraph, schedule: Schedule, moves: Moves = NO_MOVES, *,
           await_updates: bool = True, solver: str = "") -> Plan:
    """Return the plan of a schedule with its fences and no waits, executed as scheduled.

    Args:
      graph: joint graph.
      schedule: originals and copies.
      moves: the free moves that the schedule relies on.
      await_updates: see `fences`.
      solver: which proposal the schedule comes from.

    Raises:
      PlanError: a step reads a storage that nothing has made yet.
    """
    found = fences(graph, resolve(graph, schedule), await_updates=await_updates)
    return Plan(schedule, moves, found, order=tuple(range(len(schedule))),
                await_updates=await_updates, solver=solver)


def fences(graph: CostGraph, resolved: Resolved, *, await_updates: bool = True
           ) -> tuple[Fence, ...]:
    """Return the fences of a resolved schedule, in order.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      await_updates: also wait for steps scheduled earlier that are no part of the gradient. On one
        device this keeps released gradients from piling up; across devices a fence must never wait
        for what descends from a collective, so there it is False.
    """
    result = []
    window_start = 0
    original = {vertex: p for p, (vertex, copy) in enumerate(resolved.schedule) if not copy}
    regions = awaited_regions(await_updates)
    for start, stop in _segments(resolved):
        awaits = _leaves(graph, resolved, original, window_start, start, regions)
        gates = _entries(resolved, start, stop)
        result.append(Fence(start, tuple(awaits), tuple(gates)))
        window_start = start
    return tuple(result)


def awaited_regions(await_updates: bool) -> tuple[str, ...]:
    """Return the regions whose steps may be waited for.

    What a step returns besides gradients (losses, statistics of layers) is made of activations too,
    and may run after the backward: these stay until then.

    Args:
      await_updates: see `fences`; what follows a collective may be of no region too.
    """
    return REGIONS if await_updates else (FORWARD, BACKWARD)


def _segments(resolved: Resolved) -> list[tuple[int, int]]:
    """Return the maximal runs of consecutive copies as (start, stop)."""
    found = []
    for copies, run in itertools.groupby(range(len(resolved.schedule)),
                                         key=lambda p: resolved.schedule[p][1] > 0):
        if copies:
            start, *rest = run
            found.append((start, start + len(rest) + 1))
    return found


def _leaves(graph: CostGraph, resolved: Resolved, original: Mapping[int, int], start: int,
            stop: int, regions: Collection[str]) -> list[int]:
    """Return steps in the window that no later step of the window reads or waits for.

    What only updates read is a leaf where these are not awaited.
    """
    covered: set[int] = set()
    for position in range(start, stop):
        vertex, copy = resolved.schedule[position]
        if graph.vertices[vertex].region == UPDATE and UPDATE not in regions:
            continue
        covered.update(resolved.maker[i] for i in resolved.reads[position])
        if not copy:
            covered.update(original[v] for v in graph.only_after[vertex] if v in original)
    return sorted({p for leaf in range(start, stop) if leaf not in covered
                   for p in awaitable(graph, resolved, leaf)
                   if graph.vertices[resolved.schedule[p][0]].region in regions})


def awaitable(graph: CostGraph, resolved: Resolved, position: int) -> list[int]:
    """Return the steps to wait for in place of one that nothing may wait for.

    TensorFlow may merge an op into its reader, and removes joins, unless another op waits; and an
    op that runs in one branch only may not run at all.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      position: of the step in the schedule.

    Returns:
      Positions, ascending, maybe none; the step's own alone where it can be awaited itself.
    """
    found = []
    stack, seen = [position], set()  # paths meet again in branches, by the thousand
    while stack:
        p = stack.pop()
        if p in seen:
            continue
        seen.add(p)
        index, copy = resolved.schedule[p]
        vertex = graph.vertices[index]
        if not (vertex.fusible or vertex.join or vertex.conditional):
            found.append(p)
            continue
        stack.extend(resolved.maker[i] for i in resolved.reads[p])
        if vertex.conditional and not copy:
            others = graph.only_after[index]
            stack.extend(q for q, (v, again) in enumerate(resolved.schedule[:p])
                         if v in others and not again)
    return sorted(found)


def _entries(resolved: Resolved, start: int, stop: int) -> list[int]:
    """Return the steps of a segment that read nothing made inside it."""
    return [p for p in range(start, stop)
            if not any(start <= resolved.maker[i] < p for i in resolved.reads[p])]
