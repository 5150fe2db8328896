"""Groups of ops that are one vertex: whose buffers their results may take over."""

from __future__ import annotations

import pytest

from tfckpt.cost.build import build_cost_graph
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Op, Tensor

KIND = Tensor("float32", (256, 1024), 2**20)


def _op(name, kind, *reads, region=FORWARD):
    return Op(name, kind, reads, (), (KIND,), region, region == FORWARD)


@pytest.mark.parametrize("outer, donors", [
    ((2, 3), {"a:0", "b:0"}),  # (a * b) * c: c is there when the inner product is made
    ((2, 0), {"b:0"}),  # (a * b) * a: so is a
], ids=["another", "the same"])
def test_a_group_takes_over_what_its_first_op_alone_reads(outer, donors):
    x = Op("x", "Placeholder", (), (), (KIND,), FORWARD, False)
    ops = (_op("a", "Tanh", (4, 0)), _op("b", "Sin", (4, 0)), _op("inner", "Mul", (0, 0), (1, 0)),
           _op("c", "Cos", (4, 0)), x,
           _op("outer", "Mul", *((n, 0) for n in outer)),
           _op("gradient", "Neg", (5, 0), region=BACKWARD))
    order = (4, 0, 1, 2, 3, 5, 6)  # the batch comes first
    place = {old: new for new, old in enumerate(order)}
    graph = Graph("step", tuple(
        Op(op.name, op.type, tuple((place[i], slot) for i, slot in op.inputs), (), op.outputs,
           op.region, op.pure) for op in (ops[n] for n in order)), ((6, 0),), ())
    cost = build_cost_graph(graph)
    (group,) = (v for v in cost.vertices if len(v.ops) == 2)
    assert group.name == "outer"
    assert {cost.storages[r].name for _, r in group.reuses} == donors
