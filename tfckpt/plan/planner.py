"""The front door of planning: a graph and a budget in, a priced plan out.

`auto` prices every solver's proposals on the joint graph under the free moves, improves the
most promising ones locally (`tfckpt.plan.improve`), and takes the fastest that fits. A plan's
peak is the worse of the planned order and the simulated executors' orders, with the fences and
pins that the rewriter will place.
"""

from __future__ import annotations

import dataclasses

from tfckpt.cost.costgraph import CostGraph
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced
from tfckpt.plan.fences import fences
from tfckpt.plan.improve import descend, hasten
from tfckpt.plan.order import deferrable, releasable
from tfckpt.plan.pins import pin
from tfckpt.plan.schedule import Moves, Plan, check_schedule, plain_schedule
from tfckpt.plan.simulate import Timeline, resolve, simulate
from tfckpt.plan.solvers.candidates import CHEAP, SOLVERS

AUTO = "auto"
OBJECTIVES = ("time", "memory")
EVALUATIONS = 260
"""Candidates priced for a graph of up to 1,500 vertices; fewer for larger ones."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan and what it is worth.

    Attributes:
      plan: schedule, moves, pins.
      timeline: of the worse of the simulated orders.
      peak_bytes: its peak, dynamic bytes.
      time: planned time, in the graph's unit.
      baseline: timeline of the plain step, likewise the worse of the orders.
      front: (peak bytes, time) of the Pareto front of all priced candidates, by falling peak.
    """

    plan: Plan
    timeline: Timeline
    time: float
    baseline: Timeline
    front: tuple[tuple[int, float], ...]

    @property
    def peak_bytes(self) -> int:
        """Planned dynamic peak in bytes."""
        return self.timeline.peak_bytes


def plan_step(graph: CostGraph, budget: int | None = None, *, solver: str = AUTO,
              objective: str = "time", free_moves: bool = True,
              await_updates: bool = True, in_xla: bool = False) -> Planned:
    """Plans a step.

    Args:
      graph: the joint cost graph.
      budget: dynamic bytes that the peak must not pass; None for the least peak.
      solver: a name in `SOLVERS`, or "auto".
      objective: "time" takes the fastest plan that fits, "memory" the one with the least peak.
      free_moves: whether defer and release may be used.
      await_updates: see `tfckpt.plan.fences.fences`.
      in_xla: control edges mean nothing to the compiler: no moves, no pins.

    Raises:
      PlanError: unknown solver or objective.
      InfeasibleBudgetError: no plan found fits; names the least peak found.
    """
    return _Planner(graph, solver, objective, free_moves and not in_xla, await_updates,
                    in_xla).run(budget)


def baseline(graph: CostGraph, *, await_updates: bool = True) -> Timeline:
    """The plain step under the worse of the planned and the executors' orders."""
    schedule = plain_schedule(graph)
    resolved = resolve(graph, schedule)
    planned = simulate(graph, schedule)
    _, executed = pin(graph, resolved, (), (), 1 << 62, await_updates=await_updates)
    return max(planned, executed, key=lambda t: t.peak_bytes)


