"""Equation (1) of re-forwarding and the division tree: figures, definitions, brute force."""

from __future__ import annotations

import pytest
from hypothesis import given

from benchmarks.paper_tables.joint_graphs import from_edges
from tests.support import reforwarding_model as model
from tests.support.graphs import paper_graphs
from tfckpt.errors import PlanError
from tfckpt.solvers import chen
from tfckpt.solvers.forward.division_tree import (
    BRANCHED,
    COMPLICATED,
    LINEAR,
    NO_SEGMENT,
    division_tree,
)
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.reforwarding import (
    ends,
    inputs_to_store,
    price,
    segments,
    splitting_vertices,
)

EMPTY = ForwardGraph((), (), (), (), (), (), ())


def graph_of(bytes_, edges):
    return from_edges(bytes_, [1] * len(bytes_), edges)


def unit(count, *edges):
    return graph_of([1] * count, edges)


def chain(*bytes_):
    return graph_of(bytes_, [(i, i + 1) for i in range(len(bytes_) - 1)])


# Figure 4 (c) of the 2018 paper, and figure 4 of the supplement: i, k, t, j = 0, 2, 4, 7, with a
# vertex on every way between them: ik, it, kt, kj, tj.
FIGURE_4 = graph_of([10, 3, 9, 4, 8, 5, 6, 11],
                    [(0, 1), (1, 2), (0, 3), (3, 4), (2, 4), (2, 5), (5, 7), (4, 6), (6, 7)])


def members(tree, index):
    """Return all vertices inside a segment."""
    found, below = [], [index]
    while below:
        segment = tree.segments[below.pop()]
        found.extend(segment.vertices)
        below.extend(p.segment for p in segment.parts if p.segment != NO_SEGMENT)
    return tuple(sorted(found))


def closed_sets_of(tree):
    """Return (i, j, vertices) of every connected closed set that the tree stands for."""
    found = set()
    for index, segment in enumerate(tree.segments):
        if segment.kind == COMPLICATED:
            found.add((segment.source, segment.target, members(tree, index)))
        if segment.kind != LINEAR:
            continue
        points = (segment.source, *segment.vertices, segment.target)
        inside = [members(tree, p.segment) if p.segment != NO_SEGMENT else ()
                  for p in segment.parts]
        for a in range(len(points)):
            for b in range(a + 2, len(points)):
                between = points[a + 1:b] + sum(inside[a:b], ())
                found.add((points[a], points[b], tuple(sorted(between))))
    return found


def test_supplement_figure_2():
    # Checkpoints 10 + 9 + 10 = 29; the re-forwards take 8 and 6 + 7 = 13; together 42.
    found = price(chain(10, 8, 9, 6, 7, 10), (0, 2, 5))
    assert (found.stored, found.max_term, found.cost) == (29, 13, 42)


def test_segments_by_hand():
    assert segments(FIGURE_4, (0, 2, 4, 7)) == (
        (0, 2, (1,)), (0, 4, (3,)), (2, 7, (5,)), (4, 7, (6,)))
    assert price(FIGURE_4, (0, 2, 4, 7)).cost == 10 + 9 + 8 + 11 + 6
    assert segments(FIGURE_4, (0, 7)) == ((0, 7, (1, 2, 3, 4, 5, 6)),)
    # Two branches between the same checkpoints are recomputed one after the other.
    assert price(unit(4, (0, 1), (0, 2), (1, 3), (2, 3)), (0, 3)).max_term == 1


def test_virtual_ends_cost_nothing():
    two = graph_of([7, 2], [])
    assert ends(two) == (-1, 2)
    assert segments(two, ()) == ((-1, 2, (0,)), (-1, 2, (1,)))
    assert price(two, ()).cost == 7
    assert ends(unit(3, (0, 2), (1, 2))) == (-1, 2)
    assert price(EMPTY, ()).cost == 0


@pytest.mark.parametrize(("graph", "checkpoints", "complaint"), [
    (FIGURE_4, (0, 2, 7), "'v3' has 2 checkpoints before it and 1 after"),
    (FIGURE_4, (0, 4, 7), "'v1' has 1 checkpoints before it and 2 after"),
    (FIGURE_4, (0, 2, 4), "'v7' is an end"),
    (FIGURE_4, (0, 8), "8 is no vertex"),
])
def test_sets_that_are_no_checkpoints(graph, checkpoints, complaint):
    with pytest.raises(PlanError, match=complaint):
        price(graph, checkpoints)


@given(paper_graphs(largest=7))
def test_price_is_equation_1(graph):
    bytes_, _, edges = graph
    forward, defined = graph_of(bytes_, edges), model.Graph(bytes_, edges)
    for stored in defined.subsets():
        vertices = [v for v in range(len(bytes_)) if (stored | defined.ends) >> v + 1 & 1]
        expected = model.cost(defined, stored | defined.ends)
        if expected is None:
            with pytest.raises(PlanError):
                price(forward, vertices)
        else:
            assert price(forward, vertices).cost == expected


def test_figure_3_a_closed_sets():
    # Between v2 and v4 nothing can be cut out, since v3 depends on v1; between v1 and v3 v2 can.
    tree = division_tree(unit(4, (0, 1), (1, 2), (0, 2), (2, 3)))
    assert closed_sets_of(tree) == {(0, 2, (1,)), (0, 3, (1, 2))}


