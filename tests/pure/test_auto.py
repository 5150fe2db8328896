"""auto: against every single solver, against itself under other budgets, against the optimum."""

from __future__ import annotations

import pytest

from benchmarks.paper_tables import gap_graphs
from benchmarks.paper_tables.gaps import planned_time
from benchmarks.paper_tables.joint_graphs import with_backward
from tests.support import best_schedule, liveness
from tests.support.graphs import random_joint_graph, random_paper_graph
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import check_schedule, plain_plan
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.candidates import SOLVERS
from tfckpt.plan.choosing.planned import baseline
from tfckpt.plan.choosing.rules import minimum_of
from tfckpt.plan.planner import plan_step
from tfckpt.plan.rescheduling.neighbourhood import front
from tfckpt.plan.search import RUNGS
from tfckpt.solvers.exact import optimal

pytestmark = pytest.mark.pure

FRACTIONS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)


def some_graph(seed: int) -> CostGraph:
    kind, size = seed % 4, seed // 4
    if kind == 0:
        return random_joint_graph(seed, 9 + size % 12)
    if kind == 1:
        return with_backward((None, *random_paper_graph(seed, 4 + size % 9, 0.3)))
    return gap_graphs.residual(1 + size % 2, seed) if kind == 2 else gap_graphs.unet(2, seed)


def planned(graph: CostGraph, budget: int, solver: str, compiled: bool):
    """Return the plan, or None where there is none (or the solver refuses the graph)."""
    try:
        return plan_step(graph, budget, solver=solver, target=Target(device=GPU).compiled(compiled))
    except InfeasibleBudgetError:
        return None
    except PlanError:
        assert solver in ("lcg", "exact_dp")
        return None


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_a_solver_or_than_itself_with_less(seed, compiled):
    graph = some_graph(seed)
    plain = baseline(graph, Target(device=GPU).compiled(compiled)).peak_bytes
    before = None
    for fraction in FRACTIONS:
        budget = int(fraction * plain)
        auto = planned(graph, budget, "auto", compiled)
        for solver in SOLVERS:
            single = planned(graph, budget, solver, compiled)
            assert single is None or auto is not None and auto.time <= single.time, solver
        assert before is None or auto is not None and auto.time <= before.time
        if auto is not None:
            assert auto.peak_bytes <= budget
            points = [(point.peak_bytes, point.time) for point in auto.front]
            assert points == sorted(points, reverse=True)
            assert [time for _, time in points] == sorted(time for _, time in points)
        before = auto or before


@pytest.mark.parametrize("seed", range(30))
def test_rescheduled_plans_are_valid_and_never_below_the_optimum(seed):
    graph = with_backward((None, *random_paper_graph(seed, 2 + seed % 5, 0.4))) \
        if seed % 2 else random_joint_graph(seed, 8 + seed % 4)
    best = best_schedule.front(graph)
    for schedule in front(graph, [plain_plan(graph).schedule], RUNGS, 400):
        check_schedule(graph, schedule)
        peak = max(liveness.live_bytes(graph, schedule))
        time = sum(graph.vertices[v].time for v, _ in schedule)
        assert best_schedule.least_time(best, peak) <= time


def test_within_three_percent_of_the_optimum():
    pytest.importorskip("ortools")
    for graph in (gap_graphs.chain(12), gap_graphs.residual(2), gap_graphs.unet(2),
                  gap_graphs.attention(1), gap_graphs.inception(1)):
        plain = baseline(graph, Target().compiled()).peak_bytes
        for fraction in (0.9, 0.7, 0.5):
            try:
                best = optimal.solve(graph, int(fraction * plain))
            except InfeasibleBudgetError:
                continue
            assert best.status == optimal.OPTIMAL
            found = planned_time(graph, "auto", int(fraction * plain))
            assert found is not None and found <= 1.03 * best.bound


def test_what_is_taken_for_the_minimum():
    """Points of a front of eight dense layers that was measured at 2.9 times the plain time."""
    points = [(1000, 1.0), (303, 1.175), (246, 1.257), (216, 1.304), (186, 1.387), (155, 1.973),
              (125, 3.032), (121, 3.264)]
    assert minimum_of(points, 1000, 1.0, "time") == 186
    assert minimum_of(points, 1000, 1.0, "memory") == 121
