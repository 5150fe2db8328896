"""The front door of planning: a graph and a budget in, a priced plan out.

`auto` takes the fastest plan that fits from the pool that `tfckpt.plan.search` makes. A plan's
peak is the worse of the planned order and the simulated executors' orders, with the fences and
waits that the rewriter will place, as an allocator would count it (`tfckpt.simulate.allocator`).
Which of several is taken: `tfckpt.plan.choosing.rules`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.ir.schedule import plain_plan
from tfckpt.ir.target import HERE, Target
from tfckpt.plan import search
from tfckpt.plan.candidates import CHEAP, DEAR, SOLVERS, Solver
from tfckpt.plan.choosing.finished import Finished, finished, floor_of, lowest_of
from tfckpt.plan.choosing.planned import Plain, Planned, baseline
from tfckpt.plan.choosing.rules import ROOM, TAIL, cost_of
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced, non_dominated
from tfckpt.plan.names import AUTO, OPTIMAL, check_effort, check_names
from tfckpt.plan.rescheduling.neighbourhood import working_set
from tfckpt.simulate.check import check_plan
from tfckpt.simulate.order import base_order
from tfckpt.solvers.exact import optimal

OPTIMA = 4
"""Times that `optimal` is asked for less until what the allocator counts fits."""
FINALISTS = 10
"""Candidates near the minimum peak that get waits and an allocator before one is chosen."""
MOST_FINALISTS, SMALL = 120, 6_000
"""... on small graphs more: the second divided by the vertices, at most the first."""
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
    At most some `FINALISTS` candidates are finished after the first plan was found.

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
        self._pool: search.Pool | None = None  # the same for every budget

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
            self._least(pool) if budget is None else self._fitting(pool, budget), pool.priced)

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
        if self._floor(lowest) <= usable and self._finish(lowest).fits(usable):
            yield from self._checked([self._finish(lowest)], priced)

    def _checked(self, finished: Iterable[Finished], priced: Sequence[Priced]
                 ) -> Iterator[Planned]:
        """Yield different plans of the graph, checked.

        Args:
          finished: plans, best first.
          priced: all candidates, for the fronts that are reported.
        """
        front = self._points(non_dominated(priced))
        others = tuple(p for p in self._points(search.best_of_each(priced)) if p not in front)
        given: set[tuple[object, ...]] = set()
        for chosen in finished:
            plan = chosen.plan
            edits = plan.schedule, plan.moves.released, plan.waits  # what they depend on
            if edits not in given:
                given.add(edits)
                check_plan(self.graph, plan)
                yield Planned(plan, chosen.timeline, chosen.peak, chosen.priced.time,
                              self.plain, front, others, working_set(self.graph))

    def _made(self, budget: int | None) -> search.Pool:
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

    def _explored(self, patterns: list[Candidate]) -> search.Pool:
        """Return the pool of `auto`: what is remembered, priced for these sizes, or searched."""
        plain, target = self.plain.timeline.peak_bytes, self.target
        searched = self.free_moves, target.orders_by_control, target.hold, self.effort
        known = self.memory.read(self.graph, searched, plain) if self.memory else []
        if known:
            choices = tuple(self.evaluator.price(c) for c in known)
            return search.Pool((*(self.evaluator.price(c) for c in patterns), *choices), choices)
        pool = search.explore(self.evaluator, patterns, self._solvers(), plain,
                              self.effort * self.worth)
        if self.memory:
            self.memory.write(self.graph, searched, plain,
                              [p.candidate for p in pool.choices])
        return pool

    def _solvers(self) -> tuple[Solver, ...]:
        """Return what `auto` draws on: on small graphs also what is dear, or refuses others."""
        forward = sum(v.region == FORWARD for v in self.graph.vertices)
        return CHEAP if forward > EXACT_FORWARD else (*CHEAP, *DEAR)

    def _points(self, pool: list[Priced]) -> tuple[search.Point, ...]:
        return tuple(search.Point(p.peak, p.time, p.candidate.source or self.solver)
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

    def _floor(self, priced: Priced) -> int:
        """Return bytes that the finished plan will need at least."""
        return floor_of(self.graph, priced, self.target)

    def _limit(self) -> int:
        """Return how many candidates are finished before one is chosen: on small graphs, all."""
        return max(min(FINALISTS, search.few(self.graph, FINALISTS)),
                   min(MOST_FINALISTS, SMALL // max(len(self.graph.vertices), 1)))

    def _smallest(self, pool: search.Pool,
                  value: Callable[[int, float], float] = lambda peak, time: peak
                  ) -> list[Finished]:
        """Return finished choices, the one of the smallest value among them, for all budgets.

        The value of a peak in bytes and a time is the peak itself by default. A choice whose floor
        has a larger one than a finished choice cannot be the smallest. Where there are too
        many, they are spread over the lower end of the front, since neighbours share the
        allocator's luck.
        """
        choices = sorted(pool.choices, key=lambda p: (value(self._floor(p), p.time), p.time))
        limit = self._limit()
        most = 1.1 * (choices[0].peak + ROOM * self.plain.timeline.peak_bytes)
        near = [p for p in choices if p.peak <= most]
        if len(near) > limit:
            return [self._finish(p)
                    for p in search.spread(non_dominated(near)[::-1], limit)]
        found: list[Finished] = []
        for priced in choices:
            if found:
                best = lowest_of(found, lambda peak, f: (value(peak, f.priced.time),))
                if len(found) >= limit or value(self._floor(priced), priced.time) >= value(
                        best.peak, best.priced.time):
                    break
            found.append(self._finish(priced))
        return found

    def _least(self, pool: search.Pool) -> Iterator[Finished]:
        """Yield the smallest peak, but for a little memory that buys much time.

        Then so among the rest. Every choice that may win by that rule is finished, the likeliest
        first, up to a limit.
        """
        plain = self.plain.peak_bytes, self.plain.timeline.time
        room, whole, pool = ROOM * self.plain.peak_bytes, pool, self._without_tail(pool)

        def cost(peak: int, time: float) -> float:
            return cost_of(peak, time, *plain, self.objective)

        def tail(peak: int, time: float) -> float:
            return cost_of(peak, time, *plain, self.objective, TAIL)

        def least_of(entries: Sequence[Finished]) -> int:
            return lowest_of(entries, lambda peak, f: (tail(peak, f.priced.time), peak)).peak

        def chosen(entries: Sequence[Finished]) -> Finished:
            least = least_of(entries)
            most = least + room
            near = [f for f in entries if f.lowest >= least or f.peak >= least]
            return lowest_of(near, lambda peak, f: (
                peak > most, cost(peak, f.priced.time), peak, f.priced.time))

        finished = self._smallest(pool, tail)
        done = {f.priced.candidate for f in finished}
        left = sorted((p for p in pool.choices if p.candidate not in done),
                      key=lambda p: (cost(self._floor(p), p.time), p.time))
        for priced in left:
            best = chosen(finished)
            if len(finished) >= len(done) + self._limit() // 2 or (
                    cost(self._floor(priced), priced.time) > cost(best.peak, best.priced.time)):
                break
            if self._floor(priced) <= least_of(finished) + room:
                finished.append(self._finish(priced))
        for group in (finished, self._further(whole)):
            rest = list(group)
            while rest:
                best = chosen(rest)
                yield best
                rest = [f for f in rest if f is not best]

    def _without_tail(self, pool: search.Pool) -> search.Pool:
        """Return the pool without choices far below what is taken for the minimum.

        Peaks are requested bytes here. Those that an allocator counts are other ones, so that what
        is a little below may be the minimum.
        """
        plain = self.plain.timeline

        def tail(p: Priced) -> float:
            return cost_of(p.peak, p.time, plain.peak_bytes, plain.time, self.objective, TAIL)

        least = min(pool.choices, key=lambda p: (tail(p), p.peak, p.time))
        return dataclasses.replace(pool, choices=tuple(
            p for p in pool.choices if p.peak >= least.peak or tail(p) <= tail(least) + ROOM))

    def _further(self, pool: search.Pool) -> Iterator[Finished]:
        """Finish choices from the whole front, for callers that refused all earlier plans."""
        front = non_dominated(pool.choices)[::-1]
        for priced in search.spread(front, search.few(self.graph, FINALISTS)):
            yield self._finish(priced)

    def _fitting(self, pool: search.Pool, budget: int) -> Iterator[Finished]:
        """Yield the fastest plans (with objective "memory" the smallest) whose allocated peaks fit.

        A budget that the plain step meets as it is, is met by that.
        """
        usable = int(budget * self.target.safety)
        plain = [self._untouched()] if (
            self.plain.peak_bytes <= budget and not self.graph.again) else []
        found, left = False, search.few(self.graph, FINALISTS)
        if self.objective == "time":
            for priced in sorted(pool.choices, key=lambda p: (p.time, p.peak)):
                if plain and priced.time > plain[0].priced.time:
                    yield plain.pop()
                    found = True
                if self._floor(priced) <= usable and left:
                    if self._finish(priced).fits(usable):
                        yield self._finish(priced)
                        found = True
                    left -= found
        smallest = self._smallest(pool)
        fitting = [f for f in smallest if f.fits(usable)] + plain
        yield from sorted(fitting, key=lambda f: (f.peak, f.priced.time))
        if found or fitting:
            yield from sorted((f for f in self._further(pool) if f.fits(usable)),
                              key=lambda f: f.peak)
            return
        lowest = lowest_of(smallest, lambda peak, _: (peak,))
        needed = min(int(lowest.peak / self.target.safety) + 2, self.plain.peak_bytes)
        raise InfeasibleBudgetError(
            f"plan: no plan of solver {self.solver!r} fits {budget:,} bytes; the minimum dynamic "
            f"peak it can promise is {needed:,} bytes", needed,
            lowest.priced.time / max(self.graph.total_time, 1e-12) - 1.0)

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


def _alone(priced: Sequence[Priced]) -> search.Pool:
    return search.pool_of(priced, [priced])
