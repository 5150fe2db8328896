"""Which loops may be recomputed: those whose bodies may run twice and whose variables stay."""

from __future__ import annotations

import dataclasses

import keras
import pytest
import tensorflow as tf

from tests.support import process
from tests.support.carriers import planned
from tests.support.passes import replace_pass
from tfckpt.capture.tfgraph import capture
from tfckpt.capture.variables import ANY, may_write
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import Clone, Edits, check_edits
from tfckpt.ir.graph import BACKWARD, FORWARD
from tfckpt.ops import record
from tfckpt.rewrite.passes.state_writes import delay_writes

ROWS, WIDTH, TRIPS = 8, 4, 6


def _captured(body, *arguments, after=None, compiled=False):
    """Return the graph of a step whose forward is a loop over `body`, followed by `after`."""
    process.fresh()

    @tf.function(autograph=False)
    def step(x, *given):
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = tf.while_loop(lambda i, t: i < TRIPS, lambda i, t: (i + 1, body(i, t)), (0, x))[1]
            loss = tf.reduce_sum(h if after is None else after(h))
        return tape.gradient(loss, x)

    found = step.get_concrete_function(tf.TensorSpec((ROWS, WIDTH)), *arguments)
    return capture(found.graph, compiled=compiled)


def _loops(graph):
    """Return the loops of the forward."""
    return [op for op in graph.ops if record(op.type).is_loop and op.region == FORWARD]


def _nested(i, t):
    return tf.while_loop(lambda j, u: j < 2, lambda j, u: (j + 1, tf.tanh(u)), (0, t))[1]


def _call(i, t):
    return tf.function(lambda u: tf.tanh(u) * 2.0)(t)


@pytest.mark.parametrize("body", [
    lambda i, t: tf.tanh(t),
    lambda i, t: tf.cond(i < 3, lambda: tf.tanh(t), lambda: tf.sin(t)),
    lambda i, t: tf.switch_case(i % 2, [lambda: tf.tanh(t), lambda: tf.sin(t)]),
    lambda i, t: tf.tanh(t + tf.random.stateless_uniform(tf.shape(t), seed=[1, 2])),
    _nested, _call,
], ids=["tanh", "cond", "switch", "stateless random", "loop", "call"])
def test_pure_bodies(body):
    (loop,) = _loops(graph := _captured(body))
    assert loop.pure and not graph.refused


def _shaped(t):
    return tf.tanh(tf.ensure_shape(t, (ROWS, WIDTH)))


def _printed(i, t):
    tf.print(i)
    return tf.tanh(t)


def _asserted(i, t):
    with tf.control_dependencies([tf.raw_ops.Assert(condition=i < 99, data=[i])]):
        return tf.tanh(t)


@pytest.mark.parametrize("body, said", [
    (lambda i, t: tf.tanh(t + tf.random.uniform((ROWS, WIDTH))), "RandomUniform"),
    (lambda i, t: tf.cond(i < 3, lambda: tf.tanh(t * tf.random.normal(())), lambda: tf.sin(t)),
     "RandomStandardNormal"),
    (lambda i, t: _shaped(tf.py_function(lambda v: v, [t], tf.float32)), "EagerPyFunc"),
    (lambda i, t: _shaped(tf.numpy_function(lambda v: v, [t], tf.float32, stateful=False)) + t,
     "PyFuncStateless"),
    (lambda i, t: tf.tanh(tf.debugging.check_numerics(t, "bad")), "CheckNumerics"),
    (_printed, "PrintV2"), (_asserted, "Assert"),
])
def test_bodies_that_must_not_run_twice(body, said):
    (loop,) = _loops(graph := _captured(body))
    assert not loop.pure
    (text,) = [text for text in graph.refused if loop.name in text]
    assert "the loop is not recomputed" in text and said in text


def test_a_body_that_writes_a_variable():
    variable = tf.Variable(1.0)

    def body(i, t):
        variable.assign_add(1.0)
        return tf.tanh(t)

    (loop,) = _loops(graph := _captured(body))
    assert not loop.pure and any("AssignAddVariableOp" in text for text in graph.refused)


def _reading(variable):
    return lambda i, t: tf.tanh(t * variable)


def test_a_variable_that_nobody_writes():
    (loop,) = _loops(graph := _captured(_reading(tf.Variable(2.0))))
    assert loop.pure and not graph.refused and loop.later_writes == ()


def test_a_variable_that_is_written_before_the_loop():
    variable = tf.Variable(2.0)

    def body(i, t):
        return tf.tanh(t * variable)

    process.fresh()

    @tf.function
    def step(x):
        variable.assign(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.while_loop(
                lambda i, t: i < TRIPS, lambda i, t: (i + 1, body(i, t)), (0, x))[1])
        return tape.gradient(loss, x)

    graph = capture(step.get_concrete_function(tf.TensorSpec((ROWS, WIDTH))).graph)
    (loop,) = _loops(graph)
    assert loop.pure and loop.later_writes == ()


def test_a_variable_that_the_backward_finds_changed():
    variable = tf.Variable(2.0)

    def after(h):
        variable.assign(3.0)
        return tf.tanh(h * variable)

    (loop,) = _loops(graph := _captured(_reading(variable), after=after))
    assert not loop.pure
    assert any("AssignVariableOp may write a variable" in text for text in graph.refused)


def test_a_python_function_between_the_loop_and_the_backward():
    def after(h):
        return tf.py_function(lambda v: v, [h], tf.float32)

    (loop,) = _loops(_captured(_reading(tf.Variable(2.0)), after=after))
    assert not loop.pure
    (loop,) = _loops(_captured(lambda i, t: tf.tanh(t), after=after))  # it reads no variable
    assert loop.pure


