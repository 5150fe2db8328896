"""Steps in which Grappler merges ops of the forward with equal ones of the backward."""

from __future__ import annotations

import os
import shutil

import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import process

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")
LAYERS, BATCH, WIDTH = 6, 512, 256


@pytest.fixture(autouse=True)
def _off():
    yield
    process.without_pass()


def squared_twice(h):
    """Return the square is the forward's own too."""
    return h + 0.1 * tf.pow(h, 3.0) + 0.1 * tf.square(h)


def softplus_and_its_slope(h):
    return tf.nn.softplus(h) * tf.sigmoid(h)


def mask_by_hand(h):
    return tf.where(h > 0.0, h, 0.1 * tf.square(h))


def trained(activation, wrap):
    """Losses and weights as bytes, and the report."""
    process.fresh()
    weights = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (k, 0)) / 16)
               for k in range(LAYERS)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = activation(h @ weight)
            loss = tf.reduce_mean(h ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    run = wrap(tf.function(step))
    x = tf.random.stateless_normal((BATCH, WIDTH), (7, 7))
    losses = [run(x).numpy().tobytes() for _ in range(3)]
    return losses + [w.numpy().tobytes() for w in weights], getattr(run, "report", None)


@pytest.mark.parametrize("activation", [
    tf.nn.gelu, lambda h: tf.nn.gelu(h, approximate=True), lambda h: h + 0.1 * tf.pow(h, 3.0),
    *(pytest.param(f, marks=pytest.mark.nightly) for f in (
        squared_twice, softplus_and_its_slope, mask_by_hand, tf.nn.silu))],
    ids=["gelu", "tanh_gelu", "cube", "square", "softplus", "mask", "silu"])
def test_a_merged_op_is_no_gradient_for_its_name(activation):
    """Within two tensors of what the decorator plans, which sees every op under its own name."""
    wanted, _ = trained(activation, lambda f: f)
    decorated, report = trained(activation, tfckpt.checkpoint)
    grappler_ext.enable()
    found, _ = trained(activation, lambda f: f)
    native = grappler_ext.reports()["step"]
    assert wanted == decorated == found
    assert native.planned_peak_bytes < 0.6 * native.baseline_peak_bytes
    assert native.planned_peak_bytes <= report.planned_peak_bytes + 8 * BATCH * WIDTH
