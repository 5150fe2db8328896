"""The contracted forward view of joint graphs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from benchmarks.paper_tables.lower_set_model import check_lower_sets
from tests.support.graphs import paper_graphs, random_joint_graph, residual_network, seeds
from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph, Storage, Vertex, check_cost_graph
from tfckpt.solvers import approx_dp, chen
from tfckpt.solvers.forward.forward import forward_view
from tfckpt.solvers.forward.lower_sets import kept_storages


def assert_view(graph, view):
    """Assert all that a view guarantees, from the definitions."""
    members = sorted(v for node in view.members for v in node)
    assert members == [i for i, v in enumerate(graph.vertices) if v.recomputable]
    node_of = {v: node for node, group in enumerate(view.members) for v in group}
    assert len(set(view.names)) == len(view.names)
    for node in range(len(view.names)):
        assert all(other > node for other in view.successors[node])  # topological, so acyclic
        assert all(node in view.predecessors[other] for other in view.successors[node])
        assert all(node in view.successors[other] for other in view.predecessors[node])
    handed = {node: [] for node in range(len(view.names))}
    for index, storage in enumerate(graph.storages):
        mine = node_of.get(storage.producer)
        readers = [v for v, vertex in enumerate(graph.vertices) if index in vertex.reads]
        others = {node_of[v] for v in readers if v in node_of} - {mine}
        if mine is None:
            continue
        assert others <= set(view.successors[mine])
        if others or any(graph.vertices[v].region != FORWARD for v in readers):
            handed[mine].append(index)
    assert view.storages == tuple(map(tuple, handed.values()))
    assert view.bytes == tuple(
        sum(graph.storages[s].bytes for s in storages if not graph.storages[s].fetched)
        for storages in handed.values())
    assert all(isinstance(time, int) and time >= 0 for time in view.time)


@given(seeds, st.integers(3, 40), st.integers(1, 12))
@settings(max_examples=80)
def test_views_of_random_joint_graphs(seed, count, limit):
    graph = random_joint_graph(seed, count)
    check_cost_graph(graph)
    assert_view(graph, forward_view(graph))
    small = forward_view(graph, limit)
    assert_view(graph, small)
    assert len(small) <= limit
    assert set(graph.residuals) <= {s for storages in small.storages for s in storages}


@given(paper_graphs(smallest_bytes=1))
def test_view_of_a_paper_graph_is_that_graph(graph):
    forward = from_edges(*graph)
    view = forward_view(with_backward(forward))

    def by_name(shown):
        return {name: (shown.bytes[i], shown.time[i],
                       {shown.names[v] for v in shown.successors[i]},
                       {shown.names[v] for v in shown.predecessors[i]})
                for i, name in enumerate(shown.names)}

    assert by_name(view) == by_name(forward)


@given(seeds, st.integers(6, 30))
@settings(max_examples=40)
def test_solvers_accept_views(seed, count):
    graph = random_joint_graph(seed, count)
    view = forward_view(graph, 8)
    budget = approx_dp.smallest_budget(view)
    for masks in (approx_dp.lower_sets(view, budget), chen.lower_sets(view)):
        check_lower_sets(view, masks)
        kept = kept_storages(view, masks)
        assert all(graph.vertices[graph.storages[s].producer].recomputable for s in kept)


def joint(rows, storages):
    """Return a CostGraph from (name, region, reads, writes, recomputable) and sizes."""
    producers = {s: v for v, row in enumerate(rows) for s in row[3]}
    graph = CostGraph(
        tuple(Vertex(name, region, 1.0, reads=reads, writes=writes, recomputable=again)
              for name, region, reads, writes, again in rows),
        tuple(Storage(f"s{i}", size, producers[i]) for i, size in enumerate(storages)))
    check_cost_graph(graph)
    return graph


def test_what_the_backward_does_not_read_merges_into_its_consumer():
    graph = joint([
        ("conv", FORWARD, (), (0,), True),
        ("bias", FORWARD, (0,), (1,), True),
        ("relu", FORWARD, (1,), (2,), True),
        ("dense", FORWARD, (2,), (3,), True),
        ("loss", BACKWARD, (3,), (4,), False),
        ("grad", BACKWARD, (2, 4), (5,), False),
    ], [10, 10, 10, 10, 1, 10])
    view = forward_view(graph)
    assert view.names == ("relu", "dense")
    assert view.members == ((0, 1, 2), (3,))
    assert view.storages == ((2,), (3,))
    assert view.bytes == (10, 10)
    assert view.time == (3, 1)


def test_a_value_with_two_consumers_does_not_merge_into_one_of_them():
    graph = joint([
        ("split", FORWARD, (), (0,), True),
        ("left", FORWARD, (0,), (1,), True),
        ("right", FORWARD, (0,), (2,), True),
        ("loss", BACKWARD, (1, 2), (3,), False),
    ], [10, 10, 10, 1])
    view = forward_view(graph)
    assert view.names == ("split", "left", "right")
    assert view.successors == ((1, 2), (), ())
    assert view.storages == ((0,), (1,), (2,))


def test_a_few_saved_statistics_do_not_keep_a_normalisation_apart():
    graph = joint([
        ("conv", FORWARD, (), (0,), True),
        ("norm", FORWARD, (0,), (1, 2), True),
        ("relu", FORWARD, (1,), (3,), True),
        ("grad", BACKWARD, (0, 2, 3), (4,), False),
    ], [1 << 20, 1 << 20, 16, 1 << 20, 1])
    view = forward_view(graph)
    assert view.members == ((0,), (1, 2))
    assert view.storages == ((0,), (2, 3))
    assert view.bytes == (1 << 20, (1 << 20) + 16)


def test_an_op_that_may_not_repeat_still_orders_what_it_separates():
    graph = joint([
        ("first", FORWARD, (), (0,), True),
        ("opaque", FORWARD, (0,), (1,), False),
        ("second", FORWARD, (1,), (2,), True),
        ("grad", BACKWARD, (0, 1, 2), (3,), False),
    ], [10, 10, 10, 1])
    view = forward_view(graph)
    assert view.members == ((0,), (2,))
    assert view.successors == ((1,), ())
    assert view.bytes == (10, 10)


def test_nothing_merges_across_an_op_that_may_not_repeat():
    # Running "second" again needs what "opaque" made, not "first".
    graph = joint([
        ("first", FORWARD, (), (0,), True),
        ("opaque", FORWARD, (0,), (1,), False),
        ("second", FORWARD, (1,), (2,), True),
        ("grad", BACKWARD, (2,), (3,), False),
    ], [10, 10, 10, 1])
    assert forward_view(graph).members == ((0,), (2,))


def test_a_source_stands_next_to_its_consumer():
    # The mask is made first, and used last.
    graph = joint([
        ("mask", FORWARD, (), (0,), True),
        ("a", FORWARD, (), (1,), True),
        ("b", FORWARD, (1,), (2,), True),
        ("drop", FORWARD, (0, 2), (3,), True),
        ("grad", BACKWARD, (0, 1, 2, 3), (4,), False),
    ], [10, 10, 10, 10, 1])
    assert forward_view(graph).names == ("a", "b", "mask", "drop")


def test_neighbours_merge_inside_blocks_first():
    blocks = 20
    bytes_, time, edges = residual_network(blocks)
    graph = with_backward(from_edges(bytes_, time, edges))
    assert len(forward_view(graph)) == len(bytes_)
    view = forward_view(graph, limit=3 * blocks)
    assert_view(graph, view)
    assert len(view) == 3 * blocks
    # The last node of every block, and the input, can still be kept alone.
    alone = {group[0] for group in view.members if len(group) == 1}
    assert {6 * (block + 1) for block in range(blocks)} <= alone
    assert len(chen.splitting_points(view)) >= blocks


def test_the_exit_of_a_block_stays_alone_however_small():
    # Two skip connections: 0 -> 1 -> 2 -> 3 with 0 -> 3, then 3 -> 4 -> 5 -> 6 with 3 -> 6.
    edges = [(0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (4, 5), (5, 6), (3, 6)]
    graph = with_backward((None, [9, 9, 9, 1, 9, 9, 1], [1] * 7, edges))
    assert forward_view(graph, limit=5).members == ((0,), (1, 2), (3,), (4, 5), (6,))


def test_nothing_to_recompute_gives_an_empty_view():
    graph = joint([("loss", BACKWARD, (), (0,), False)], [4])
    view = forward_view(graph)
    assert len(view) == 0
    assert approx_dp.smallest_budget(view) == 0
    assert approx_dp.lower_sets(view, 0) == chen.lower_sets(view) == ()
    check_lower_sets(view, ())
    assert kept_storages(view, ()) == frozenset()
