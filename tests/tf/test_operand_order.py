"""Sums and cubes in the order of the plain step: by hand, given what Grappler makes of it.

Here and not among the pure tests because `tfckpt.rewrite.sums` and `cubes` import TensorFlow; no
step is run. `tests/tf/test_sums.py` has real ones.
"""

from __future__ import annotations

import dataclasses
import types

import pytest
import tensorflow as tf

from tfckpt.capture.tfgraph import capture
from tfckpt.edits import Clone, Create, Edits, Rewire
from tfckpt.graph import FORWARD, Graph, Op, Tensor
from tfckpt.rewrite.cubes import cubes, multiply_in_plain_order
from tfckpt.rewrite.sums import add_in_plain_order, equal_ops

VECTOR = tf.TensorSpec((8,), tf.float32, name="x")


def node(name: str, kind: str, *inputs: str):
    """What matters of a NodeDef."""
    return types.SimpleNamespace(name=name, op=kind, input=list(inputs))


def passed_on(edits) -> dict[str, str]:
    """What each new pass-through reads."""
    return {op.name: op.inputs[0] for op in edits.added if isinstance(op, Create)}


def traced(body, spec=VECTOR):
    return tf.function(body, autograph=False).get_concrete_function(spec).graph


# Sums.


def summed(x, number=tf.add_n):
    """b/Sin and a/Sin are equal; the sum reads b's."""
    twin, early = tf.sin(x, name="a/Sin"), tf.sin(x, name="b/Sin")
    total = number([tf.cos(x, name="m/Cos"), early, tf.exp(x, name="q/Exp")], name="total")
    return total, twin


def ordered(edits, made, body=summed, spec=VECTOR):
    """The edits after the sums' order was looked at, given the node that became of "total"."""
    live = traced(body, spec)
    asked = []

    def plain():
        asked.append(1)
        return {"total": made} if made else {}

    return add_in_plain_order(edits, capture(live), live, plain), asked


@pytest.mark.parametrize(("read", "order"), [
    (["a/Sin", "m/Cos", "q/Exp"], ["b/Sin:0", "m/Cos:0", "q/Exp:0"]),
    (["q/Exp", "m/Cos", "b/Sin"], ["q/Exp:0", "m/Cos:0", "b/Sin:0"]),
    (["m/Cos:0", "^q/Exp", "q/Exp", "a/Sin"], ["m/Cos:0", "q/Exp:0", "b/Sin:0"]),
    # one is called what nobody knows: it is the one that is left
    (["m/Cos", "folded/Exp", "a/Sin"], ["m/Cos:0", "q/Exp:0", "b/Sin:0"])])
def test_a_sum_reads_its_terms_in_grapplers_order(read, order):
    edits, asked = ordered(Edits(), node("total", "AddN", *read))
    assert asked
    names = [f"total-tfckpt_term{place:04d}" for place in range(3)]
    assert passed_on(edits) == dict(zip(names, order, strict=True))
    terms = ["m/Cos:0", "b/Sin:0", "q/Exp:0"]
    assert edits.rewires == tuple(
        Rewire("total", terms.index(tensor), f"{name}:0")
        for name, tensor in zip(names, order, strict=True))
    assert all(op.dtypes == ("float32",) for op in edits.added)


@pytest.mark.parametrize("made", [
    None, node("total", "Mul", "a/Sin", "m/Cos", "q/Exp"),
    node("total", "AddN", "m/Cos", "q/Exp"), node("total", "AddN", "x", "y", "a/Sin"),
    node("total", "AddN", "m/Cos", "m/Cos", "a/Sin", "q/Exp"),
    node("total", "AddN", "m/Cos:1", "q/Exp:1", "a/Sin")])
def test_where_it_is_unclear_what_became_of_a_sum_it_is_left_alone(made):
    edits, _ = ordered(Edits(), made)
    assert edits == Edits()


def two_terms(x):
    twin, early = tf.sin(x, name="a/Sin"), tf.sin(x, name="b/Sin")
    return tf.add_n([tf.cos(x, name="m/Cos"), early], name="total"), twin


def no_equal(x):
    return tf.add_n([tf.cos(x), tf.sin(x), tf.exp(x)], name="total")


def integers(x):
    y = tf.cast(x, tf.int32)
    return tf.add_n([y + 1, y + 1, y], name="total")


@pytest.mark.parametrize("body", [two_terms, no_equal, integers])
def test_grappler_is_not_asked_where_no_order_is_open(body):
    edits, asked = ordered(Edits(), None, body)
    assert edits == Edits() and not asked
    assert not ordered(Edits(dropped=("total",)), None)[1]  # a sum that goes away


@pytest.mark.parametrize("kind", [tf.float16, tf.bfloat16, tf.float64, tf.complex64])
def test_what_is_rounded_is_ordered(kind):
    assert ordered(Edits(), None, lambda x: summed(tf.cast(x, kind)))[1]


