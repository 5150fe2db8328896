"""A time limit ends a search with what it has found; the clock counts how often it is read."""

from __future__ import annotations

import itertools
import types

import pytest

from benchmarks.paper_tables import gap_graphs
from tests.support.graphs import random_joint_graph
from tfckpt.common import clock
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.schedule import plain_plan
from tfckpt.ir.target import GPU, Target
from tfckpt.plan import search
from tfckpt.plan.planner import plan_step
from tfckpt.simulate.check import check_plan

pytestmark = pytest.mark.pure

ON_GPU = Target(device=GPU)


@pytest.fixture
def ticks(monkeypatch):
    """Return a counter that every look at the clock moves on."""
    counter = itertools.count()
    monkeypatch.setattr(clock, "time", types.SimpleNamespace(monotonic=lambda: next(counter)))
    return counter


def lowest(graph, seconds):
    """Return the minimum peak in bytes that is found in some time, and what ended the search."""
    with clock.time_limit(seconds):
        planned = plan_step(graph, objective="memory", target=ON_GPU)
        check_plan(graph, planned.plan)
        return planned.peak_bytes, clock.ended_by()


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("graph", [gap_graphs.unet(2, 1), gap_graphs.residual(2, 2),
                                   random_joint_graph(5, 20)], ids=["unet", "residual", "random"])
def test_more_time_never_finds_less(graph, coarse, ticks, monkeypatch):
    if coarse:
        monkeypatch.setattr(search, "LARGEST", len(graph.vertices) // 2)
    found = [lowest(graph, seconds) for seconds in (0.5, 10, 40, 160)]
    whole, ended = lowest(graph, 10 ** 9)
    assert not ended and all(by for _, by in found[:2])
    assert found[0][0] >= whole and found[-1][0] >= whole
    assert [peak for peak, _ in found] == sorted((peak for peak, _ in found), reverse=True)


def test_without_any_time_there_is_the_plain_step(ticks):
    graph = gap_graphs.unet(2, 1)
    with clock.time_limit(0.5):
        planned = plan_step(graph, target=ON_GPU)
    assert planned.peak_bytes <= planned.baseline_bytes
    assert not planned.plan.recomputed
    assert len(planned.plan.schedule) == len(plain_plan(graph).schedule)


def test_a_budget_that_needs_more_time_is_refused(ticks):
    graph = gap_graphs.unet(2, 1)
    whole = plan_step(graph, objective="memory", target=ON_GPU).peak_bytes
    with clock.time_limit(0.5), pytest.raises(InfeasibleBudgetError) as refused:
        plan_step(graph, whole, target=ON_GPU)
    smallest = refused.value.smallest_bytes
    assert plan_step(graph, smallest, target=ON_GPU).peak_bytes <= smallest


def test_what_follows_a_search_has_all_the_time_it_needs(ticks):
    with clock.time_limit(1):
        with clock.until_time_is_over():
            for _ in range(3):
                clock.check_time()
        assert clock.ended_by() == "time_limit=1 seconds"
        with pytest.raises(clock.OutOfTimeError):
            clock.check_time()
        # another search, of another graph
        planned = plan_step(random_joint_graph(5, 12), target=ON_GPU)
        assert planned.peak_bytes > 0
    assert not clock.ended_by()
    assert not clock.time_is_over()
