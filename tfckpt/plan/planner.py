"""The front door of planning: a graph and a budget in, a priced plan out.

`auto` prices every solver's proposals on the joint graph under the free moves, improves the
most promising ones locally (`tfckpt.plan.improve`), and takes the fastest that fits. A plan's
peak is the worse of the planned order and the simulated executors' orders, with the fences and
pins that the rewriter will place, as an allocator would count it (`tfckpt.plan.allocator`).
"""

from __future__ import annotations

import dataclasses

from tfckpt.cost.costgraph import CostGraph
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.plan.allocator import CPU_SMALLEST, allocated_peak
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced
from tfckpt.plan.executor import ORDERS, executor_order
from tfckpt.plan.fences import fences
from tfckpt.plan.improve import descend, hasten
from tfckpt.plan.order import deferrable, releasable
from tfckpt.plan.pins import pin
from tfckpt.plan.schedule import Moves, Plan, check_schedule, plain_schedule
from tfckpt.plan.simulate import Timeline, resolve, simulate, simulate_order
from tfckpt.plan.solvers.candidates import CHEAP, SOLVERS

AUTO = "auto"
OBJECTIVES = ("time", "memory")
EVALUATIONS = 230
"""Candidates priced for a graph of up to 1,500 vertices; fewer for larger ones."""
SPEND_EVALUATIONS = 24
"""Candidates priced when a plan that fits is made faster."""
SAFETY = 0.95
"""Of a budget, what a predicted peak may take: predictions are within a few percent."""
FINALISTS = 8
"""Candidates that get pins and an allocator before one is chosen."""
MARGIN = 0.92
"""Of a budget, what the search aims at; the rest is for the allocator's slack."""
ROOM_OF_LEAST, ROOM_OF_PLAIN = 0.06, 0.03
"""A faster plan counts as the least peak if it lies within either fraction: of the least peak, or
of the plain one, since nobody buys the last 3 % of a step's memory with several percent of time."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan and what it is worth.

    Attributes:
      plan: schedule, moves, pins.
      timeline: of the worse of the simulated orders, in requested bytes.
      peak_bytes: dynamic peak as the allocator counts it.
      time: planned time, in the graph's unit.
      baseline, baseline_bytes: the plain step, under the middle one of the orders.
      front: (peak bytes, time) of the Pareto front of all priced candidates, by falling peak.
    """

    plan: Plan
    timeline: Timeline
    peak_bytes: int
    time: float
    baseline: Timeline
    baseline_bytes: int
    front: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class _Finished:
    """A candidate with pins, its worse timeline and the peak that the allocator would count."""

    plan: Plan
    timeline: Timeline
    peak: int
    priced: Priced


def plan_step(graph: CostGraph, budget: int | None = None, *, solver: str = AUTO,
              objective: str = "time", free_moves: bool = True,
              await_updates: bool = True, in_xla: bool = False,
              smallest: int = CPU_SMALLEST,
              plain: tuple[Timeline, int] | None = None) -> Planned:
    """Plans a step.

    Args:
      graph: the joint cost graph.
      budget: dynamic bytes that the peak must not pass; None for the least peak.
      solver: a name in `SOLVERS`, or "auto".
      objective: "time" takes the fastest plan that fits, "memory" the one with the least peak.
      free_moves: whether defer and release may be used.
      await_updates: see `tfckpt.plan.fences.fences`.
      in_xla: control edges mean nothing to the compiler: no moves, no pins.
      smallest: the allocator does not count smaller requests (0 on a GPU).
      plain: what `baseline` returned for this graph, if it was called already.

    Raises:
      PlanError: unknown solver or objective.
      InfeasibleBudgetError: no plan found fits; names the least peak found.
    """
    return _Planner(graph, solver, objective, free_moves and not in_xla, await_updates,
                    in_xla, smallest, plain).run(budget)


