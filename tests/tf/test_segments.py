"""Which loops may be recomputed in segments, read from their bodies."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.support import process
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.build import build_cost_graph
from tfckpt.driving.answers import alike
from tfckpt.driving.parts import Part, Proposal
from tfckpt.ir.target import HERE
from tfckpt.plan.choosing.planned import baseline
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops.choice import segmented
from tfckpt.plan.loops.segments import Cut
from tfckpt.plan.planner import plan_step
from tfckpt.request.budget import Budget

ROWS, WIDTH, LENGTH = 8, 4, 6


def _captured(forward, compiled=False):
    process.fresh()
    weight = tf.Variable(tf.ones((WIDTH, WIDTH)))

    @tf.function(jit_compile=compiled)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x, weight))
        return tape.gradient(loss, weight)

    return capture(step.get_concrete_function(tf.TensorSpec((ROWS, WIDTH))).graph,
                   compiled=compiled)


def _loops(graph):
    return [op for op in graph.ops if op.loop is not None and op.region == "forward"]


def _plain(x, weight):
    return tf.while_loop(lambda i, h: i < LENGTH, lambda i, h: (i + 1, tf.tanh(h @ weight)),
                         (0, x))[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_known_of_a_plain_loop(compiled):
    graph = _captured(_plain, compiled)
    (loop,) = _loops(graph)
    segments = loop.loop.segments
    gradient = next(op for op in graph.ops if op.name == segments.gradient)
    assert gradient.region == "backward" and not graph.refused
    assert loop.pure is not compiled
    assert [loop.outputs[slot].dtype for slot in segments.states] == ["int32", "int32", "float32"]
    assert {loop.outputs[slot].dtype for slot in segments.lists} == {"variant"}
    assert [gradient.inputs[n] for n in segments.residuals] == [
        (graph.ops.index(loop), slot) for slot in segments.lists]
    assert gradient.inputs[segments.trips] == (graph.ops.index(loop), 0)


def _read_and_written(x, weight):
    rows = tf.TensorArray(tf.float32, LENGTH + 1, element_shape=(ROWS, WIDTH),
                          clear_after_read=False).write(0, x)
    return tf.while_loop(
        lambda i, rows: i < LENGTH,
        lambda i, rows: (i + 1, rows.write(i + 1, tf.tanh(rows.read(i) @ weight))),
        (0, rows))[1].read(LENGTH)


def _two_sums(x, weight):
    """Both states are read several times: their gradients are sums of what the body is handed."""
    return tf.while_loop(
        lambda i, a, b, c: i < LENGTH,
        lambda i, a, b, c: (i + 1, tf.add_n([a, b, tf.tanh(a @ weight)]), tf.sin(b), c),
        (0, x, x, x))[1]


@pytest.mark.parametrize("forward, reason", [
    (_read_and_written, "its body reads the list"),
    (_two_sums, "its body adds several things that it is handed"),
])
def test_what_is_refused(forward, reason):
    graph = _captured(forward)
    assert all(op.loop.segments is None for op in _loops(graph))
    assert any(f"not recomputed in segments: {reason}" in line for line in graph.refused), (
        graph.refused)


def test_a_loop_in_a_loop_under_xla():
    def forward(x, weight):
        return tf.while_loop(
            lambda i, h: i < LENGTH, lambda i, h: (i + 1, _plain(h, weight)), (0, x),
            maximum_iterations=LENGTH)[1]

    for compiled in (False, True):
        graph = _captured(forward, compiled=compiled)
        assert _loops(graph)[0].loop.segments is not None, graph.refused


def test_proposals_that_cut_a_loop_otherwise_are_others():
    """Their schedules are one: what had been tried of one was taken for the other's."""
    plain = _captured(_plain)
    cost = build_cost_graph(plain)
    part = Part("", None, Budget(), HERE, plain, cost, baseline(cost, HERE))

    def proposal(cut):
        graph, changed, edits = segmented(plain, cost, {_loops(plain)[0].name: cut}, HERE)
        planned = plan_step(changed, solver="store_all", plain=part.plain)
        return Proposal(part, Decision(graph, changed, planned, (), edits, (("loop", cut),)))

    one, other, again = map(proposal, (Cut(2), Cut(3), Cut(2)))
    assert one.decision.planned.plan == other.decision.planned.plan
    assert not alike(one, other) and alike(one, again)
