"""Sums in the order of the plain step: traced graphs, given what Grappler makes of them.

No step is run; `tests/tf/test_sums.py` has real ones, `tests/pure/test_passes.py` none at all.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfckpt.capture.tfgraph import capture
from tfckpt.ir.edits import Clone, Create, Edits, Rewire
from tfckpt.rewrite.passes.manager import Node
from tfckpt.rewrite.plain_step import LiveStep
from tfckpt.rewrite.summation_order import add_in_plain_order, equal_ops

VECTOR = tf.TensorSpec((8,), tf.float32, name="x")


def node(name: str, kind: str, *inputs: str) -> Node:
    return Node(name, kind, inputs)


def passed_on(edits) -> dict[str, str]:
    """Return what each new pass-through reads."""
    return {op.name: op.inputs[0] for op in edits.added if isinstance(op, Create)}


def traced(body, spec=VECTOR):
    return tf.function(body, autograph=False).get_concrete_function(spec).graph


def summed(x, number=tf.add_n):
    """b/Sin and a/Sin are equal; the sum reads b's."""
    twin, early = tf.sin(x, name="a/Sin"), tf.sin(x, name="b/Sin")
    total = number([tf.cos(x, name="m/Cos"), early, tf.exp(x, name="q/Exp")], name="total")
    return total, twin


def ordered(edits, made, body=summed, spec=VECTOR):
    """Return the edits after the sums' order was looked at, given the node that became of "total".
    """
    live = traced(body, spec)
    asked = []

    class Plain(LiveStep):
        def optimised(self):
            asked.append(1)
            return {"total": made} if made else {}

    return add_in_plain_order(edits, capture(live), Plain(live)), asked


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


def test_what_nobody_knows_is_not_taken_for_the_first_op():
    def body(x):
        twin, early = tf.sin(x, name="a/Sin"), tf.sin(x, name="b/Sin")
        return tf.add_n([x, early, tf.exp(x, name="q/Exp")], name="total"), twin

    assert ordered(Edits(), node("total", "AddN", "new", "newer", "a/Sin"), body)[0] == Edits()
    assert ordered(Edits(), node("total", "AddN", "new", "q/Exp", "a/Sin"), body)[0] != Edits()


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
    return {op.name: c for op, c in zip(graph.ops, equal_ops(graph, LiveStep(live)), strict=True)}


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
    unknown = classes_of(lambda x: (tf.zeros_like(x), tf.zeros_like(tf.sin(x))),
                         tf.TensorSpec(None, tf.float32, name="x"))
    assert unknown["zeros_like"] != unknown["zeros_like_1"]