def baseline(graph: CostGraph, *, in_xla: bool = False,
             smallest: int = CPU_SMALLEST) -> tuple[Timeline, int]:
    """The plain step under the middle one of the simulated executors, and the allocator's peak.

    Nothing of ours orders the plain step, so it is not priced by its worst order: a fraction of
    that would be a larger part of what the step really needs.
    """
    schedule = plain_schedule(graph)
    resolved = resolve(graph, schedule)
    if in_xla:
        planned = simulate(graph, schedule)
        return planned, planned.peak_bytes
    found = []
    for policy in ORDERS:
        order = executor_order(graph, resolved, (), (), (), policy)
        found.append((simulate_order(graph, resolved, order), order))
    timeline, order = sorted(found, key=lambda entry: entry[0].peak_bytes)[len(found) // 2]
    return timeline, allocated_peak(graph, resolved, order, smallest)


class _Planner:
    def __init__(self, graph: CostGraph, solver: str, objective: str, free_moves: bool,
                 await_updates: bool, in_xla: bool, smallest: int,
                 plain: tuple[Timeline, int] | None = None):
        if solver != AUTO and solver not in SOLVERS:
            raise PlanError(f"plan: unknown solver {solver!r}; choose one of "
                            f"{', '.join([AUTO, *SOLVERS])}")
        if objective not in OBJECTIVES:
            raise PlanError(f"plan: unknown objective {objective!r}; choose one of "
                            f"{', '.join(OBJECTIVES)}")
        self.graph, self.solver, self.objective = graph, solver, objective
        self.free_moves, self.await_updates, self.in_xla = free_moves, await_updates, in_xla
        self.evaluator = Evaluator(graph)
        self.baseline, self.baseline_bytes = plain or baseline(
            graph, in_xla=in_xla, smallest=smallest)
        self.smallest = smallest
        self.seen: dict[Candidate, Priced] = {}
        self.finished: dict[Candidate, _Finished] = {}

    def run(self, budget: int | None) -> Planned:
        templates = self._templates()
        if self.solver == "store_all":
            return self._choose([self._price(t) for t in templates], budget)
        template = templates[-1]
        starts = [self._price(dataclasses.replace(template, keep=keep, source=name))
                  for name, keep in self._proposals()]
        starts += [self._price(t) for t in templates]
        if self.solver != AUTO:
            return self._choose(starts, budget)
        improved = starts + self._improve(starts, budget)
        try:
            return self._choose(improved, budget)
        except InfeasibleBudgetError:  # the search stopped at what seemed enough: go all the way
            return self._choose(improved + self._improve(starts, None), budget)

    # Candidates.

    def _templates(self) -> list[Candidate]:
        """Everything kept, under each combination of free moves; the most moves last."""
        keep = self.evaluator.everything()
        plain = Candidate(keep, source="store_all")
        if not self.free_moves:
            return [plain]
        joins = releasable(self.graph)
        templates = [plain, dataclasses.replace(plain, moves=Moves(deferrable(self.graph)))]
        if joins:
            templates.append(dataclasses.replace(
                plain, moves=Moves(deferrable(self.graph, joins), joins)))
        return templates + [dataclasses.replace(t, thrifty=True) for t in templates[1:]]

    def _proposals(self):
        proposers = CHEAP if self.solver == AUTO else (SOLVERS[self.solver],)
        for propose in proposers:
            for keep in propose(self.evaluator, self.objective):
                yield propose.__name__, keep

    def _price(self, candidate: Candidate) -> Priced:
        priced = self.evaluator.price(candidate)
        self.seen[candidate] = priced
        return priced

    def _improve(self, starts: list[Priced], budget: int | None) -> list[Priced]:
        """Descends from the candidates with the least peaks, then spends what is left on time."""
        size = max(len(self.graph.vertices), 1)
        evaluations = max(60, min(EVALUATIONS, EVALUATIONS * 1500 // size))
        target = 0 if budget is None or self.objective == "memory" else int(budget * MARGIN)
        order = sorted(starts, key=lambda p: (max(p.peak, target), p.time))
        lowest = []
        for start, share in zip(order, (0.45, 0.2), strict=False):
            lowest.append(self._note(descend(self.evaluator, start, target,
                                             int(evaluations * share))))
        best = min(lowest, key=lambda p: (max(p.peak, target), p.time))
        lowest_peak = best.peak
        quick = []
        for share in (0.35, 0.7, 1.0):  # several, since the allocator's slack cannot be foreseen
            room = self._room(lowest_peak, self.baseline.peak_bytes) - lowest_peak
            best = self._note(hasten(self.evaluator, best,
                                     max(target, lowest_peak + int(share * room)),
                                     int(evaluations * 0.1)))
            quick.append(best)
        if budget is not None:
            fitting = [p for p in starts if p.peak <= target]
            if fitting:
                fastest = min(fitting, key=lambda p: (p.time, p.peak))
                quick.append(self._note(hasten(self.evaluator, fastest, target,
                                               int(evaluations * 0.15))))
        return lowest + quick

    def _note(self, priced: Priced) -> Priced:
        self.seen[priced.candidate] = priced
        return priced

    # Choice.

    def _choose(self, priced: list[Priced], budget: int | None) -> Planned:
        """The best candidate as the allocator counts it: the least, or the fastest that fits."""
        unique = list({p.candidate: p for p in priced}.values())
        if budget is None:
            chosen = self._least(unique)
        else:
            usable = int(budget * SAFETY)
            found = self._fitting(unique, usable)
            if found is None:
                found = self._least(unique)
                if found.peak > usable:
                    needed = int(found.peak / SAFETY) + 2
                    raise InfeasibleBudgetError(
                        f"plan: no plan of solver {self.solver!r} fits {budget:,} bytes; the "
                        f"least dynamic peak it can promise is {needed:,} bytes", needed)
            chosen = found
        return Planned(chosen.plan, chosen.timeline, chosen.peak, chosen.priced.time,
                       self.baseline, self.baseline_bytes, self._front())

    def _least(self, priced: list[Priced]) -> _Finished:
        """The least peak; within a few percent of it, the fastest."""
        order = sorted(priced, key=lambda p: (p.peak, p.time))
        near = [p for p in order if p.peak <= 1.1 * self._room(
            order[0].peak, self.baseline.peak_bytes)]
        quick = sorted(near, key=lambda p: (p.time, p.peak))[:FINALISTS // 2]
        near = list({p.candidate: p for p in near[:FINALISTS - 2] + quick}.values())
        finished = [self._finish(p) for p in near]
        least = min(f.peak for f in finished)
        room = self._room(least, self.baseline_bytes)
        close = [f for f in finished if f.peak <= room]
        if self.objective == "memory":
            return min(close, key=lambda f: (f.peak, f.priced.time))
        return min(close, key=lambda f: (f.priced.time, f.peak))

    @staticmethod
    def _room(least: int, plain: int) -> int:
        return int(max(least * (1 + ROOM_OF_LEAST), least + ROOM_OF_PLAIN * plain))

    def _fitting(self, priced: list[Priced], budget: int) -> _Finished | None:
        """The fastest (or, for memory, the least) candidate whose allocated peak fits."""
        limit = float(budget)
        for _ in range(2 * FINALISTS):
            below = [p for p in priced if p.peak <= limit and (
                p.candidate not in self.finished or self.finished[p.candidate].peak <= budget)]
            if not below:
                return None
            if self.objective == "memory":
                return self._least(below) if self._least(below).peak <= budget else None
            finished = self._finish(min(below, key=lambda p: (p.time, p.peak)))
            if finished.peak <= budget:
                return self._spend(finished, budget) if self.solver == AUTO else finished
            limit = min(limit, finished.priced.peak * max(0.9, budget / finished.peak))
        return None

    def _spend(self, fitting: _Finished, budget: int) -> _Finished:
        """The fastest plan that still fits, from one that fits with room to spare."""
        best = fitting
        slack = fitting.peak / max(fitting.priced.peak, 1)
        for share in (0.92, 1.0):
            room = int(share * budget / slack)
            if room > best.priced.peak:
                faster = self._finish(self._note(hasten(
                    self.evaluator, best.priced, room, SPEND_EVALUATIONS)))
                if faster.peak <= budget and faster.priced.time < best.priced.time:
                    best = faster
        return best

    def _finish(self, priced: Priced) -> _Finished:
        """The plan with its pins, and what its worse order holds."""
        candidate = priced.candidate
        if candidate not in self.finished:
            moves, graph = candidate.moves, self.graph
            check_schedule(graph, priced.schedule, moves.released)
            resolved = resolve(graph, priced.schedule)
            pins: tuple = ()
            timeline, peak = priced.timeline, priced.peak
            if not self.in_xla:
                found = fences(graph, resolved, await_updates=self.await_updates)
                target = priced.peak if self.free_moves else 1 << 62
                pins, executed, order = pin(graph, resolved, moves.released, found, target,
                                            await_updates=self.await_updates)
                if executed.peak_bytes < timeline.peak_bytes:
                    order = None
                else:
                    timeline = executed
                peak = allocated_peak(graph, resolved, order, self.smallest)
            plan = Plan(priced.schedule, moves, pins, candidate.source or self.solver)
            self.finished[candidate] = _Finished(plan, timeline, peak, priced)
        return self.finished[candidate]

    def _front(self) -> tuple[tuple[int, float], ...]:
        """Non-dominated (peak, time) of everything priced, by falling peak."""
        points = sorted({(p.peak, p.time) for p in self.seen.values()})
        front: list[tuple[int, float]] = []
        for peak, time in points:
            if not front or time < front[-1][1]:
                front.append((peak, time))
        return tuple(reversed(front))
