"""The proven optimum for small graphs: the yardstick of every other solver.

Optimal over this class of schedules: the originals run once each, in the order given; just
before every original a set of recomputable vertices runs again, each at most once there and in
the order of the originals; a vertex has at most `copies` copies in all (any number by default).
Copies may stand in the forward pass as well. Not in the class: another order of the originals,
copies of one stage in another order among themselves, and the same vertex twice before one
original. What is live follows `tfckpt.simulate.simulate` to the byte.

Source: the problem as in Jain et al. 2020, "Checkmate", with freeing decided by liveness; solved
by constraint programming with learned clauses and a linear relaxation (OR-tools CP-SAT), as
Bartan et al. 2023, "Moccasin", proposed for it.
Limits: exponential in the worst case. Chains of 20 forward nodes are proven in seconds, tight
budgets on 30 may not be. Needs the optional extra `exact`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule, check_schedule, copies_before
from tfckpt.simulate.simulate import simulate
from tfckpt.solvers.exact import own_process
from tfckpt.solvers.exact.cp_model import StageModel

LARGEST = 6000
"""Places for copies (recomputable vertices times the originals that follow each) at most."""
TIME_LIMIT = 60.0
TIME_UNITS = 10_000_000
"""Times that are not small integers are rounded down to this fraction of the plain step."""
LARGEST_KEPT_TIME = 1 << 31
OPTIMAL, FEASIBLE = "optimal", "feasible"


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best schedule found, and how good any schedule of the class can be.

    Attributes:
      schedule: originals and copies.
      peak_bytes: its simulated peak.
      time: its time, in the graph's unit.
      bound: proven lower bound for schedules of the class: on the time within the budget, in the
        graph's unit (with objective "memory": on the peak, in bytes).
      status: "optimal" if the solver proved that, "feasible" if its time ran out before.
    """

    schedule: Schedule
    peak_bytes: int
    time: float
    bound: float
    status: str


def solve(graph: CostGraph, budget: int | None = None, *, objective: str = "time",
          order: Sequence[int] | None = None, copies: int | None = None,
          time_limit: float = TIME_LIMIT, start: Schedule | None = None) -> Optimum:
    """Return the fastest schedule within a budget, or the one of minimum peak.

    Args:
      graph: joint graph.
      budget: dynamic bytes that no step may pass; None for the minimum peak.
      objective: "time" for the fastest schedule within the budget, "memory" for the minimum peak,
        and of those the fastest.
      order: order of the originals (`tfckpt.simulate.order.base_order`); the graph's by default.
      copies: most copies of one vertex; None for any number.
      time_limit: seconds of work for each of the (at most two) programmes solved, by CP-SAT's
        own deterministic clock, so that a result does not depend on how busy the machine is.
      start: a schedule to start from, over the same originals.

    Raises:
      PlanError: OR-tools is missing; the graph is too large; unknown objective; the time ran
        out before any schedule was found.
      InfeasibleBudgetError: no schedule of the class fits; names the minimum peak found.

    Deterministic: one worker, a fixed seed, no wall clock. Runs in a process of its own if this
    one has loaded TensorFlow (see `tfckpt.solvers.exact.own_process`).
    """
    if objective not in ("time", "memory"):
        raise PlanError(f"plan: unknown objective {objective!r}; choose 'time' or 'memory'")
    if not graph.vertices:
        return Optimum((), 0, 0.0, 0.0, OPTIMAL)
    order = tuple(range(len(graph.vertices)) if order is None else order)
    check_size(graph, order)
    if "tensorflow" in sys.modules:
        return own_process.call(solve, graph, budget, objective=objective, order=order,
                                copies=copies, time_limit=time_limit, start=start)
    problem = _Problem(graph, order, copies, time_limit, start)
    if objective == "time" and budget is not None:
        return problem.fastest(budget)
    smallest = problem.smallest()
    if budget is not None and smallest.peak_bytes > budget:
        raise _infeasible(budget, smallest)
    fastest = problem.fastest(smallest.peak_bytes, smallest.schedule)
    both = OPTIMAL if {smallest.status, fastest.status} == {OPTIMAL} else FEASIBLE
    return dataclasses.replace(fastest, bound=smallest.bound, status=both)


