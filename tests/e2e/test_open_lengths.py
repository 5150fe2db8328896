"""Loops over what a call brings, a batch or a sequence of any length: planned for that length."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.verify import measure_peak

LENGTH, ROWS, WIDTH = 16, 512, 128


def _weights():
    return [tf.Variable(0.06 * tf.random.stateless_normal(shape, (n, 0)))
            for n, shape in enumerate([(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)])]


def folded(weights, x):
    """The state has one shape, whatever the length: no shape says how often the loop runs."""
    return tf.foldl(lambda h, v: tf.nn.tanh(tf.nn.gelu((v + h) @ weights[0]) @ weights[1]),
                    x, tf.zeros((ROWS, WIDTH)))


def iterated(weights, x):
    h = tf.zeros((ROWS, WIDTH))
    for v in x:
        h = tf.nn.tanh(tf.nn.gelu((v + h) @ weights[0]) @ weights[1])
    return h


def mapped(weights, x):
    """The list of the rows is copied, and lies in the memory of the argument."""
    h = tf.map_fn(lambda v: tf.nn.tanh(tf.nn.gelu(v @ weights[0]) @ weights[1]), x)
    return tf.nn.gelu(tf.reshape(h, (-1, WIDTH)) @ weights[0])


def _trained(forward, wrap):
    process.fresh()
    weights = _weights()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(weights, x)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    function = wrap(tf.function(step, input_signature=[tf.TensorSpec((None, None, WIDTH) if (
        forward is mapped) else (None, ROWS, WIDTH))]))
    x = tf.random.stateless_normal((LENGTH, ROWS, WIDTH), (1, 1))
    losses = [function(x).numpy() for _ in range(2)]
    return [losses, *(w.numpy().tobytes() for w in weights)], measure_peak(function, x), function


def _both(forward):
    """Train without tfckpt and with it; return what came of each, the peaks, and the report."""
    wanted, before, _ = _trained(forward, lambda step: step)
    found, after, step = _trained(forward, tfckpt.checkpoint(budget="min"))
    return wanted, found, before, after, step.report


@pytest.mark.parametrize(("forward", "share"), [(folded, 0.3), (iterated, 0.3), (mapped, 0.4)])
def test_a_loop_over_an_open_length_is_planned_for_what_comes(forward, share, apart):
    wanted, found, before, after, report = apart.submit(_both, forward).result()
    assert found == wanted
    assert after < share * before, str(report)
    assert 0.85 * before < report.baseline_peak_bytes < 1.3 * before, str(report)
    assert not any("internal error" in line for line in report.refused)
