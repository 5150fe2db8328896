"""Steps with something special in them: every bit as in the plain step, whatever is recomputed."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, training
from tests.support.models import Trial, numbers, trial

layers = keras.layers
WIDTH, BATCH = 64, 2048


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _stack(optimizer, depth=5, **options) -> Trial:
    model = keras.Sequential([keras.Input((32,)), *(layers.Dense(WIDTH, activation="tanh")
                                                    for _ in range(depth)), layers.Dense(5)])
    return trial(model, optimizer, _loss(), numbers((BATCH, 32), 5), **options)


def clipped_by_the_global_norm():
    """Return a real join: every gradient is needed before any update."""
    return _stack(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.01), gradients=False)


def weight_decay_and_average():
    return _stack(keras.optimizers.AdamW(1e-2, weight_decay=0.1, use_ema=True, ema_momentum=0.9),
                  gradients=False)


def half_precision():
    """bfloat16 activations: weights are cast at the start of the step."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    return _stack(keras.optimizers.Adam(1e-2))


def loss_scaling():
    """float16 with a dynamic loss scale: the update is conditional."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    made = _stack(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model = made.model
    optimizer.build(model.trainable_variables)
    loss = _loss()

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(value)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value, []

    return Trial(step, made.batches, lambda: [*model.variables, *optimizer.variables], model)


def recurrent():
    """Return a while loop between layers: one opaque vertex."""
    model = keras.Sequential([keras.Input((16, 32)),
                              *(layers.Dense(WIDTH, activation="relu") for _ in range(8)),
                              layers.Dense(8), layers.GRU(8, reset_after=True, unroll=False),
                              layers.Dense(5)])
    return trial(model, keras.optimizers.SGD(0.1), _loss(), numbers((128, 16, 32), 5))


def _weights(count=10):
    made = np.random.default_rng(2)
    return [tf.Variable(made.standard_normal((32, 32)).astype(np.float32) * 0.2)
            for _ in range(count)]


def _by_hand(forward, weights) -> Trial:
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = forward(x, weights)
        found = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, found

    return Trial(step, numbers((2 * BATCH, 32), 5), lambda: list(weights))


def conditional():
    def forward(x, weights):
        h = x
        for weight in weights:
            h = tf.tanh(h @ weight)
        scale = tf.cond(tf.reduce_sum(h) > 0.0, lambda: tf.constant(2.0), lambda: tf.constant(3.0))
        return tf.reduce_mean(tf.square(h * scale))

    return _by_hand(forward, _weights())


def custom_gradients():
    @tf.custom_gradient
    def reversed_gradient(t):
        return tf.sinh(t), lambda upstream: -0.5 * upstream * tf.cosh(t)

    def forward(x, weights):
        h = x
        for weight in weights:
            h = tf.tanh(reversed_gradient(h @ weight))
        return tf.reduce_mean(tf.square(h))

    return _by_hand(forward, _weights())


def gradient_penalty():
    """Return a gradient of a gradient."""
    weights = _weights(6)

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                h = x
                for weight in weights:
                    h = tf.tanh(h @ weight)
                value = tf.reduce_sum(h)
            penalty = tf.reduce_mean(tf.square(inner.gradient(value, x)))
            loss = tf.reduce_mean(h) + penalty
        found = outer.gradient(loss, weights)
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, found

    return Trial(step, numbers((2 * BATCH, 32), 5), lambda: list(weights))


def two_losses():
    """Two tapes in a row, as a generator and a critic have."""
    first, second = _weights(10), _weights(10)

    def step(x, y):
        losses, found = [], []
        for weights in (first, second):
            with tf.GradientTape() as tape:
                h = x
                for weight in weights:
                    h = tf.nn.elu(h @ weight)
                losses.append(tf.reduce_mean(tf.square(h - 0.5)))
            gradients = tape.gradient(losses[-1], weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.1 * gradient)
            found += gradients
        return losses[0] + losses[1], found

    return Trial(step, numbers((2 * BATCH, 32), 5), lambda: [*first, *second])


def statistics_on_the_side():
    """Counters and statistics advance once, as they did."""
    weights, counter = _weights(), tf.Variable(0, dtype=tf.int64)
    seen = tf.Variable(tf.zeros(32))

    def step(x, y):
        counter.assign_add(1)
        with tf.GradientTape() as tape:
            h = x
            for i, weight in enumerate(weights):
                h = tf.tanh(h @ weight)
                if i == 3:
                    seen.assign_add(tf.reduce_mean(h, 0))
            loss = tf.reduce_mean(h * tf.cast(counter, tf.float32))
        found = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, found

    return Trial(step, numbers((2 * BATCH, 32), 5), lambda: [*weights, counter, seen])


KEPT = [gradient_penalty]
"""Nothing is recomputed: the forward is itself a backward."""
STEPS = [clipped_by_the_global_norm, weight_decay_and_average,
         half_precision, loss_scaling, recurrent, conditional, custom_gradients,
         gradient_penalty, two_losses, statistics_on_the_side]


@contextlib.contextmanager
def _policy():
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("make", STEPS, ids=lambda make: getattr(make, "__name__", None))
def test_every_bit_as_in_the_plain_step(make):
    histories = []
    with _policy():
        for wrap in (lambda step: step, tfckpt.checkpoint):
            process.fresh()
            made = make()
            step = wrap(tf.function(made.step))
            histories.append(training.train(step, made))
    if make not in KEPT:
        assert step.report.applied and step.report.recomputed_ops > 0, step.report.reason
    training.assert_same_bits(histories[1], histories[0])


@pytest.mark.parametrize("solver", ["auto", "chen"])
def test_a_constant_in_a_sum_of_two(solver):
    """Grappler moves it to what is added first, where that has one reader: ours make no other."""
    made = np.random.default_rng(3)
    start = [(made.standard_normal((64, 64)) / 8.0).astype(np.float32) for _ in range(4)]
    x = tf.constant(made.standard_normal((BATCH, 64)), tf.float32)

    def trained(wrap):
        variables = [tf.Variable(v) for v in start]

        def step(x):
            with tf.GradientTape() as tape:
                h = x
                for w in variables:
                    h = tf.tanh(h @ w)
                    shifted = h - tf.reduce_logsumexp(h, -1, keepdims=True) + 3.0
                    h = tf.cast(tf.sigmoid(tf.cast(h, tf.bfloat16)), tf.float32) + shifted
                loss = tf.reduce_mean(tf.square(h))
            for w, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                w.assign_sub(0.1 * gradient)
            return loss

        step = wrap(tf.function(step))
        return step, [step(x).numpy(), *(v.numpy() for v in variables)]

    _, wanted = trained(lambda step: step)
    step, found = trained(lambda step: tfckpt.checkpoint(step, solver=solver))
    assert step.report.applied and step.report.recomputed_ops > 0
    assert all((a == b).all() for a, b in zip(found, wanted, strict=True))


def test_a_product_with_the_hessian_of_an_open_batch():
    """Gradients pass sums over no axes there, which Grappler removes before it rearranges."""
    made = np.random.default_rng(7)
    shapes = ((64, 2, 32), (64, 2, 32), (2, 32, 64), (64, 1))
    start = [(made.standard_normal(s) * s[0] ** -0.5).astype(np.float32) for s in shapes]
    batch = [tf.constant(made.standard_normal(s), tf.float32) for s in ((32, 32, 64), (32, 1))]

    def attention(h, query, memory, out):
        asked = tf.einsum("btd,dhe->bhte", h, query)
        key, value = tf.unstack(tf.einsum("btd,dke->kbte", h, memory))
        shares = tf.nn.softmax(tf.einsum("bhte,bse->bhts", asked, key) * 32 ** -0.5)
        return h + tf.einsum("bhtv,hvd->btd", tf.einsum("bhts,bsv->bhtv", shares, value), out)

    def trained(wrap):
        variables = [tf.Variable(v) for v in start]

        def step(x, y):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    h = x
                    for _ in range(3):
                        h = attention(h, *variables[:3])
                    error = tf.reduce_mean(h, 1) @ variables[3] - y
                    loss = tf.reduce_mean(tf.square(error))
                found = inner.gradient(loss, variables)
                along = tf.add_n([tf.reduce_sum(g * tf.stop_gradient(g)) for g in found])
            for v, g, b in zip(variables, found, outer.gradient(along, variables), strict=True):
                v.assign_sub(0.02 * (g + 0.01 * b))
            return loss

        step = wrap(tf.function(step, input_signature=[
            tf.TensorSpec([None, *t.shape[1:]]) for t in batch]))
        return step, [step(*batch).numpy(), *(v.numpy() for v in variables)]

    _, wanted = trained(lambda step: step)
    step, found = trained(tfckpt.checkpoint)
    assert step.report.applied and step.report.recomputed_ops > 0
    assert all((a == b).all() for a, b in zip(found, wanted, strict=True))


def test_a_step_too_small_to_matter_is_left_alone_and_says_why():
    def tiny():
        process.fresh()
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4, activation="tanh"),
                                  layers.Dense(2)])
        return trial(model, keras.optimizers.SGD(0.1), _loss(), numbers((8, 4), 2))

    plain = tiny()
    wanted = training.train(tf.function(plain.step), plain)
    made = tiny()
    step = tfckpt.checkpoint(tf.function(made.step))
    training.assert_same_bits(training.train(step, made), wanted)
    report = step.report
    assert not report.applied and "lower the peak" in report.reason
    assert report.recomputed_ops == report.fences == report.deferred_ops == 0
    assert "no: " in str(report)


def test_a_step_traced_for_the_executor_and_then_called_from_xla():
    process.fresh()
    made = _stack(keras.optimizers.SGD(0.1, momentum=0.9))
    step = tfckpt.checkpoint(tf.function(made.step))
    with process.without_determinism():
        history = [step(*made.batches[0])[0].numpy()]
        assert step.report.applied and step.report.recomputed_ops > 0, step.report.reason
        outer = tf.function(lambda x, y: step(x, y), jit_compile=True)
        history += [outer(*batch)[0].numpy() for batch in made.batches[1:]]
        assert [name.endswith(" compiled") for name in step.reports] == [False, True]
        assert step.report.applied and step.report.fences == 0  # data guards, no control edges
        process.fresh()
        plain = _stack(keras.optimizers.SGD(0.1, momentum=0.9))
        wanted = training.train(tf.function(plain.step), plain)
    np.testing.assert_allclose(history, [float(x) for x in wanted.losses], rtol=1e-5)