def check_size(graph: CostGraph, order: Sequence[int] | None = None) -> None:
    """Raise `PlanError`, naming `auto`, if the graph is too large for `solve`.

    Args:
      graph: joint graph.
      order: order of the originals; the graph's by default.

    Raises:
      PlanError: the graph has more than `LARGEST` places for copies.
    """
    places = recomputable = 0
    for v in range(len(graph.vertices)) if order is None else order:
        places += recomputable
        recomputable += graph.vertices[v].recomputable
    if places > LARGEST:
        raise PlanError(
            f"plan: optimal takes graphs with at most {LARGEST} places for copies; this one has "
            f"{places} ({recomputable} recomputable of {len(graph.vertices)} vertices); use auto")


def _infeasible(budget: int, smallest: Optimum) -> InfeasibleBudgetError:
    proven = "" if smallest.status == OPTIMAL else " found"
    return InfeasibleBudgetError(
        f"plan: no schedule fits in {budget} bytes; the minimum peak{proven} is "
        f"{smallest.peak_bytes} bytes", smallest.peak_bytes)


def _cp_sat() -> ModuleType:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise PlanError("plan: the solver 'optimal' needs OR-tools; install it with "
                        "pip install 'tfckpt[exact]'") from error
    return cp_model


class _Problem:
    """One graph and order, as programmes for CP-SAT."""

    def __init__(self, graph: CostGraph, order: Sequence[int], copies: int | None,
                 time_limit: float, start: Schedule | None) -> None:
        self.cp = _cp_sat()
        self.graph, self.order, self.copies = graph, order, copies
        self.time_limit, self.start = time_limit, start
        times = [vertex.time for vertex in graph.vertices]
        total = math.fsum(times)
        small = total <= LARGEST_KEPT_TIME and all(float(time).is_integer() for time in times)
        self.scale = 1.0 if small else TIME_UNITS / total
        self.units = [math.floor(time * self.scale) for time in times]

    def fastest(self, budget: int, start: Schedule | None = None) -> Optimum:
        """Return the schedule of the minimum time within the budget."""
        stages = StageModel(self.cp, self.graph, self.order, self.copies)
        stages.limit(budget // stages.unit)
        stages.model.minimize(self._time(stages))
        found = self._solve(stages, start or self.start)
        if found is None:
            raise _infeasible(budget, self.smallest())
        plain = math.fsum(self.graph.vertices[v].time for v in self.order)
        schedule, bound, status = found
        return self._optimum(schedule, plain + bound / self.scale, status)

    def smallest(self) -> Optimum:
        """Return the schedule of the minimum peak."""
        stages = StageModel(self.cp, self.graph, self.order, self.copies)
        most = simulate(self.graph, tuple((v, 0) for v in self.order)).peak_bytes
        peak = stages.model.new_int_var(0, most // stages.unit, "peak")
        stages.limit(peak)
        stages.model.minimize(peak)
        found = self._solve(stages, None)
        assert found is not None  # the plain schedule fits
        schedule, bound, status = found
        return self._optimum(schedule, round(bound) * stages.unit, status)

    def _time(self, stages: StageModel) -> Any:
        return sum(self.units[v] * run for row in stages.runs for v, run in row.items())

    def _solve(self, stages: StageModel, start: Schedule | None
               ) -> tuple[Schedule, float, str] | None:
        """Return a schedule, the bound on the objective and the status; None if nothing fits."""
        self._hint(stages, start)
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.linearization_level = 2  # the bound comes from the relaxation
        solver.parameters.max_deterministic_time = self.time_limit
        status = solver.solve(stages.model)
        if status == self.cp.INFEASIBLE:
            return None
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            raise PlanError(f"plan: optimal found no schedule in {self.time_limit} s of work; "
                            "raise time_limit, or use auto")
        return (stages.schedule(solver.boolean_value), solver.best_objective_bound,
                OPTIMAL if status == self.cp.OPTIMAL else FEASIBLE)

    def _optimum(self, schedule: Schedule, bound: float, status: str) -> Optimum:
        joins = set(range(len(self.graph.vertices))) - set(self.order)
        check_schedule(self.graph, schedule, tuple(sorted(joins)))
        timeline = simulate(self.graph, schedule)
        return Optimum(schedule, timeline.peak_bytes, timeline.time, bound, status)

    def _hint(self, stages: StageModel, start: Schedule | None) -> None:
        """Offer the copies of a schedule as a first guess."""
        for row, made in zip(stages.runs, copies_before(start or ()), strict=False):
            for v, run in row.items():
                stages.model.add_hint(run, v in made)
