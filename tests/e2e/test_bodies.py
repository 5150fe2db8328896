"""What loops and branches hold while they run is part of what a step takes."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt


def _refining(around):
    """Return a step with layers, and something without a gradient that takes memory while it runs.

    Args:
      around: takes what refines a tensor, and a tensor.
    """
    drawn = [tf.random.stateless_normal((128, 128), (n, 9)) * 0.08 for n in range(6)]
    weights = [tf.Variable(w) for w in drawn]
    wide = tf.Variable(tf.tile(drawn[0], [1, 6])), tf.Variable(tf.tile(drawn[1], [6, 1]))

    def refine(h):
        return 0.1 * tf.nn.softmax(tf.tanh(2.0 * tf.sin(h @ wide[0])) * tf.cos(
            h @ wide[0])) @ wide[1] + h

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.gelu(h @ weight)
            h = h + tf.stop_gradient(around(refine, h))
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


@pytest.mark.parametrize("around", [
    lambda refine, h: tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, refine(h)), (0, h))[1],
    lambda refine, h: tf.cond(tf.reduce_sum(h) < 1e9, lambda: refine(h), lambda: h)],
    ids=["loop", "cond"])
def test_what_a_body_holds_while_it_runs_is_counted(around):
    x = tf.random.stateless_normal((2048, 128), (1, 2))
    plain = tfckpt.verify.measure_peak(tf.function(_refining(around)), x, repeats=3)
    step = tfckpt.checkpoint(tf.function(_refining(around)), budget=0.7)
    after = tfckpt.verify.measure_peak(step, x, repeats=3)
    report = step.report
    assert report.applied and report.baseline_peak_bytes == pytest.approx(plain, rel=0.15)
    assert after < 1.05 * report.allowed_bytes, (after, report.allowed_bytes)
