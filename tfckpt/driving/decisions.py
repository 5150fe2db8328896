"""The plans of one part of a step, best first: of its loops, with forward AD, in every heap."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator

from tfckpt.common import faults
from tfckpt.common.clock import ended_by
from tfckpt.driving.parts import MINIMUM, Part
from tfckpt.errors import InfeasibleBudgetError, PlanError, TfckptError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.graph import Graph
from tfckpt.plan.choosing.planned import Planned
from tfckpt.plan.forward_ad import Decision, decisions_of
from tfckpt.plan.loops.choice import Variants, with_loops_in_segments
from tfckpt.plan.loops.segments import Cut
from tfckpt.plan.names import AUTO
from tfckpt.plan.planner import Memory, StepPlanner, plans_of
from tfckpt.request.options import Options

WHOLE_EFFORT, LEAST_EFFORT = 16 << 20, 0.1
"""Bytes of a plain peak from which on the search takes its default effort, and the minimum share of
it: below, a step is planned in less time than a person notices, and there is little to save."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the plans of a source may use: waits for updates, and free moves."""

    await_updates: bool
    free_moves: bool


def decisions(part: Part, options: Options, limits: Limits,
              planners: dict[tuple, StepPlanner], memory: Memory | None = None,
              may_cut: Callable[[Iterable[Cut]], bool] = lambda cuts: True,
              variants: dict[tuple[int, int], Variants] | None = None) -> Iterator[Decision]:
    """Yield the plans of a part, best first.

    Where XLA is asked what plans need, one is yielded though none is predicted to fit.

    Args:
      part: with its budget, whose room the plans are to fit.
      options: how the step is planned.
      limits: what the plans may use.
      planners: what is known of the part's graphs for every budget.
      memory: of searches of the same step for other sizes and budgets.
      may_cut: says, whenever a decision is asked for, whether loops may be cut as they are in it.
      variants: takes what is known of a graph with its loops cut, and gives it to later calls.

    Raises:
      InfeasibleBudgetError: in the unit of the budget that was asked for.
      PlanError: no plan could be made.
    """
    plain, cost = part.plain, part.cost
    fad = options.fad if options.solver == AUTO or options.fad is True else False
    of_loops = ({} if variants is None else variants).setdefault(
        (id(part.graph), id(cost)), Variants(part.graph, cost, part.target))  # keeps both
    # a room that XLA's answers say asks for another plan than the smallest
    as_asked = part.target.orders_by_control or part.corrected in (None, 0, MINIMUM)
    objective = options.objective if as_asked else "time"

    def within(room: int | None, every_heap: bool = True) -> Iterator[Decision]:
        def over(graph: Graph, cost: CostGraph, share: float = 1.0) -> Iterator[Decision]:
            def plans(of: CostGraph) -> Iterator[Planned]:
                return plans_of(of, room, solver=options.solver, objective=objective,
                                free_moves=limits.free_moves, await_updates=limits.await_updates,
                                target=part.target, plain=plain, known=planners, memory=memory,
                                effort=options.effort, worth=share * worth_of(plain.peak_bytes),
                                every_heap=every_heap, searched=share > 0)

            def found(fad: object) -> Iterator[Decision]:
                return decisions_of(graph, cost, plans, fad=fad, budget=room,
                                    objective=objective, plain_bytes=plain.peak_bytes,
                                    target=part.target)

            return found(False) if fad is False else _or_without(found, fad)

        if options.solver != AUTO or part.number is not None:  # replicas get one plan
            return over(part.graph, cost)
        return with_loops_in_segments(part.graph, cost, over, budget=room,
                                      objective=objective, target=part.target,
                                      allowed=may_cut, plain=None if fad else plain,
                                      variants=of_loops)

    # where nobody is asked what a plan takes at most, nobody says either that it may pass a budget
    judged = part.asked is not None or part.room is None
    found = functools.partial(_likely, within) if (
        judged and part.target.several_heaps) else within
    try:
        yield from found(part.room)
    except InfeasibleBudgetError as error:
        if part.asked is None:
            ended = ended_by()
            raise part.refusal(error.smallest_bytes, cost.resident_bytes,
                               f"; {ended} ended the search" if ended else "",
                               overhead=error.overhead) from None
        yield from found(error.smallest_bytes)


def _likely(within: Callable[..., Iterator[Decision]], room: int | None) -> Iterator[Decision]:
    """Yield plans whose peak is low in every heap; where there are none, in all heaps but one.

    Args:
      within: returns plans, best first, for some bytes and whether every heap counts.
      room: planned bytes; None for the minimum peak.

    Raises:
      InfeasibleBudgetError: there is no plan of either kind.
    """
    try:
        plans = within(room)
        first = next(plans, None)
    except InfeasibleBudgetError:
        first = None
    if first is None or room is None and (
            first.planned.peak_bytes >= first.planned.baseline_bytes):
        yield from within(room, every_heap=False)
        return
    yield first
    yield from plans


def _or_without(found: Callable[[object], Iterator[Decision]], fad: object) -> Iterator[Decision]:
    """Yield decisions with forward AD, and such without where it fails."""
    try:
        yield from found(fad)
    except PlanError:
        raise
    except Exception as error:  # CostError too: the graph itself was priced before
        why = str(error) if isinstance(error, TfckptError) else faults.said(
            error, "forward AD failed")
        warnings.warn(f"tfckpt: no derivatives are kept: {faults.with_advice(why)}", stacklevel=2)
        yield from found(False)


def worth_of(plain_bytes: int) -> float:
    """Return how much of the default effort a step is worth: less where there is little to save.

    Args:
      plain_bytes: peak of the plain step.

    Returns:
      A factor from `LEAST_EFFORT` to 1.
    """
    return min(1.0, max(LEAST_EFFORT, plain_bytes / WHOLE_EFFORT))
