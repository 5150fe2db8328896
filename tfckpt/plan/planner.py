"""The front door of planning: a graph and a budget in, a priced plan out.

`auto` takes the fastest plan that fits from the pool that `tfckpt.plan.search` makes. A plan's
peak is the worse of the planned order and the simulated executors' orders, with the fences and
waits that the rewriter will place, as an allocator would count it (`tfckpt.simulate.allocator`).
Which of several is taken: `tfckpt.plan.choosing.rules`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.ir.schedule import plain_plan
from tfckpt.ir.target import HERE, ORDER, Target
from tfckpt.plan import search
from tfckpt.plan.candidates import CHEAP, DEAR, SOLVERS, Solver
from tfckpt.plan.choosing.finished import Finished, finished
from tfckpt.plan.choosing.planned import Plain, Planned, baseline
from tfckpt.plan.choosing.ranking import Ranking
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced, non_dominated
from tfckpt.plan.names import AUTO, OPTIMAL, check_effort, check_names
from tfckpt.plan.pool import Point, Pool, best_of_each, pool_of
from tfckpt.plan.rescheduling.neighbourhood import working_set
from tfckpt.simulate.check import check_plan
from tfckpt.simulate.order import base_order
from tfckpt.solvers.exact import optimal

OPTIMA = 4
"""Times that `optimal` is asked for less until what the allocator counts fits."""
EXACT_FORWARD = 16
"""Forward vertices of the largest graph on which `auto` asks the solvers of `DEAR` as well."""


class Memory(Protocol):
    """Results of earlier searches of graphs of the same structure, whatever their sizes."""

    def read(self, graph: CostGraph, searched: object, plain_bytes: int) -> list[Candidate]:
        """Return the candidates that a search ended with; none where there was none.

        Args:
          graph: the cost graph that is searched.
          searched: what else the search depends on.
          plain_bytes: requested peak of the plain step.
        """

    def write(self, graph: CostGraph, searched: object, plain_bytes: int,
              candidates: Sequence[Candidate]) -> None:
        """Keep the candidates that a search ended with.

        Args:
          graph: the cost graph that was searched.
          searched: what else the search depends on.
          plain_bytes: requested peak of the plain step.
          candidates: what plans are chosen from.
        """


def plan_step(graph: CostGraph, budget: int | None = None, *, solver: str = AUTO,
              objective: str = "time", free_moves: bool = True,
              await_updates: bool = True, target: Target = HERE,
              plain: Plain | None = None, effort: float = 1.0) -> Planned:
    """Return the best plan of a step: the first of `plans_of`, which says what is asked for.

    Args:
      graph: the joint cost graph.
      budget: dynamic bytes that the peak must not pass; None for the minimum peak.
      solver: one of `SOLVER_NAMES`; "optimal" takes small graphs only.
      objective: "time" takes the fastest plan that fits, "memory" the one with the minimum peak.
      free_moves: whether defer and release may be used.
      await_updates: see `tfckpt.simulate.fences.fences`.
      target: what the step is planned for.
      plain: what `baseline` returned for this graph, if it was called already.
      effort: how many evaluations the search of "auto" may take, as a multiple of the default.

    Raises:
      PlanError: effort that is not positive; unknown solver or objective; a graph that the solver
        does not take; or OR-tools is missing for "optimal".
      InfeasibleBudgetError: no plan found fits; names the smallest peak found.
    """
    return next(plans_of(graph, budget, solver=solver, objective=objective, free_moves=free_moves,
                         await_updates=await_updates, target=target, plain=plain, effort=effort))


def plans_of(graph: CostGraph, budget: int | None = None, *, solver: str = AUTO,
             objective: str = "time", free_moves: bool = True, await_updates: bool = True,
             target: Target = HERE, plain: Plain | None = None,
             known: dict[tuple[object, ...], StepPlanner] | None = None,
             memory: Memory | None = None, effort: float = 1.0, worth: float = 1.0,
             every_heap: bool = True, searched: bool = True) -> Iterator[Planned]:
    """Yield different plans of a step, best first, each made when it is asked for.

    Every plan is the best of those not yet given by the rule that chooses the first. With a budget
    and objective "time" these are the fastest that fit, then those of the smallest peaks that fit.
    At most some ten candidates are finished after the first plan was found (`FINALISTS` in
    `tfckpt.plan.choosing.ranking`).

    Args:
      graph: the joint cost graph.
      budget: dynamic bytes that the peak must not pass; None for the minimum peak.
      solver: one of `SOLVER_NAMES`; "optimal" takes small graphs only.
      objective: "time" takes the fastest plan that fits, "memory" the one with the minimum peak.
      free_moves: whether defer and release may be used.
      await_updates: see `tfckpt.simulate.fences.fences`.
      target: where control edges mean nothing there are no waits, and the moves are those that the
        compiler makes by itself.
      plain: what `baseline` returned for this graph, if it was called already.
      known: takes what is searched once for all budgets, and gives it to later calls with it.
      memory: what a search of "auto" is kept in; one that is known there is priced, not searched.
      effort: how many evaluations the search of "auto" may take, as a multiple of the default,
        which is in proportion to the graph. More are never less good in what a search of one kind
        finds first, and usually better.
      worth: share of it that is taken; a search that is known already is used whatever it was.
      every_heap: whether a peak is the worst of several heaps; else that of all but the worst: one
        large request that meets a chunk just below twice its size counts twice.
      searched: whether to search; else yielded is at most the plan with nothing computed again that
        fits a budget: no search finds a faster one.

    Raises:
      PlanError: effort that is not positive; unknown solver or objective; a graph too large for
        "optimal".
      InfeasibleBudgetError: the first plan is asked for, and none found fits; names the smallest
        peak found.
    """
    # equal graphs are one: loops are put in segments anew for each budget
    key = graph, solver, objective, free_moves, await_updates, effort, worth
    planner = None if known is None else known.get(key)
    if planner is None:
        planner = StepPlanner(graph, solver, objective, free_moves, await_updates, target, plain,
                              memory, effort, worth)
    if known is not None:
        known[key] = planner
    planner = planner if every_heap else planner.but_for_one_heap()
    return planner.plans(budget) if searched else planner.at_once(budget)


class StepPlanner:
    """Plans one step for one budget after the other; the arguments are those of `plans_of`."""

    def __init__(self, graph: CostGraph, solver: str, objective: str, free_moves: bool,
                 await_updates: bool, target: Target,
                 plain: Plain | None = None, memory: Memory | None = None,
                 effort: float = 1.0, worth: float = 1.0) -> None:
        check_names(solver, objective)
        check_effort(effort)
        self.memory, self.effort, self.worth = memory, effort, worth
        self.graph, self.solver, self.objective = graph, solver, objective
        self.free_moves, self.await_updates, self.target = free_moves, await_updates, target
        self.evaluator = Evaluator(graph)
        self.plain = plain or baseline(graph, target)
        self.finished: dict[Candidate, Finished] = {}
        self._every_heap = True
        self._pool: Pool | None = None  # the same for every budget

    def but_for_one_heap(self) -> StepPlanner:
        """Return a planner of what is known here that does not count the worst of the heaps."""
        other = copy.copy(self)
        other.finished = {candidate: found.but_for_one_heap()
                          for candidate, found in self.finished.items()}
        other._every_heap = False
        return other

    def plans(self, budget: int | None) -> Iterator[Planned]:
        """Yield plans, best first; see `plans_of`.

        Args:
          budget: dynamic bytes that the peak must not pass; None for the minimum peak.

        Raises:
          PlanError: the solver does not take the graph, or OR-tools is missing for "optimal".
          InfeasibleBudgetError: the first plan is asked for, and none found fits; names the
            smallest peak found.
        """
        pool = self._made(budget)
        yield from self._checked(
            self._ranking.least(pool) if budget is None else self._ranking.fitting(
                pool, budget, [self._untouched()] if (
                    self.plain.peak_bytes <= budget and not self.graph.again) else []),
            pool.priced)

    @property
    def _ranking(self) -> Ranking:
        return Ranking(self.graph, self.plain, self.target, self.objective, self.solver,
                       self._finish)

    def at_once(self, budget: int | None) -> Iterator[Planned]:
        """Yield a plan that fits with nothing computed again, if there is one; see `plans_of`.

        Args:
          budget: as for `plans`.
        """
        if budget is None or self.objective != "time" or self.graph.again or (
                self.plain.peak_bytes <= budget):
            return
        patterns = search.templates(self.evaluator, self.free_moves, self.target)
        priced = [self.evaluator.price(pattern) for pattern in patterns]
        lowest, usable = min(priced, key=lambda p: p.peak), int(budget * self.target.safety)
        if self._ranking.floor(lowest) <= usable and self._finish(lowest).fits(usable):
            yield from self._checked([self._finish(lowest)], priced)

    def _checked(self, finished: Iterable[Finished], priced: Sequence[Priced]
                 ) -> Iterator[Planned]:
        """Yield different plans of the graph, checked.

        Args:
          finished: plans, best first.
          priced: all candidates, for the fronts that are reported.
        """
        front = self._points(non_dominated(priced))
        others = tuple(p for p in self._points(best_of_each(priced)) if p not in front)
        given: set[tuple[object, ...]] = set()
        for chosen in finished:
            plan = chosen.plan
            edits = plan.schedule, plan.moves.released, plan.waits  # what they depend on
            if edits not in given:
                given.add(edits)
                check_plan(self.graph, plan)
                yield Planned(plan, chosen.timeline, chosen.peak, chosen.priced.time,
                              self.plain, front, others, working_set(self.graph))

    def _made(self, budget: int | None) -> Pool:
        """Return the pool of candidates; that of "optimal" alone depends on the budget."""
        if self._pool:
            return self._pool
        patterns = search.templates(self.evaluator, self.free_moves, self.target)
        if self.solver == OPTIMAL:
            return _alone(self._optima([p for p in patterns if not p.reordered][-1], budget))
        if self.solver == AUTO:
            self._pool = self._explored(patterns)
        else:
            named = () if self.solver == "store_all" else (SOLVERS[self.solver],)
            self._pool = _alone(search.starts(self.evaluator, patterns, named, self.objective))
        return self._pool

    def _explored(self, patterns: list[Candidate]) -> Pool:
        """Return the pool of `auto`: what is remembered, priced for these sizes, or searched."""
        plain, target = self.plain.timeline.peak_bytes, self.target
        searched = self.free_moves, target.orders_by_control, target.hold, self.effort
        known = self.memory.read(self.graph, searched, plain) if self.memory else []
        if known:
            choices = tuple(self.evaluator.price(c) for c in known)
            return Pool((*(self.evaluator.price(c) for c in patterns), *choices), choices)
        pool = search.explore(self.evaluator, patterns, self._solvers(), plain,
                              self.effort * self.worth,
                              target.orders_by_control or target.hold == ORDER)
        if self.memory:
            self.memory.write(self.graph, searched, plain,
                              [p.candidate for p in pool.choices])
        return pool

    def _solvers(self) -> tuple[Solver, ...]:
        """Return what `auto` draws on: on small graphs also what is dear, or refuses others."""
        forward = sum(v.region == FORWARD for v in self.graph.vertices)
        return CHEAP if forward > EXACT_FORWARD else (*CHEAP, *DEAR)

    def _points(self, pool: list[Priced]) -> tuple[Point, ...]:
        return tuple(Point(p.peak, p.time, p.candidate.source or self.solver)
                     for p in pool)

    def _optima(self, pattern: Candidate, budget: int | None) -> list[Priced]:
        """Return proven schedules in a pattern's order, the last one within the budget.

        The solver counts requested bytes in the planned order; a plan has to fit by what an
        allocator counts in the executors' orders. Where that is more, the solver gets a smaller
        budget.
        """
        order = base_order(self.graph, pattern.moves)
        found: list[Priced] = []
        usable = room = None if budget is None else int(budget * self.target.safety)
        for _ in range(OPTIMA):
            try:
                best = optimal.solve(self.graph, room, objective=self.objective, order=order)
            except InfeasibleBudgetError:
                best, room = optimal.solve(self.graph, objective="memory", order=order), None
            found.append(self.evaluator.price(dataclasses.replace(
                pattern, schedule=best.schedule, source=OPTIMAL)))
            if usable is None or room is None:
                break
            highest = self._finish(found[-1]).peak
            if highest <= usable:
                break
            room = min(room * usable // highest, found[-1].peak - 1)
        return found

    def _untouched(self) -> Finished:
        """Return the plain step as a plan of this graph.

        Its updates may wait for more than the plain step's own.
        """
        plain = self.plain
        plan = plain_plan(self.graph) if self.target.orders_by_control else plain.plan
        priced = Priced(Candidate(self.evaluator.everything(), source="store_all"),
                        plan.schedule, plain.timeline, 0)
        return Finished(plan, plain.timeline, plain.peak_bytes, plain.peak_bytes, priced)

    def _finish(self, priced: Priced) -> Finished:
        """Return the plan with its waits, and what its worse order needs."""
        candidate = priced.candidate
        if candidate not in self.finished:
            found = finished(
                self.graph, priced, self.target, free_moves=self.free_moves,
                await_updates=self.await_updates, solver=self.solver)
            self.finished[candidate] = found if self._every_heap else found.but_for_one_heap()
        return self.finished[candidate]


def _alone(priced: Sequence[Priced]) -> Pool:
    return pool_of(priced, [priced])
