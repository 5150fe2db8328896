"""The order in which a step is planned to run, and which vertices are worth delaying.

The plain order is the graph's own. What may change it, at no cost in time:

* *defer*: a vertex that is ready long before anything can use its result (momentum * velocity,
  dropout masks, the square in GELU's derivative) is placed just before its first reader;
* *release*: a pass-through join is bypassed, so that each update runs as soon as its own
  gradient is there;
* *branchwise* or *early* backward: see `tfckpt.simulate.branchwise`.

Under XLA, which ignores control edges, nothing can be moved; the first two it does by itself.
"""

from __future__ import annotations

import copy

from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph
from tfckpt.ir.schedule import Moves

SLACK_FRACTION = 0.004
"""A vertex is deferred only if it could wait for this fraction of the step."""
SPREAD_FRACTION = 0.05
"""A join is bypassed only if what it joins becomes ready over this fraction of the step."""


def releasable(graph: CostGraph) -> tuple[int, ...]:
    """Return joins worth bypassing: what they join becomes ready at different times.

    After a global norm all gradients are scaled at once; there bypassing would save nothing.

    Args:
      graph: joint graph.
    """
    joins = [v for v, vertex in enumerate(graph.vertices) if vertex.join]
    if not joins:
        return ()
    start, finish = _earliest(graph, frozenset())
    spread = SPREAD_FRACTION * max(finish)
    found = []
    for j in joins:
        ready = [start[graph.storages[s].producer] for s in graph.vertices[j].reads]
        if ready and max(ready) - min(ready) > spread:
            found.append(j)
    return tuple(found)


