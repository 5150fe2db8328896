"""Peaks of steps whose largest tensors are the logits of a loss, as in language models."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process

ROWS, CLASSES = 1024, 2000


def _trained(inside):
    """Return the expected plain peak of a step, by itself or in a loop, and the measured one."""
    process.fresh()
    weights = tf.Variable(tf.random.stateless_normal((64, CLASSES), (1, 2)) * 0.05)
    labels = tf.one_hot(tf.range(ROWS) % CLASSES, CLASSES)

    def descend(x):
        with tf.GradientTape() as tape:
            # not `tf.nn`: where all is deterministic it has other kernels
            loss = tf.reduce_mean(tf.raw_ops.SoftmaxCrossEntropyWithLogits(
                features=x @ weights, labels=labels).loss)
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    def step(x):
        if not inside:
            return descend(x)
        total = 0.0
        for _ in tf.range(3):
            total += descend(x)
        return total

    x = tf.random.stateless_normal((ROWS, 64), (3, 4))
    ours = tfckpt.checkpoint(tf.function(step), budget=1.0)
    ours(x)
    plain = tf.function(step)
    plain(x)
    return ours.report.expected_bytes[0], tfckpt.verify.measure_peak(plain, x, repeats=3)


@pytest.mark.parametrize("inside", [False, True], ids=["step", "loop"])
def test_a_gradient_that_takes_the_place_of_the_logits_is_counted_once(inside, apart):
    expected, measured = apart.submit(_trained, inside).result()
    assert measured == pytest.approx(expected, rel=0.1)
    assert measured < 1.5 * 4 * ROWS * CLASSES
