"""Candidates with all that they will have when they run: fences, waits, and an allocator's peak."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Plan, resolve
from tfckpt.ir.target import Target
from tfckpt.plan.evaluate import Priced
from tfckpt.simulate.allocator import allocated_peaks
from tfckpt.simulate.executor import Edges
from tfckpt.simulate.fences import fenced
from tfckpt.simulate.simulate import Timeline
from tfckpt.simulate.waits import place_waits
from tfckpt.simulate.workers import concurrent_peak


@dataclasses.dataclass(frozen=True)
class Finished:
    """A candidate with waits, its worse timeline, and the most that the allocator would count.

    Peaks measured lie nearer to the worst of several simulated heaps than to the middle one.

    Attributes:
      lowest: a lower bound of the peak: that of one thread.
      elsewhere: the same in all heaps but the worst.
      most: takes `lowest` and returns the peak on all threads, where that is more.
    """

    plan: Plan
    timeline: Timeline
    lowest: int
    elsewhere: int
    priced: Priced
    most: Callable[[int], int] = int

    @functools.cached_property
    def peak(self) -> int:
        """Return the peak on the target's threads: known only once it is asked for."""
        return self.most(self.lowest)

    def but_for_one_heap(self) -> Finished:
        """Return the same, counted without the worst of the heaps."""
        return self if self.elsewhere == self.lowest else dataclasses.replace(
            self, lowest=self.elsewhere)

    def fits(self, usable: int) -> bool:
        """Return whether the peak is at most so many bytes.

        Args:
          usable: these bytes.
        """
        return self.lowest <= usable and self.peak <= usable


def lowest_of(finished: Iterable[Finished], value: Callable[[int, Finished], tuple[float, ...]]
            ) -> Finished:
    """Return the entry whose peak has the minimum value, the first of equals.

    Asked for are the peaks of those alone that may be it by what their peaks are not below.

    Args:
      finished: entries to choose from, at least one.
      value: takes a peak and the entry; it never falls while the peak rises.
    """
    best: tuple[tuple[float, ...], int, Finished] | None = None
    for bound, number, entry in sorted(
            ((value(f.lowest, f), n, f) for n, f in enumerate(finished)), key=lambda e: e[:2]):
        if best is not None and bound > best[0]:
            break
        found = value(entry.peak, entry), number
        if best is None or found < best[:2]:
            best = (*found, entry)
    assert best is not None
    return best[2]


def finished(graph: CostGraph, priced: Priced, target: Target, *, free_moves: bool,
             await_updates: bool, solver: str) -> Finished:
    """Return a candidate with its waits, and what its worse order needs.

    Args:
      graph: that was priced.
      priced: the candidate.
      target: what the step is planned for.
      free_moves: whether defer and release may be used.
      await_updates: see `tfckpt.simulate.fences.fences`.
      solver: what a candidate without a source is called after.
    """
    candidate, timeline = priced.candidate, priced.timeline
    plan = fenced(graph, priced.schedule, candidate.moves, await_updates=await_updates,
                  solver=candidate.source or solver)
    peaks: tuple[int, ...] = (priced.peak,)
    most: Callable[[int], int] = int
    if target.orders_by_control:
        resolved = resolve(graph, plan.schedule)
        highest = priced.peak if free_moves else 1 << 62
        edges = Edges(graph, resolved, plan.moves.released, plan.fences)
        waits, executed, order = place_waits(
            graph, resolved, plan.moves.released, plan.fences, highest,
            await_updates=await_updates, edges=edges)
        plan = dataclasses.replace(plan, waits=waits)
        if executed.peak_bytes >= timeline.peak_bytes:
            timeline, plan = executed, dataclasses.replace(plan, order=order)
        smallest = target.smallest_counted
        peaks = (timeline.peak_bytes,) if smallest is None else allocated_peaks(
            graph, resolved, order, smallest, target.takes_all_memory)
        if target.threads > 1:
            most = functools.partial(concurrent_peak, edges, target, waits)
    floor = floor_of(graph, priced, target)
    return Finished(plan, timeline, max(*peaks, floor), max(*peaks[:-1], peaks[0], floor), priced,
                    most)


def floor_of(graph: CostGraph, priced: Priced, target: Target) -> int:
    """Return bytes that a finished plan will need at least: the planned order's own peak.

    Less what an allocator does not count: requests smaller than the smallest.

    Args:
      graph: that was priced.
      priced: the candidate.
      target: what the step is planned for.
    """
    smallest = target.smallest_counted or 0
    timeline = priced.timeline
    small = sum(live.bytes for live in timeline.live_at_peak if live.bytes < smallest)
    working = graph.vertices[timeline.working].workspace if timeline.working >= 0 else 0
    return max(0, priced.peak - small - (working if working < smallest else 0))
