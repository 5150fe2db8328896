"""The simulator: live bytes at every step of a schedule, the peak, and what is live there.

Model: a step allocates what it writes, unless the kernel can take over the buffer of an input
that dies in this very step (`Vertex.reuses`); its inputs are held until it ends; a storage is
freed after its last reader. Fetched storages are held to the end, donated ones pass into the
resident set. Bytes are *dynamic*: above what is allocated when the step starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfckpt.cost.costgraph import CostGraph
from tfckpt.errors import PlanError
from tfckpt.plan.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Live:
    """A storage instance that is live at the peak: storage index, copy, bytes."""

    storage: int
    copy: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What one execution holds.

    Attributes:
      live_bytes: dynamic bytes held while each step runs.
      peak_bytes: their maximum.
      peak_step: first step at which it is reached.
      live_at_peak: what is live there, largest first.
      time: sum of the steps' times (the unit of `Vertex.time`).
    """

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    live_at_peak: tuple[Live, ...]
    time: float


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A schedule with every read bound to one instance of its storage.

    Attributes:
      schedule: the steps.
      reads, writes: instance indices for each step.
      storage, copy, maker: for each instance its storage, copy number and producing step.
    """

    schedule: Schedule
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    storage: tuple[int, ...]
    copy: tuple[int, ...]
    maker: tuple[int, ...]


def resolve(graph: CostGraph, schedule: Schedule) -> Resolved:
    """Binds each read to the latest instance made before it.

    Raises:
      PlanError: a step reads a storage that nothing has made yet.
    """
    latest = [-1] * len(graph.storages)
    reads, writes = [], []
    storage: list[int] = []
    copies: list[int] = []
    maker: list[int] = []
    vertices = graph.vertices
    for position, (index, copy) in enumerate(schedule):
        vertex = vertices[index]
        bound = tuple([latest[s] for s in vertex.reads])
        if -1 in bound:
            missing = vertex.reads[bound.index(-1)]
            raise PlanError(f"plan: {vertex.name!r} reads {graph.storages[missing].name!r} "
                            "before anything has made it")
        reads.append(bound)
        made = []
        for s in vertex.writes:
            made.append(len(storage))
            latest[s] = len(storage)
            storage.append(s)
            copies.append(copy)
            maker.append(position)
        writes.append(tuple(made))
    return Resolved(schedule, tuple(reads), tuple(writes), tuple(storage), tuple(copies),
                    tuple(maker))


def simulate(graph: CostGraph, schedule: Schedule) -> Timeline:
    """Prices a schedule executed in its own order."""
    return simulate_order(graph, resolve(graph, schedule), None)


def simulate_order(graph: CostGraph, resolved: Resolved,
                   order: Sequence[int] | None) -> Timeline:
    """Prices a resolved schedule whose steps run in `order` (positions; None: as scheduled).

    Complexity: linear in the number of steps and reads.
    """
    live, held_at_peak, peak, at = _sweep(graph, resolved, order)
    positions = range(len(live)) if order is None else order
    storages = graph.storages
    entries = sorted(
        (Live(resolved.storage[i], resolved.copy[i], storages[resolved.storage[i]].bytes)
         for i in held_at_peak),
        key=lambda entry: (-entry.bytes, entry.storage, entry.copy),
    )
    vertices = graph.vertices
    time = sum(vertices[resolved.schedule[p][0]].time for p in positions)
    return Timeline(tuple(live), peak, at, tuple(entries), time)


def _sweep(graph, resolved, order):
    """Live bytes per step, the instances held at the peak, the peak and its first step."""
    steps = list(range(len(resolved.schedule)) if order is None else order)
    last = [-1] * len(resolved.storage)
    for when, position in enumerate(steps):
        for instance in resolved.reads[position]:
            last[instance] = when
    live, end = _lifetimes(graph, resolved, steps, last)
    peak = max(live, default=0)
    at = live.index(peak) if peak else 0
    held = [i for position in steps[:at + 1] for i in resolved.writes[position] if end[i] >= at]
    return live, sorted(held), peak, at


def _lifetimes(graph, resolved, steps, last):
    """Live bytes per step, and for each instance the last step through which it is held."""
    storages, vertices = graph.storages, graph.vertices
    size = [storages[s].bytes for s in resolved.storage]
    fetched = [storages[s].fetched for s in resolved.storage]
    forever = len(steps)
    end = [forever] * len(size)
    current = 0
    live = []
    schedule, reads, writes = resolved.schedule, resolved.reads, resolved.writes
    for when, position in enumerate(steps):
        vertex = vertices[schedule[position][0]]
        bound, made = reads[position], writes[position]
        dying = [i for i in bound if last[i] == when and end[i] == forever and not fetched[i]]
        for i in made:
            current += size[i]
        if vertex.reuses and dying:
            for i in taken_buffers(vertex, resolved, dying, made, size).values():
                end[i] = when - 1
                current -= size[i]
        live.append(current + vertex.workspace)
        ended = dying + [i for i in made if last[i] < 0 and not fetched[i]]
        if vertex.donates:
            ended += [i for i in bound if resolved.storage[i] in vertex.donates]
        for i in ended:
            if end[i] == forever:
                end[i] = when
                current -= size[i]
    return live, end


def taken_buffers(vertex, resolved: Resolved, dying: Sequence[int], made: Sequence[int],
                  size: Sequence[int]) -> dict[int, int]:
    """Written instances by the dying instance whose buffer each takes over, first pair first."""
    if not vertex.reuses or not dying:
        return {}
    by_storage = {resolved.storage[i]: i for i in dying}
    wanted = {resolved.storage[i]: i for i in made}
    taken: dict[int, int] = {}
    for written, read in vertex.reuses:
        source, target = by_storage.get(read), wanted.get(written)
        if source is None or target is None or size[source] != size[target]:
            continue
        taken[target] = source
        del by_storage[read], wanted[written]
    return taken
