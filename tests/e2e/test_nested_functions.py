"""Layers that are `tf.function`s: inlined into the step, planned with it, the same in every bit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, training
from tests.support.models import Trial, numbers

layers = keras.layers
WIDTH, BATCH, DEPTH = 64, 2048, 4


def _weights(count=DEPTH):
    made = np.random.default_rng(2)
    return [tf.Variable(made.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.15)
            for _ in range(count)]


def _trial(forward, weights, state=(), persistent=False) -> Trial:
    def step(x, y):
        with tf.GradientTape(persistent=persistent) as tape:
            loss = forward(x)
        found = tape.gradient(loss, weights)
        if persistent:
            found += tape.gradient(loss, weights[:2])
        for weight, gradient in zip(weights, found, strict=False):
            weight.assign_sub(0.1 * gradient)
        return loss, found

    return Trial(step, numbers((BATCH, WIDTH), 5), lambda: [*weights, *state])


def _loss(h):
    return tf.reduce_mean(tf.square(h))


def weights_as_arguments(persistent=False):
    @tf.function
    def layer(h, weight):
        return tf.nn.gelu(h @ weight)

    ws = _weights()

    def forward(x):
        for weight in ws:
            x = layer(x, weight)
        return _loss(x)

    return _trial(forward, ws, persistent=persistent)


def persistent_tape():
    return weights_as_arguments(persistent=True)


def blocks_of_keras_layers():
    """Return each reads and writes state of its own; the ReLU stands outside, after a nested
    result.
    """
    def block():
        dense, norm = layers.Dense(WIDTH), layers.BatchNormalization()
        drop = layers.Dropout(0.3, seed=7)
        dense.build((BATCH, WIDTH))
        norm.build((BATCH, WIDTH))
        return [dense, norm, drop], tf.function(
            lambda h: drop(norm(tf.nn.relu(dense(h)), training=True), training=True))

    made = [block() for _ in range(DEPTH)]
    parts = [layer for block_layers, _ in made for layer in block_layers]

    def forward(x):
        for _, fn in made:
            x = tf.nn.relu(fn(x))
        return _loss(x)

    return _trial(forward, [v.value for layer in parts for v in layer.trainable_variables],
                  [v.value for layer in parts for v in layer.variables if not v.trainable])


def one_block_called_again_and_again():
    """Shared weights, statistics and a generator: every call waits for the one before."""
    dense, norm = layers.Dense(WIDTH), layers.BatchNormalization()
    drop = layers.Dropout(0.3, seed=7)
    dense.build((BATCH, WIDTH))
    norm.build((BATCH, WIDTH))
    calls = tf.Variable(0.0)

    @tf.function
    def block(h):
        calls.assign_add(1.0)
        return drop(tf.tanh(norm(dense(h), training=True)) * calls, training=True)

    def forward(x):
        for _ in range(DEPTH):
            x = x + block(x)
        return _loss(x)

    return _trial(forward, [v.value for layer in (dense, norm) for v in layer.trainable_variables],
                  [calls, *(v.value for layer in (norm, drop) for v in layer.variables
                            if not v.trainable)])


def functions_in_functions():
    @tf.function
    def product(h, weight):
        return tf.nn.softplus(h @ weight)

    @tf.function
    def layer(h, weight):
        noise = tf.random.normal((WIDTH,), seed=3)
        return tf.tanh(product(h, weight)) + tf.nn.dropout(noise, 0.5, seed=4)

    ws = _weights()

    def forward(x):
        for weight in ws:
            x = layer(x, weight)
        return _loss(x)

    return _trial(forward, ws)


def also_in_a_loop():
    """In the loop's body the calls stay with the loop, which is one op."""
    made = weights_as_arguments()
    ws = made.variables()

    @tf.function
    def layer(h, weight):
        return tf.tanh(tf.nn.softplus(h @ weight))

    def forward(x):
        for weight in ws[:-1]:
            x = layer(x, weight)
        x = tf.while_loop(lambda i, _: i < 2, lambda i, t: (i + 1, layer(t, ws[-1])), (0, x))[1]
        return _loss(x)

    return _trial(forward, ws)


