"""Live instances during each step, derived again by looking forward for readers.

For every step on its own: every instance that exists by then is asked who still reads it. This is
quadratic, keeps no running total, and imports nothing from `tfckpt.simulate.simulate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Instance:
    """One allocation of a storage: made by the step at `made` of the schedule."""

    storage: int
    made: int


def bindings(graph, schedule) -> dict[int, list[Instance]]:
    """For each position the instances it reads: of each storage the one made last before it."""
    result = {}
    for position, (vertex, _) in enumerate(schedule):
        bound = []
        for storage in graph.vertices[vertex].reads:
            producer = graph.storages[storage].producer
            made = [q for q in range(position) if schedule[q][0] == producer]
            bound.append(Instance(storage, made[-1]))
        result[position] = bound
    return result


def live_sets(graph, schedule, order: Sequence[int] | None = None) -> list[set[Instance]]:
    """Return the instances that have memory of their own while each step of the execution runs."""
    order = list(range(len(schedule)) if order is None else order)
    when = {position: turn for turn, position in enumerate(order)}
    reads = bindings(graph, schedule)
    instances = [Instance(s, q) for q, (vertex, _) in enumerate(schedule)
                 for s in graph.vertices[vertex].writes]
    readers = {i: [when[p] for p in reads if i in reads[p]] for i in instances}
    donated = {
        i: [when[p] for p in reads
            if i in reads[p] and i.storage in graph.vertices[schedule[p][0]].donates]
        for i in instances
    }
    taken = {}
    for turn, position in enumerate(order):
        vertex = graph.vertices[schedule[position][0]]
        for source in _takeovers(graph, vertex, position, turn, reads[position], readers, donated):
            taken[source] = turn

    def is_live(instance, turn):
        if turn < when[instance.made]:
            return False
        if instance in taken and turn >= taken[instance]:
            return False
        if donated[instance] and turn > min(donated[instance]):
            return False
        if graph.storages[instance.storage].fetched:
            return True
        return turn == when[instance.made] or any(later >= turn for later in readers[instance])

    return [{i for i in instances if is_live(i, turn)} for turn in range(len(order))]


def _takeovers(graph, vertex, position, turn, bound, readers, donated):
    """Inputs whose buffer an output takes: dying here, of equal size, one output each."""
    used_sources, used_targets = [], []
    for written, read in vertex.reuses:
        for instance in bound:
            if (instance.storage == read
                    and max(readers[instance]) == turn
                    and not graph.storages[read].fetched
                    and not any(gone < turn for gone in donated[instance])
                    and graph.storages[read].bytes == graph.storages[written].bytes
                    and instance not in used_sources and written not in used_targets):
                used_sources.append(instance)
                used_targets.append(written)
    return used_sources


def live_bytes(graph, schedule, order=None) -> list[int]:
    """Dynamic bytes while each step runs, workspace included."""
    order = list(range(len(schedule)) if order is None else order)
    return [
        sum(graph.storages[i.storage].bytes for i in live)
        + graph.vertices[schedule[position][0]].workspace
        for live, position in zip(live_sets(graph, schedule, order), order, strict=True)
    ]
