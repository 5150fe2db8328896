"""The simulator: against a second derivation of liveness, and by hand with unit sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_tables.joint_graphs import with_backward
from tests.support import liveness
from tests.support.graphs import (
    paper_graphs,
    random_execution,
    random_joint_graph,
    random_schedule,
    seeds,
)
from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph, Storage, Vertex
from tfckpt.ir.schedule import check_schedule, plain_plan, resolve
from tfckpt.simulate.simulate import simulate, simulate_order


def assert_same(graph, schedule, timeline, order=None):
    """Assert that a timeline equals the independent derivation, with the tensors at its peak."""
    expected = liveness.live_bytes(graph, schedule, order)
    assert list(timeline.live_bytes) == expected
    assert timeline.peak_bytes == max(expected)
    assert timeline.peak_step == expected.index(max(expected))
    assert timeline.time == sum(graph.vertices[v].time for v, _ in schedule)
    live_there = liveness.live_sets(graph, schedule, order)[timeline.peak_step]
    assert {(live.storage, live.copy, live.bytes) for live in timeline.live_at_peak} == {
        (i.storage, schedule[i.made][1], graph.storages[i.storage].bytes) for i in live_there}
    sizes = [live.bytes for live in timeline.live_at_peak]
    assert len(sizes) == len(live_there)
    assert sizes == sorted(sizes, reverse=True)


@given(seeds, st.integers(1, 16), st.integers(0, 8))
@settings(max_examples=150)
def test_random_schedules(seed, count, repeats):
    graph = random_joint_graph(seed, count)
    schedule = random_schedule(graph, seed + 1, repeats)
    check_schedule(graph, schedule)
    assert_same(graph, schedule, simulate(graph, schedule))


@given(seeds, st.integers(2, 12))
@settings(max_examples=80)
def test_random_executions_of_a_resolved_schedule(seed, count):
    graph = random_joint_graph(seed, count)
    schedule = random_schedule(graph, seed + 1)
    order = random_execution(graph, schedule, seed + 2)
    timeline = simulate_order(graph, resolve(graph, schedule), order)
    assert_same(graph, schedule, timeline, order)


@given(paper_graphs())
def test_plain_schedules_of_paper_graphs(graph):
    joint = with_backward((None, *graph))
    schedule = plain_plan(joint).schedule
    assert_same(joint, schedule, simulate(joint, schedule))


def build(rows, sizes, fetched=()):
    """Return a CostGraph from keyword rows; storage producers follow from `writes`."""
    producers = {s: v for v, row in enumerate(rows) for s in row.get("writes", ())}
    vertices = tuple(Vertex(**{"name": f"v{i}", "region": FORWARD, "time": 1.0, **row})
                     for i, row in enumerate(rows))
    return CostGraph(vertices, tuple(
        Storage(f"s{i}", size, producers[i], fetched=i in fetched)
        for i, size in enumerate(sizes)))


def test_unit_chain_with_everything_kept():
    for count in range(1, 9):
        edges = [(i, i + 1) for i in range(count - 1)]
        joint = with_backward((None, [1] * count, [1] * count, edges))
        timeline = simulate(joint, plain_plan(joint).schedule)
        assert timeline.peak_bytes == count + 1  # all values and one gradient
        assert timeline.peak_step == count + 1  # the backward of the last value
        assert timeline.live_bytes[:count] == tuple(range(1, count + 1))
        assert timeline.live_bytes[-1] == (3 if count > 1 else 2)
        assert timeline.time == 2 * count


def test_unit_chain_of_nine_with_two_checkpoints():
    # Keep 2 and 5; recompute 0-1, 3-4 and 6-7 segment by segment. 8 is read at once.
    joint = with_backward((None, [1] * 9, [1] * 9, [(i, i + 1) for i in range(8)]))
    back = {node: 10 + 8 - node for node in range(9)}
    schedule = [(v, 0) for v in range(10)]
    schedule += [(6, 1), (7, 1), (back[8], 0), (back[7], 0), (back[6], 0)]
    schedule += [(3, 1), (4, 1), (back[5], 0), (back[4], 0), (back[3], 0)]
    schedule += [(0, 1), (1, 1), (back[2], 0), (back[1], 0), (back[0], 0)]
    check_schedule(joint, tuple(schedule))
    timeline = simulate(joint, tuple(schedule))
    assert timeline.live_bytes == (
        # forward: a value and the one before it, 2 and 5 kept, then the loss
        1, 2, 2, 2, 3, 3, 3, 4, 4, 3,
        # 6, 7 made again beside 2 5 8; gradients of 8, 7, 6
        4, 5, 6, 6, 5,
        # 3, 4 made again beside 2, 5 and the gradient of 6; 5 dies with its backward
        4, 5, 6, 5, 4,
        # 0, 1 made again beside 2 and the gradient of 3
        3, 4, 5, 4, 3)
    assert timeline.peak_bytes == 6
    assert timeline.time == 18 + 6
    assert simulate(joint, plain_plan(joint).schedule).peak_bytes == 10


def test_the_latest_copy_is_read_and_the_original_freed():
    graph = build([
        {"writes": (0,)}, {"reads": (0,), "writes": (1,), "recomputable": True},
        {"reads": (1,), "writes": (2,)},
        {"reads": (1, 2), "writes": (3,), "region": BACKWARD}], [1, 10, 1, 1])
    plain = simulate(graph, plain_plan(graph).schedule)
    assert plain.live_bytes == (1, 11, 11, 12)
    again = simulate(graph, ((0, 0), (1, 0), (2, 0), (1, 1), (3, 0)))
    assert again.live_bytes == (1, 11, 12, 12, 12)  # storage 0 waits for the copy
    assert [(live.storage, live.copy) for live in again.live_at_peak] == [(1, 0), (0, 0), (2, 0)]


def test_a_buffer_is_reused_only_where_it_dies():
    rows = [{"writes": (0,)}, {"reads": (0,), "writes": (1,), "reuses": ((1, 0),)}]
    assert simulate(build(rows, [4, 4]), ((0, 0), (1, 0))).live_bytes == (4, 4)
    assert simulate(build(rows, [4, 2]), ((0, 0), (1, 0))).live_bytes == (4, 6)  # another size
    kept = build(rows, [4, 4], fetched=(0,))
    assert simulate(kept, plain_plan(kept).schedule).live_bytes == (4, 8)
    read_later = build([*rows, {"reads": (0,)}], [4, 4])
    assert simulate(read_later, plain_plan(read_later).schedule).live_bytes == (4, 8, 4)


def test_one_buffer_serves_one_output():
    graph = build([{"writes": (0,)},
                   {"reads": (0,), "writes": (1, 2), "reuses": ((1, 0), (2, 0))}], [4, 4, 4])
    assert simulate(graph, plain_plan(graph).schedule).live_bytes == (4, 8)


def test_workspace_counts_while_the_step_runs():
    graph = build([{"writes": (0,), "workspace": 5}, {"reads": (0,), "writes": (1,)}], [1, 1])
    assert simulate(graph, plain_plan(graph).schedule).live_bytes == (6, 2)


def test_nothing_is_live_where_nothing_costs():
    empty = simulate(CostGraph((), ()), ())
    assert (empty.peak_bytes, empty.peak_step, empty.live_bytes) == (0, 0, ())
    free = build([{"writes": (0,)}, {"reads": (0,)}, {}], [0])
    timeline = simulate(free, plain_plan(free).schedule)
    assert (timeline.peak_bytes, timeline.peak_step) == (0, 0)
    assert [live.storage for live in timeline.live_at_peak] == [0]


def test_fetched_storages_stay_and_unread_ones_go():
    graph = build([{"writes": (0, 1)}, {}, {}], [3, 5], fetched=(1,))
    assert simulate(graph, plain_plan(graph).schedule).live_bytes == (8, 5, 5)


def test_donated_storages_leave_the_dynamic_set():
    graph = build([{"writes": (0,)}, {"reads": (0,), "donates": (0,), "region": UPDATE},
                   {"reads": (0,), "writes": (1,), "region": UPDATE}, {}], [4, 1])
    assert simulate(graph, plain_plan(graph).schedule).live_bytes == (4, 4, 1, 0)


def test_reading_what_nothing_has_made():
    graph = build([{"writes": (0,)}, {"reads": (0,)}], [1])
    with pytest.raises(PlanError, match="'v1' reads 's0'"):
        simulate(graph, ((1, 0), (0, 0)))
