"""Waits: control edges that make an executor follow the plan where it matters.

Ordering every op by control edges would cost parallelism (and Grappler turns such chains into
cycles), so waits are placed only where a simulated executor needs more than the plan. The steps
that made something at its peak before their turn are delayed until the step planned before them
has run, the last one that did not run ahead as well; and a step that allocates at that peak waits
for readers that are late, compared with the plan. Every wait follows the schedule, hence none can
close a cycle. An op that TensorFlow merges into its readers counts as scheduled just before the
first of them (see `_turns`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Fence, Resolved, Wait
from tfckpt.simulate.executor import ORDERS, Edges
from tfckpt.simulate.fences import awaitable, awaited_regions
from tfckpt.simulate.liveness import Account
from tfckpt.simulate.simulate import Timeline, timeline_of

ROUNDS = 24
TOLERANCE = 1.005
CULPRIT_FRACTION = 0.002
"""Tensors below this fraction of the peak, and much smaller than others, are not worth a wait."""


def place_waits(graph: CostGraph, resolved: Resolved, released: Sequence[int],
                fences: Sequence[Fence], target: int, *, await_updates: bool = True,
                edges: Edges | None = None) -> tuple[tuple[Wait, ...], Timeline, tuple[int, ...]]:
    """Return waits that bring the simulated executors' peaks down to `target` bytes where they can.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      released: joins that are not waited for.
      fences: of the schedule.
      target: usually the planned peak, in bytes.
      await_updates: whether update steps may be awaited (never across devices).
      edges: of the schedule with its fences, where they are known.

    Returns:
      The waits in schedule order, the worst timeline among the simulated executors with them, and
      the order of execution it belongs to.

    Raises:
      PlanError: the edges have a cycle.
    """
    edges = edges or Edges(graph, resolved, released, fences)
    placer = _Placer(graph, resolved, edges, await_updates)
    best = None
    late: list[str] = []
    for number in range(ROUNDS):
        # one that stays below is asked again where no other wants more waits
        all_of_them = not late or number == ROUNDS - 1
        found = placer.round(ORDERS if all_of_them else late, target)
        late = [policy for policy, simulated in found.items() if simulated.grew]
        if all_of_them:
            worst = max(found.values(), key=lambda simulated: simulated.timeline.peak_bytes)
            if best is None or worst.timeline.peak_bytes < best[1].peak_bytes:
                best = (placer.before, worst.timeline, tuple(worst.order))
            if not late:
                break
    assert best is not None
    return best


class _Simulated(NamedTuple):
    """An executor's order, its timeline, and whether it asked for waits that were not there."""

    order: list[int]
    timeline: Timeline
    grew: bool


