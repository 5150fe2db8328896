"""An executor with one thread, written down again from the rules that TensorFlow documents.

Rules (`Process`, `NodeDone` and `ScheduleReady` in TensorFlow's `common_runtime/executor.cc`, and
the docstring of `tfckpt.simulate.executor`):

1. What needs nothing is in the thread's own queue when the step starts.
2. The thread runs the first in its own queue; where that is empty, the newest in the pool.
3. When an op has run, those that waited for it alone become ready, in the order of their edges:
   here ascending, or descending for a policy that is "late".
4. Of these, inexpensive ones join the end of the own queue. Of the expensive ones all but the last
   go to the pool; the last goes to the own queue if that is empty by then, else to the pool.

Ready ops are found by asking every op again after every op that ran; no counters, no lists of
readers. Shares nothing with `tfckpt.simulate.executor`.
"""

from __future__ import annotations

from tests.support import liveness

EXPENSIVE_SECONDS = 3.0e-6
"""About the 8,000 cycles from which TensorFlow calls a CPU kernel expensive."""


def edges(graph, schedule, released=(), waits=(), found=()) -> dict[int, set[int]]:
    """Return for each step's position, and then each fence's number, all that it waits for."""
    steps = len(schedule)
    needed = {position: {i.made for i in read}
              for position, read in liveness.bindings(graph, schedule).items()}
    for position, (vertex, copy) in enumerate(schedule):
        read_from = [graph.storages[s].producer for s in graph.vertices[vertex].reads]
        for other in graph.vertices[vertex].after:
            if copy == 0 and other not in released and other not in read_from:
                needed[position].add(schedule.index((other, 0)))
    for wait in waits:
        needed[schedule.index(wait.waiting)].add(schedule.index(wait.awaited))
    for number, fence in enumerate(found):
        before = {steps + number - 1} if number > 0 else set()
        needed[steps + number] = set(fence.awaits) | before
        for position in fence.gates:
            needed[position].add(steps + number)
    return needed


def order(graph, schedule, policy: str, released=(), waits=(), found=()) -> list[int]:
    """Positions in the order in which they run; shorter than the schedule where there is a cycle.

    Args:
      policy: "breadth_first" (nothing is expensive), "pool", "pool_late" or "pool_turned".
    """
    needed = edges(graph, schedule, released, waits, found)
    own = [node for node in sorted(needed) if not needed[node]]
    if policy == "pool_turned":
        own = own[::-1]
    pool: list[int] = []
    ran: list[int] = []
    seen = set(own)
    while own or pool:
        ran.append(own.pop(0) if own else pool.pop(-1))
        ready = [n for n in sorted(needed) if n not in seen and needed[n] <= set(ran)]
        seen.update(ready)
        if policy == "pool_late":
            ready.reverse()
        expensive = [n for n in ready if policy != "breadth_first" and n < len(schedule)
                     and graph.vertices[schedule[n][0]].time > EXPENSIVE_SECONDS]
        own += [n for n in ready if n not in expensive]
        if expensive:
            pool += expensive[:-1]
            (pool if own else own).append(expensive[-1])
    return [n for n in ran if n < len(schedule)] if len(ran) == len(needed) else []

