"""Functions that XLA compiles by themselves, inside of a step that the executor runs."""

from __future__ import annotations

import tensorflow as tf

import tfckpt
from benchmarks.requests import peak_of, requests_of
from tfckpt.capture.inlining import compiled_calls
from tfckpt.capture.tfgraph import capture

X = tf.random.stateless_normal((512, 512), (1, 2))
MIB = 1 << 20


def _inner():
    @tf.function(jit_compile=True)
    def inner(x):
        x = tf.sort(tf.matmul(x, x), axis=1)
        return tf.matmul(tf.matmul(x, x), tf.sort(x, axis=0))

    return inner


def _ops(function, *args):
    graph = capture(function.get_concrete_function(*args).graph)
    return graph, [op for op in graph.ops if op.type.endswith("PartitionedCall")]


def _measured(function, *args):
    """Return what a call asks TensorFlow's allocator for, by its own profile, without the result.
    """
    function(*args)
    requests, _ = requests_of(function, args)
    asked, _ = peak_of(requests, lambda request: request.bytes)
    result = function(*args)
    return asked - result.shape.num_elements() * result.dtype.size


def test_what_xla_allocates_inside_is_what_the_allocator_counts():
    inner = _inner()
    _, (call,) = _ops(tf.function(lambda x: inner(x) + 1.), X)
    assert call.workspace > 0
    assert abs(call.workspace - _measured(inner, X)) < 0.02 * MIB + 0.02 * call.workspace


def test_a_variable_that_is_read_stands_for_its_value():
    weights = tf.Variable(X)

    @tf.function(jit_compile=True)
    def inner(x):
        return tf.matmul(tf.sort(tf.matmul(x, weights), axis=0), x)

    _, (call,) = _ops(tf.function(lambda x: inner(x) + 1.), X)
    assert abs(call.workspace - _measured(inner, X)) < 0.02 * MIB + 0.02 * call.workspace


def test_it_is_asked_once_for_functions_that_do_the_same(monkeypatch):
    asked = []
    compiled = compiled_calls._compiled
    monkeypatch.setattr(compiled_calls, "_compiled",
                        lambda *given: asked.append(given) or compiled(*given))
    compiled_calls._known.clear()
    one, other = _inner(), _inner()
    _, calls = _ops(tf.function(lambda x: one(x) + other(x) + one(x[:256, :256])[0, 0]), X)
    assert len(calls) == 3 and len(asked) == 2  # by body and shapes
    assert calls[0].workspace == calls[1].workspace > 0


def test_what_is_not_told_is_said():
    weights = tf.Variable(X)

    @tf.function(jit_compile=True)
    def inner(x):
        weights.assign_add(x)
        return tf.matmul(x, weights)

    graph, (call,) = _ops(tf.function(lambda x: inner(x) + 1.), X)
    assert call.workspace == 0
    assert any("is not counted: it uses a variable by AssignAdd" in line for line in graph.refused)


def test_a_budget_counts_it_and_the_report_names_it():
    inner = _inner()
    weights = [tf.Variable(X / 30.) for _ in range(12)]

    @tfckpt.checkpoint(budget=0.8)
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(tf.matmul(h, w))
            loss = tf.reduce_sum(h)
        gradients = tape.gradient(loss, weights)
        for w, g in zip(weights, gradients, strict=True):
            w.assign_sub(1e-4 * (g + inner(g)))
        return loss

    step(X)
    taken = _ops(tf.function(inner), X)[1][0].workspace
    assert taken > 2 * MIB
    live = step.report.curves[0].at_peak
    assert any(h.why == "workspace while it runs" and h.bytes == taken for h in live), live
