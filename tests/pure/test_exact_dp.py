"""exact_dp against two oracles, its bounds against every sequence, and what it refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.paper_tables.canonical import canonical_schedule
from benchmarks.paper_tables.joint_graphs import from_edges, with_backward
from benchmarks.paper_tables.lower_set_model import (
    check_lower_sets,
    paper_overhead,
    paper_peak,
    segmentations,
)
from tests.support import exhaustive, liveness, paper_model
from tests.support.graphs import paper_graphs, random_paper_graph, residual_network
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.ir.schedule import check_schedule
from tfckpt.simulate.simulate import simulate
from tfckpt.solvers import approx_dp, chen, exact_dp
from tfckpt.solvers.exact_bounds import arrival
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import boundary, weight
from tfckpt.solvers.lattice import lattice

pytestmark = pytest.mark.pure

OBJECTIVES = ("time", "memory")


def random_graph(seed):
    """Return a graph of up to 8 vertices, sparse or dense, costs from {0 .. 2} to {0 .. 100}."""
    rng = random.Random(seed)
    count, largest = rng.randint(1, 8), rng.choice((2, 9, 100))
    density = rng.choice((0.1, 0.25, 0.4, 0.7))
    return ([rng.randint(0, largest) for _ in range(count)],
            [rng.randint(0, largest) for _ in range(count)],
            [(u, v) for v in range(count) for u in range(v) if rng.random() < density])


def assert_best_of_all(graph):
    """Assert that exact_dp equals exhaustive, and that approx_dp and chen are never better."""
    forward = from_edges(*graph)
    minimum, pruned = exhaustive.smallest_budget(forward), approx_dp.smallest_budget(forward)
    one = paper_peak(forward, (forward.everything,))
    assert exact_dp.smallest_budget(forward) == minimum <= pruned
    segments = list(segmentations(forward))
    for budget in sorted({minimum, minimum + 1, pruned, (minimum + one) // 2, one}):
        over = {}
        for objective in OBJECTIVES:
            masks = exact_dp.lower_sets(forward, budget, objective=objective)
            check_lower_sets(forward, masks)
            sequence = paper_model.as_sets(masks)
            assert paper_model.peak(graph, sequence) <= budget
            over[objective] = paper_model.overhead(graph, sequence)
            assert over[objective] == paper_overhead(forward, exhaustive.lower_sets(
                forward, budget, objective=objective))
            if budget >= pruned:
                other = paper_overhead(forward, approx_dp.lower_sets(forward, budget,
                                                                     objective=objective))
                assert over["time"] <= other <= over.get("memory", other)
        for masks in segments:
            if paper_peak(forward, masks) <= budget:
                assert over["time"] <= paper_overhead(forward, masks) <= over["memory"]
    with pytest.raises(InfeasibleBudgetError) as caught:
        exact_dp.lower_sets(forward, minimum - 1)
    assert caught.value.smallest_bytes == minimum


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_graphs(first):
    for seed in range(first, first + 50):
        print(f"seed {seed}")
        assert_best_of_all(random_graph(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 6000, 500))
def test_thousands_of_random_graphs(first):
    for seed in range(first, first + 500):
        print(f"seed {seed}")
        assert_best_of_all(random_graph(seed))


@pytest.mark.parametrize("seed", range(20))
def test_a_poor_start_and_weak_domination_do_not_change_the_optimum(seed, monkeypatch):
    print(f"seed {seed}")
    forward = from_edges(*random_paper_graph(seed, 12, density=0.25))
    minimum = exact_dp.smallest_budget(forward)
    budgets = (minimum, 2 * minimum)
    expected = [paper_overhead(forward, exact_dp.lower_sets(forward, b, objective=o))
                for b in budgets for o in OBJECTIVES]
    monkeypatch.setattr(exact_dp, "BEAM", 1)
    monkeypatch.setattr(exact_dp, "NEIGHBOURS", 1)
    assert expected == [paper_overhead(forward, exact_dp.lower_sets(forward, b, objective=o))
                        for b in budgets for o in OBJECTIVES]


@given(paper_graphs(largest=5))
@settings(max_examples=40)
def test_no_sequence_arrives_better_than_the_bounds_say(graph):
    forward = from_edges(*graph)
    sets = lattice(forward)
    place = {mask: index for index, mask in enumerate(sets.masks)}
    family = paper_model.all_lower_sets(graph)
    minimum = exact_dp.smallest_budget(forward)
    for budget in (minimum, 2 * minimum):
        for sign, price in ((1, 0.0), (1, 0.7), (-1, 0.0)):
            bounds = arrival(sets, budget, sign, price)
            for everything in family:
                if not everything:
                    continue
                for sequence in paper_model.sequences(
                        [lower for lower in family if lower <= everything], everything):
                    if paper_model.peak(graph, sequence) > budget:
                        continue
                    kept = set().union(*(paper_model.boundary(graph, set(s)) for s in sequence))
                    size = sum(graph[0][v] for v in kept)
                    score = sign * sum(graph[1][v] for v in kept) - price * size
                    index = place[sum(1 << v for v in everything)]
                    assert bounds.bytes[index] <= size
                    assert bounds.score[index] >= score - 1e-9


@given(paper_graphs())
def test_the_lattice_is_all_lower_sets_and_their_steps(graph):
    forward = from_edges(*graph)
    sets = lattice(forward)
    assert set(paper_model.as_sets(sets.masks)) == set(paper_model.all_lower_sets(graph))
    assert len(set(sets.masks)) == len(sets.masks)
    for index, mask in enumerate(sets.masks):
        assert sets.bytes[index] == weight(forward.bytes, mask)
        assert sets.edge_bytes[index].sum() == weight(forward.bytes, boundary(forward, mask))
        _, steps = sets.down.out_of(np.array([index]))
        smaller = {sets.masks[sets.down.to[s]]: 1 << int(sets.down.node[s]) for s in steps}
        assert smaller == {other: mask ^ other for other in sets.masks
                           if other & mask == other and (mask ^ other).bit_count() == 1}


def test_more_boundary_nodes_than_bits_in_a_word():
    # Every node feeds all later ones: the lower sets are those of a chain, so approx_dp is exact.
    count = 70
    forward = from_edges([3 + v % 5 for v in range(count)], [1 + v % 3 for v in range(count)],
                         [(u, v) for v in range(count) for u in range(v)])
    assert lattice(forward).edge.shape[1] == 2
    minimum = approx_dp.smallest_budget(forward)
    assert exact_dp.smallest_budget(forward) == minimum
    for objective in OBJECTIVES:
        for budget in (minimum, minimum + 40):
            both = [paper_overhead(forward, solver.lower_sets(forward, budget, objective=objective))
                    for solver in (approx_dp, exact_dp)]
            assert both[0] == both[1]


def test_too_many_lower_sets_are_refused_by_name():
    wide = from_edges([1] * 17, [1] * 17, [])
    with pytest.raises(PlanError, match="at most 100000 lower sets.*approx_dp"):
        exact_dp.lower_sets(wide, 100)
    with pytest.raises(PlanError, match="approx_dp"):
        exact_dp.smallest_budget(wide)


def test_too_many_states_are_refused_by_name(monkeypatch):
    forward = from_edges(*random_paper_graph(3, 10, density=0.2))
    monkeypatch.setattr(exact_dp, "LARGEST_FRONT", 5)
    with pytest.raises(PlanError, match="states at once.*approx_dp"):
        exact_dp.lower_sets(forward, 10**6)


def test_nodes_without_bytes_or_time():
    nothing = from_edges([0] * 4, [0] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert exact_dp.smallest_budget(nothing) == 0
    for objective in OBJECTIVES:
        check_lower_sets(nothing, exact_dp.lower_sets(nothing, 0, objective=objective))


@given(paper_graphs())
@settings(max_examples=60)
def test_canonical_schedules_are_valid_and_priced_right(graph):
    forward = from_edges(*graph)
    joint = with_backward(forward)
    minimum = exact_dp.smallest_budget(forward)
    sequences = [exact_dp.lower_sets(forward, minimum, objective=o) for o in OBJECTIVES]
    sequences += [approx_dp.lower_sets(forward, 2 * sum(graph[0])), *segmentations(forward)]
    for masks in sequences:
        schedule = canonical_schedule(joint, forward, masks)
        check_schedule(joint, schedule)
        timeline = simulate(joint, schedule)
        assert list(timeline.live_bytes) == liveness.live_bytes(joint, schedule)
        assert timeline.time - joint.total_time <= paper_overhead(forward, masks)


def test_canonical_order_runs_segment_by_segment():
    # A diamond whose branches are two segments: the forward runs 0 2, then 1, then 3.
    forward = from_edges([1] * 4, [1] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    joint = with_backward(forward)
    schedule = canonical_schedule(joint, forward, (0b0101, 0b0111, 0b1111))
    assert [v for v, copy in schedule if v < 4 and not copy] == [0, 2, 1, 3]
    assert [joint.vertices[v].name for v, copy in schedule if v > 4] == [
        "v3/backward", "v1/backward", "v2/backward", "v0/backward"]
    with pytest.raises(PlanError, match="not a lower set"):
        canonical_schedule(joint, forward, (0b0010, 0b1111))


def test_chen_tries_every_segment_budget_from_nothing_to_everything():
    forward = from_edges([1] * 6, [1] * 6, [(i, i + 1) for i in range(5)])
    found = list(segmentations(forward))
    assert found[0] == (0b1, 0b11, 0b111, 0b1111, 0b11111, 0b111111)
    assert found[-1] == (0b111111,)
    assert found == list(dict.fromkeys(chen.lower_sets(forward, b) for b in range(7)))


def test_residual_network_is_no_worse_than_the_pruned_family():
    forward = from_edges(*residual_network(20))
    pruned = approx_dp.smallest_budget(forward)
    assert exact_dp.smallest_budget(forward) <= pruned
    for budget in (pruned, 2 * pruned):
        time, memory = (paper_overhead(forward, exact_dp.lower_sets(forward, budget, objective=o))
                        for o in OBJECTIVES)
        assert time <= paper_overhead(forward, approx_dp.lower_sets(forward, budget))
        assert memory >= paper_overhead(forward, approx_dp.lower_sets(
            forward, budget, objective="memory"))


def test_a_graph_without_nodes_needs_nothing():
    empty = ForwardGraph((), (), (), (), (), (), ())
    assert exact_dp.smallest_budget(empty) == 0
    assert exact_dp.lower_sets(empty, 0) == ()
    assert list(segmentations(empty)) == []
