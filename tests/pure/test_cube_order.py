"""Cubes in the order of the plain step: by hand, given what Grappler makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from tfckpt.ir.edits import Clone, Create, Edits, Rewire
from tfckpt.ir.graph import FORWARD, Graph, Op, Tensor
from tfckpt.rewrite.cube_order import cubes, multiply_in_plain_order
from tfckpt.rewrite.passes.manager import Node


def node(name: str, kind: str, *inputs: str) -> Node:
    return Node(name, kind, inputs)


def passed_on(edits) -> dict[str, str]:
    """Return what each new pass-through reads."""
    return {op.name: op.inputs[0] for op in edits.added if isinstance(op, Create)}


def cubic(base="s/h", power=3.0, name="s/Pow") -> Graph:
    """base = x; Pow = base^3, both in one scope; Sin reads it."""
    f32 = Tensor("float32", (8,), 32)

    def op(name, kind, *inputs, **attrs):
        return Op(name, kind, tuple((i, 0) for i in inputs), (), (f32,), FORWARD, True,
                  attrs=attrs, device="/device:CPU:0")

    return Graph("made", (op("x", "Placeholder"), op(base, "Tanh", 0),
                          op("three", "Const", value=power), op(name, "Pow", 1, 2),
                          op("s/end", "Sin", 3)), ((4, 0),), ())


def plain_of(*nodes):
    return {n.name: n for n in nodes}


SQUARE, OTHER_SQUARE = "s/ArithmeticOptimizer/Square", "a/Square"


def test_cubes_are_powers_of_three():
    assert [op.name for op in cubes(cubic())] == ["s/Pow"]
    assert cubes(cubic(power=2.0)) == []
    graph = cubic()
    product = dataclasses.replace(graph.ops[3], type="Mul")
    assert cubes(dataclasses.replace(graph, ops=(*graph.ops[:3], product, graph.ops[4]))) == []


@pytest.mark.parametrize(("square", "base"), [
    (OTHER_SQUARE, "s/h"), ("s/z", "s/A"), (OTHER_SQUARE, "s/B")])
def test_a_cube_whose_operands_keep_their_order_is_left_alone(square, base):
    """x sorts after its square in both, or before it in both."""
    plain = plain_of(node("s/Pow", "Mul", base, square), node(base, "Tanh", "x"),
                     node(square, "Square", base))
    assert multiply_in_plain_order(Edits(), cubic(base), plain) == Edits()


@pytest.mark.parametrize(("square", "base", "passed"), [
    ("t/Square", "s/h", "s/0Pow-tfckpt_base"),  # x came first; its own square would
    (OTHER_SQUARE, "s/A", "s/zPow-tfckpt_base")])
def test_else_the_cube_reads_what_sorts_as_in_the_plain_step(square, base, passed):
    plain = plain_of(node("s/Pow", "Mul", square, base), node(base, "Tanh", "x"),
                     node(square, "Square", base))
    found = multiply_in_plain_order(Edits(), cubic(base), plain)
    assert passed_on(found) == {passed: f"{base}:0"}
    assert found.rewires == (Rewire("s/Pow", 0, f"{passed}:0"),)
    assert found.added[0].device == "/device:CPU:0" and found.added[0].dtypes == ("float32",)
    assert base < square if passed[2] == "0" else base > square


def test_constants_in_between():
    """Grappler has c * x^3 as (c * x^2) * x: the reader of the cube reads x."""
    plain = plain_of(node("s/Pow", "Mul", "c", "t/Square"), node("s/end", "Mul", "s/Pow", "s/h"),
                     node("c", "Const"), node("t/Square", "Square", "s/h"), node("s/h", "Tanh"))
    assert passed_on(multiply_in_plain_order(Edits(), cubic(), plain))
    unread = {**plain, "s/end": node("s/end", "Sin", "s/Pow", "s/h")}
    assert multiply_in_plain_order(Edits(), cubic(), unread) == Edits()


@pytest.mark.parametrize("nodes", [
    [], [node("s/Pow", "Pow", "s/h", "three")],
    [node("s/Pow", "Mul", "s/h", "t/Square"), node("s/h", "Tanh"), node("t/Square", "Square", "o")],
    [node("s/Pow", "Mul", "s/h", "t/Square"), node("s/h", "Tanh"), node("t/Square", "Sin", "s/h")],
    [node("s/Pow", "Mul", "s/h", "t/Square"), node("t/Square", "Square", "s/h")]])
def test_where_no_product_of_x_and_its_square_is_found_it_is_left_alone(nodes):
    assert multiply_in_plain_order(Edits(), cubic(), plain_of(*nodes)) == Edits()


def test_copies_of_a_cube_keep_what_they_read():
    plain = plain_of(node("s/Pow", "Mul", "s/h", "t/Square"), node("s/h", "Tanh", "x"),
                     node("t/Square", "Square", "s/h"))
    fence = Create("tfckpt/fence_1", "NoOp", (), (), (), {})
    edits = Edits((fence, Clone("s/h-1", "s/h", ("x:0",)),
                   Clone("s/Pow-1", "s/Pow", ("s/h-1:0", "t:0"))),
                  (Rewire("s/end", 0, "s/Pow-1:0"), Rewire("s/Pow", 0, "seen:0")))
    found = multiply_in_plain_order(edits, cubic(), plain)
    assert [op.name for op in found.added] == [
        fence.name, "s/h-1", "s/0Pow-1-tfckpt_base", "s/Pow-1", "s/0Pow-tfckpt_base"]
    passed = passed_on(dataclasses.replace(found, added=found.added[1:]))
    assert passed == {"s/0Pow-1-tfckpt_base": "s/h-1:0", "s/0Pow-tfckpt_base": "seen:0"}
    assert found.clones == (edits.added[1], Clone("s/Pow-1", "s/Pow",
                                                  ("s/0Pow-1-tfckpt_base:0", "t:0")))
    assert found.rewires == (Rewire("s/end", 0, "s/Pow-1:0"),
                             Rewire("s/Pow", 0, "s/0Pow-tfckpt_base:0"))
