"""The front door of planning: a graph and a budget in, a priced plan out.

`auto` takes the fastest plan that fits from the pool that `tfckpt.plan.search` makes. A plan's
peak is the worse of the planned order and the simulated executors' orders, with the fences and
waits that the rewriter will place, as an allocator would count it (`tfckpt.simulate.allocator`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.ir.schedule import Plan, plain_plan, resolve
from tfckpt.ir.target import HERE, Target
from tfckpt.plan import search
from tfckpt.plan.candidates import CHEAP, DEAR, SOLVERS, Solver
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced, non_dominated
from tfckpt.plan.rescheduling.neighbourhood import working_set
from tfckpt.simulate.allocator import allocated_peaks
from tfckpt.simulate.check import check_plan
from tfckpt.simulate.executor import Edges, orders_on
from tfckpt.simulate.fences import fenced
from tfckpt.simulate.order import base_order, moves_of_xla
from tfckpt.simulate.simulate import Timeline, simulate, simulate_order
from tfckpt.simulate.waits import place_waits
from tfckpt.simulate.workers import concurrent_peak, several_peaks
from tfckpt.solvers.exact import optimal

AUTO, OPTIMAL = "auto", "optimal"
SOLVER_NAMES = (AUTO, *SOLVERS, OPTIMAL)
OBJECTIVES = ("time", "memory")
OPTIMA = 4
"""Times that `optimal` is asked for less until what the allocator counts fits."""
FINALISTS = 10
"""Candidates near the minimum peak that get waits and an allocator before one is chosen."""
MOST_FINALISTS, SMALL = 120, 6_000
"""... on small graphs more: the second divided by the vertices, at most the first."""
EXACT_FORWARD = 16
"""Forward vertices of the largest graph on which `auto` asks the solvers of `DEAR` as well."""
ROOM = 0.045
"""The minimum peak is asked for: how much more, as a fraction of the plain one, a plan may take."""
WORTH = 0.75
"""... and only where each percent of the plain peak buys 1 / 0.75 percent of the plain time."""
EXPECTED = 0.75
"""Of the peaks simulated on several threads, the share that is below the expected one: where
measured medians lie in the mean (`benchmarks.executor_budgets`)."""
TAIL = 0.1
"""What is no minimum: a peak where each percent less takes more than 1 / 0.1 percent of the plain
time more."""
MARGIN = 0.002
"""Of the plain peak and time: plans nearer to each other than this are equal."""


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
    front: tuple[search.Point, ...]
    others: tuple[search.Point, ...] = ()
    bound_bytes: int = 0

    @property
    def baseline(self) -> Timeline:
        """Return the plain step's timeline."""
        return self.plain.timeline

    @property
    def baseline_bytes(self) -> int:
        """Return the plain step's peak as the allocator counts it."""
        return self.plain.peak_bytes


@dataclasses.dataclass(frozen=True)
class _Finished:
    """A candidate with waits, its worse timeline, and the most that the allocator would count.

    Peaks measured lie nearer to the worst of several simulated heaps than to the middle one.

    Attributes:
      lowest: a lower bound of the peak: that of one thread.
      most: takes `lowest` and returns the peak on all threads, where that is more.
    """

    plan: Plan
    timeline: Timeline
    lowest: int
    priced: Priced
    most: Callable[[int], int] = int

    @functools.cached_property
    def peak(self) -> int:
        """Return the peak on the target's threads: known only once it is asked for."""
        return self.most(self.lowest)

    def fits(self, usable: int) -> bool:
        """Return whether the peak is at most so many bytes."""
        return self.lowest <= usable and self.peak <= usable