class _Placer:
    """Collects waits round by round."""

    def __init__(self, graph: CostGraph, resolved: Resolved, edges: Edges, await_updates: bool
                 ) -> None:
        self.graph, self.resolved, self.edges = graph, resolved, edges
        self.regions = awaited_regions(await_updates)
        self.waits: dict[tuple[int, int], Wait] = {}
        self.before: tuple[Wait, ...] = ()
        self.account = Account(graph, resolved.schedule)
        self.known: tuple[_Simulated, ...] = ()  # in the round before
        self.where = edges.where
        self.turns = _turns(graph, resolved, edges.needed)
        self.last_read = [-1] * len(resolved.storage)
        self.reader_count = [0] * len(resolved.storage)
        for position, bound in enumerate(resolved.reads):
            for instance in bound:
                self.last_read[instance] = position
                self.reader_count[instance] += 1
        self.instance = {instance: i for i, instance in enumerate(
            zip(resolved.storage, resolved.copy, strict=True))}

    def ordered(self) -> tuple[Wait, ...]:
        return tuple(sorted(self.waits.values(),
                            key=lambda w: (self.where[w.waiting], self.where[w.awaited])))

    def round(self, policies: Sequence[str], target: int) -> dict[str, _Simulated]:
        """Simulate executors with the present waits and add what those above the target need."""
        self.before = self.ordered()
        found: dict[str, _Simulated] = {}
        for policy, order in zip(policies, self.edges.orders(policies, self.before), strict=True):
            timeline = next((known.timeline for known in (*found.values(), *self.known)
                             if known.order == order), None)
            timeline = timeline or timeline_of(self.account, self.resolved.schedule, order)
            grew = timeline.peak_bytes > target * TOLERANCE and self._add(order, timeline)
            found[policy] = _Simulated(order, timeline, grew)
        self.known = tuple(found.values())
        return found

    def _add(self, order: Sequence[int], timeline: Timeline) -> bool:
        """Delay what is live at this peak and would not be in the plan; whether any was new."""
        ran = [False] * len(order)
        for position in order[:timeline.peak_step + 1]:
            ran[position] = True
        at = order[timeline.peak_step]
        # what is planned after it ran ahead: of the step at the peak, or of one that has not run
        turn = min(at, next((p for p, done in enumerate(ran) if not done), len(ran)))
        count = len(self.waits)
        smallest = min(timeline.peak_bytes * CULPRIT_FRACTION, timeline.live_at_peak[0].bytes / 4)
        for live in timeline.live_at_peak:
            if live.bytes < smallest:
                break
            i = self.instance[live.storage, live.copy]
            made = self.resolved.maker[i]
            if made > turn:  # ran ahead of a step planned before it
                self._delay(made, turn, ran)
            elif 0 <= self.last_read[i] < at and not ran[self.last_read[i]]:
                self._put(at, self.last_read[i])  # a reader is late
        return len(self.waits) > count

    def _delay(self, position: int, turn: int, ran: Sequence[bool]) -> None:
        """Delay a step until the step planned just before it has run that did not run ahead."""
        position = self._head(position, turn)
        schedule, vertices = self.resolved.schedule, self.graph.vertices
        for before in range(position - 1, -1, -1):
            vertex = vertices[schedule[before][0]]
            if before > turn and before in self._makers(position):
                position = before  # what it reads ran ahead as well
            elif vertex.region in self.regions and not (
                    vertex.fusible or vertex.conditional or before > turn and ran[before]):
                self._put(position, before)
                return

    def _makers(self, position: int) -> list[int]:
        """Return the steps that made what a step reads."""
        return [self.resolved.maker[i] for i in self.resolved.reads[position]]

    def _head(self, position: int, turn: int) -> int:
        """Return the step that allocated the buffer which this one took over from its only input.

        Delaying the head leaves the chain after it whole, so that TensorFlow merges it (a
        convolution with its bias, a sum of sums) exactly as in the plain step.
        """
        vertices = self.graph.vertices
        while True:
            vertex = vertices[self.resolved.schedule[position][0]]
            earlier = [
                self.resolved.maker[i] for i in self.resolved.reads[position]
                if self.reader_count[i] == 1 and self.resolved.maker[i] > turn
            ] if vertex.reuses else []
            if not earlier:
                return position
            position = max(earlier)

    def _put(self, waiting: int, awaited: int) -> None:
        schedule, first = self.resolved.schedule, self._merged_head(waiting)
        before = min(waiting, self.turns[first])
        for p in awaitable(self.graph, self.resolved, awaited):
            if p < before and self.graph.vertices[schedule[p][0]].region in self.regions:
                self.waits.setdefault((first, p), Wait(schedule[first], schedule[p]))

    def _merged_head(self, position: int) -> int:
        """Return the first of the ops that TensorFlow may merge into the one at a position.

        A wait between two of them would keep them apart; the first can wait for whatever stands
        before its turn.
        """
        schedule, vertices = self.resolved.schedule, self.graph.vertices
        while not schedule[position][1]:
            merged = [m for m in self._makers(position)
                      if not schedule[m][1] and vertices[schedule[m][0]].fusible]
            if not merged:
                break
            position = max(merged)
        return position


def _turns(graph: CostGraph, resolved: Resolved, needed: Sequence[Collection[int]]) -> list[int]:
    """Return for each step the position before which all stands that it may wait for.

    Its own; for an op that TensorFlow may merge into its readers the turn of the first of them
    (there are several where they are equal, such as both gradients of x * x). With merged ops
    moved there every edge of the step still leads forward.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      needed: `tfckpt.simulate.executor.needed_before`, without waits.
    """
    turns = list(range(len(resolved.schedule)))
    first = [len(turns)] * len(turns)  # the turn of the first step that needs each
    for position in range(len(turns) - 1, -1, -1):
        vertex, copy = resolved.schedule[position]
        if graph.vertices[vertex].fusible and not copy and first[position] < len(turns):
            turns[position] = first[position]
        for other in needed[position]:
            first[other] = min(first[other], turns[position])
    return turns