def test_a_variable_that_is_an_argument_too_may_be_any():
    variable = tf.Variable(2.0)
    (loop,) = _loops(_captured(_reading(variable), variable))
    assert loop.pure  # nothing is written

    process.fresh()

    @tf.function(autograph=False)
    def step(x, given):
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = tf.while_loop(lambda i, t: i < TRIPS,
                              lambda i, t: (i + 1, tf.tanh(t * variable)), (0, x))[1]
            loss = tf.reduce_sum(h)
        given.assign(5.0)
        return tape.gradient(loss, x)

    graph = capture(step.get_concrete_function(tf.TensorSpec((ROWS, WIDTH)), variable).graph)
    (loop,) = _loops(graph)
    assert loop.pure and len(loop.later_writes) == 1


def test_under_xla_loops_are_recomputed_in_segments_alone():
    graph = _captured(lambda i, t: tf.tanh(t), compiled=True)
    (loop,) = _loops(graph)
    assert not loop.pure and loop.loop.segments is not None and not graph.refused
    graph = _captured(lambda i, t: tf.add_n([t, t, tf.tanh(t)]), compiled=True)
    loop = _loops(graph)[0]
    assert not loop.pure and loop.loop.segments is None
    assert any("under XLA copies are delayed" in text for text in graph.refused)


def test_a_late_write_waits_for_the_copy():
    variable = tf.Variable(2.0)

    def after(h):
        variable.assign(3.0)
        return h

    graph = _captured(_reading(variable), after=after)
    (loop,) = _loops(graph)
    (write,) = loop.later_writes
    inputs = tuple(f"{graph.ops[s].name}:{slot}" for s, slot in loop.inputs)
    edits = Edits((Clone("again", loop.name, inputs),))
    (control,) = delay_writes(graph, edits).controls
    assert (control.op, control.control) == (write, "again")
    check_edits(graph, delay_writes(graph, edits))


def test_what_may_write_a_variable():
    a, b = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def step(x):
        inner = tf.function(lambda: a.assign_add(b), experimental_attributes={"_noinline": True})
        inner()
        tf.py_function(lambda: None, [], [])
        b.assign(a * x)

    graph = step.get_concrete_function(tf.TensorSpec(())).graph
    names = {t.name: v for v, t in zip("ab", [graph.capture(v.handle) for v in (a, b)],
                                       strict=True)}
    written = {op.type: [names.get(w, w) for w in may_write(op)] for op in graph.get_operations()}
    assert written["StatefulPartitionedCall"] == ["a"]
    assert written["AssignVariableOp"] == ["b"]
    assert written["EagerPyFunc"] == [ANY]
    assert written["ReadVariableOp"] == written["Mul"] == []


@pytest.mark.parametrize("layer", [
    keras.layers.LSTM, pytest.param(keras.layers.GRU, marks=pytest.mark.nightly)])
def test_recurrent_layers_belong_to_the_forward_and_may_be_recomputed(layer):
    process.fresh()
    model = keras.Sequential([keras.Input((TRIPS, WIDTH), batch_size=ROWS),
                              layer(WIDTH, return_sequences=True),
                              keras.layers.Dense(WIDTH, "tanh"), layer(WIDTH)])
    weights = [v.value for v in model.trainable_variables]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(g)

    graph = capture(step.get_concrete_function(tf.TensorSpec((ROWS, TRIPS, WIDTH))).graph)
    loops = _loops(graph)
    assert len(loops) == 2 and all(loop.pure for loop in loops) and not graph.refused
    for loop in loops:
        writes = [op for op in graph.ops if op.name in loop.later_writes]
        assert {op.type for op in writes} == {"AssignSubVariableOp"} and len(writes) == 3
    tanh = next(op for op in graph.ops if op.type == "Tanh" and "dense" in op.name)
    assert tanh.region == FORWARD
    assert sum(record(op.type).is_loop and op.region == BACKWARD for op in graph.ops) == 2


def test_where_writes_cannot_wait_the_step_is_planned_without_loops(monkeypatch, tmp_path):
    def refuse(context, edits):
        if any(clone.source.startswith("while") for clone in edits.clones):
            raise RewriteError("rewrite: for this test")
        return edits

    def body(i, t):
        return tf.tanh(tf.nn.softplus(tf.sin(t)))

    def after(h):
        for _ in range(2):
            h = tf.while_loop(lambda i, t: i < TRIPS, lambda i, t: (i + 1, body(i, t)), (0, h))[1]
        return h

    graph = _captured(body, after=after)
    graph = dataclasses.replace(graph, ops=tuple(  # as wholes only
        op if op.loop is None else dataclasses.replace(op, loop=dataclasses.replace(
            op.loop, segments=None)) for op in graph.ops))
    assert any(clone.source == "while" for clone in planned(graph).edits.clones)
    replace_pass(monkeypatch, "state writes", refuse)
    outcome = planned(graph)
    assert outcome.edits is None or not any("while" in c.source for c in outcome.edits.clones)
    assert outcome.report.rejected
    refused = outcome.report.refused
    assert len(refused) == 3
    for loop, line in zip(("while", "while_1", "while_2"), refused, strict=True):
        assert line.startswith(f"{loop}: the loop is not recomputed: rewrite: for this test (pass: "
                               "state writes; before it: derivatives, loop segments, late "
                               "updates, copies")
    monkeypatch.setenv("TFCKPT_CACHE", str(tmp_path))
    planned(graph)
    again = planned(graph)  # its loops are left alone as well
    assert again.report.stored and again.report.refused == refused
    assert again.plans == outcome.plans and again.edits == outcome.edits
