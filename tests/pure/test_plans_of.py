"""`plans_of`: further plans, best first, for whoever refuses the first."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from tests.support.graphs import random_joint_graph, random_paper_graph, residual_network
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph, Storage, Vertex
from tfckpt.ir.target import GPU, SAFETY, Target
from tfckpt.plan.choosing.planned import baseline
from tfckpt.plan.choosing.ranking import FINALISTS
from tfckpt.plan.choosing.rules import ROOM
from tfckpt.plan.planner import plan_step, plans_of
from tfckpt.simulate.check import check_plan

pytestmark = pytest.mark.pure


def graphs():
    sizes, times, edges = residual_network(3)
    return [with_backward(from_edges([100_000 * s for s in sizes], times, edges)),
            with_backward((None, *random_paper_graph(3, 14))), random_joint_graph(5, 24)]


GRAPHS = graphs()
GPU_TARGET = Target(device=GPU)
CASES = [(None, "time"), (None, "memory"), (0.9, "time"), (0.75, "time"), (0.9, "memory")]


def planned(graph, fraction, objective="time", solver="approx_dp", **options):
    budget = fraction and int(fraction * baseline(graph, GPU_TARGET).peak_bytes)
    options = {"objective": objective, "solver": solver, "target": GPU_TARGET, **options}
    return budget, options, plans_of(graph, budget, **options)


@pytest.mark.parametrize("number", range(len(GRAPHS)))
@pytest.mark.parametrize("fraction, objective", CASES)
@pytest.mark.parametrize("solver", ["approx_dp", pytest.param("auto", marks=pytest.mark.nightly)])
def test_further_plans(number, fraction, objective, solver):
    graph = GRAPHS[number]
    budget, options, plans = planned(graph, fraction, objective, solver)
    try:
        first = next(plans)
    except InfeasibleBudgetError:
        with pytest.raises(InfeasibleBudgetError):
            plan_step(graph, budget, **options)
        return
    found = [first, *plans]
    assert first == plan_step(graph, budget, **options)
    assert found == [*plans_of(graph, budget, **options)]
    assert 1 <= len(found) <= 6 * FINALISTS + 1
    edits = [(p.plan.schedule, p.plan.moves.released, p.plan.waits) for p in found]
    assert len(set(edits)) == len(edits)
    for p in found:
        check_plan(graph, p.plan)
        assert dataclasses.replace(p, plan=first.plan, timeline=first.timeline, time=first.time,
                                   peak_bytes=first.peak_bytes) == first
        assert budget is None or p.peak_bytes <= SAFETY * budget


@pytest.mark.parametrize("number", range(len(GRAPHS)))
def test_they_come_in_the_order_of_what_they_are_chosen_by(number):
    graph = GRAPHS[number]
    plain = baseline(graph, GPU_TARGET).peak_bytes
    smallest = [p.peak_bytes for p in planned(graph, None, "memory")[2]]
    assert smallest[0] <= min(smallest) + ROOM * plain
    assert len(smallest) > 1
    found = [(p.time, p.peak_bytes) for p in planned(graph, 1.1)[2]]
    fastest = list(itertools.takewhile(lambda pair: pair[0] <= pair[1], zip(
        found, found[1:], strict=False)))
    rest = found[len(fastest) + 1:]  # the smallest of those that fit, by rising peak
    assert fastest and [peak for _, peak in rest] == sorted(peak for _, peak in rest)


def test_nothing_is_planned_before_it_is_asked_for_but_options_are_checked():
    graph = GRAPHS[0]
    none_fits = plans_of(graph, 1, solver="chen")
    with pytest.raises(InfeasibleBudgetError):
        next(none_fits)
    with pytest.raises(PlanError, match="unknown solver"):
        plans_of(graph, solver="least")


@pytest.mark.parametrize("options", [
    {"solver": "store_all"}, {"solver": "chen"}, {"solver": "auto"},
    {"solver": "auto", "target": GPU_TARGET.compiled()}])
def test_other_solvers_and_xla(options):
    graph = GRAPHS[2]
    first, *others = planned(graph, None, **options)[2]
    assert first == plan_step(graph, **{"target": GPU_TARGET, **options})
    assert others or options["solver"] != "auto"
    for p in (first, *others):
        check_plan(graph, p.plan)


def test_the_plain_step_is_a_plan_of_a_graph_whose_updates_wait_for_more():
    """The baseline is of the step as it was captured (random step 9211 of the native pass)."""
    names, regions = ("a", "g", "u"), (FORWARD, BACKWARD, UPDATE)
    graph = CostGraph(tuple(
        Vertex(name, region, 1.0, reads=(0,) if n else (), writes=(n,),
               after=(1,) if name == "u" else ())
        for n, (name, region) in enumerate(zip(names, regions, strict=True))),
        tuple(Storage(name, 1 << 20, n, fetched=name == "g") for n, name in enumerate(names)))
    plain = baseline(graph)
    early = dataclasses.replace(plain, plan=dataclasses.replace(plain.plan, order=(0, 2, 1)))
    planned = plan_step(graph, plain.peak_bytes, plain=early, solver="store_all",
                        free_moves=False, target=Target())
    check_plan(graph, planned.plan)
    assert planned.peak_bytes <= plain.peak_bytes
