"""Plans that `check_plan` refuses: a hand-made plan, changed in one place at a time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.graphs import random_joint_graph, random_schedule, seeds
from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph, Storage, Vertex
from tfckpt.ir.schedule import Fence, Plan, Wait, plain_plan, resolve
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.planner import plan_step
from tfckpt.simulate.check import check_plan
from tfckpt.simulate.executor import ORDERS, executor_order
from tfckpt.simulate.fences import fenced

pytestmark = pytest.mark.pure


def step() -> CostGraph:
    """a -> b -> loss; their gradients; one update, which a gradient runs after."""
    names = ("a", "b", "loss", "grad_b", "update", "grad_a")
    regions = (FORWARD, FORWARD, FORWARD, BACKWARD, UPDATE, BACKWARD)
    reads = ((), (0,), (1,), (1, 2), (3,), (0, 3))
    vertices = tuple(
        Vertex(name, region, 1.0, reads=read, writes=(i,), recomputable=region == FORWARD,
               fusible=name == "b", after=(4,) if name == "grad_a" else ())
        for i, (name, region, read) in enumerate(zip(names, regions, reads, strict=True)))
    return CostGraph(vertices, tuple(Storage(name, 4, i) for i, name in enumerate(names)))


GRAPH = step()
# a b loss | b' | grad_b update | a' | grad_a
PLAN = Plan(((0, 0), (1, 0), (2, 0), (1, 1), (3, 0), (4, 0), (0, 1), (5, 0)),
            fences=(Fence(3, (2,), (3,)), Fence(6, (5,), (6,))),
            waits=(Wait((3, 0), (2, 0)),), order=tuple(range(8)))


def changed(**fields) -> Plan:
    return dataclasses.replace(PLAN, **fields)


def test_the_plan_itself_is_accepted():
    check_plan(GRAPH, PLAN)
    check_plan(GRAPH, changed(order=(0, 1, 2, 3, 4, 5, 6, 7)))
    check_plan(GRAPH, plain_plan(GRAPH))
    without = changed(waits=(), fences=(Fence(3, (2,), (3,)), Fence(6, (4,), (6,))),
                      await_updates=False)
    check_plan(GRAPH, without)
    check_plan(GRAPH, dataclasses.replace(without, order=(0, 1, 2, 3, 4, 6, 5, 7)))


@pytest.mark.parametrize("plan, said", [
    (changed(schedule=PLAN.schedule[:-1]), "'grad_a' is never scheduled"),
    (changed(fences=PLAN.fences[:1]), "fences stand at"),
    (changed(fences=(PLAN.fences[0], Fence(7, (5,), (7,)))), "fences stand at"),
    (changed(fences=(Fence(3, (4,), (3,)), PLAN.fences[1])), "fence at 3 awaits"),
    (changed(fences=(Fence(3, (-1,), (3,)), PLAN.fences[1])), "fence at 3 awaits"),
    (changed(fences=(Fence(3, (2,), (4,)), PLAN.fences[1])), "fence at 3 gates"),
    (changed(fences=(PLAN.fences[0], Fence(6, (5,), (8,)))), "fence at 6 gates"),
    (changed(waits=(Wait((3, 0), (2, 1)),)), r"a wait names \(2, 1\)"),
    (changed(waits=(Wait((3, 1), (2, 0)),)), r"a wait names \(3, 1\)"),
    (changed(waits=(Wait((3, 0), (5, 0)),)), "'grad_b' waits for 'grad_a'"),
    (changed(waits=(Wait((3, 0), (3, 0)),)), "'grad_b' waits for 'grad_b'"),
    (changed(await_updates=False), "'update' of the update is awaited"),
    (changed(await_updates=False, waits=(Wait((5, 0), (4, 0)),),
             fences=(PLAN.fences[0], Fence(6, (4,), (6,)))), "'update' of the update is awaited"),
    (changed(order=()), "no permutation"),
    (changed(order=(0, 1, 2, 3, 4, 5, 6, 6)), "no permutation"),
    (changed(order=(1, 0, 2, 3, 4, 5, 6, 7)), "'b' is executed before 'a'"),
    (changed(order=(0, 1, 2, 3, 4, 6, 5, 7)), "before what the fence at 6 awaits"),
    (changed(order=(0, 1, 2, 3, 4, 6, 7, 5), fences=(PLAN.fences[0], Fence(6, (), (6,)))),
     "'grad_a' is executed before 'update'"),
    (changed(order=(0, 1, 2, 4, 3, 5, 6, 7)), "'grad_b' is executed before 'b'"),
])
def test_a_violation_is_named(plan, said):
    with pytest.raises(PlanError, match=said):
        check_plan(GRAPH, plan)


def test_a_wait_counts_in_the_order():
    """loss and a' are independent of each other but for the wait."""
    free = Plan(((0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (4, 0), (5, 0)), waits=(),
                fences=(Fence(3, (), (3,)),), order=(0, 1, 3, 2, 4, 5, 6))
    check_plan(GRAPH, free)
    with pytest.raises(PlanError, match="'a' is executed before 'loss'"):
        check_plan(GRAPH, dataclasses.replace(free, waits=(Wait((0, 1), (2, 0)),)))


def test_a_fence_opens_after_those_before_it():
    first, second = PLAN.fences
    late = changed(fences=(first, Fence(6, (), (6,))), waits=())
    early = (0, 6, 1, 2, 3, 4, 5, 7)
    with pytest.raises(PlanError, match="before what the fence at 6 awaits"):
        check_plan(GRAPH, dataclasses.replace(late, order=early))
    check_plan(GRAPH, dataclasses.replace(late, fences=(Fence(3, (), (3,)), late.fences[1]),
                                          order=early))


def test_a_merged_step_may_wait_for_what_comes_later_but_in_no_cycle():
    """b is merged into what reads it: waiting for the loss itself is a cycle, for a is none."""
    check_plan(GRAPH, changed(waits=(Wait((1, 0), (0, 0)),)))
    with pytest.raises(PlanError, match="cycle"):
        check_plan(GRAPH, changed(waits=(Wait((1, 0), (2, 0)),)))


@given(seeds, st.integers(3, 20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_fences_as_placed_are_accepted_under_every_executor(seed, count, await_updates):
    graph = random_joint_graph(seed, count)
    plan = fenced(graph, random_schedule(graph, seed), await_updates=await_updates)
    check_plan(graph, plan)
    for policy in ORDERS:
        order = executor_order(graph, resolve(graph, plan.schedule), (), (), plan.fences, policy)
        check_plan(graph, dataclasses.replace(plan, order=tuple(order)))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_planner_gives_is_accepted(seed, compiled):
    graph = random_joint_graph(seed, 20)
    planned = plan_step(graph, solver="approx_dp", target=Target(device=GPU).compiled(compiled),
                        await_updates=bool(seed % 2))
    for plan in (planned.plan, planned.plain.plan):
        check_plan(graph, plan)
    assert planned.plan.await_updates == bool(seed % 2)
