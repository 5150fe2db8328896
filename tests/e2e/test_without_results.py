"""Steps that return nothing, as loops of one's own often do: Grappler knows of no result there."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process

ROWS, WIDTH = 1024, 128


def gelu(weights, x, _):
    for w in weights:
        x = tf.nn.gelu(x @ w)
    return x


def nested(weights, x, _):
    @tf.function
    def block(h, w):
        return tf.nn.silu(h @ w) * tf.nn.gelu(h, approximate=True)

    for w in weights:
        x = block(x, w)
    return x


def noisy(weights, x, generator):
    """Nothing waits for the last call of a function that moves a generator's state."""
    @tf.function
    def block(h):
        return h + 0.1 * generator.normal(tf.shape(h))

    for n, w in enumerate(weights):
        x = tf.nn.gelu((block(x) if n < 2 else x) @ w)
    return x


def branch(weights, x, _):
    for w in weights:
        x = tf.nn.gelu(x @ w)
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.gelu(x @ weights[0]), lambda: x * 2)


def loop(weights, x, _):
    for w in weights:
        x = tf.nn.gelu(x @ w)
    return tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, tf.nn.gelu(h @ weights[0])),
                         (0, x))[1]


def trained(body, wrap, metric=False):
    """Return the variables after three steps, and the step."""
    random = np.random.default_rng(0)
    weights = [tf.Variable(random.standard_normal((WIDTH, WIDTH), dtype=np.float32) * 0.1)
               for _ in range(5)]
    total, generator = tf.Variable(0.0), tf.random.Generator.from_seed(5)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(body(weights, x, generator)))
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        if metric:
            total.assign_add(loss)

    step = wrap(step)
    for _ in range(3):
        step(tf.constant(random.standard_normal((ROWS, WIDTH), dtype=np.float32)))
    return [v.numpy().tobytes() for v in (*weights, total)], step


@pytest.mark.parametrize("body", [
    gelu, nested, noisy, pytest.param(branch, marks=pytest.mark.nightly),
    pytest.param(loop, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("metric", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_plain_step_is_the_one_that_runs(body, metric, monkeypatch):
    process.fresh()
    monkeypatch.setenv("TFCKPT_CERTIFICATES", "on")
    wanted, _ = trained(body, lambda f: f, metric)
    assert trained(body, lambda f: f, metric)[0] == wanted
    found, step = trained(body, tfckpt.checkpoint(budget="min"), metric)
    assert step.report.applied, step.report.reason
    assert found == wanted
    tfckpt.verify.wait_for_certificates()
    assert step.report.identical, step.report.certificate
    x = tf.zeros((ROWS, WIDTH))
    same = tfckpt.verify.same_arithmetic(step, x)
    assert same.same, same


def test_a_loop_of_ones_own_with_keras():
    """As TensorFlow's tutorial for experts writes it."""
    process.fresh()

    def run(wrap):
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential([keras.Input((32, 32, 3)), *(
            layer for n in range(3) for layer in (
                layers.Conv2D(16, 3, padding="same", activation="gelu"),
                layers.BatchNormalization())),
            layers.GlobalAveragePooling2D(), layers.Dense(10)])
        optimizer, mean = keras.optimizers.Adam(0.01), keras.metrics.Mean()
        compute = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @wrap
        @tf.function
        def train_step(images, labels):
            with tf.GradientTape() as tape:
                loss = compute(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            mean(loss)

        random = np.random.default_rng(1)
        for _ in range(3):
            train_step(tf.constant(random.random((64, 32, 32, 3), dtype=np.float32)),
                       tf.constant(random.integers(0, 10, 64)))
        return [w.tobytes() for w in (*model.get_weights(), mean.result().numpy())], train_step

    wanted, _ = run(lambda f: f)
    found, step = run(tfckpt.checkpoint(budget="min"))
    assert step.report.applied and found == wanted
