"""Large graphs: chains planned without recursion, and the coarse graph against the fine one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper_tables.joint_graphs import with_backward
from tests.support.graphs import random_joint_graph, seeds
from tests.support.stack import shallow
from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph
from tfckpt.ir.schedule import check_schedule, plain_plan
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.coarsen import coarsen
from tfckpt.plan.evaluate import Candidate, Evaluator
from tfckpt.plan.keep_sets import keep_schedule
from tfckpt.plan.planner import plan_step
from tfckpt.simulate.simulate import simulate

pytestmark = pytest.mark.pure

UNIT = 256
"""Bytes of a chain's value: what an allocator rounds to."""


def chain(length: int) -> CostGraph:
    return with_backward((None, [UNIT] * length, [1] * length,
                          [(v, v + 1) for v in range(length - 1)]))


@pytest.mark.parametrize("length", [
    4_000, pytest.param(100_000, marks=[pytest.mark.nightly])])
def test_a_chain_is_simulated_and_planned_without_recursion(length):
    graph = chain(length)
    with shallow():
        plain = simulate(graph, plain_plan(graph).schedule)
        planned = plan_step(graph, target=Target(device=GPU).compiled())
    # everything is kept, and the backward's first two gradients
    assert length <= plain.peak_bytes / UNIT <= length + 3
    check_schedule(graph, planned.plan.schedule)
    # two square roots are the optimum of one recomputation; auto may pay memory for time
    assert planned.peak_bytes / UNIT <= 5 * math.sqrt(length)
    assert planned.time <= plain.time + length


def test_optimal_refuses_what_would_take_too_long_and_names_another():
    with pytest.raises(PlanError, match="vertices.*auto"):
        plan_step(chain(5_000), solver="optimal", target=Target(device=GPU).compiled())


@given(seeds, st.integers(2, 40), st.integers(2, 9))
def test_a_coarse_graph_does_the_same_work_and_needs_no_less(seed, count, size):
    graph = random_joint_graph(seed, count)
    order = [v for v, _ in plain_plan(graph).schedule]
    coarse = coarsen(graph, order, size)
    plain = simulate(graph, plain_plan(graph).schedule)
    rough = simulate(coarse.graph, plain_plan(coarse.graph).schedule)
    assert rough.time == plain.time
    assert rough.peak_bytes >= plain.peak_bytes
    assert len(coarse.graph.vertices) <= len(graph.vertices)
    for number, s in enumerate(coarse.storages):
        assert coarse.graph.storages[number].bytes == graph.storages[s].bytes
        assert coarse.graph.storages[number].fetched == graph.storages[s].fetched


@given(seeds, st.integers(3, 30), st.integers(2, 9))
def test_a_coarse_choice_costs_no_more_time_on_the_fine_graph(seed, count, size):
    made = random.Random(seed)
    graph = chain(count) if seed % 2 else with_backward((
        None, [made.randint(1, 9) for _ in range(count)],
        [made.randint(1, 9) for _ in range(count)],
        [(u, v) for v in range(count) for u in range(max(0, v - 4), v) if made.random() < 0.5]))
    order = [v for v, _ in plain_plan(graph).schedule]
    coarse = coarsen(graph, order, size)
    forward = [s for s, storage in enumerate(coarse.graph.storages)
               if coarse.graph.vertices[storage.producer].region == FORWARD]
    keep = frozenset(s for s in forward if made.random() < 0.4)
    rough = Evaluator(coarse.graph).price(Candidate(keep))
    schedule = keep_schedule(graph, coarse.fine(keep), order)
    check_schedule(graph, schedule)
    assert simulate(graph, schedule).time <= rough.time
    assert {graph.vertices[v].region for v, copy in schedule if copy} <= {FORWARD}
    assert any(v.region == BACKWARD for v in coarse.graph.vertices)