def test_figure_4_a_linear():
    tree = division_tree(chain(1, 2, 4))
    (root,) = tree.segments
    assert (root.kind, root.vertices, root.bytes) == (LINEAR, (1,), 2)
    assert [(p.source, p.target) for p in root.parts] == [(0, 1), (1, 2)]


def test_figure_4_b_branched():
    tree = division_tree(unit(5, (0, 1), (1, 4), (0, 2), (2, 4), (0, 3), (3, 4), (0, 4)))
    root = tree.segments[-1]
    assert (root.kind, root.vertices) == (BRANCHED, ())
    assert [members(tree, p.segment) if p.segment != NO_SEGMENT else () for p in root.parts] == [
        (), (1,), (2,), (3,)]


def test_figure_4_c_complicated():
    tree = division_tree(FIGURE_4)
    root = tree.segments[-1]
    assert (root.kind, root.vertices, root.bytes) == (COMPLICATED, (2, 4), 35)
    assert [(p.source, p.target) for p in root.parts] == [(0, 2), (0, 4), (2, 4), (2, 7), (4, 7)]
    assert str(tree) == "\n".join([
        "complicated v0 -> v7, 35 bytes: v2, v4",
        "  linear v0 -> v2, 3 bytes: v1",
        "  linear v0 -> v4, 4 bytes: v3",
        "  linear v2 -> v7, 5 bytes: v5",
        "  linear v4 -> v7, 6 bytes: v6"])


def test_complicated_inside_complicated():
    # A bridge 0, 1, 2, 5 whose way from 1 to 5 is a bridge 1, 3, 4, 5 itself.
    tree = division_tree(unit(6, (0, 1), (0, 2), (1, 2), (2, 5),
                              (1, 3), (1, 4), (3, 4), (3, 5), (4, 5)))
    assert str(tree) == "\n".join([
        "complicated v0 -> v5, 4 bytes: v1, v2",
        "  complicated v1 -> v5, 2 bytes: v3, v4"])


@given(paper_graphs(largest=8))
def test_the_tree_contains_every_closed_set(graph):
    bytes_, _, edges = graph
    if len(bytes_) > 1:
        tree = division_tree(graph_of(bytes_, edges))
        assert closed_sets_of(tree) == model.connected_closed_sets(bytes_, edges)


def test_trivial_trees():
    assert division_tree(EMPTY).segments == division_tree(unit(1)).segments == ()
    tree = division_tree(unit(2, (0, 1)))
    assert (tree.segments, str(tree)) == ((), "v0 -> v1")
    assert str(division_tree(graph_of([7, 2], []))) == "\n".join([
        "branched (start) -> (end), 9 bytes",
        "  linear (start) -> (end), 7 bytes: v0",
        "  linear (start) -> (end), 2 bytes: v1"])


def test_a_deep_tree_needs_no_recursion():
    # Around each skip connection another one: as many levels as vertices.
    count = 5_000
    edges = [(i, i + 1) for i in range(count - 1)]
    edges += [(i, count - 1 - i) for i in range(count // 2 - 1)]
    tree = division_tree(unit(count, *edges))
    assert len(tree.segments) > count / 2
    assert len(str(tree).splitlines()) == len(tree.segments)


def test_entangled_graphs_are_refused():
    edges = [(i, j) for i in range(2_400) for j in (i + 1, i + 2) if j < 2_400]
    with pytest.raises(PlanError, match="use auto"):
        division_tree(unit(2_400, *edges))


@given(paper_graphs(largest=8))
def test_splitting_vertices_are_those_on_every_path(graph):
    bytes_, _, edges = graph
    defined = model.Graph(bytes_, edges)
    everything = (1 << len(defined.bytes)) - 1
    expected = tuple(
        v for v in range(len(bytes_)) if v + 1 in (defined.source, defined.target)
        or not defined.grow(1 << defined.source, everything & ~(1 << v + 1), (defined.after,))
        >> defined.target & 1)
    assert splitting_vertices(graph_of(bytes_, edges)) == expected


def test_inputs_that_a_product_needs():
    graph = unit(4, (0, 1), (0, 2), (1, 3), (2, 3))
    assert inputs_to_store(graph, (3,)) == {1, 2}
    assert inputs_to_store(graph, (1,)) == frozenset()
    with pytest.raises(PlanError, match="vertex 4"):
        inputs_to_store(graph, (4,))


def test_chen_on_splitting_vertices_by_hand():
    assert chen.manual(chain(*[1] * 9)).vertices == (0, 3, 6, 8)
    # Blocks 0 -> (1, 2) -> 3 -> (4, 5) -> 6: three splitting vertices, every second is stored.
    blocks = unit(7, (0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6))
    assert chen.manual(blocks).vertices == (0, 6)
    assert chen.manual(blocks, budget=3).vertices == (0, 3, 6)
    assert chen.manual(blocks, budget=100).vertices == (0, 6)
    assert chen.manual(EMPTY).vertices == ()
    with pytest.raises(PlanError):
        chen.manual(blocks, budget=-1)


@given(paper_graphs(largest=8))
def test_chen_on_splitting_vertices_is_never_better_than_the_optimum(graph):
    bytes_, _, edges = graph
    forward = graph_of(bytes_, edges)
    for budget in (None, 0, 3, 10):
        assert chen.manual(forward, budget).cost >= model.least_cost(bytes_, edges)