def test_copies_of_a_sum_and_what_was_rewired_keep_what_they_read():
    edits = Edits((Clone("total-1", "total", ("m-1:0", "s-1:0", "q-1:0")),
                   Clone("other", "m/Cos", ("x:0",))),
                  (Rewire("total", 1, "s-1:0"), Rewire("q/Exp", 0, "other:0")))
    found, _ = ordered(edits, node("total", "AddN", "q/Exp", "a/Sin", "m/Cos"))
    names = [op.name for op in found.added]
    assert names == [*[f"total-1-tfckpt_term000{i}" for i in range(3)], "total-1", "other",
                     *[f"total-tfckpt_term000{i}" for i in range(3)]]
    assert list(passed_on(found).values()) == ["q-1:0", "s-1:0", "m-1:0",
                                               "q/Exp:0", "s-1:0", "m/Cos:0"]
    (copy, other) = found.clones
    assert copy.inputs == ("total-1-tfckpt_term0002:0", "total-1-tfckpt_term0001:0",
                           "total-1-tfckpt_term0000:0")
    assert other == edits.added[1]
    assert found.rewires == (
        Rewire("total", 1, "total-tfckpt_term0001:0"), Rewire("q/Exp", 0, "other:0"),
        Rewire("total", 2, "total-tfckpt_term0000:0"),
        Rewire("total", 0, "total-tfckpt_term0002:0"))


def classes_of(body, spec=VECTOR):
    live = traced(body, spec)
    graph = capture(live)
    return {op.name: c for op, c in zip(graph.ops, equal_ops(graph, live), strict=True)}


def test_which_ops_are_equal():
    def body(x):
        def named(name):
            with tf.name_scope(name):
                big = tf.constant(1.5, shape=(1 << 13,))
                return [tf.sin(x), tf.sin(x + 1.0), tf.split(tf.sin(x), 2)[1], big, -big,
                        tf.constant([1.0, 2.0]) * 3.0, tf.zeros_like(x), tf.zeros_like(tf.sin(x)),
                        tf.cast(x, tf.int32), tf.ones_like(x)]
        one, two = named("one"), named("two")
        with tf.control_dependencies([tf.cos(x, name="gate")]):
            waits = tf.sin(x, name="waits")
        return one, two, waits, tf.random.uniform((2,), seed=1), tf.cast(x, tf.int64)

    found = classes_of(body)
    for name, number in found.items():
        if name.startswith("one/"):
            assert found["two/" + name[4:]] == number, name
    assert len({found[n] for n in ("one/Sin", "one/Sin_1", "waits", "one/zeros_like")}) == 4
    # what depends on a shape alone is one, whatever it reads
    assert found["one/zeros_like"] == found["one/zeros_like_1"] != found["one/ones_like"]
    assert found["Cast"] != found["one/Cast"]


def test_large_constants_and_open_shapes_have_no_equal():
    def body(x):
        large = [tf.constant([float(i) for i in range(1 << 14)] + more) for more in ([], [1.0])]
        same = [tf.constant([float(i) for i in range(1 << 14)] + more) for more in ([], [1.0])]
        return [tf.reduce_sum(value) for value in (*large, *same)], tf.zeros_like(x), (
            tf.zeros_like(tf.sin(x)))

    found = classes_of(body, tf.TensorSpec((None,), tf.float32, name="x"))
    # 64 KiB are compared, 4 bytes more are not
    assert found["Const"] == found["Const_2"] and found["Const_1"] != found["Const_3"]
    assert found["zeros_like"] != found["zeros_like_1"]


# Cubes.


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


@pytest.mark.parametrize(("square", "base"), [(OTHER_SQUARE, "s/h"), ("s/z", "s/A")])
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
    edits = Edits((Clone("s/h-1", "s/h", ("x:0",)), Clone("s/Pow-1", "s/Pow", ("s/h-1:0", "t:0"))),
                  (Rewire("s/end", 0, "s/Pow-1:0"), Rewire("s/Pow", 0, "seen:0")))
    found = multiply_in_plain_order(edits, cubic(), plain)
    assert [op.name for op in found.added] == [
        "s/h-1", "s/0Pow-1-tfckpt_base", "s/Pow-1", "s/0Pow-tfckpt_base"]
    assert passed_on(found) == {"s/0Pow-1-tfckpt_base": "s/h-1:0", "s/0Pow-tfckpt_base": "seen:0"}
    assert found.clones == (edits.added[0], Clone("s/Pow-1", "s/Pow",
                                                  ("s/0Pow-1-tfckpt_base:0", "t:0")))
    assert found.rewires == (Rewire("s/end", 0, "s/Pow-1:0"),
                             Rewire("s/Pow", 0, "s/0Pow-tfckpt_base:0"))
