"""The order in which TensorFlow's executor would run a schedule, not the one we would like.

The executor runs whatever is ready. A thread keeps the ready ops that count as inexpensive in a
first-in first-out queue of its own and gives the others to a pool whose newest entry is taken
first; on a GPU every kernel counts as inexpensive, so there the order is breadth-first. Which of
several ops that become ready together is taken first depends on the order of edges in the
optimised graph, which is not known here, so the pool is simulated both ways. Nor is known which of
the ops that a step begins with is taken first: where parts of it meet late (two views, the terms of
a physics-informed loss), whole parts change places with that, so it is simulated the other way
round too. All are simulated with one thread; fences and waits are control edges like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Fence, Resolved, Wait
from tfckpt.ir.target import Target

BREADTH_FIRST, POOL, POOL_LATE = "breadth_first", "pool", "pool_late"
POOL_TURNED = "pool_turned"
"""The pool, by a step that begins with its last ops."""
ORDERS = (BREADTH_FIRST, POOL, POOL_LATE, POOL_TURNED)
"""What a CPU's executor may do; a GPU's takes ops breadth-first (`orders_on`)."""
EXPENSIVE_SECONDS = 3.0e-6
"""Time from which an op is given to the pool; TensorFlow draws the line at 8,000 cycles."""


def executor_order(graph: CostGraph, resolved: Resolved, released: Sequence[int],
                   waits: Sequence[Wait], fences: Sequence[Fence], policy: str) -> list[int]:
    """Return positions of the schedule's steps in the order an executor would run them.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      released: joins that are not waited for.
      waits: each delays one step until another has run.
      fences: each delays its gated steps until its awaited steps have run.
      policy: one of `ORDERS`.

    Raises:
      PlanError: the edges have a cycle.
    """
    return Edges(graph, resolved, released, fences).order(policy, waits)


def orders_on(target: Target) -> Sequence[str]:
    """Return in which of the `ORDERS` a target may run a step.

    On an H100 the operations of networks ran breadth-first, and took what was simulated so.

    Args:
      target: what runs the step.
    """
    return (BREADTH_FIRST,) if target.starts_in_turn else ORDERS


class Edges:
    """Dependencies between the nodes of a schedule: its steps, and after them its fences.

    Made once for a schedule that is run with different waits, or in different orders.

    Args:
      graph, resolved, released, fences: as for `executor_order`.

    Attributes:
      expensive: for each node whether it is given to the pool.
    """

    def __init__(self, graph: CostGraph, resolved: Resolved, released: Sequence[int],
                 fences: Sequence[Fence]) -> None:
        self.graph, self.resolved = graph, resolved
        steps = self.steps = len(resolved.schedule)
        self.where = {step: p for p, step in enumerate(resolved.schedule)}
        self.needed = needed_before(graph, resolved, released, ())
        sources = [*self.needed, *(set[int]() for _ in fences)]
        for number, fence in enumerate(fences):
            sources[steps + number].update(fence.awaits)
            if number:
                sources[steps + number].add(steps + number - 1)
            for gated in fence.gates:
                if sources[gated] is self.needed[gated]:
                    sources[gated] = set(self.needed[gated])
                sources[gated].add(steps + number)
        self._sources = sources
        self._readers: list[list[int]] = [[] for _ in sources]
        for node, awaited in enumerate(sources):
            for source in awaited:
                self._readers[source].append(node)
        self._counts = [len(awaited) for awaited in sources]
        slow = [vertex.time > EXPENSIVE_SECONDS for vertex in graph.vertices]
        self.expensive = [slow[vertex] for vertex, _ in resolved.schedule] + [False] * len(fences)

    def waiting_for(self, waits: Sequence[Wait]) -> tuple[list[list[int]], list[int]]:
        """Return readers of each node, ascending, and counts of what each awaits, with waits.

        Args:
          waits: each delays one step until another has run; may be empty.
        """
        readers, counts = self._readers, list(self._counts)
        if waits:
            readers = list(readers)
        new = sorted({(self.where[w.awaited], self.where[w.waiting]) for w in waits})
        for awaited, waiting in new:
            if awaited not in self._sources[waiting]:
                readers[awaited] = sorted((*readers[awaited], waiting))
                counts[waiting] += 1
        return readers, counts

    def order(self, policy: str, waits: Sequence[Wait] = ()) -> list[int]:
        """Return positions of steps in the order of an executor; see `executor_order`.

        Args:
          policy: one of `ORDERS`.
          waits: each delays one step until another has run.

        Raises:
          PlanError: the edges have a cycle.
        """
        return self.orders((policy,), waits)[0]

    def orders(self, policies: Sequence[str], waits: Sequence[Wait] = ()) -> list[list[int]]:
        """Return the order of each policy: positions of steps, as `order` does.

        Args:
          policies: of `ORDERS`.
          waits: each delays one step until another has run.

        Raises:
          PlanError: the edges have a cycle.
        """
        readers, counts = self.waiting_for(waits)
        none, found = [False] * len(counts), []
        for policy in policies:
            order = _run(readers, list(counts),
                         none if policy == BREADTH_FIRST else self.expensive, policy == POOL_LATE,
                         first_ops(counts, policy))
            if len(order) != len(counts):
                raise PlanError("plan: fences and data edges form a cycle")
            found.append([position for position in order if position < self.steps])
        return found


def first_ops(waiting: Sequence[int], policy: str) -> list[int]:
    """Return the nodes that a step begins with, in the order in which they are taken.

    Args:
      waiting: for how many others each node waits.
      policy: one of `ORDERS`.
    """
    found = [node for node, count in enumerate(waiting) if not count]
    return found[::-1] if policy == POOL_TURNED else found


def needed_before(graph: CostGraph, resolved: Resolved, released: Sequence[int],
                  waits: Sequence[Wait]) -> list[set[int]]:
    """Return for each step the positions of those that it needs by data or waits for by itself.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      released: joins that are not waited for.
      waits: each delays one step until another has run; may be empty.
    """
    where = [-1] * len(graph.vertices)  # of originals
    joins, maker, others = frozenset(released), resolved.maker, graph.only_after
    sources = [{maker[instance] for instance in reads} for reads in resolved.reads]
    for position, (vertex, copy) in enumerate(resolved.schedule):
        if not copy:
            where[vertex] = position
    for position, (vertex, copy) in enumerate(resolved.schedule):
        if not copy and others[vertex]:
            # data edges are bound above: a reader that moved to a copy no longer waits here
            sources[position].update(where[v] for v in others[vertex] if v not in joins)
    if waits:
        place = {step: p for p, step in enumerate(resolved.schedule)}
        for wait in waits:
            sources[place[wait.waiting]].add(place[wait.awaited])
    return sources


def _run(readers: Sequence[Sequence[int]], waiting: list[int],
         expensive: Sequence[bool], reverse: bool, first: Sequence[int]) -> list[int]:
    """One worker: its own queue first, then the newest entry of the pool."""
    inline: deque[int] = deque(first)
    pool: list[int] = []
    order: list[int] = []
    add, queue = order.append, inline.append
    while inline or pool:
        node = inline.popleft() if inline else pool.pop()
        add(node)
        costly = None
        for reader in reversed(readers[node]) if reverse else readers[node]:
            left = waiting[reader] = waiting[reader] - 1
            if not left:
                if not expensive[reader]:
                    queue(reader)
                elif costly is None:
                    costly = [reader]
                else:
                    costly.append(reader)
        if costly is not None:
            if not inline:
                queue(costly.pop())
            pool.extend(costly)
    return order
