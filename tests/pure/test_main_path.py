"""`main_path`: which nodes of a view it merges, and that nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given

from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from tests.support.graphs import paper_graphs, random_joint_graph
from tfckpt.errors import PlanError
from tfckpt.plan import candidates
from tfckpt.plan.evaluate import Evaluator
from tfckpt.solvers.forward.forward import forward_view
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.main_path import main_path
from tfckpt.solvers.forward.reforwarding import ends


def graph_of(bytes_, edges):
    return from_edges(bytes_, [1] * len(bytes_), edges)


def test_a_mask_and_a_statistic_join_their_neighbours():
    # 0 -> 1 -> 3 -> 5; 2 is a mask that 3 reads, 4 a statistic of 1 that weighs nothing.
    view = graph_of([5000, 5000, 8, 5000, 0, 5000], [(0, 1), (1, 3), (2, 3), (1, 4), (3, 5)])
    merged = main_path(view)
    assert merged.names == ("v0", "v1", "v3", "v5")
    assert merged.bytes == (5000, 5000, 5008, 5000)
    assert merged.members == ((0,), (1, 4), (2, 3), (5,))
    assert merged.successors == ((1,), (2,), (3,), ())
    assert ends(view) == (-1, 6) and ends(merged) == (0, 3)


def test_dead_ends_go_as_a_whole():
    # 1 -> 2 -> 3: mean, variance and what is made of both, all of no weight.
    view = graph_of([9000, 0, 0, 0, 9000], [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (0, 4)])
    assert main_path(view).members == ((0, 1, 2, 3), (4,))


def test_a_second_network_and_a_heavy_output_stay():
    two_inputs = graph_of([9, 9, 9, 9, 9], [(0, 2), (1, 3), (2, 4), (3, 4)])
    assert main_path(two_inputs) == two_inputs
    two_outputs = graph_of([9, 9, 9], [(0, 1), (0, 2)])
    assert main_path(two_outputs) == two_outputs


def check(view):
    merged = main_path(view)
    assert sum(merged.bytes) == sum(view.bytes) and sum(merged.time) == sum(view.time)
    for parts, whole in ((merged.members, view.members), (merged.storages, view.storages)):
        assert sorted(sum(parts, ())) == sorted(sum(whole, ()))
    for node, after in enumerate(merged.successors):
        assert list(after) == sorted(set(after)) and all(other > node for other in after)
        assert all(node in merged.predecessors[other] for other in after)
    assert sum(map(len, merged.predecessors)) == sum(map(len, merged.successors))


@given(paper_graphs(largest=12))
def test_nothing_is_lost(graph):
    check(graph_of(graph[0], graph[2]))


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_of_views(seed):
    check(forward_view(random_joint_graph(seed, 40), 12))


def test_empty():
    assert len(main_path(ForwardGraph((), (), (), (), (), (), ()))) == 0


def test_proposals_keep_the_checkpoints():
    # Both ends and the small one between cost 9 + 1 + 9 + 9; all or none in between 37.
    chain = with_backward((None, [9, 9, 1, 9, 9], [1] * 5, [(i, i + 1) for i in range(4)]))
    assert list(candidates.lcg(Evaluator(chain), "time")) == [frozenset({0, 2, 4})]
    assert frozenset({0, 2, 4}) in list(candidates.acg(Evaluator(chain), "time"))
    skip = with_backward((None, [9, 9, 1, 9, 9], [1] * 5,
                          [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]))
    assert frozenset({0, 2, 4}) in list(candidates.acg(Evaluator(skip), "time"))
    with pytest.raises(PlanError, match="use acg"):
        list(candidates.lcg(Evaluator(skip), "time"))
