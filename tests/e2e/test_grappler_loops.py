"""Loops under the native pass, which sees them as TensorFlow has lowered them: as cycles."""

from __future__ import annotations

import os
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
from tests.support import process
from tfckpt.verify.memory import measure_peak

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")
BATCH, LENGTH, WIDTH, CLASSES = 8, 12, 16, 8


@pytest.fixture(autouse=True)
def _off():
    yield
    process.without_pass()


def recurrent(layer):
    """Return a model around a recurrent layer, its loss and its data; the batch is open."""
    x, y = batches(2)
    model = keras.Sequential([keras.Input((LENGTH, WIDTH)), keras.layers.Dense(WIDTH, "gelu"),
                              layer, keras.layers.Dense(CLASSES)])
    return model, "mse", x, np.eye(CLASSES, dtype=np.float32)[y[:, 0]]


def bidirectional():
    return recurrent(keras.layers.Bidirectional(keras.layers.GRU(WIDTH)))


def stateful():
    x, y = batches(2)
    model = keras.Sequential([keras.Input(batch_shape=(BATCH, LENGTH, WIDTH)),
                              keras.layers.LSTM(WIDTH, stateful=True),
                              keras.layers.Dense(CLASSES)])
    return model, "mse", x, np.eye(CLASSES, dtype=np.float32)[y[:, 0]]


def masked():
    x, y = batches(2)
    x[:, LENGTH // 2:] = 0.0
    model = keras.Sequential([keras.Input((LENGTH, WIDTH)), keras.layers.Masking(),
                              keras.layers.LSTM(WIDTH), keras.layers.Dense(CLASSES)])
    return model, "mse", x, np.eye(CLASSES, dtype=np.float32)[y[:, 0]]


def ctc():
    """Return the loss has a loop that TensorFlow does not lower, beside those that it does."""
    x, y = batches(2)
    model = keras.Sequential([keras.Input((None, WIDTH)),
                              keras.layers.Bidirectional(keras.layers.GRU(
                                  WIDTH, return_sequences=True)), keras.layers.Dense(CLASSES)])

    def loss(labels, logits):
        rows = keras.ops.cast(keras.ops.shape(labels)[0], "int32")
        lengths = keras.ops.ones((rows,), "int32")
        return keras.ops.nn.ctc_loss(
            keras.ops.cast(labels, "int32"), logits, keras.ops.shape(labels)[1] * lengths,
            keras.ops.shape(logits)[1] * lengths, mask_index=0)

    return model, loss, x, y[:, :4]


def batches(count):
    """Inputs and labels."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((count * BATCH, LENGTH, WIDTH), dtype=np.float32),
            rng.integers(1, CLASSES, (count * BATCH, LENGTH)).astype(np.int32))


def fitted(make, on):
    """Losses and weights, as bytes."""
    process.fresh()
    model, loss, x, y = make()
    model.compile("adam", loss, jit_compile=False)
    if on:
        grappler_ext.enable()
    losses = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False).history["loss"]
    process.without_pass()
    return losses, [w.numpy().tobytes() for w in model.weights]


@pytest.mark.parametrize("make", [
    ctc, bidirectional, pytest.param(stateful, marks=pytest.mark.nightly),
    pytest.param(masked, marks=pytest.mark.nightly)])
def test_a_recurrent_model_trains_alike(make):
    assert fitted(make, on=True) == fitted(make, on=False)


def loop_step(weight):
    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def step(x):
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ weight)),
                                 (0, tf.nn.gelu(x @ weight)))
            loss = tf.reduce_mean(h * h)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss
    return step


def test_a_loop_of_ones_own_trains_alike():
    found = []
    for on in (False, True):
        process.fresh()
        weight = tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (1, 2)) / 4)
        if on:
            grappler_ext.enable()
        step = loop_step(weight)
        found.append([step(tf.ones((BATCH, WIDTH))).numpy() for _ in range(3)])
        found[-1].append(weight.numpy().tobytes())
    assert found[0] == found[1]


def test_what_stands_around_a_loop_is_recomputed():
    """The loop itself runs as it is, and the report says so."""
    found, peaks = [], []
    for on in (False, True):
        process.fresh()
        weights = [tf.Variable(tf.random.stateless_normal((256, 256), (1, k)) / 16)
                   for k in range(9)]
        if on:
            grappler_ext.enable(strict=True)

        @tf.function
        def step(x, weights=weights):
            with tf.GradientTape() as tape:
                h = x
                for weight in weights[:4]:
                    h = tf.nn.gelu(h @ weight)
                _, h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (
                    i + 1, tf.tanh(h @ weights[4])), (0, h))
                for weight in weights[5:]:
                    h = tf.nn.gelu(h @ weight)
                loss = tf.reduce_mean(h * h)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(gradient)
            return loss

        x = tf.random.stateless_normal((1024, 256), (3, 3))
        peaks.append(measure_peak(step, x, repeats=3))
        found.append([step(x).numpy() for _ in range(2)] + [w.numpy().tobytes() for w in weights])
    report = grappler_ext.reports()["step"]
    assert found[0] == found[1]
    assert report.recomputed_ops and peaks[1] < 0.75 * peaks[0]
    assert sum("has lowered the loop" in line for line in report.refused) == 2


def stacked():
    """Return a model of Keras' recurrent layers after dense ones over every step, and its data."""
    x, y = batches(16)
    model = keras.Sequential([
        keras.Input((LENGTH, WIDTH)), *(keras.layers.Dense(128, "gelu") for _ in range(4)),
        keras.layers.LSTM(WIDTH, return_sequences=True, use_cudnn=False),
        keras.layers.LSTM(WIDTH, use_cudnn=False), keras.layers.Dense(CLASSES)])
    return model, "mse", x, np.eye(CLASSES, dtype=np.float32)[y[:, 0]]


def test_the_lists_of_a_recurrent_layer_are_no_gradients(monkeypatch):
    """TensorFlow names the lists that a loop fills after the gradient that reads them."""
    monkeypatch.setattr(sys.modules[__name__], "BATCH", 64)
    assert fitted(stacked, on=True) == fitted(stacked, on=False)
    model, loss, x, y = stacked()
    model.compile("adam", loss, jit_compile=False)
    with grappler_ext.enabled(strict=True):
        model.fit(x, y, batch_size=BATCH, verbose=0)
        report, = grappler_ext.reports().values()
    assert report.applied and report.planned_peak_bytes < 0.8 * report.baseline_peak_bytes


def test_a_loop_that_trains_is_left_to_the_decorator(caplog):
    weight = tf.Variable(tf.ones((WIDTH, WIDTH)) / WIDTH)
    step = loop_step(weight)
    grappler_ext.enable()

    @tf.function
    def several(x):
        for _ in tf.range(3):
            step(x)

    several(tf.ones((BATCH, WIDTH)))
    assert "is computed inside of a loop that TensorFlow has lowered" in caplog.text


def test_strict_says_why_a_step_with_a_loop_is_not_rewritten():
    process.fresh()
    weight = tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (1, 2)) / 4)
    before = weight.numpy()
    with grappler_ext.enabled(budget=0.01, strict=True), pytest.raises(
            tf.errors.InvalidArgumentError, match="step is not rewritten: plan: .*0.01"):
        loop_step(weight)(tf.ones((BATCH, WIDTH)))
    assert (weight.numpy() == before).all()
