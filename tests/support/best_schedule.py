"""The best rematerialization of a small joint graph, by visiting every schedule of a class.

A state is what matters for the rest of the step: how many originals have run, what has run
again since the last of them, and which storages have an instance. Every way to go on is tried,
dropping inputs and outputs of each step or not; for each state all (peak, time) pairs are kept of
which none is at least as good in both. Nothing is imported from tfckpt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

HELD, GIVEN, GONE = 1, 2, 0  # GIVEN: handed over by a donor, may be read and costs nothing
Front = list[tuple[int, float]]


def front(graph, order=None, any_order: bool = False) -> Front:
    """(peak bytes, time) pairs of the Pareto front, by falling peak and rising time.

    Args:
      order: originals in the order in which they run; the graph's by default.
      any_order: copies before one original may run in any order that works, else in that of
        their originals; each at most once there in either case.
    """
    order = list(range(len(graph.vertices))) if order is None else list(order)
    place = {v: i for i, v in enumerate(order)}
    nothing = (GONE,) * len(graph.storages)
    fronts = {(nothing, (0,) * len(graph.storages)): [(0, 0.0)]}
    for stage, original in enumerate(order):
        done: dict = {}
        again = [v for v in order[:stage] if graph.vertices[v].recomputable]
        more = [v for v in order[:stage + 1] if graph.vertices[v].recomputable]
        waiting = {(frozenset(), *state): pairs for state, pairs in fronts.items()}
        while waiting:
            later: dict = {}
            for (ran, state, extra), pairs in waiting.items():
                for after, used in _runs(graph, original, state, extra, order[stage + 1:], more):
                    _merge(done, after, _worse(pairs, used, graph.vertices[original].time))
                for v in again:
                    if all(state[s] == HELD for s in graph.vertices[v].writes):
                        continue  # what it makes is there
                    if v in ran or not any_order and any(place[u] > place[v] for u in ran):
                        continue
                    for after, used in _runs(graph, v, state, extra, order[stage:], again):
                        _merge(later, (ran | {v}, *after),
                               _worse(pairs, used, graph.vertices[v].time))
            waiting = later
        fronts = done
    merged: dict = {}
    for pairs in fronts.values():
        _merge(merged, None, pairs)
    return sorted(merged[None], reverse=True)


def least_time(pairs: Front, budget: int) -> float | None:
    """Return the minimum time within a budget; None if nothing fits."""
    return min((time for peak, time in pairs if peak <= budget), default=None)


def _runs(graph, v: int, state, extra, originals, again) -> Iterator[tuple[tuple, int]]:
    """Yield every way to run a vertex: (state and fetched extras after it), bytes while it runs.

    `originals` are still to run, copies of `again` may be: what none of them reads is dropped at
    once, and what an original reads is kept if nothing can make it again.
    """
    vertex = graph.vertices[v]
    if any(state[s] == GONE for s in vertex.reads):
        return
    size = [storage.bytes for storage in graph.storages]
    fetched = [storage.fetched for storage in graph.storages]
    base = sum(size[s] for s, how in enumerate(state) if how == HELD and s not in vertex.writes)
    base += sum(size[s] * count for s, count in enumerate(extra))
    # an instance that is replaced has had its last reader; a fetched one stays beside the new
    more = list(extra)
    for s in vertex.writes:
        base += size[s]
        if fetched[s] and state[s] == HELD:
            more[s] += 1
            base += size[s]
    readable = {s for u in (*originals, *again) for s in graph.vertices[u].reads}
    wanted = {s for u in originals for s in graph.vertices[u].reads
              if not graph.vertices[graph.storages[s].producer].recomputable}
    fates = [(True,) if fetched[s] or s in wanted else (True, False) if s in readable
             else (False,) for s in (*vertex.reads, *vertex.writes)]
    for stays in itertools.product(*fates):
        dying = [s for s, stay in zip(vertex.reads, stays, strict=False) if not stay]
        used = base + vertex.workspace - _taken(graph, vertex, state, dying)
        after = list(state)
        for s in vertex.writes:
            after[s] = HELD
        for s in vertex.donates:
            after[s] = GIVEN
        for s, stay in zip((*vertex.reads, *vertex.writes), stays, strict=True):
            if not stay:
                after[s] = GONE
        yield (tuple(after), tuple(more)), used


def _taken(graph, vertex, state, dying) -> int:
    """Return bytes of dying inputs whose buffers outputs take over, first pair first."""
    sources, targets, total = set(dying), set(vertex.writes), 0
    for written, read in vertex.reuses:
        same = graph.storages[written].bytes == graph.storages[read].bytes
        if read in sources and written in targets and same and state[read] == HELD:
            sources.remove(read)
            targets.remove(written)
            total += graph.storages[read].bytes
    return total


def _worse(pairs: Front, used: int, time: float) -> Front:
    return [(max(peak, used), spent + time) for peak, spent in pairs]


def _merge(fronts: dict, state, pairs: Front) -> None:
    """Add pairs to a state's front and drop what is no better than another."""
    best: Front = []
    for peak, time in sorted(set(fronts.get(state, [])) | set(pairs)):
        if not best or time < best[-1][1]:
            best.append((peak, time))
    fronts[state] = best