def deferrable(graph: CostGraph, released: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the vertices worth deferring, ascending.

    A vertex may wait if whatever it reads is read by another vertex later on, or made by a vertex
    that waits as well, and if waiting keeps no more bytes alive than its result would take.

    Args:
      graph: joint graph.
      released: joins that are not waited for.
    """
    joins = frozenset(released)
    start, finish = _earliest(graph, joins)
    readers = _readers(graph)
    slack = SLACK_FRACTION * max(finish, default=0.0)
    begin = list(start)
    found = []
    for v in range(len(graph.vertices) - 1, -1, -1):
        vertex = graph.vertices[v]
        if not readers[v] or not vertex.writes or vertex.join:
            continue
        late = min(begin[r] for r in readers[v]) - vertex.time
        if late - start[v] > slack and _pays(graph, v, late, start, begin):
            begin[v] = late
            found.append(v)
    return tuple(reversed(found))


def moves_of_xla(graph: CostGraph) -> Moves:
    """Return what XLA does by itself.

    It has no joins, and fuses what only an update needs into it.

    Args:
      graph: joint graph.
    """
    joins = releasable(graph)
    return Moves(deferrable(graph, joins), joins)


def idle(graph: CostGraph, released: tuple[int, ...] = ()) -> frozenset[int]:
    """Return backward vertices that no gradient leads to and that nothing needs for a while.

    They could run as soon as the forward is done (the square in GELU's derivative); a branchwise
    order runs them when something asks for them.

    Args:
      graph: joint graph.
      released: joins that are not waited for.
    """
    joins = frozenset(released)
    start, finish = _earliest(graph, joins)
    readers = _readers(graph)
    slack = SLACK_FRACTION * max(finish, default=0.0)
    begin = list(start)
    for v in range(len(graph.vertices) - 1, -1, -1):
        if readers[v]:
            begin[v] = max(start[v], min(begin[r] for r in readers[v]) - graph.vertices[v].time)
    found: set[int] = set()
    for v, vertex in enumerate(graph.vertices):
        if vertex.region == BACKWARD and begin[v] - start[v] > slack and all(
                graph.vertices[p].region == FORWARD or p in found for p in graph.predecessors[v]):
            found.add(v)
    return frozenset(found)


def _earliest(graph: CostGraph, joins: frozenset[int]) -> tuple[list[float], list[float]]:
    """Earliest start and finish of each vertex with unlimited workers."""
    start: list[float] = []
    finish: list[float] = []
    for v, vertex in enumerate(graph.vertices):
        begin = max((finish[p] for p in graph.predecessors[v] if p not in joins), default=0.0)
        start.append(begin)
        finish.append(begin + vertex.time)
    return start, finish


def _readers(graph: CostGraph) -> list[list[int]]:
    """For each vertex those that wait for it, ascending; a join does not count as a use."""
    readers: list[list[int]] = [[] for _ in graph.vertices]
    for v, vertex in enumerate(graph.vertices):
        if not vertex.join:
            for p in graph.predecessors[v]:
                readers[p].append(v)
    return readers


def _pays(graph: CostGraph, v: int, late: float, start: list[float],
          begin: list[float]) -> bool:
    """Return whether waiting until `late` keeps no more bytes alive than it saves.

    An input whose other readers have all run by then is there for this vertex alone: a slice of
    a gradient that waits keeps the whole gradient alive.
    """
    kept_alive = 0
    for s in graph.vertices[v].reads:
        producer = graph.storages[s].producer
        if begin[producer] > start[producer]:
            continue  # made late as well
        others = [begin[r] for r in graph.readers[s] if r > v]
        if not any(other >= begin[v] for other in others):
            return False
        if max(others) < late:
            kept_alive += graph.storages[s].bytes
    return kept_alive <= sum(graph.storages[s].bytes for s in graph.vertices[v].writes)


def base_order(graph: CostGraph, moves: Moves) -> tuple[int, ...]:
    """Return the vertices in the planned order of a plan, recomputation left out.

    Vertices keep the graph's order; deferred ones stand just before their first reader; released
    joins are left out; update and other vertices run as soon as their inputs exist. Another order
    is `tfckpt.simulate.branchwise`.

    Args:
      graph: joint graph.
      moves: the free moves of the plan.
    """
    emitter = Emitter(graph, moves, frozenset())
    for v in range(len(graph.vertices)):
        if v not in emitter.late and v not in emitter.joins:
            emitter.emit(v)
    return emitter.finish()


class Emitter:
    """Emits vertices so that what they need comes first and what they allow comes next.

    Args:
      graph: joint graph.
      moves: the free moves of the plan.
      waiting: vertices that are emitted only when one asks for them, as deferred ones are.
    """

    def __init__(self, graph: CostGraph, moves: Moves, waiting: frozenset[int]) -> None:
        self.graph = graph
        joins = self.joins = frozenset(moves.released)
        late = self.late = frozenset(moves.deferred) | waiting
        self.readers = _readers(graph)
        self.needed = [tuple(p for p in needed if p not in joins) if joins else needed
                       for needed in graph.predecessors]
        self.prompt = [v not in late and v not in joins and vertex.region not in (FORWARD, BACKWARD)
                       for v, vertex in enumerate(graph.vertices)]
        self.done = [False] * len(graph.vertices)
        self.order: list[int] = []
        self.unread = [len(r) for r in graph.readers]  # readers that have not run
        self.touched = [False] * len(graph.storages)
        self.changed: list[int] = []  # storages with which `growth` of their readers changed
        self.runnable = [False] * len(graph.vertices)  # found ready: it stays so

    def copy(self) -> Emitter:
        """Return another that goes on from here."""
        other = copy.copy(self)
        for name in ("done", "order", "unread", "touched", "changed", "runnable"):
            setattr(other, name, list(getattr(self, name)))
        return other

    def finish(self) -> tuple[int, ...]:
        """Emit what is left, and return all in order."""
        for v in range(len(self.graph.vertices)):
            if not self.done[v] and v not in self.joins:
                self.emit(v)
        return tuple(self.order)

    def emit(self, vertex: int) -> None:
        """Emit a vertex after what it still needs, then what becomes ready at once.

        Args:
          vertex: that is emitted unless it has been.
        """
        done, needed, unread, touched = self.done, self.needed, self.unread, self.touched
        prompt, vertices = self.prompt, self.graph.vertices
        stack = [vertex]
        while stack:
            v = stack[-1]
            if done[v]:
                stack.pop()
                continue
            missing = [p for p in needed[v] if not done[p]]
            if missing:
                missing.reverse()
                stack += missing
                continue
            stack.pop()
            done[v] = True
            self.order.append(v)
            for s in vertices[v].reads:
                unread[s] -= 1
                if unread[s] == 1 or not touched[s]:
                    self.changed.append(s)
                touched[s] = True
            for r in reversed(self.readers[v]):
                if prompt[r] and not done[r] and self.ready(r):
                    stack.append(r)

    def ready(self, v: int) -> bool:
        """Return whether everything the vertex needs has run or can run at any time.

        Args:
          v: the vertex.
        """
        if not self.runnable[v]:  # remembered: late vertices share what they need
            done, late = self.done, self.late
            for p in self.needed[v]:
                if not done[p] and not (p in late and self.ready(p)):
                    return False
            self.runnable[v] = True
        return True
