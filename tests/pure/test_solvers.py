"""approx_dp, exact_dp, exhaustive and chen: against brute force, on each other, and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from benchmarks.paper_tables.joint_graphs import from_edges
from benchmarks.paper_tables.lower_set_model import check_lower_sets, paper_overhead, paper_peak
from tests.support import exhaustive, paper_model
from tests.support.graphs import paper_graphs, random_paper_graph, residual_network
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.solvers import approx_dp, chen, exact_dp

OBJECTIVES = ("time", "memory")


def chain(count, size=1, time=1):
    return from_edges([size] * count, [time] * count, [(i, i + 1) for i in range(count - 1)])


def pruned_family(graph):
    return [paper_model.ancestors_and_self(graph[2], v) for v in range(len(graph[0]))]


def assert_optimal(solver, graph, prices):
    """Assert that a solver equals the brute force at every budget where the answer can change."""
    forward = from_edges(*graph)
    peaks = sorted({need for _, need in prices})
    assert solver.smallest_budget(forward) == peaks[0]
    for objective in OBJECTIVES:
        with pytest.raises(InfeasibleBudgetError) as caught:
            solver.lower_sets(forward, peaks[0] - 1, objective=objective)
        assert caught.value.smallest_bytes == peaks[0]
        for budget in peaks:
            masks = solver.lower_sets(forward, budget, objective=objective)
            check_lower_sets(forward, masks)
            sequence = paper_model.as_sets(masks)
            assert paper_model.peak(graph, sequence) <= budget
            assert paper_model.overhead(graph, sequence) == paper_model.best(
                prices, budget, objective)


@given(paper_graphs(largest=7))
def test_approx_dp_is_optimal_over_its_family(graph):
    assert_optimal(approx_dp, graph, paper_model.priced(graph, pruned_family(graph)))


@given(paper_graphs(largest=5))
@settings(max_examples=60)
def test_exhaustive_and_exact_dp_are_optimal_over_all_lower_sets(graph):
    prices = paper_model.priced(graph, paper_model.all_lower_sets(graph))
    assert_optimal(exhaustive, graph, prices)
    assert_optimal(exact_dp, graph, prices)


@pytest.mark.parametrize("seed", range(25))
def test_seeded_graphs_of_eight_vertices(seed):
    print(f"seed {seed}")
    graph = random_paper_graph(seed, 8, density=0.15 + 0.02 * seed)
    assert_optimal(approx_dp, graph, paper_model.priced(graph, pruned_family(graph)))


@pytest.mark.parametrize("seed", range(12))
def test_approx_dp_is_never_better_than_exhaustive(seed):
    print(f"seed {seed}")
    forward = from_edges(*random_paper_graph(seed, 7, density=0.45))
    minimum = exhaustive.smallest_budget(forward)
    pruned_minimum = approx_dp.smallest_budget(forward)
    assert minimum <= pruned_minimum
    for budget in (pruned_minimum, pruned_minimum + 5, 2 * pruned_minimum):
        exact, pruned = ({o: paper_overhead(forward, s.lower_sets(forward, budget, objective=o))
                          for o in OBJECTIVES} for s in (exhaustive, approx_dp))
        assert exact["time"] <= pruned["time"] <= pruned["memory"] <= exact["memory"]


@pytest.mark.parametrize("solver", [approx_dp, exact_dp, exhaustive])
def test_chain_by_hand(solver):
    # Four unit nodes. One segment needs 2*4 = 8. The minimum is 5: {0,1}, V needs 2*2 + 1 = 5
    # for the first segment ((iv) is empty on a chain) and 1 + 2*2 = 5 for the second.
    forward = chain(4)
    assert solver.smallest_budget(forward) == 5
    assert solver.lower_sets(forward, 8, objective="memory") == (0b1111,)
    assert solver.lower_sets(forward, 5, objective="memory") == (0b0011, 0b1111)
    # Keeping all but the last node: 3 kept + 2*1.
    assert solver.lower_sets(forward, 5, objective="time") == (0b0001, 0b0011, 0b0111, 0b1111)
    assert paper_overhead(forward, (0b0001, 0b0011, 0b0111, 0b1111)) == 1


@pytest.mark.parametrize("solver", [approx_dp, exact_dp, exhaustive])
def test_single_and_disconnected(solver):
    one = from_edges([7], [3], [])
    assert solver.smallest_budget(one) == 14
    assert solver.lower_sets(one, 14) == (1,)
    two = from_edges([7, 2], [3, 3], [])
    assert solver.smallest_budget(two) == 14  # one at a time: nothing joins them
    check_lower_sets(two, solver.lower_sets(two, 14))


@pytest.mark.parametrize("solver", [approx_dp, exact_dp, exhaustive])
def test_refusals(solver):
    with pytest.raises(PlanError, match="objective"):
        solver.lower_sets(chain(3), 100, objective="speed")
    with pytest.raises(InfeasibleBudgetError, match="minimum budget"):
        solver.lower_sets(chain(3), -1)


def test_exhaustive_refuses_large_graphs():
    with pytest.raises(PlanError, match="approx_dp"):
        exhaustive.lower_sets(chain(13), 100)


def test_budgets_and_bytes_of_any_size():
    huge = from_edges([1 << 50] * 4, [1] * 4, [(0, 1), (1, 2), (2, 3)])
    assert approx_dp.smallest_budget(huge) == 5 << 50
    assert approx_dp.lower_sets(huge, 1 << 90, objective="memory") == (0b1111,)
    assert exact_dp.lower_sets(huge, 1 << 90, objective="memory") == (0b1111,)
    for solver in (approx_dp, exact_dp):
        with pytest.raises(PlanError, match="more than"):
            solver.lower_sets(chain(2, size=1 << 60), 1)


@pytest.mark.parametrize("count", [16, 100, 144])
def test_equal_cost_chain_is_cut_into_about_root_n(count):
    forward = chain(count)
    assert len(chen.lower_sets(forward)) == math.isqrt(count)
    masks = approx_dp.lower_sets(forward, approx_dp.smallest_budget(forward), objective="memory")
    assert math.isqrt(count) <= len(masks) <= 2 * math.isqrt(count)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 37, 100, 144])
def test_smallest_budget_of_a_unit_chain_in_closed_form(count):
    # Equation (2) on a chain: segment i (from 0) of m nodes needs i kept + 2m, and 1 more for
    # the gradient of the node that follows it unless it is the last.
    def longest(budget):
        lengths, before = [], 0
        for i in range(budget):
            lengths.append(before + max(0, (budget - i) // 2))
            before += max(0, (budget - 1 - i) // 2)
        return max(lengths)

    minimum = next(budget for budget in range(2, 4 * count + 4) if longest(budget) >= count)
    assert approx_dp.smallest_budget(chain(count)) == minimum
    assert 2 * math.sqrt(count) - 1 <= minimum <= 2 * math.sqrt(count) + 2


def test_chen_segments_by_hand():
    assert chen.lower_sets(chain(9)) == (0b111, 0b111111, 0b111111111)
    # Segments end once they have more than 2 bytes.
    assert chen.lower_sets(chain(7), budget=2) == (0b111, 0b111111, 0b1111111)
    assert chen.lower_sets(chain(3), budget=0) == (0b1, 0b11, 0b111)
    assert chen.lower_sets(chain(3), budget=100) == (0b111,)
    with pytest.raises(PlanError):
        chen.lower_sets(chain(3), budget=-1)


def test_splitting_points_by_hand():
    diamond = from_edges([1] * 4, [1] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert chen.splitting_points(diamond) == (0, 3)
    skip = from_edges([1] * 4, [1] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    assert chen.splitting_points(skip) == (0, 3)
    # Two inputs and two outputs around one node in the middle.
    bow = from_edges([1] * 5, [1] * 5, [(0, 2), (1, 2), (2, 3), (2, 4)])
    assert chen.splitting_points(bow) == (2,)
    assert chen.splitting_points(from_edges([1, 1], [1, 1], [])) == ()
    assert chen.splitting_points(from_edges([1], [1], [])) == (0,)


@given(paper_graphs(largest=9))
def test_chen_is_valid_and_cuts_at_single_nodes(graph):
    forward = from_edges(*graph)
    for budget in (None, 0, 3, 10):
        masks = chen.lower_sets(forward, budget)
        check_lower_sets(forward, masks)
        for lower in paper_model.as_sets(masks)[:-1]:
            assert len(paper_model.boundary(graph, set(lower))) == 1


def test_residual_network_of_three_hundred_nodes():
    forward = from_edges(*residual_network(50))
    minimum = approx_dp.smallest_budget(forward)
    one_segment = paper_peak(forward, (forward.everything,))
    assert minimum < one_segment / 3
    previous = None
    for budget in (minimum, 2 * minimum, one_segment):
        masks = approx_dp.lower_sets(forward, budget)
        check_lower_sets(forward, masks)
        assert paper_peak(forward, masks) <= budget
        time = paper_overhead(forward, masks)
        assert previous is None or time <= previous
        previous = time
