"""Programs of derivatives, liveness, and graphs with alternatives taken, without TensorFlow."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graph_diff import graph_edits
from tfckpt.fad.alternatives import find_alternatives
from tfckpt.fad.evaluate import run
from tfckpt.fad.liveness import Liveness
from tfckpt.fad.transform import take
from tfckpt.ir.edits import check_edits
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, Graph, Op, Tensor, check_graph
from tfckpt.ops.terms import Builder, select

pytestmark = pytest.mark.pure
X = np.linspace(-3, 3, 25)


def builder():
    made = Builder()
    return made, made.tensor((0, 0), "float32")


def value(made, term):
    return np.broadcast_to(run(made.program(), {(0, 0): X})[term.index], X.shape)


def test_numbers_cost_no_op():
    made, x = builder()
    one = made.number(1.0, "float32")
    assert (one * x).index == x.index
    assert (x * 0.0).number == 0.0
    assert (x + 0.0).index == x.index
    negative = -x
    assert (-negative).index == x.index
    assert (one * 3.0 + 1.0).number == 4.0
    assert (x * 2.0).node.type == "Mul"


def test_products_and_disjoint_sums_of_masks_stay_masks():
    made, x = builder()
    one, zero = made.number(1.0, "float32"), made.number(0.0, "float32")
    right, left = x.test("Greater", 1.0), x.test("Less", 2.0)
    inside = select(right, one, zero) * select(left, one * 0.5, zero)
    assert inside.two is not None and inside.two[1:] == (0.5, 0.0)
    np.testing.assert_array_equal(value(made, inside), np.where((X > 1) & (X < 2), 0.5, 0.0))
    elsewhere = select(right, zero, one)
    both = select(right, one, zero) + select(left, one, zero) * elsewhere
    assert both.two is not None
    np.testing.assert_array_equal(value(made, both), np.where((X > 1) | (X < 2), 1.0, 0.0))


MASKS = st.sampled_from([-2.0, -0.5, 0.0, 1.0, 2.5])
PIECES = st.tuples(MASKS, st.sampled_from([0.0, 1.0, -1.0, 0.5]), st.sampled_from([0.0, 1.0, 0.2]))


@given(st.lists(st.tuples(st.sampled_from("*+-s/"), PIECES), min_size=1, max_size=5))
def test_simplification_changes_no_value(steps):
    """Against numpy doing the same without any."""
    made, x = builder()
    term, wanted = x, X
    for what, (at, on, off) in steps:
        mask = x.test("Greater", at)
        piece = select(mask, made.number(on, "float32"), made.number(off, "float32"))
        numbers = np.where(at < X, on, off)
        if what == "*":
            term, wanted = term * piece, wanted * numbers
        elif what == "+":
            term, wanted = piece + term, wanted + numbers
        elif what == "-":
            term, wanted = piece - term, numbers - wanted
        elif what == "/":
            term, wanted = term / made.number(4.0, "float32"), wanted / 4.0
        else:
            term, wanted = select(mask, term, piece), np.where(at < X, wanted, numbers)
    np.testing.assert_allclose(value(made, term), wanted, atol=1e-12)


# A graph by hand: y = x * tanh(x) between two products, with a gradient nobody reads.

F32 = Tensor("float32", (8, 4), 128)


def step(names_and_inputs):
    index: dict[str, int] = {}
    ops = []
    for name, kind, inputs, region in names_and_inputs:
        ops.append(Op(name, kind, tuple((index[i], 0) for i in inputs), (), (F32,), region,
                      kind not in ("Placeholder",)))
        index[name] = len(ops) - 1
    return Graph("hand", tuple(ops), ((index["dw"], 0), (index["dv"], 0)), ())


HAND = step([
    ("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in"), FORWARD),
    ("t", "Tanh", ("x",), FORWARD), ("y", "Mul", ("x", "t"), FORWARD),
    ("out", "MatMul", ("y", "y"), FORWARD), ("g", "MatMul", ("out", "out"), BACKWARD),
    ("dv", "MatMul", ("y", "out"), BACKWARD), ("gt", "Mul", ("g", "t"), BACKWARD),
    ("gx", "Mul", ("g", "x"), BACKWARD), ("th", "TanhGrad", ("t", "gx"), BACKWARD),
    ("unread", "Mul", ("gx", "t"), BACKWARD), ("dx", "AddN", ("gt", "th"), BACKWARD),
    ("dw", "MatMul", ("in", "dx"), BACKWARD)])
ROOTS = [((i, 0),) if op.type != "Placeholder" else ((-1, -1),) for i, op in enumerate(HAND.ops)]


def test_what_nothing_reads_is_dead_and_what_only_the_sink_needs_dies_with_it():
    live = Liveness(HAND)
    assert [op.name for i, op in enumerate(HAND.ops) if not live.alive[i]] == ["unread"]
    names = {op.name: i for i, op in enumerate(HAND.ops)}
    dead = live.dies(names["dx"], [names["g"], names["x"], names["t"]])
    assert [HAND.ops[i].name for i in dead] == ["gt", "gx", "th", "dx"]


def test_an_alternative_of_the_graph_by_hand():
    offers = find_alternatives(HAND, ROOTS)
    alternative, = offers.alternatives
    assert (alternative.bytes_before, alternative.bytes_after) == (3 * 128, 2 * 128)
    after, edits = take(HAND, [alternative])
    check_graph(after)
    left = [op.name for op in after.ops if not op.name.endswith(tuple("0123456789"))]
    assert left == ["in", "x", "t", "y", "out", "g", "dv", "dw"]
    assert edits == graph_edits(HAND, after)
    check_edits(HAND, edits)
    assert {(r.op, r.index) for r in edits.rewires} == {("dw", 1), ("out", 0), ("out", 1)}
    assert edits.dropped == ("gt", "gx", "th", "unread", "dx")


def test_a_region_of_five_thousand_ops_is_no_recursion():
    ops = [("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in"), FORWARD)]
    last = "x"
    for n in range(5000):
        ops.append((f"n{n}", "Neg", (last,), FORWARD))
        last = f"n{n}"
    ops += [("out", "MatMul", (last, last), FORWARD), ("g", "MatMul", ("out", "out"), BACKWARD)]
    last = "g"
    for n in range(5000):
        ops.append((f"b{n}", "Neg", (last,), BACKWARD))
        last = f"b{n}"
    ops += [("dw", "MatMul", ("in", last), BACKWARD), ("dv", "MatMul", ("out", "g"), BACKWARD)]
    graph = step(ops)
    roots = [((i, 0),) for i in range(len(graph.ops))]
    assert not find_alternatives(graph, roots).alternatives  # nothing of it is read


def test_equal_across_hash_seeds():
    script = ("from tests.pure.test_fad import HAND, ROOTS\n"
              "from tfckpt.fad.alternatives import find_alternatives\n"
              "print(find_alternatives(HAND, ROOTS))")
    found = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                            check=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(
                                p for p in sys.path if p) + ":."}).stdout for seed in "12"}
    assert len(found) == 1
