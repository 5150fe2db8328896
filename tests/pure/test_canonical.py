"""Lower-set sequences turned into schedules: equation (1) bounds what is recomputed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from benchmarks.paper_tables.lower_set_model import paper_overhead, paper_peak
from tests.support import liveness
from tests.support.graphs import paper_graphs, random_joint_graph, seeds
from tfckpt.ir.schedule import check_schedule, plain_plan
from tfckpt.plan.keep_sets import keep_schedule
from tfckpt.simulate.simulate import simulate
from tfckpt.solvers import approx_dp, chen
from tfckpt.solvers.forward.forward import forward_view
from tfckpt.solvers.forward.lower_sets import kept_storages


def canonical(graph, forward, masks):
    return keep_schedule(graph, kept_storages(forward, masks), range(len(graph.vertices)))


@given(paper_graphs())
def test_a_paper_schedule_recomputes_no_more_than_equation_one_says(graph):
    forward = from_edges(*graph)
    joint = with_backward(forward)
    minimum = approx_dp.smallest_budget(forward)
    for masks in (approx_dp.lower_sets(forward, minimum), chen.lower_sets(forward),
                  approx_dp.lower_sets(forward, minimum, objective="memory")):
        schedule = canonical(joint, forward, masks)
        check_schedule(joint, schedule)
        extra = simulate(joint, schedule).time - joint.total_time
        assert extra <= paper_overhead(forward, masks)
        kept = kept_storages(forward, masks)
        again = {v for v, copy in schedule if copy}
        assert not again & kept  # vertex and storage numbers coincide here
        assert all(copy <= 1 for _, copy in schedule)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 16, 40])
def test_liveness_only_lowers_the_peak_of_equation_two_on_a_chain(count):
    forward = from_edges([1] * count, [1] * count, [(i, i + 1) for i in range(count - 1)])
    joint = with_backward(forward)
    minimum = approx_dp.smallest_budget(forward)
    for budget in range(minimum, 2 * count + 1):
        for objective in ("time", "memory"):
            masks = approx_dp.lower_sets(forward, budget, objective=objective)
            schedule = canonical(joint, forward, masks)
            timeline = simulate(joint, schedule)
            assert list(timeline.live_bytes) == liveness.live_bytes(joint, schedule)
            assert timeline.peak_bytes <= paper_peak(forward, masks)
    if count >= 9:
        masks = approx_dp.lower_sets(forward, minimum)
        assert simulate(joint, canonical(joint, forward, masks)).peak_bytes < simulate(
            joint, plain_plan(joint).schedule).peak_bytes


@given(seeds, st.integers(6, 30))
@settings(max_examples=80)
def test_schedules_of_contracted_views_are_valid(seed, count):
    graph = random_joint_graph(seed, count)
    view = forward_view(graph, 6)
    masks = approx_dp.lower_sets(view, approx_dp.smallest_budget(view))
    check_schedule(graph, canonical(graph, view, masks))
