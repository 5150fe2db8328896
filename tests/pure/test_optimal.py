"""optimal: against a search that visits every schedule of its class, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from tests.support import best_schedule, liveness
from tests.support.graphs import random_joint_graph, random_paper_graph
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import check_schedule, plain_plan
from tfckpt.ir.target import Target
from tfckpt.plan.planner import plan_step
from tfckpt.simulate.simulate import simulate
from tfckpt.solvers.exact import optimal

pytestmark = pytest.mark.pure
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _needs_ortools(request):
    if "without" not in request.node.name:
        pytest.importorskip("ortools")


def chain(count, size=1, time=1):
    edges = [(i, i + 1) for i in range(count - 1)]
    return with_backward(from_edges([size] * count, [time] * count, edges))


def small_graph(seed: int) -> CostGraph:
    """Return a graph with all features of the simulator (odd seeds), or a paper graph (even)."""
    if seed % 2:
        return random_joint_graph(seed, 8 + seed % 5)
    return with_backward((None, *random_paper_graph(seed, 2 + seed % 4, 0.4)))


def assert_equal_to_search(graph: CostGraph) -> None:
    """Compare at every budget where the answer can change, and one byte below the minimum."""
    front = best_schedule.front(graph)
    for budget in sorted({peak for peak, _ in front} | {front[0][0] + 5}):
        found = optimal.solve(graph, budget)
        check_schedule(graph, found.schedule)
        assert max(liveness.live_bytes(graph, found.schedule)) == found.peak_bytes <= budget
        assert found.time == found.bound == best_schedule.least_time(front, budget)
        assert found.status == optimal.OPTIMAL
    minimum, time = front[-1]
    for peak in (None, minimum):
        found = optimal.solve(graph, peak, objective="memory")
        assert (found.peak_bytes, found.bound, found.time) == (minimum, minimum, time)
    with pytest.raises(InfeasibleBudgetError) as caught:
        optimal.solve(graph, minimum - 1)
    assert caught.value.smallest_bytes == minimum


@pytest.mark.parametrize("first", range(0, 300, 20))
def test_equal_to_a_search_of_every_schedule(first):
    for seed in range(first, first + 20):
        print(f"seed {seed}")
        assert_equal_to_search(small_graph(seed))


@pytest.mark.parametrize("seed", range(1, 40, 3))
def test_the_search_prices_as_the_second_derivation_of_liveness(seed):
    # Not what `optimal` finds, but any schedule: none may lie below the search's front.
    graph = random_joint_graph(seed, 9)
    front = best_schedule.front(graph)
    plain = plain_plan(graph).schedule
    again = [v for v, vertex in enumerate(graph.vertices) if vertex.recomputable]
    for vertex in again:
        for place in range(vertex + 1, len(plain)):
            schedule = (*plain[:place], (vertex, 1), *plain[place:])
            peak = max(liveness.live_bytes(graph, schedule))
            time = sum(graph.vertices[v].time for v, _ in schedule)
            assert best_schedule.least_time(front, peak) <= time
    peak = max(liveness.live_bytes(graph, plain))
    assert best_schedule.least_time(front, peak) == graph.total_time


@pytest.mark.parametrize("seed", range(0, 30, 2))
def test_a_bound_on_copies(seed):
    graph = small_graph(seed)
    minimum = optimal.solve(graph, objective="memory")
    plain = simulate(graph, plain_plan(graph).schedule).peak_bytes
    assert optimal.solve(graph, copies=0).peak_bytes == plain
    once = optimal.solve(graph, copies=1)
    assert minimum.peak_bytes <= once.peak_bytes <= plain
    assert max(copy for _, copy in once.schedule) <= 1


def test_chain_by_hand():
    # a | ab | abc | loss | C: abc+C | B: ab+C+B | A: a+B+A, of one byte each: 4 bytes.
    joint = chain(3)
    assert optimal.solve(joint, 4).time == 6
    # Three: c is freed by the end of the loss and recomputed before C, where b does not fit beside
    # a, c and C. The minimum is 4 whatever is recomputed.
    with pytest.raises(InfeasibleBudgetError, match="minimum peak is 4 bytes"):
        optimal.solve(joint, 3)


def test_times_that_are_no_integers():
    graph = with_backward((None, *random_paper_graph(8, 5, 0.4)))
    third = dataclasses.replace(graph, vertices=tuple(
        dataclasses.replace(v, time=v.time / 3e6) for v in graph.vertices))
    front = best_schedule.front(graph)
    for peak, time in front:
        found = optimal.solve(third, peak)
        assert found.time == pytest.approx(time / 3e6, rel=1e-6)
        assert found.bound <= found.time * (1 + 1e-12)


def test_the_time_limit_leaves_a_bound():
    joint = with_backward((None, *random_paper_graph(3, 20, 0.15)))
    plain = simulate(joint, plain_plan(joint).schedule).peak_bytes
    found = optimal.solve(joint, objective="memory", time_limit=0.02,
                          start=plain_plan(joint).schedule)
    assert found.bound <= found.peak_bytes <= plain


def test_refusals():
    with pytest.raises(PlanError, match="use auto"):
        optimal.solve(chain(100), 10)
    with pytest.raises(PlanError, match="objective"):
        optimal.solve(chain(3), 10, objective="speed")
    with pytest.raises(PlanError, match="use auto"):
        plan_step(chain(100), 1000, solver="optimal", target=Target().compiled())
    assert optimal.solve(CostGraph((), ())).schedule == ()


def test_without_ortools_the_extra_is_named(monkeypatch):
    for name in ("ortools", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)  # what cannot be imported
    with pytest.raises(PlanError, match=r"tfckpt\[exact\]"):
        optimal.solve(chain(3), 10)


SCRIPT = """
from tests.support.graphs import random_joint_graph, random_paper_graph
from benchmarks.paper_tables.joint_graphs import with_backward
from tfckpt.solvers.exact import optimal
for seed in range(6):
    print(optimal.solve(random_joint_graph(seed, 14), objective="memory"))
    joint = with_backward((None, *random_paper_graph(seed, 8, 0.3)))
    print(optimal.solve(joint))
"""


def test_the_same_in_every_process():
    outputs = []
    for seed in ("0", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] and len(outputs[0]) > 1000
