"""Local improvement of a candidate, driven by what is live at the peak.

`descend` lowers the peak: it drops what is kept across it, recomputes anew a copy that is live
across it, or keeps a storage so that a recomputation segment is split in two. `speed_up` spends the
room that a budget leaves on keeping what costs most to recompute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tfckpt.plan.evaluate import Candidate, Evaluator, Priced

ACTIONABLE_FRACTION = 0.004
"""Tensors below this fraction of the peak, and much smaller than others, are left alone."""


def descend(evaluator: Evaluator, start: Priced, target: int, evaluations: int) -> Priced:
    """Lower the planned peak to `target` bytes or as far as it finds a way.

    Each step takes the first neighbour that improves (peak, excess). At most `evaluations`
    candidates are priced.

    Args:
      evaluator: prices candidates of the graph that is planned.
      start: priced by the evaluator; what is changed step by step.
      target: planned peak in bytes at which it stops; 0 for as low as it can.
      evaluations: candidates that may be priced.

    Returns:
      The candidate with the smallest peak found; `start` where nothing improves it.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    best = start
    limit = len(evaluator.priced) + evaluations
    while best.peak > target and len(evaluator.priced) < limit:
        for neighbour in _neighbours(evaluator, best):
            priced = evaluator.price(neighbour)
            if (priced.peak, priced.excess) < (best.peak, best.excess):
                best = priced
                break
            if len(evaluator.priced) >= limit:
                return best
        else:
            return best
    return best


def _neighbours(evaluator: Evaluator, priced: Priced) -> Iterator[Candidate]:
    """Yield candidates that differ by one decision about something live at the peak."""
    graph, candidate = evaluator.graph, priced.candidate
    largest = max((live.bytes for live in priced.timeline.live_at_peak), default=0)
    smallest = min(priced.peak * ACTIONABLE_FRACTION, largest / 4)
    kept, copied = [], []
    for live in priced.timeline.live_at_peak:
        if live.bytes < smallest or live.storage not in graph.droppable:
            continue
        if live.copy:
            copied.append(live.storage)
        elif live.storage in candidate.keep:
            kept.append(live.storage)
    for s in sorted(kept, key=lambda s: (-_worth(evaluator, s), s)):
        yield dataclasses.replace(candidate, keep=candidate.keep - {s})
    for s in copied:
        if s not in candidate.again:
            yield dataclasses.replace(candidate, again=candidate.again | {s})
    for s in sorted(copied, key=lambda s: (graph.storages[s].bytes, -s)):
        yield dataclasses.replace(candidate, keep=candidate.keep | {s})
    for s in copied:
        if s in candidate.again:
            yield dataclasses.replace(candidate, again=candidate.again - {s})


def _worth(evaluator: Evaluator, s: int) -> float:
    """Return bytes freed for each second spent on recomputing the storage from its inputs."""
    storage = evaluator.graph.storages[s]
    return storage.bytes / (evaluator.graph.vertices[storage.producer].time + 1e-12)


def speed_up(evaluator: Evaluator, start: Priced, budget: int, evaluations: int) -> Priced:
    """Lower the planned time while the peak stays within `budget`.

    Keeps dropped storages, the costliest to recompute first, wherever the timeline has room for
    them from their last use in the forward pass until they would be recomputed; prices the
    outcome, halves the choice if it does not fit, and looks for room again.

    Args:
      evaluator: prices candidates of the graph that is planned.
      start: priced by the evaluator, with a peak within the budget.
      budget: dynamic bytes that the planned peak must not pass.
      evaluations: candidates that may be priced.

    Returns:
      The fastest candidate found; `start` where nothing is faster.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    best = start
    limit = len(evaluator.priced) + evaluations
    wanted = _with_room(evaluator, start, budget)
    while wanted and len(evaluator.priced) < limit:
        group = frozenset(wanted)
        priced = evaluator.price(dataclasses.replace(
            best.candidate, keep=best.candidate.keep | group, again=best.candidate.again - group))
        if priced.peak <= budget and priced.time < best.time:
            best = priced
            wanted = _with_room(evaluator, best, budget)
        else:
            wanted = wanted[:len(wanted) // 2]
    return best


def _with_room(evaluator: Evaluator, priced: Priced, budget: int) -> list[int]:
    """Storages that could be kept instead of recomputed, the most worthwhile first."""
    storages = evaluator.graph.storages
    live = np.array(priced.timeline.live_bytes, dtype=np.int64)
    place = {step: position for position, step in enumerate(priced.schedule)}
    last_use = _last_use_of_originals(evaluator, priced)
    found = []
    for s in _recomputed(evaluator, priced):
        gap = slice(last_use[s] + 1, place[storages[s].producer, 1])
        size = storages[s].bytes
        if gap.start >= gap.stop or live[gap].max() + size <= budget:
            live[gap] += size
            found.append(s)
    return found


def _last_use_of_originals(evaluator: Evaluator, priced: Priced) -> list[int]:
    """For each storage the last position that makes or reads its original."""
    vertices = evaluator.graph.vertices
    last = [-1] * len(evaluator.graph.storages)
    remade: set[int] = set()
    for position, (v, copy) in enumerate(priced.schedule):
        for s in vertices[v].reads:
            if s not in remade:
                last[s] = position
        if copy:
            remade.update(vertices[v].writes)
        else:
            for s in vertices[v].writes:
                last[s] = position
    return last


def _recomputed(evaluator: Evaluator, priced: Priced) -> list[int]:
    """Storages that the schedule recomputes, by time saved for each byte kept."""
    graph = evaluator.graph
    residual = frozenset(graph.residuals)
    copies = dict(priced.schedule)  # the last copy of each vertex

    def saved(s: int) -> float:
        """Time spent on the storage and on intermediates that only lead to it."""
        total, pending, seen = 0.0, [graph.storages[s].producer], set()
        while pending:
            v = pending.pop()
            if v in seen or not copies.get(v):
                continue
            seen.add(v)
            total += graph.vertices[v].time * copies[v]
            pending.extend(graph.storages[r].producer for r in graph.vertices[v].reads
                           if r not in residual)
        return total

    found = [s for s in graph.residuals if copies.get(graph.storages[s].producer)]
    return sorted(found, key=lambda s: (-saved(s) / max(graph.storages[s].bytes, 1), s))
