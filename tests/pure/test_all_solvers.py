"""Every solver through `plan_step`: validity, true peaks, trivial and long graphs."""

from __future__ import annotations

import pytest

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from tests.support import liveness
from tests.support.graphs import random_joint_graph, random_paper_graph
from tests.support.validity import assert_executable
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import FORWARD, CostGraph, Storage, Vertex
from tfckpt.ir.schedule import plain_plan
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.candidates import SOLVERS
from tfckpt.plan.names import AUTO
from tfckpt.plan.planner import plan_step
from tfckpt.solvers import approx_dp, chen, lcg

pytestmark = pytest.mark.pure

NAMES = (AUTO, *SOLVERS)


def small_graph(seed: int) -> CostGraph:
    if seed % 2:
        return random_joint_graph(seed, 8 + seed % 9)
    return with_backward((None, *random_paper_graph(seed, 2 + seed % 7, 0.3)))


def planned(graph, budget, solver, **options):
    """As the compiler would run it: in the planned order, requested bytes."""
    return plan_step(graph, budget, solver=solver, target=Target(device=GPU).compiled(), **options)


def assert_valid(seed: int) -> None:
    graph = small_graph(seed)
    plain = max(liveness.live_bytes(graph, plain_plan(graph).schedule))
    for solver in NAMES:
        for budget, objective in ((None, "time"), (None, "memory"), (int(0.9 * plain), "time")):
            try:
                found = planned(graph, budget, solver, objective=objective)
            except InfeasibleBudgetError:
                assert budget is not None
                continue
            except PlanError:
                assert solver == "lcg"  # no chain
                continue
            schedule = found.plan.schedule
            assert_executable(graph, schedule)
            assert max(liveness.live_bytes(graph, schedule)) == found.peak_bytes
            assert found.time == sum(graph.vertices[v].time for v, _ in schedule)
            assert budget is None or found.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(6))
def test_every_solver_gives_executable_schedules_and_true_peaks(seed):
    assert_valid(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 400, 30))
def test_every_solver_on_hundreds_of_graphs(first):
    for seed in range(first, first + 30):
        print(f"seed {seed}")
        assert_valid(seed)


TRIVIAL = {  # graph, minimum peak in bytes, time
    "empty": (CostGraph((), ()), 0, 0),
    "one forward vertex": (
        CostGraph((Vertex("x", FORWARD, 1.0, writes=(0,)),), (Storage("s", 4, 0),)), 4, 1),
    "one vertex and its backward": (with_backward(from_edges([8], [1], [])), 16, 2),
    "two disconnected": (with_backward(from_edges([8, 1], [1, 1], [])), 16, 4),
    "nothing costs anything": (with_backward(from_edges([0, 0], [0, 0], [(0, 1)])), 0, 0),
}


@pytest.mark.parametrize("solver", NAMES)
@pytest.mark.parametrize("name", TRIVIAL)
def test_trivial_graphs_have_trivial_answers(name, solver):
    graph, peak, time = TRIVIAL[name]
    if (name, solver) == ("two disconnected", "lcg"):
        with pytest.raises(PlanError, match="'v0' feeds 0 others; use acg"):
            planned(graph, None, solver)
        return
    for budget in (None, 100):
        found = planned(graph, budget, solver)
        assert (found.peak_bytes, found.time) == (peak, time)
        assert_executable(graph, found.plan.schedule)


def chain(count):
    """Vertices of 1, 2, 3, 1 ... bytes."""
    return from_edges([1 + i % 3 for i in range(count)], [1] * count,
                      [(i, i + 1) for i in range(count - 1)])


@pytest.mark.parametrize("solve", [
    lambda forward: approx_dp.lower_sets(forward, 10),
    approx_dp.smallest_budget,
    chen.lower_sets,
    lcg.solve,
])
def test_quadratic_solvers_refuse_long_chains_with_a_bound(solve):
    with pytest.raises(PlanError, match=r"at most \d+ .*60000.*; use auto"):
        solve(chain(60_000))
