"""The order in which TensorFlow's executor would run a schedule, not the one we would like.

The executor runs whatever is ready. A thread keeps the ready ops that count as inexpensive in a
first-in first-out queue of its own and gives the others to a pool whose newest entry is taken
first; on a GPU every kernel counts as inexpensive, so there the order is breadth-first. Which of
several ops that become ready together is taken first depends on the order of edges in the
optimised graph, which is not known here, so the pool is simulated both ways. All are simulated
with one thread; fences and waits are control edges like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tfckpt.cost.costgraph import CostGraph
from tfckpt.errors import PlanError
from tfckpt.plan.fences import by_data
from tfckpt.plan.schedule import Fence, Resolved, Wait

BREADTH_FIRST, POOL, POOL_LATE = "breadth_first", "pool", "pool_late"
ORDERS = (BREADTH_FIRST, POOL, POOL_LATE)
EXPENSIVE_SECONDS = 3.0e-6
"""What an op takes that is given to the pool; TensorFlow draws the line at 8,000 cycles."""


def executor_order(graph: CostGraph, resolved: Resolved, released: Sequence[int],
                   waits: Sequence[Wait], fences: Sequence[Fence], policy: str) -> list[int]:
    """Return positions of the schedule's steps in the order an executor would run them.

    Args:
      graph, resolved: the graph and its resolved schedule.
      released: joins that are not waited for.
      waits: each delays one step until another has run.
      fences: each delays its gated steps until its awaited steps have run.
      policy: one of `ORDERS`.

    Raises:
      PlanError: the edges have a cycle.
    """
    readers, waiting = edges(graph, resolved, released, waits, fences)
    steps = len(resolved.schedule)
    expensive = [False] * (steps + len(fences))
    if policy != BREADTH_FIRST:
        for position, (vertex, _) in enumerate(resolved.schedule):
            expensive[position] = graph.vertices[vertex].time > EXPENSIVE_SECONDS
    order = _run(readers, waiting, expensive, reverse=policy == POOL_LATE)
    if len(order) != len(waiting):
        raise PlanError("plan: fences and data edges form a cycle")
    return [position for position in order if position < steps]


def needed_before(graph: CostGraph, resolved: Resolved, released: Sequence[int],
                  waits: Sequence[Wait]) -> list[set[int]]:
    """Return for each step the positions of those that it needs by data or waits for by itself."""
    where = {step: p for p, step in enumerate(resolved.schedule)}
    joins = frozenset(released)
    sources: list[set[int]] = [set() for _ in resolved.schedule]
    for position, (vertex, copy) in enumerate(resolved.schedule):
        awaited = sources[position]
        for instance in resolved.reads[position]:
            awaited.add(resolved.maker[instance])
        if not copy:
            for other in graph.vertices[vertex].after:
                # data edges are bound above: a reader that moved to a copy no longer waits here
                if other not in joins and not by_data(graph, vertex, other):
                    awaited.add(where[other, 0])
    for wait in waits:
        sources[where[wait.waiting]].add(where[wait.awaited])
    return sources


def edges(graph: CostGraph, resolved: Resolved, released: Sequence[int], waits: Sequence[Wait],
          fences: Sequence[Fence]) -> tuple[list[list[int]], list[int]]:
    """Return readers and counts of awaited nodes; fences are numbered after the steps."""
    steps = len(resolved.schedule)
    sources = needed_before(graph, resolved, released, waits) + [set() for _ in fences]
    for number, fence in enumerate(fences):
        sources[steps + number].update(fence.awaits)
        if number:
            sources[steps + number].add(steps + number - 1)
        for gated in fence.gates:
            sources[gated].add(steps + number)
    readers: list[list[int]] = [[] for _ in sources]
    for node, awaited in enumerate(sources):
        for source in sorted(awaited):
            readers[source].append(node)
    return readers, [len(awaited) for awaited in sources]


def _run(readers: Sequence[Sequence[int]], waiting: list[int],
         expensive: Sequence[bool], reverse: bool) -> list[int]:
    """One worker: its own queue first, then the newest entry of the pool."""
    inline: deque[int] = deque()
    pool: list[int] = []
    order: list[int] = []

    # roots of a step are all given to the pool by the thread that starts it
    inline.extend(node for node, count in enumerate(waiting) if not count)
    while inline or pool:
        node = inline.popleft() if inline else pool.pop()
        order.append(node)
        ready = []
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
        if reverse:
            ready.reverse()
        inline.extend(reader for reader in ready if not expensive[reader])
        costly = [reader for reader in ready if expensive[reader]]
        if costly and not inline:
            inline.append(costly.pop())
        pool.extend(costly)
    return order
