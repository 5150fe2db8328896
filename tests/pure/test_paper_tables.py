"""The papers' networks: vertices, cut-offs, and optima by a slower way."""

from __future__ import annotations

import networkx as nx
import pytest

from benchmarks.paper_tables import nas_graphs, reforwarding_graphs
from benchmarks.paper_tables.reforwarding import ROWS, cut_off
from tfckpt.plan.division_tree import COMPLICATED, division_tree
from tfckpt.plan.reforwarding import splitting_vertices
from tfckpt.plan.solvers import acg

ROW = {row.name: row for row in ROWS}
TABLE_2 = [row.name for row in ROWS if row.cut_off is not None]


def cost_by_networkx(graph, checkpoints):
    """Equation (1), the segments being found by networkx."""
    joined = nx.Graph((u, v) for u, after in enumerate(graph.successors) for v in after)
    joined.remove_nodes_from(checkpoints)
    largest = max(sum(graph.bytes[v] for v in part) for part in nx.connected_components(joined))
    return sum(graph.bytes[v] for v in checkpoints) + largest


@pytest.mark.parametrize("name", TABLE_2)
def test_table_2_comes_out(name):
    row = ROW[name]
    graph = row.build()
    assert len(graph) == row.vertices
    found = row.solver(graph)
    assert found.cost == cost_by_networkx(graph, found.vertices)
    assert cut_off(graph, found) >= row.cut_off - 1


def test_tensor_sizes_that_the_paper_states():
    # AlexNet: the input holds 150,528 values, the first convolution with its activation 64x55x55.
    graph = reforwarding_graphs.alexnet()
    assert graph.bytes[:2] == (4 * 150_528, 4 * 193_600)


@pytest.mark.parametrize("depth", sorted(reforwarding_graphs.VGG))
def test_vgg_by_trying_every_max_term(depth):
    graph = reforwarding_graphs.vgg(depth)
    count, size = len(graph), graph.bytes
    between = {(a, b): sum(size[a + 1:b]) for a in range(count) for b in range(a + 1, count)}
    totals = []
    for limit in sorted(set(between.values())):
        best = [size[0]] + [0] * (count - 1)
        for b in range(1, count):
            best[b] = size[b] + min(best[a] for a in range(b) if between[a, b] <= limit)
        totals.append(best[-1] + limit)
    assert ROW[f"VGG{depth}"].solver(graph).cost == min(totals)


def test_two_streams_have_no_splitting_vertex():
    graph = reforwarding_graphs.two_streams()
    assert len(graph) == 35
    assert splitting_vertices(graph) == (0, 34)
    assert division_tree(graph).segments[-1].kind == COMPLICATED


@pytest.mark.parametrize("build", [nas_graphs.nasnet, nas_graphs.amoebanet, nas_graphs.darts])
def test_searched_cells_are_about_a_thousand_vertices(build):
    graph = build()
    assert 1000 < len(graph) < 1250
    found = acg.solve(graph)
    assert found.cost == cost_by_networkx(graph, found.vertices) < sum(graph.bytes) / 3
