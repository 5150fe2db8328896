"""Schedules and graphs that the checkers refuse, with messages that name the vertex."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.paper_tables.joint_graphs import with_backward
from tests.support.graphs import random_joint_graph, random_schedule
from tfckpt.errors import CostError, PlanError
from tfckpt.ir.costgraph import FORWARD, CostGraph, Storage, Vertex, check_cost_graph
from tfckpt.ir.schedule import Plan, check_schedule, plain_plan

# Vertices: a, b, c, loss, c/backward, b/backward, a/backward.
JOINT = with_backward((["a", "b", "c"], [1, 1, 1], [1, 1, 1], [(0, 1), (1, 2)]))
PLAIN = plain_plan(JOINT).schedule


def test_plain_and_repeated_schedules_pass():
    check_schedule(JOINT, PLAIN)
    check_schedule(JOINT, (*PLAIN[:4], (0, 1), (1, 1), (1, 2), *PLAIN[4:]))
    assert Plan((*PLAIN, (0, 1))).recomputed == ((0, 1),)


@pytest.mark.parametrize(("schedule", "complaint"), [
    ((*PLAIN[:3], *PLAIN[4:]), "'c/backward' is scheduled before 'loss'"),
    (PLAIN[:-1], "'a/backward' is never scheduled"),
    ((), "'a' is never scheduled"),
    ((PLAIN[1], PLAIN[0], *PLAIN[2:]), "'b' is scheduled before 'a'"),
    ((*PLAIN, (4, 1)), "'c/backward' may not run twice"),
    ((*PLAIN, (0, 2)), "copy 2 of 'a'"),
    ((*PLAIN, (0, 0)), "copy 0 of 'a'"),
    (((0, 1), *PLAIN), "copy 1 of 'a'"),
])
def test_bad_schedules_are_refused(schedule, complaint):
    with pytest.raises(PlanError, match=complaint):
        check_schedule(JOINT, schedule)


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_to_a_schedule_is_found(seed):
    print(f"seed {seed}")
    graph = random_joint_graph(seed)
    schedule = random_schedule(graph, seed)
    check_schedule(graph, schedule)
    last = max(p for p, (_, copy) in enumerate(schedule) if copy == 0)
    with pytest.raises(PlanError):
        check_schedule(graph, schedule[:last] + schedule[last + 1:])
    with pytest.raises(PlanError):
        check_schedule(graph, (*schedule, schedule[seed % len(schedule)]))


def test_well_formed_graphs_pass():
    check_cost_graph(JOINT)
    check_cost_graph(CostGraph((), ()))


def vertex(name, **fields):
    return Vertex(name, **{"region": FORWARD, "time": 1.0, **fields})


def damaged(index, **fields):
    """JOINT with some fields of one vertex replaced."""
    vertices = list(JOINT.vertices)
    vertices[index] = dataclasses.replace(vertices[index], **fields)
    return dataclasses.replace(JOINT, vertices=tuple(vertices))


@pytest.mark.parametrize(("graph", "complaint"), [
    (damaged(1, name="a"), "'a'"),
    (damaged(1, region="sideways"), "'b'.*'sideways'"),
    (damaged(1, time=-1.0), "'b'.*-1"),
    (damaged(1, time=float("nan")), "'b'.*nan"),
    (damaged(1, time=float("inf")), "'b'.*inf"),
    (damaged(1, workspace=-1), "'b'.*workspace"),
    (damaged(1, reads=(2,)), "'b' reads 'c'.*cycle"),
    (damaged(1, reads=(1,)), "'b' reads 'b'.*cycle"),
    (damaged(1, after=(2,)), "'b' waits"),
    (damaged(1, after=(1,)), "'b' waits"),
    (damaged(1, after=(-1,)), "'b' waits"),
    (damaged(1, reuses=((1, 2),)), "'b' reuses"),
    (damaged(1, reuses=((0, 0),)), "'b' reuses"),
    (damaged(1, writes=(0, 1)), "'a' has two producers"),
    (damaged(1, writes=()), "'b'"),
    (CostGraph((vertex("x", writes=(0,)),), (Storage("s", -1, 0),)), "'s'.*negative"),
    (CostGraph((vertex("x"),), (Storage("s", 1, 3),)), "'s'.*no producer"),
    (CostGraph((vertex("x"),), (Storage("s", 1, -1),)), "'s'.*no producer"),
])
def test_bad_graphs_are_refused(graph, complaint):
    with pytest.raises(CostError, match=complaint):
        check_cost_graph(graph)
