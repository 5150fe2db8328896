"""Lower sets and equations (1) and (2) against plain definitions over Python sets."""

from __future__ import annotations

import pytest
from hypothesis import given

from benchmarks.paper_tables.joint_graphs import from_edges
from benchmarks.paper_tables.lower_set_model import (
    check_lower_sets,
    is_lower_set,
    paper_overhead,
    paper_peak,
)
from tests.support import exhaustive, paper_model
from tests.support.graphs import paper_graphs
from tfckpt.errors import PlanError
from tfckpt.solvers.forward import lower_sets

DIAMOND = ([1, 2, 4, 8], [1, 1, 1, 1], [(0, 1), (0, 2), (1, 3), (2, 3)])


def diamond():
    return from_edges(*DIAMOND)


@given(paper_graphs())
def test_lower_sets_are_those_of_the_definition(graph):
    forward = from_edges(*graph)
    masks = range(forward.everything + 1)
    found = [mask for mask in masks if is_lower_set(forward, mask)]
    assert set(paper_model.as_sets(found)) == set(paper_model.all_lower_sets(graph))
    for mask in found:
        (chosen,) = paper_model.as_sets([mask])
        (edge,) = paper_model.as_sets([lower_sets.boundary(forward, mask)])
        assert edge == paper_model.boundary(graph, set(chosen))


@given(paper_graphs())
def test_reach_sets_are_ancestors(graph):
    reach = lower_sets.reach_lower_sets(from_edges(*graph))
    assert paper_model.as_sets(reach) == [
        paper_model.ancestors_and_self(graph[2], v) for v in range(len(graph[0]))]


@given(paper_graphs(largest=5))
def test_equations_one_and_two(graph):
    forward = from_edges(*graph)
    family = paper_model.all_lower_sets(graph)
    everything = frozenset(range(len(graph[0])))
    for sequence in paper_model.sequences(family, everything):
        masks = [sum(1 << v for v in lower) for lower in sequence]
        check_lower_sets(forward, masks)
        assert paper_overhead(forward, masks) == paper_model.overhead(graph, sequence)
        assert paper_peak(forward, masks) == paper_model.peak(graph, sequence)


def test_diamond_by_hand():
    forward = diamond()
    assert [is_lower_set(forward, m) for m in (0b0, 0b1, 0b10, 0b11, 0b1001)] == [
        True, True, False, True, False]
    assert lower_sets.boundary(forward, 0b0011) == 0b0011  # 0 feeds 2, 1 feeds 3
    assert lower_sets.boundary(forward, 0b0111) == 0b0110
    assert lower_sets.reach_lower_sets(forward) == (0b0001, 0b0011, 0b0101, 0b1111)
    # L_1 = {0}: 2*1 + M({1,2}) + M({}) = 2 + 6 (the predecessors of 1 and 2 lie in L_1) = 8.
    # L_2 = V: M(U_1) + 2 * (2+4+8) = 1 + 28 = 29.
    assert paper_peak(forward, (0b0001, 0b1111)) == 29
    assert paper_overhead(forward, (0b0001, 0b1111)) == 3
    # L_1 = {0, 1}: 2*3 + M({2,3}) + M({2}) = 6 + 12 + 4 = 22; L_2: 3 + 2*12 = 27.
    assert paper_peak(forward, (0b0011, 0b1111)) == 27
    assert paper_overhead(forward, (0b0011, 0b1111)) == 2
    assert lower_sets.kept_storages(forward, (0b0011, 0b1111)) == frozenset({0, 1})
    assert lower_sets.kept_storages(forward, (0b1111,)) == frozenset()


@pytest.mark.parametrize(("sequence", "complaint"), [
    ((0b0010, 0b1111), "not a lower set"),
    ((0b0001, 0b0001, 0b1111), "increase"),
    ((0b0101, 0b0011, 0b1111), "increase"),
    ((0b0011,), "end in the whole graph"),
    ((), "end in the whole graph"),
    ((0b11111,), "not a lower set"),
])
def test_bad_sequences_are_refused(sequence, complaint):
    with pytest.raises(PlanError, match=complaint):
        check_lower_sets(diamond(), sequence)


def test_all_lower_sets_of_independent_nodes():
    forward = from_edges([1] * 4, [1] * 4, [])
    assert exhaustive.all_lower_sets(forward) == tuple(
        sorted(range(1, 16), key=lambda mask: (mask.bit_count(), mask)))