class _Planner:
    def __init__(self, graph, solver, objective, free_moves, await_updates, in_xla):
        if solver != AUTO and solver not in SOLVERS:
            raise PlanError(f"plan: unknown solver {solver!r}; choose one of "
                            f"{', '.join([*SOLVERS, AUTO])}")
        if objective not in OBJECTIVES:
            raise PlanError(f"plan: unknown objective {objective!r}; choose one of "
                            f"{', '.join(OBJECTIVES)}")
        self.graph, self.solver, self.objective = graph, solver, objective
        self.free_moves, self.await_updates, self.in_xla = free_moves, await_updates, in_xla
        self.evaluator = Evaluator(graph)
        self.baseline = baseline(graph, await_updates=await_updates)
        self.seen: dict[Candidate, Priced] = {}
        self.finished: dict[Candidate, tuple[Plan, Timeline]] = {}

    def run(self, budget: int | None) -> Planned:
        templates = self._templates()
        if self.solver == "store_all":
            return self._choose([self._price(t) for t in templates], budget)
        template = templates[-1]
        starts = [self._price(dataclasses.replace(template, keep=keep, source=name))
                  for name, keep in self._proposals()]
        starts += [self._price(t) for t in templates]
        if self.solver == AUTO:
            starts += self._improve(starts, budget)
        return self._choose(starts, budget)

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
        target = 0 if budget is None or self.objective == "memory" else int(budget * 0.97)
        order = sorted(starts, key=lambda p: (max(p.peak, target), p.time))
        lowest = []
        for start, share in zip(order, (0.45, 0.2), strict=False):
            lowest.append(self._note(descend(self.evaluator, start, target,
                                             int(evaluations * share))))
        best = min(lowest, key=lambda p: (max(p.peak, target), p.time))
        room = max(target, int(best.peak * 1.01))
        quick = [self._note(hasten(self.evaluator, best, room, int(evaluations * 0.25)))]
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
        """The first of the candidates, best first, whose worst simulated order fits."""
        limit = self._limit(priced, budget)
        tried: list[tuple[Plan, Timeline, Priced]] = []
        for entry in self._ranked(priced, limit)[:6]:
            plan, timeline = self._finish(entry)
            tried.append((plan, timeline, entry))
            if budget is not None and timeline.peak_bytes <= budget:
                break
            if budget is None and len(tried) >= 3:
                break
        if budget is None or tried[-1][1].peak_bytes > budget:
            chosen = min(tried, key=lambda t: (t[1].peak_bytes, t[2].time))
        else:
            chosen = tried[-1]
        plan, timeline, entry = chosen
        if budget is not None and timeline.peak_bytes > budget:
            least = min(self._finish(p)[1].peak_bytes
                        for p in sorted(priced, key=lambda p: p.peak)[:2])
            least = min(least, timeline.peak_bytes)
            raise InfeasibleBudgetError(
                f"plan: no plan of solver {self.solver!r} fits {budget:,} bytes; the least "
                f"dynamic peak it reaches is {least:,} bytes", least)
        return Planned(plan, timeline, entry.time, self.baseline, self._front())

    def _limit(self, priced: list[Priced], budget: int | None) -> int:
        return min(p.peak for p in priced) if budget is None else budget

    def _ranked(self, priced: list[Priced], limit: int) -> list[Priced]:
        """What fits first: by time (or by peak), what does not fit after it, by peak."""
        slack = int(limit * 1.01)

        def rank(p: Priced):
            if p.peak <= slack and self.objective == "time":
                return (0, p.time, p.peak)
            return (0 if p.peak <= slack else 1, p.peak, p.time)

        unique = {p.candidate: p for p in priced}
        return sorted(unique.values(), key=rank)

    def _finish(self, priced: Priced) -> tuple[Plan, Timeline]:
        """The plan with its pins, and the timeline of its worse order."""
        candidate = priced.candidate
        if candidate not in self.finished:
            moves = candidate.moves
            check_schedule(self.graph, priced.schedule, moves.released)
            resolved = resolve(self.graph, priced.schedule)
            pins, worst = (), priced.timeline
            if not self.in_xla:
                found = fences(self.graph, resolved, await_updates=self.await_updates)
                plain = candidate.moves == Moves() and not candidate.thrifty
                target = priced.peak if self.free_moves or not plain else 1 << 62
                pins, worst = pin(self.graph, resolved, moves.released, found, target,
                                  await_updates=self.await_updates)
            plan = Plan(priced.schedule, moves, pins, candidate.source or self.solver)
            self.finished[candidate] = (
                plan, max(worst, priced.timeline, key=lambda t: t.peak_bytes))
        return self.finished[candidate]

    def _front(self) -> tuple[tuple[int, float], ...]:
        """Non-dominated (peak, time) of everything priced, by falling peak."""
        points = sorted({(p.peak, p.time) for p in self.seen.values()})
        front: list[tuple[int, float]] = []
        for peak, time in points:
            if not front or time < front[-1][1]:
                front.append((peak, time))
        return tuple(reversed(front))