def the_tape_itself():
    """Return all that trains is called, by a name that gradients have too; the update is not."""
    inner = weights_as_arguments()
    ws = inner.variables()

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            for weight in ws:
                x = tf.tanh(tf.nn.softplus(x @ weight))
            loss = _loss(x)
        return loss, tape.gradient(loss, ws)

    def step(x, y):
        loss, found = gradients(x)
        for weight, gradient in zip(ws, found, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, found

    return Trial(step, inner.batches, inner.variables)


STEPS = [weights_as_arguments, persistent_tape, blocks_of_keras_layers,
         one_block_called_again_and_again, functions_in_functions, also_in_a_loop,
         the_tape_itself]


def _both(make, **function):
    steps, histories = [], []
    for wrap in (lambda step: step, tfckpt.checkpoint):
        process.fresh()
        made = make()
        steps.append(wrap(tf.function(made.step, **function)))
        histories.append(training.train(steps[-1], made))
    return *steps, *histories, made


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_every_bit_as_in_the_plain_step_with_less_memory(make):
    plain, step, wanted, found, made = _both(make)
    training.assert_same_bits(found, wanted)
    report = step.report
    assert report.applied and report.recomputed_ops > 0, report.reason
    assert report.inlined and not report.refused, report.refused
    assert report.planned_peak_bytes < 0.9 * report.baseline_peak_bytes
    peaks = [tfckpt.verify.measure_peak(fn, *made.batches[0], repeats=3) for fn in (plain, step)]
    assert peaks[1] < 0.9 * peaks[0], peaks


def test_the_report_counts_calls_by_name():
    _, step, *_ = _both(functions_in_functions)
    assert step.report.inlined == (f"layer, {DEPTH} calls", f"product, {DEPTH} calls")
    assert "inlined" in str(step.report) and f"layer, {DEPTH} calls" in str(step.report)


def _opaque(layer):
    """Return a layer between others, which are Python functions."""
    ws = _weights()

    def forward(x):
        for i, weight in enumerate(ws):
            x = layer(x, weight) if i == DEPTH // 2 else tf.tanh(tf.nn.softplus(x @ weight))
        return _loss(x)

    return _trial(forward, ws)


def _body(h, weight):
    return tf.tanh(h @ weight)


def compiled_by_itself():
    return _opaque(tf.function(_body, jit_compile=True))


def marked_not_to_be_inlined():
    return _opaque(tf.function(_body, experimental_attributes={"_noinline": True}))


def with_recomputation_of_its_own():
    return _opaque(tf.function(lambda h, weight: tf.recompute_grad(
        lambda t: tf.tanh(t @ weight))(h)))


def with_a_custom_gradient():
    @tf.custom_gradient
    def double(t):
        return 2.0 * t, lambda upstream: 2.0 * upstream

    return _opaque(tf.function(lambda h, weight: double(tf.tanh(h @ weight))))


@pytest.mark.parametrize("make, reason", [
    (compiled_by_itself, "compiled by itself"),
    (marked_not_to_be_inlined, "marked _noinline"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_function_that_is_more_than_its_body_is_refused_by_name(make, reason):
    _, step, wanted, found, _ = _both(make)
    training.assert_same_bits(found, wanted)
    report = step.report
    assert report.applied and not report.inlined
    assert len(report.refused) == 2  # forward and backward
    assert all(reason in text and "Call" in text for text in report.refused)


@pytest.mark.parametrize("make", [with_recomputation_of_its_own, with_a_custom_gradient])
def test_a_function_with_a_gradient_of_its_own_is_inlined_as_grappler_does(make):
    _, step, wanted, found, _ = _both(make)
    training.assert_same_bits(found, wanted)
    report = step.report
    assert report.applied and not report.refused
    assert report.inlined == ("<lambda>, 1 call",)


def test_where_nothing_is_to_be_gained_the_calls_are_put_back():
    @tf.function
    def layer(h, weight):
        return tf.tanh(h @ weight)

    process.fresh()
    weight = tf.Variable(tf.ones((4, 4)))
    made = _trial(lambda x: _loss(layer(x[:, :4], weight)), [weight])
    step = tfckpt.checkpoint(tf.function(made.step))
    graph = step.get_concrete_function(*made.batches[0]).graph
    assert not step.report.applied and not step.report.inlined
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert len(calls) == 2
    names = [node.name for node in step.get_concrete_function(
        *made.batches[0]).function_def.node_def]
    assert not any("layer/" in name for name in names)


@pytest.mark.filterwarnings("ignore:tfckpt. <lambda> trains unchanged")
def test_what_tfckpt_rewrote_before_is_not_rewritten_again():
    process.fresh()
    inner = weights_as_arguments()
    step = tfckpt.checkpoint(tf.function(inner.step))
    again = tfckpt.checkpoint(tf.function(lambda x, y: step(x, y)))
    again(*inner.batches[0])
    assert step.report.applied
    assert not again.report.applied and "rewritten it already" in again.report.refused[0]


@pytest.mark.parametrize("options", [{"disable_meta_optimizer": True}, {}], ids=str)
def test_what_was_inlined_runs_once(options):
    """Also without Grappler, which would remove a call that nothing reads any more."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(options)
    try:
        ran = []
        for wrap in (lambda step: step, tfckpt.checkpoint):
            process.fresh()
            made = one_block_called_again_and_again()
            training.train(wrap(tf.function(made.step)), made)
            ran.append(next(v for v in made.variables() if v.shape == () and
                            v.dtype == tf.float32).numpy())
        assert ran[0] == ran[1] == 3 * DEPTH
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": False, **before})


def test_under_xla():
    with process.without_determinism():
        _, step, wanted, found, _ = _both(weights_as_arguments, jit_compile=True)
    assert step.report.applied and step.report.inlined == (f"layer, {DEPTH} calls",)
    assert training.relative_difference(found, wanted) < 1e-5