def _lowest(finished: Iterable[_Finished], value: Callable[[int, _Finished], tuple[float, ...]]
            ) -> _Finished:
    """Return the entry whose peak has the minimum value, the first of equals.

    Asked for are the peaks of those alone that may be it by what their peaks are not below.

    Args:
      finished: entries to choose from, at least one.
      value: takes a peak and the entry; it never falls while the peak rises.
    """
    best: tuple[tuple[float, ...], int, _Finished] | None = None
    for bound, number, entry in sorted(
            ((value(f.lowest, f), n, f) for n, f in enumerate(finished)), key=lambda e: e[:2]):
        if best is not None and bound > best[0]:
            break
        found = value(entry.peak, entry), number
        if best is None or found < best[:2]:
            best = (*found, entry)
    assert best is not None
    return best[2]


def _smallest_peak(finished: Iterable[_Finished]) -> int:
    return _lowest(finished, lambda peak, _: (peak,)).peak


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


def check_names(solver: str, objective: str) -> None:
    """Raise `PlanError`, naming the choices, for an unknown solver or objective.

    Args:
      solver: should be one of `SOLVER_NAMES`.
      objective: should be one of `OBJECTIVES`.

    Raises:
      PlanError: it is not.
    """
    if solver not in SOLVER_NAMES:
        raise PlanError(f"plan: unknown solver {solver!r}; choose one of "
                        f"{', '.join(SOLVER_NAMES)}")
    if objective not in OBJECTIVES:
        raise PlanError(f"plan: unknown objective {objective!r}; choose one of "
                        f"{', '.join(OBJECTIVES)}")


