"""lcg and acg: against brute force, on each other, and by hand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_tables.joint_graphs import from_edges
from tests.support import reforwarding_model as model
from tests.support.graphs import paper_graphs, residual_network
from tfckpt.errors import PlanError
from tfckpt.solvers import acg, lcg
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.reforwarding import price
from tfckpt.solvers.max_terms import best_max_term

EMPTY = ForwardGraph((), (), (), (), (), (), ())

COSTS = (0, 1, 2, 3, 5, 9)

costs_of_a_chain = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def chain_edges(count):
    return [(i, i + 1) for i in range(count - 1)]


def chain(costs):
    return from_edges(costs, [1] * len(costs), chain_edges(len(costs)))


def bridges(rng, count):
    """Return (bytes, edges) with one input and one output: many complicated segments."""
    edges = {(max(0, v - rng.randint(1, 3)), v) for v in range(1, count)}
    edges |= {(v, min(count - 1, v + rng.randint(1, 3))) for v in range(count - 1)}
    return [rng.choice(COSTS) for _ in range(count)], sorted(edges)


def any_graph(rng, count):
    """Return (bytes, edges) of any density, often disconnected."""
    density = rng.choice((0.1, 0.3, 0.5, 0.8))
    edges = [(u, v) for v in range(count) for u in range(v) if rng.random() < density]
    return [rng.choice(COSTS) for _ in range(count)], edges


def series_parallel(rng, count):
    """Return (bytes, edges), where edges have been replaced by two in a row or in parallel."""
    edges, vertices = [(0.0, 1.0)], [0.0, 1.0]
    while len(vertices) < count:
        u, v = rng.choice(edges)
        middle = (u + v) / 2 + (v - u) * rng.uniform(-0.2, 0.2)
        vertices.append(middle)
        edges += [(u, middle), (middle, v)]
        if rng.random() < 0.6:
            edges.remove((u, v))
    place = {vertex: i for i, vertex in enumerate(sorted(vertices))}
    return ([rng.choice(COSTS) for _ in vertices],
            sorted({(place[u], place[v]) for u, v in edges}))


@pytest.mark.parametrize("family", [bridges, any_graph, series_parallel])
@pytest.mark.parametrize("block", range(4))
def test_acg_is_optimal_on_a_thousand_small_graphs(family, block):
    # One input and one output each, and one of several; both assumptions of the paper are true.
    for seed in range(300 * block, 300 * (block + 1)):
        rng = random.Random(seed)
        bytes_, edges = family(rng, rng.randint(2, 8))
        found = acg.solve(from_edges(bytes_, [1] * len(bytes_), edges))
        assert found.cost == model.least_cost(bytes_, edges), (seed, bytes_, edges)


@given(paper_graphs(largest=8), st.randoms(use_true_random=False))
def test_acg_stores_what_products_need_and_is_optimal_otherwise(graph, rng):
    bytes_, _, edges = graph
    products = [v for v in range(len(bytes_)) if rng.random() < 0.3]
    needs = {v: [u for u, w in edges if w == v] for v in products}
    must_store = [u for v in products if len(needs[v]) > 1 for u in needs[v]]
    found = acg.solve(from_edges(bytes_, [1] * len(bytes_), edges), needs_inputs=products)
    assert set(must_store) <= set(found.vertices)
    assert found.cost == model.least_cost(bytes_, edges, must_store)


@given(costs_of_a_chain)
def test_lcg_is_optimal(costs):
    found = lcg.solve(chain(costs))
    assert found.cost == model.least_cost(costs, chain_edges(len(costs)))


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=120))
@settings(max_examples=300)
def test_acg_is_lcg_on_chains(costs):
    tree, line = acg.solve(chain(costs)), lcg.solve(chain(costs))
    assert tree.cost == line.cost
    if all(costs):  # what costs nothing may be stored or not
        assert tree == line


@given(st.lists(st.integers(1, 50), min_size=3, max_size=40))
def test_lcg_is_optimal_over_every_max_term(costs):
    # Algorithm 1 as it stands: each pair's cost as the bound, a shortest path by relaxation.
    count = len(costs)
    between = {(a, b): sum(costs[a + 1:b]) for a in range(count) for b in range(a + 1, count)}
    totals = []
    for limit in set(between.values()):
        best = [costs[0], *[math.inf] * (count - 1)]
        for b in range(1, count):
            best[b] = costs[b] + min(best[a] for a in range(b) if between[a, b] <= limit)
        totals.append(best[-1] + limit)
    assert lcg.solve(chain(costs)).cost == min(totals)


@pytest.mark.parametrize("root", [2, 3, 4, 10, 25, 40])
def test_equal_costs_in_closed_form(root):
    # N = root^2 vertices of cost 1/N: k = sqrt(N) checkpoints are optimal and cost 2/sqrt(N).
    count = root * root
    found = lcg.solve(chain([1] * count))
    assert found.cost / count == pytest.approx(2 / root, abs=1e-12)
    evenly = [round(i * (count - 1) / (root - 1)) for i in range(root)]
    assert price(chain([1] * count), evenly).cost == found.cost


def test_supplement_figures_2_and_3():
    costs = [10, 8, 9, 6, 7, 10]
    assert lcg.solve(chain(costs)).cost == 42
    assert lcg.solve(chain(costs)).vertices == (0, 2, 5)
    # C = 8 allows the step from the first vertex to the third, over 8, but none over 6 + 7.
    start, end = lcg.spans(costs, [0] * 5)
    cost, path = lcg.shortest_path(costs, start, end, [0] * 5, 8)
    assert (cost, path) == (9 + 6, [0, 2, 3, 5])


def test_supplement_figure_4():
    # i, k, t, j = 0, 2, 4, 7 with a vertex on each way: all four are stored once C is under 35.
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 4), (2, 5), (5, 7), (4, 6), (6, 7)]
    graph = from_edges([1, 9, 1, 9, 1, 9, 9, 1], [1] * 8, edges)
    found = acg.solve(graph)
    assert (found.vertices, found.max_term) == ((0, 2, 4, 7), 9)
    assert acg.solve_under(graph, 37).vertices == (0, 2, 4, 7)
    assert acg.solve_under(graph, 38).vertices == (0, 7)


def test_single_branches_are_max_terms():
    # The branches 4 and 3 are recomputed one after the other: 4, not 7, is the max term.
    graph = from_edges([1, 4, 3, 1], [1] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    found = acg.solve(graph)
    assert (found.vertices, found.cost) == ((0, 3), 1 + 1 + 4)


def test_inner_checkpoints_only_where_needed():
    # Two branches of three; storing the middle of the large one halves the max term.
    edges = [(0, 1), (1, 2), (2, 3), (3, 7), (0, 4), (4, 5), (5, 6), (6, 7)]
    graph = from_edges([1, 8, 1, 8, 2, 1, 2, 1], [1] * 8, edges)
    assert acg.solve(graph).vertices == (0, 2, 7)


@pytest.mark.parametrize("solver", [lcg.solve, acg.solve])
def test_trivial_answers(solver):
    assert solver(EMPTY).vertices == ()
    assert solver(chain([7])).vertices == (0,)
    assert solver(chain([7, 2])).cost == 9
    assert solver(chain([0, 0, 0])).cost == 0


def test_acg_on_disconnected_vertices():
    found = acg.solve(from_edges([7, 2], [1, 1], []))
    assert (found.vertices, found.cost) == ((), 7)


def test_lcg_refuses_what_is_no_chain():
    for edges, complaint in (([(0, 1), (0, 2)], "'v0' feeds 2"), ([(0, 2), (1, 2)], "'v0' feeds"),
                             ([], "'v0' feeds 0"), ([(0, 1), (1, 2), (0, 2)], "'v0' feeds 2")):
        with pytest.raises(PlanError, match=complaint + ".*use acg"):
            lcg.solve(from_edges([1] * 3, [1] * 3, edges))


def test_refusals_by_size():
    with pytest.raises(PlanError, match="use auto"):
        lcg.solve(chain([1] * (lcg.LARGEST + 1)))
    with pytest.raises(PlanError, match="use auto"):
        acg.solve(chain([1] * (acg.LARGEST + 1)))
    with pytest.raises(PlanError, match="not -1"):
        acg.solve_under(chain([1] * 3), -1)


def steps_to(values):
    """`under` of a made-up trade: (g, B) of the largest B in `values` that C allows."""
    tried = []

    def under(limit):
        tried.append(limit)
        return next((g, b) for b, g in sorted(values.items(), reverse=True) if b <= limit)

    return under, tried


@given(st.dictionaries(st.integers(1, 10**9), st.integers(1, 10**9), max_size=30))
def test_the_best_max_term_in_few_tries(trade):
    # g falls strictly as B grows, as the sums of fewer and fewer checkpoints do.
    values, sums = {0: 2 * 10**9}, sorted(trade.values(), reverse=True)
    values |= {b: g for b, g in zip(sorted(trade), sums, strict=True) if sums.count(g) == 1}
    under, tried = steps_to(values)
    limit = best_max_term(under, 10**9, 1_000)
    assert sum(under(limit)) == min(g + b for b, g in values.items())
    assert len(tried) <= 3 * len(values) + 3


def test_max_terms_without_end_are_refused():
    # Every max term costs the same, so that none can be left out unseen.
    under, _ = steps_to({b: 1_000 - b for b in range(1_000)})
    assert best_max_term(under, 999, 2_100) == 0
    with pytest.raises(PlanError, match="use auto"):
        best_max_term(under, 999, 100)


def test_nested_skip_connections():
    # Each pair of checkpoints makes the largest segment smaller by just what it costs.
    count = 60
    edges = chain_edges(count) + [(i, count - 1 - i) for i in range(count // 2 - 1)]
    graph = from_edges(list(range(1, count + 1)), [1] * count, edges)
    assert acg.solve(graph).cost == sum(graph.bytes)


def test_residual_network_of_three_hundred_nodes():
    bytes_, time, edges = residual_network(50)
    found = acg.solve(from_edges(bytes_, time, edges))
    assert found.cost < sum(bytes_) / 5
    for bound in (found.max_term, 2 * found.max_term):
        under = acg.solve_under(from_edges(bytes_, time, edges), bound)
        assert under.max_term <= bound
        assert under.stored <= found.stored
