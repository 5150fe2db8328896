"""The order of a program, recovered from a graph that is in any topological order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import seeds
from tfckpt.capture.order import in_program_order
from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import CaptureError
from tfckpt.ir.graph import (
    BACKWARD,
    FORWARD,
    OTHER,
    UPDATE,
    Graph,
    Op,
    Tensor,
    check_graph,
    depth_first_order,
)
from tfckpt.solvers.forward.cuts import narrow_cuts

UNIT = Tensor("float32", (1 << 16,), 1 << 18)


class Writer:
    """Writes a graph down as a program would."""

    def __init__(self):
        self.ops: list[Op] = []
        self.index: dict[str, int] = {}

    def op(self, name, kind, *inputs, region=FORWARD, controls=()):
        self.index[name] = len(self.ops)
        self.ops.append(Op(name, kind, tuple((self.index[i], 0) for i in inputs),
                           tuple(self.index[c] for c in controls), (UNIT,), region,
                           kind not in ("Const", "AssignVariableOp")))


def with_dropout(layers: int) -> Graph:
    """Tanh, dropout, and a weight gradient in each layer; everything weighs a unit.

    GELU's derivative has ops like `slope`, which read the forward alone.
    """
    write = Writer()
    write.op("x", "Const", region=OTHER)
    write.op("seed", "Const", region=OTHER)
    here = "x"
    for k in range(layers):
        write.op(f"h{k}", "Tanh", here)
        write.op(f"noise{k}", "StatelessRandomUniformV2", "seed")
        write.op(f"d{k}", "Mul", f"h{k}", f"noise{k}")
        here = f"d{k}"
    write.op("g", "Neg", here, region=BACKWARD)
    here = "g"
    for k in reversed(range(layers)):
        write.op(f"gd{k}", "Mul", here, f"noise{k}", region=BACKWARD)
        write.op(f"slope{k}", "Square", f"h{k}", region=BACKWARD)
        write.op(f"gh{k}", "TanhGrad", f"slope{k}", f"gd{k}", region=BACKWARD)
        write.op(f"update{k}", "AssignVariableOp", "x", f"gh{k}", region=UPDATE)
        here = f"gh{k}"
    return Graph("step", tuple(write.ops), (), tuple(
        i for i, op in enumerate(write.ops) if op.region == UPDATE))


def reordered(graph: Graph, choose) -> Graph:
    """Return the graph in another topological order: of the ops that are ready `choose` takes one.
    """
    left = list(range(len(graph.ops)))
    order: list[int] = []
    while left:
        ready = [i for i in left if not any(
            s in left for s in [*(s for s, _ in graph.ops[i].inputs), *graph.ops[i].controls])]
        order.append(choose(ready))
        left.remove(order[-1])
    write = Writer()
    for i in order:
        op = graph.ops[i]
        write.op(op.name, op.type, *(graph.ops[s].name for s, _ in op.inputs), region=op.region,
                 controls=[graph.ops[c].name for c in op.controls])
    return Graph(graph.name, tuple(write.ops), tuple(
        (order.index(i), slot) for i, slot in graph.fetches), tuple(
        order.index(i) for i in graph.sinks))


def described(graph: Graph):
    """Return all properties of a graph except its order."""
    def name(i):
        return graph.ops[i].name

    return (sorted((op.name, op.type, op.region, [(name(s), n) for s, n in op.inputs],
                    [name(c) for c in op.controls]) for op in graph.ops),
            [(name(i), slot) for i, slot in graph.fetches], sorted(map(name, graph.sinks)))


def test_side_branches_stand_where_they_are_read():
    graph = in_program_order(reordered(with_dropout(3), lambda ready: ready[-1]))
    names = [op.name for op in graph.ops if op.region != OTHER]
    assert names == ["h0", "noise0", "d0", "h1", "noise1", "d1", "h2", "noise2", "d2", "g",
                     "gd2", "slope2", "gh2", "gd1", "update2", "slope1", "gh1", "gd0", "update1",
                     "slope0", "gh0", "update0"]


@given(seeds, st.integers(1, 6))
def test_nothing_but_the_order_changes(seed, layers):
    rng = random.Random(seed)
    graph = reordered(with_dropout(layers), rng.choice)
    found = in_program_order(graph)
    check_graph(found)
    assert described(found) == described(graph)


@pytest.mark.parametrize("choose", [
    pytest.param(lambda ready: ready[-1], id="last"),
    pytest.param(random.Random(0).choice, id="random")])
def test_cuts_are_as_narrow_as_in_the_graph_that_was_written(choose):
    def widths(graph):
        return [cut.bytes for cut in narrow_cuts(build_cost_graph(graph))]

    written = with_dropout(12)
    shuffled = reordered(written, choose)
    assert widths(written) == 12 * [UNIT.bytes]  # one after each layer
    assert len(widths(shuffled)) < 12
    assert widths(in_program_order(shuffled)) == widths(written)


def test_control_edges_and_long_chains():
    write = Writer()
    write.op("v0", "Neg")
    for k in range(1, 3000):
        write.op(f"v{k}", "Neg", f"v{k - 1}", controls=("v0",))
    graph = Graph("chain", tuple(write.ops), ((2999, 0),), ())
    assert in_program_order(graph) == graph


@pytest.mark.parametrize("sources", [
    {"a": "a"}, {"a": "b", "b": "a"}, {"a": "bc", "b": "c", "c": "d", "d": "eb", "e": ""}])
def test_a_cycle_is_refused_and_not_searched_for_ever(sources):
    with pytest.raises(CaptureError, match="is on a cycle"):
        depth_first_order("a", sources.__getitem__)


def test_sources_come_first():
    sources = {"a": "bc", "b": "cd", "c": "d", "d": "", "e": "a"}
    assert depth_first_order("ea", sources.__getitem__) == list("dcbae")
