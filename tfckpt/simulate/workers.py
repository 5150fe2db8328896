"""Several threads of TensorFlow's executor at once, in simulated time.

While one op runs for long, other threads go on, and their results stay live. Each has a queue of
its own for ops that count as inexpensive, which nobody else takes from, and one of the pool: what
it adds there it takes back newest first, and where it has nothing left it takes the oldest of
another thread's. What starts a step is shared out. Ops take the time that they are priced with.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Resolved, Wait
from tfckpt.ir.target import Target
from tfckpt.simulate.allocator import BEFORE, replayed_peaks
from tfckpt.simulate.executor import (
    BREADTH_FIRST,
    POOL,
    POOL_LATE,
    Edges,
    first_ops,
    orders_on,
)
from tfckpt.simulate.liveness import Moment, taken_buffers

UNEVEN = 2.0
"""How many times longer or shorter than priced a step may take."""
PACES = 6
"""Runs with such times."""
_MIDDLE = len(BEFORE) // 2 + 1
"""Heaps that are enough to know that the middle one of all is no more than the worst of them."""
Event = tuple[int, bool]
"""A node, and whether it ends; else it starts."""
_NOTHING: Mapping[int, int] = {}


class _Threads:
    """The queues of the threads."""

    def __init__(self, count: int, roots: Sequence[int]) -> None:
        self.own: list[deque[int]] = [deque() for _ in range(count)]
        self.pool: list[deque[int]] = [deque() for _ in range(count)]
        for number, node in enumerate(roots):
            self.pool[number % count].append(node)

    def take(self, thread: int) -> int | None:
        """Return the next node of a thread; None where there is none for it."""
        if self.own[thread]:
            return self.own[thread].popleft()
        if self.pool[thread]:
            return self.pool[thread].popleft()
        count = len(self.pool)
        for other in range(thread + 1, thread + count):
            if self.pool[other % count]:
                return self.pool[other % count].pop()
        return None

    def add(self, thread: int, ready: Sequence[int], expensive: Sequence[bool]) -> None:
        """Add what a thread has made ready."""
        self.own[thread].extend(node for node in ready if not expensive[node])
        costly = [node for node in ready if expensive[node]]
        if costly and not self.own[thread]:
            self.own[thread].append(costly.pop())
        self.pool[thread].extendleft(costly)


def events(readers: Sequence[Sequence[int]], waiting: Sequence[int], expensive: Sequence[bool],
           seconds: Sequence[float], count: int, policy: str = POOL) -> list[Event]:
    """Return the starts and ends of all nodes, in the order in which they happen.

    Args:
      readers: of each node.
      waiting: for how many others each node waits.
      expensive: whether others may take it from the thread that made it ready.
      seconds: how long it runs.
      count: threads.
      policy: as for `tfckpt.simulate.executor.executor_order`.
    """
    left = list(waiting)
    threads = _Threads(count, first_ops(left, policy))
    running: list[tuple[float, int, int, int]] = []
    found: list[Event] = []
    idle, now = list(range(count)), 0.0
    while True:
        still = []
        for thread in idle:
            node = threads.take(thread)
            if node is None:
                still.append(thread)
                continue
            found.append((node, False))
            heapq.heappush(running, (now + seconds[node], len(found), thread, node))
        idle = still
        if not running:
            return found
        now, _, thread, node = heapq.heappop(running)
        found.append((node, True))
        ready = []
        for reader in readers[node]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
        threads.add(thread, ready[::-1] if policy == POOL_LATE else ready, expensive)
        idle.insert(0, thread)


def walk_events(graph: CostGraph, resolved: Resolved, happened: Sequence[Event]
                ) -> Iterator[Moment]:
    """Yield the moments of an execution in which steps overlap: of each step its start and its end.

    What a step makes is there from its start, what it reads until its end. Its workspace is an
    instance of its own (`sizes`), and not told by the vertex.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      happened: starts and ends of the steps, in the order in which they happen; none of fences.
    """
    storage, workspace = resolved.storage, len(resolved.storage)
    schedule, reads, writes = resolved.schedule, resolved.reads, resolved.writes
    vertices, (starting, ending) = graph.vertices, graph.halves
    left = _reads_left(graph, resolved)
    gone = [False] * workspace
    for position, ends in happened:
        index = schedule[position][0]
        bound, made, works = reads[position], writes[position], vertices[index].workspace
        if not ends:
            vertex = starting[index]
            taken = _NOTHING
            if vertex.reuses:
                dying = [i for i in bound if left[i] == 1 and not gone[i]]
                if dying:
                    taken = taken_buffers(graph, vertex, storage, dying, made)
                    for i in taken.values():
                        gone[i] = True
            yield vertex, (*made, workspace + position) if works else made, taken, ()
            continue
        vertex = ending[index]
        freed = [workspace + position] if works else []
        for i in bound:
            left[i] -= 1
            if not gone[i] and (not left[i] or storage[i] in vertex.donates):
                gone[i] = True
                freed.append(i)
        freed.extend(i for i in made if not left[i] and not gone[i])
        yield vertex, (), _NOTHING, freed


def _reads_left(graph: CostGraph, resolved: Resolved) -> list[int]:
    """Return how often each instance is read; a negative number where it is fetched."""
    left = [0] * len(resolved.storage)
    for bound in resolved.reads:
        for i in bound:
            left[i] += 1
    for i, s in enumerate(resolved.storage):
        if graph.storages[s].fetched:
            left[i] = -1  # never 0
    return left


def sizes(graph: CostGraph, resolved: Resolved) -> list[int]:
    """Return the bytes of each instance, followed by those of each step's workspace.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
    """
    return [graph.storages[s].bytes for s in resolved.storage] + [
        graph.vertices[v].workspace for v, _ in resolved.schedule]


def requested_peak(moments: Sequence[Moment], size: Sequence[int]) -> int:
    """Return the most bytes that are asked for at once.

    Args:
      moments: in the order of execution.
      size: bytes of each instance; where steps overlap, as `sizes` returns them.
    """
    live = peak = 0
    for vertex, made, taken, freed in moments:
        live += sum(size[i] for i in made) - sum(size[i] for i in taken.values())
        peak = max(peak, live + vertex.workspace)
        live -= sum(size[i] for i in freed)
    return peak


def concurrent(edges: Edges, policy: str, count: int, waits: Sequence[Wait] = (), pace: int = 0
               ) -> list[Moment]:
    """Return the moments of a schedule that runs on several threads.

    Args:
      edges: of the schedule with its fences.
      policy: as for `tfckpt.simulate.executor.executor_order`.
      count: threads.
      waits: each delays one step until another has run.
      pace: 0 has every step take its time, any other number some up to `UNEVEN` times as long and
        others as much less.

    Raises:
      PlanError: the edges have a cycle.
    """
    graph, resolved, steps = edges.graph, edges.resolved, edges.steps
    readers, waiting = edges.waiting_for(waits)
    seconds = [graph.vertices[v].time for v, _ in resolved.schedule]
    seconds += [0.0] * (len(waiting) - steps)
    expensive = [False] * len(waiting) if policy == BREADTH_FIRST else edges.expensive
    if pace:
        chance = random.Random(pace)
        seconds = [time * UNEVEN ** chance.uniform(-1, 1) for time in seconds]
    happened = events(readers, waiting, expensive, seconds, count, policy)
    if len(happened) != 2 * len(waiting):
        raise PlanError("plan: fences and data edges form a cycle")
    return list(walk_events(graph, resolved, [e for e in happened if e[0] < steps]))


def concurrent_peak(edges: Edges, target: Target, waits: Sequence[Wait], lowest: int = 0) -> int:
    """Return the peak of a schedule on a target's threads in the worst of the orders.

    As the allocator counts it, where the target has one: in the middle one of several heaps.

    Args:
      edges: of the schedule with its fences.
      target: has the threads, and says which requests its allocator counts.
      waits: each delays one step until another has run.
      lowest: bytes that are returned where the peak is less: heaps that cannot change that are
        left out.
    """
    size = sizes(edges.graph, edges.resolved)
    for moments in _in_each_order(edges, target, waits, size):
        heaps = _heaps(edges, moments, size, target, BEFORE[:_MIDDLE])
        if len(heaps) == _MIDDLE and heaps[-1] > lowest:  # the middle one of all may be more
            heaps = tuple(sorted(heaps + _heaps(edges, moments, size, target, BEFORE[_MIDDLE:])))
        if len(heaps) != _MIDDLE:
            lowest = max(lowest, heaps[len(heaps) // 2])
    return lowest


def several_peaks(edges: Edges, target: Target, settled: bool, waits: Sequence[Wait] = ()
                  ) -> list[tuple[int, ...]]:
    """Return the peaks that may come about, in several heaps each, ascending.

    Args:
      edges: of the schedule with its fences.
      target: has the threads, and says which requests its allocator counts.
      settled: whether they are those of the long run, where variables move
        (`tfckpt.simulate.allocator.replayed_peaks`); on several threads at uneven paces as well.
      waits: each delays one step until another has run.

    Returns:
      Bytes, of each order on its own; then, of an allocator that has all memory, those that it may
      take where it is told to let its memory grow, and those at uneven paces.
    """
    size = sizes(edges.graph, edges.resolved)
    orders = _in_each_order(edges, target, waits, size)
    found = [_heaps(edges, moments, size, target, settled=settled) for moments in orders]
    if target.takes_all_memory and settled and target.allocator:
        found += [_heaps(edges, moments, size, target, settled=True, grows=True)
                  for moments in orders]
    for pace in range(1, PACES + 1) if settled and target.threads > 1 else ():
        moments = concurrent(edges, POOL, target.threads, waits, pace)
        found.append(_heaps(edges, moments, size, target, BEFORE[::2]))
    return found


def _in_each_order(edges: Edges, target: Target, waits: Sequence[Wait], size: Sequence[int]
                   ) -> list[list[Moment]]:
    """Return the moments of each order; of a step's two beginnings only those that may be worse."""
    found = [concurrent(edges, policy, target.threads, waits) for policy in orders_on(target)]
    *before, turned = found
    if before and requested_peak(turned, size) <= max(requested_peak(m, size) for m in before):
        return before
    return found


def _heaps(edges: Edges, moments: Sequence[Moment], size: Sequence[int], target: Target,
           before: Sequence[int] = BEFORE, settled: bool = False, grows: bool = False
           ) -> tuple[int, ...]:
    smallest = target.smallest_counted
    return (requested_peak(moments, size),) if smallest is None else replayed_peaks(
        edges.graph, moments, size, edges.resolved.storage, smallest, before, settled,
        target.takes_all_memory and not grows)
