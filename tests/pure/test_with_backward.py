"""Forward graphs made by hand: what they become, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from tests.support.graphs import paper_graphs
from tfckpt.errors import CostError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, check_cost_graph
from tfckpt.ir.schedule import check_schedule, plain_plan
from tfckpt.simulate.simulate import simulate
from tfckpt.solvers.forward.forward_graph import integer_times


def test_chain_of_three_by_hand():
    joint = with_backward((["a", "b", "c"], [1, 2, 4], [5, 6, 7], [(0, 1), (1, 2)]))
    assert [v.name for v in joint.vertices] == [
        "a", "b", "c", "loss", "c/backward", "b/backward", "a/backward"]
    assert [v.region for v in joint.vertices] == [FORWARD] * 3 + [BACKWARD] * 4
    assert [v.recomputable for v in joint.vertices] == [True] * 3 + [False] * 4
    assert [v.reads for v in joint.vertices] == [
        (), (0,), (1,), (2,), (1, 2, 3), (0, 1, 4), (0, 5)]
    assert [v.writes for v in joint.vertices] == [(i,) for i in range(7)]
    assert [s.bytes for s in joint.storages] == [1, 2, 4, 0, 4, 2, 1]
    assert joint.residuals == (0, 1, 2)
    # a | ab | abc | abc | abc+C | ab+C+B | a+B+A
    assert simulate(joint, plain_plan(joint).schedule).live_bytes == (1, 3, 7, 7, 11, 9, 4)


def test_gradients_of_all_consumers_are_read():
    joint = with_backward((None, [1] * 4, [1] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)]))
    names = {v.name: v for v in joint.vertices}
    read = {joint.storages[s].name for s in names["v0/backward"].reads}
    assert read == {"v0", "v1:gradient", "v2:gradient"}
    read = {joint.storages[s].name for s in names["v3/backward"].reads}
    assert read == {"v3", "v1", "v2", "loss:seed"}


@given(paper_graphs())
def test_any_graph_is_well_formed(graph):
    forward = from_edges(*graph)
    joint = with_backward(forward)
    check_cost_graph(joint)
    check_schedule(joint, plain_plan(joint).schedule)
    assert len(joint.vertices) == 2 * len(forward) + 1


def test_single_vertex_and_disconnected_vertices():
    one = with_backward(from_edges([8], [1], []))
    assert simulate(one, plain_plan(one).schedule).peak_bytes == 16
    two = with_backward(from_edges([8, 1], [1, 1], []))
    assert two.vertices[2].reads == (0, 1)
    # The small one goes first, so only the large value and its gradient are left at the end.
    assert simulate(two, plain_plan(two).schedule).live_bytes == (8, 9, 9, 10, 16)


def test_vertices_are_sorted_and_keep_their_names():
    forward = from_edges([1, 2, 3], [4, 5, 6], [(2, 0), (0, 1)], ["x", "y", "z"])
    assert forward.names == ("z", "x", "y")
    assert forward.bytes == (3, 1, 2)
    assert forward.time == (6, 4, 5)
    assert forward.successors == ((1,), (2,), ())
    assert forward.predecessors == ((), (0,), (1,))


def test_repeated_edges_count_once():
    assert from_edges([1, 1], [1, 1], [(0, 1), (0, 1)]).successors == ((1,), ())


NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(("arguments", "complaint"), [
    (([], [], []), "empty"),
    (([1, 1], [1, 1], [(0, 1), (1, 0)]), "cycle.*'v0'"),
    (([1, 1], [1, 1], [(1, 1)]), "cycle.*'v1'"),
    (([1, -1], [1, 1], []), "'v1' has bytes -1"),
    (([1, NAN], [1, 1], []), "'v1' has bytes nan"),
    (([1, 1.5], [1, 1], []), "'v1' has bytes 1.5"),
    (([1, 1], [-2, 1], []), "'v0' has time -2"),
    (([1, 1], [1, NAN], []), "'v1' has time nan"),
    (([1, 1], [1, INF], []), "'v1' has time inf"),
    (([1], [1, 1], []), "'v1' has no bytes"),
    (([1, 1], [1], []), "'v1' has no time"),
    (([1, 1], [1, None], []), "'v1' has no time"),
    (([1, 1], [1, 1], [(0, 2)]), r"edge \(0, 2\)"),
    (([1, 1], [1, 1], [(-1, 0)]), r"edge \(-1, 0\)"),
    (([1, 1], [1, 1], [], ["x", "x"]), "'x'"),
    (([1, 1], [1, 1], [], ["x"]), "vertex 1 has no name"),
    (([1], [1], [], ["x", "y"]), "'y' has no bytes"),
])
def test_bad_graphs_are_refused_by_name(arguments, complaint):
    with pytest.raises(CostError, match=complaint):
        from_edges(*arguments)


def test_names_that_collide_in_the_joint_graph_are_refused():
    with pytest.raises(CostError, match="loss"):
        with_backward((["loss"], [1], [1], []))


def test_integer_times():
    assert integer_times([3, 0, 10]) == (3, 0, 10)
    assert integer_times([3.0, 2.0]) == (3, 2)
    assert integer_times([0.5, 0.25, 0.25, 0.0]) == (2048, 1024, 1024, 0)
    assert integer_times([1e-12, 1.0]) == (1, 4096)
    assert integer_times([10**9, 10**9]) == (2048, 2048)
    assert integer_times([0.0]) == (0,)
    scaled = integer_times([math.sqrt(i) for i in range(1, 100)])
    assert abs(sum(scaled) - 4096) <= 50