def check_effort(effort: Any) -> None:
    """Raise `PlanError` unless the effort is a positive number.

    Args:
      effort: any value; bools and infinity are refused.

    Raises:
      PlanError: it is no positive number.
    """
    if isinstance(effort, bool) or not isinstance(effort, numbers.Real) or not (
            0 < float(effort) < math.inf):
        raise PlanError(f"plan: effort={effort!r} must be a positive number, 1 by default")


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
             memory: Memory | None = None, effort: float = 1.0, worth: float = 1.0
             ) -> Iterator[Planned]:
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

    Raises:
      PlanError: effort that is not positive; unknown solver or objective; a graph too large for
        "optimal".
      InfeasibleBudgetError: the first plan is asked for, and none found fits; names the smallest
        peak found.
    """
    # a planner keeps its graph
    key = id(graph), solver, objective, free_moves, await_updates, effort, worth
    planner = None if known is None else known.get(key)
    if planner is None:
        planner = StepPlanner(graph, solver, objective, free_moves, await_updates, target, plain,
                              memory, effort, worth)
    if known is not None:
        known[key] = planner
    return planner.plans(budget)


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


def best_of(plans: Sequence[Planned], budget: int | None, objective: str) -> int:
    """Return which of several plans of one step to take: an index, the earliest among equals.

    The plans may be of different graphs of the step; all fit the budget and share one baseline.
    The rule is that by which a plan of one graph is chosen: time under a budget, and `TAIL`, `ROOM`
    and `WORTH` for the minimum peak. Plans within `MARGIN` of the best are its equals.

    Args:
      plans: at least one.
      budget: dynamic bytes that they were planned for; None for the minimum peak.
      objective: "time" or "memory": what they were planned for.
    """
    if budget is not None and objective == "time":
        scores = [p.time / max(p.baseline.time, 1e-12) for p in plans]
    else:
        near = most_for_minimum([(p.peak_bytes, p.time) for p in plans], plans[0].baseline_bytes,
                                plans[0].baseline.time, objective)
        scores = [_cost(p.peak_bytes, p.time, p.baseline_bytes, p.baseline.time, objective)
                  if p.peak_bytes <= near else math.inf for p in plans]
    return next(n for n, score in enumerate(scores) if score <= min(scores) + MARGIN)


def minimum_of(points: Sequence[tuple[int, float]], plain_peak: int, plain_time: float,
               objective: str) -> int:
    """Return the peak in bytes that is taken for the minimum of some plans: `TAIL` says which.

    Args:
      points: peak and time of each plan; at least one.
      plain_peak: bytes of the plain step, counted in the same way.
      plain_time: of the plain step, in the same unit.
      objective: "memory" takes the smallest peak, whatever its time.
    """
    tail = 0.0 if objective == "memory" else TAIL
    return min(points, key=lambda point: (
        point[0] / max(plain_peak, 1) + tail * point[1] / max(plain_time, 1e-12), point))[0]


def most_for_minimum(points: Sequence[tuple[int, float]], plain_peak: int, plain_time: float,
                     objective: str) -> float:
    """Return up to which peak in bytes a plan is near the minimum: `ROOM` above it.

    Args:
      points: peak and time of each plan; at least one.
      plain_peak: bytes of the plain step, counted in the same way.
      plain_time: of the plain step, in the same unit.
      objective: as for `minimum_of`.
    """
    return minimum_of(points, plain_peak, plain_time, objective) + ROOM * plain_peak


def _alone(priced: Sequence[Priced]) -> search.Pool:
    return search.pool_of(priced, [priced])


def _cost(peak: int, time: float, plain_peak: int, plain_time: float, objective: str) -> float:
    """Return what the minimum plan is chosen by; bytes alone where the objective is memory."""
    worth = 0.0 if objective == "memory" else WORTH
    return peak / max(plain_peak, 1) + worth * time / max(plain_time, 1e-12)


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
        self.finished: dict[Candidate, _Finished] = {}
        self._pool: search.Pool | None = None  # the same for every budget

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
        front = self._points(non_dominated(pool.priced))
        others = tuple(p for p in self._points(search.best_of_each(pool.priced))
                       if p not in front)
        given: set[tuple[object, ...]] = set()
        for chosen in self._least(pool) if budget is None else self._fitting(pool, budget):
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
        """Return bytes that the finished plan will need at least: the planned order's own peak.

        Less what an allocator does not count: requests smaller than the smallest.
        """
        smallest = self.target.smallest_counted or 0
        timeline = priced.timeline
        small = sum(live.bytes for live in timeline.live_at_peak if live.bytes < smallest)
        working = self.graph.vertices[timeline.working].workspace if timeline.working >= 0 else 0
        return max(0, priced.peak - small - (working if working < smallest else 0))

    def _limit(self) -> int:
        """Return how many candidates are finished before one is chosen: on small graphs, all."""
        return max(min(FINALISTS, search.few(self.graph, FINALISTS)),
                   min(MOST_FINALISTS, SMALL // max(len(self.graph.vertices), 1)))

    def _smallest(self, pool: search.Pool) -> list[_Finished]:
        """Return finished choices, the one of the smallest peak among them, for all budgets.

        A choice whose floor is above a finished peak cannot be the smallest. Where there are too
        many, they are spread over the lower end of the front, since neighbours share the
        allocator's luck.
        """
        choices = sorted(pool.choices, key=lambda p: (self._floor(p), p.time))
        limit = self._limit()
        most = 1.1 * (choices[0].peak + ROOM * self.plain.timeline.peak_bytes)
        near = [p for p in choices if p.peak <= most]
        if len(near) > limit:
            return [self._finish(p)
                    for p in search.spread(non_dominated(near)[::-1], limit)]
        found: list[_Finished] = []
        for priced in choices:
            if found and (len(found) >= limit or self._floor(priced) >= _smallest_peak(found)):
                break
            found.append(self._finish(priced))
        return found

    def _least(self, pool: search.Pool) -> Iterator[_Finished]:
        """Yield the smallest peak, but for a little memory that buys much time.

        Then so among the rest. Every choice that may win by that rule is finished, the likeliest
        first, up to a limit.
        """
        plain = self.plain.peak_bytes, self.plain.timeline.time
        room, whole, pool = ROOM * self.plain.peak_bytes, pool, self._without_tail(pool)

        def cost(peak: int, time: float) -> float:
            return _cost(peak, time, *plain, self.objective)

        def chosen(entries: Sequence[_Finished]) -> _Finished:
            most = _smallest_peak(entries) + room
            return _lowest(entries, lambda peak, f: (
                peak > most, cost(peak, f.priced.time), peak, f.priced.time))

        finished = self._smallest(pool)
        done = {f.priced.candidate for f in finished}
        left = sorted((p for p in pool.choices if p.candidate not in done),
                      key=lambda p: (cost(self._floor(p), p.time), p.time))
        for priced in left:
            best = chosen(finished)
            if len(finished) >= len(done) + self._limit() // 2 or (
                    cost(self._floor(priced), priced.time) > cost(best.peak, best.priced.time)):
                break
            if self._floor(priced) <= _smallest_peak(finished) + room:
                finished.append(self._finish(priced))
        for group in (finished, self._further(whole)):
            rest = list(group)
            while rest:
                best = chosen(rest)
                yield best
                rest = [f for f in rest if f is not best]

    def _without_tail(self, pool: search.Pool) -> search.Pool:
        """Return the pool with no choice below what is taken for the minimum."""
        plain = self.plain.timeline
        least = minimum_of([(p.peak, p.time) for p in pool.choices], plain.peak_bytes, plain.time,
                           self.objective)
        return dataclasses.replace(pool, choices=tuple(
            p for p in pool.choices if p.peak >= least))

    def _further(self, pool: search.Pool) -> Iterator[_Finished]:
        """Finish choices from the whole front, for callers that refused all earlier plans."""
        front = non_dominated(pool.choices)[::-1]
        for priced in search.spread(front, search.few(self.graph, FINALISTS)):
            yield self._finish(priced)

    def _fitting(self, pool: search.Pool, budget: int) -> Iterator[_Finished]:
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
        lowest = _lowest(smallest, lambda peak, _: (peak,))
        needed = min(int(lowest.peak / self.target.safety) + 2, self.plain.peak_bytes)
        raise InfeasibleBudgetError(
            f"plan: no plan of solver {self.solver!r} fits {budget:,} bytes; the minimum dynamic "
            f"peak it can promise is {needed:,} bytes", needed,
            lowest.priced.time / max(self.graph.total_time, 1e-12) - 1.0)

    def _untouched(self) -> _Finished:
        """Return the plain step as a plan of this graph.

        Its updates may wait for more than the plain step's own.
        """
        plain = self.plain
        plan = plain_plan(self.graph) if self.target.orders_by_control else plain.plan
        priced = Priced(Candidate(self.evaluator.everything(), source="store_all"),
                        plan.schedule, plain.timeline, 0)
        return _Finished(plan, plain.timeline, plain.peak_bytes, priced)

    def _finish(self, priced: Priced) -> _Finished:
        """Return the plan with its waits, and what its worse order needs."""
        candidate = priced.candidate
        if candidate not in self.finished:
            graph, timeline = self.graph, priced.timeline
            plan = fenced(graph, priced.schedule, candidate.moves,
                          await_updates=self.await_updates, solver=candidate.source or self.solver)
            peaks: tuple[int, ...] = (priced.peak,)
            most: Callable[[int], int] = int
            if self.target.orders_by_control:
                resolved = resolve(graph, plan.schedule)
                target = priced.peak if self.free_moves else 1 << 62
                edges = Edges(graph, resolved, plan.moves.released, plan.fences)
                waits, executed, order = place_waits(
                    graph, resolved, plan.moves.released, plan.fences, target,
                    await_updates=self.await_updates, edges=edges)
                plan = dataclasses.replace(plan, waits=waits)
                if executed.peak_bytes >= timeline.peak_bytes:
                    timeline, plan = executed, dataclasses.replace(plan, order=order)
                smallest = self.target.smallest_counted
                peaks = (timeline.peak_bytes,) if smallest is None else allocated_peaks(
                    graph, resolved, order, smallest, self.target.takes_all_memory)
                if self.target.threads > 1:
                    most = functools.partial(concurrent_peak, edges, self.target, waits)
            self.finished[candidate] = _Finished(
                plan, timeline, max(*peaks, self._floor(priced)), priced, most)
        return self.finished[candidate]
