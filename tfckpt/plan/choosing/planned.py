"""A plan and what it is worth, and the plain step as the same executors run it."""

from __future__ import annotations

import dataclasses
import itertools

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Plan, plain_plan, resolve
from tfckpt.ir.target import HERE, Target
from tfckpt.plan.pool import Point
from tfckpt.simulate.allocator import allocated_peaks
from tfckpt.simulate.executor import Edges, orders_on
from tfckpt.simulate.fences import fenced
from tfckpt.simulate.order import base_order, moves_of_xla
from tfckpt.simulate.simulate import Timeline, simulate, simulate_order
from tfckpt.simulate.workers import several_peaks

EXPECTED = 0.75
"""Of the peaks simulated on several threads, the share that is below the expected one: where
measured medians lie in the mean (`benchmarks.executor_budgets`)."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """The plain step: its plan, its timeline in requested bytes, and the allocator's peak."""

    plan: Plan
    timeline: Timeline
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan and what it is worth.

    Attributes:
      plan: all that is needed to replay it.
      timeline: of the worse of the simulated orders, in requested bytes.
      peak_bytes: dynamic peak as the allocator counts it.
      time: planned time, in the graph's unit.
      plain: the plain step, under the middle one of the orders.
      front: the Pareto front of all priced candidates, by falling peak. Its peaks are requested
        bytes in the planned order, before waits and the allocator's slack.
      others: the best of every solver that the front beats, priced in the same way.
      bound_bytes: requested bytes that no plan of the graph stays below: the largest vertex's
        working set.
    """

    plan: Plan
    timeline: Timeline
    peak_bytes: int
    time: float
    plain: Plain
    front: tuple[Point, ...]
    others: tuple[Point, ...] = ()
    bound_bytes: int = 0

    @property
    def baseline(self) -> Timeline:
        """Return the plain step's timeline."""
        return self.plain.timeline

    @property
    def baseline_bytes(self) -> int:
        """Return the plain step's peak as the allocator counts it."""
        return self.plain.peak_bytes


def baseline(graph: CostGraph, target: Target = HERE, peak: int | None = None) -> Plain:
    """Return the plain step under the middle one of the simulated executors.

    Nothing of ours orders the plain step, so it is not priced by its worst order: a fraction of
    that would be a larger part of what the step really needs.

    Args:
      graph: joint graph.
      target: what the step is planned for.
      peak: in bytes, as the allocator counts it, where it is known.
    """
    if not target.orders_by_control:
        moves = moves_of_xla(graph)
        plan = fenced(graph, tuple((v, 0) for v in base_order(graph, moves)), moves)
        timeline = simulate(graph, plan.schedule)
        return Plain(plan, timeline, timeline.peak_bytes)
    plan = plain_plan(graph)
    resolved = resolve(graph, plan.schedule)
    found = [(simulate_order(graph, resolved, order), order)
             for order in Edges(graph, resolved, plan.moves.released, ()).orders(orders_on(target))]
    timeline, order = sorted(found, key=lambda entry: entry[0].peak_bytes)[len(found) // 2]
    plan = dataclasses.replace(plan, order=tuple(order))
    if target.smallest_counted is None or peak is not None:
        return Plain(plan, timeline, timeline.peak_bytes if peak is None else peak)
    if target.threads > 1:
        return Plain(plan, timeline, executed_peaks(graph, target, settled=False)[0])
    peaks = allocated_peaks(graph, resolved, order, target.smallest_counted,
                            target.takes_all_memory)
    return Plain(plan, timeline, peaks[len(peaks) // 2])


def executed_peaks(graph: CostGraph, target: Target, settled: bool = True,
                   plan: Plan | None = None) -> tuple[int, int]:
    """Return the expected and the largest peak of a graph that runs by a plan.

    It is simulated in several orders, at several paces, and in several heaps that earlier
    allocations may have left. The expected peak is the median; on several threads the upper
    quartile, since the times of real steps vary more than simulated ones.

    Args:
      graph: joint graph.
      target: what the step is planned for.
      settled: as for `tfckpt.simulate.allocator.replayed_peaks`.
      plan: with its fences and waits; None for the graph as it is, with its own edges alone.
    """
    plan = plan or plain_plan(graph)
    edges = Edges(graph, resolve(graph, plan.schedule), plan.moves.released, plan.fences)
    peaks = several_peaks(edges, target, settled, plan.waits)
    if target.threads > 1:
        every = sorted(itertools.chain.from_iterable(peaks))
        return every[int(EXPECTED * len(every))], every[-1]
    middles = sorted(p[len(p) // 2] for p in peaks[:len(orders_on(target))])
    return middles[len(middles) // 2], max(map(max, peaks))
