"""Gradients of biases that oneDNN does not compute with those of filters.

Planned with them they would run at the step's end, and each keeps the gradient that it adds up.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.verify import measure_peak


def _trained(rank, dtype):
    """Return the report of a step, and its measured peak."""
    process.fresh()

    def drawn(seed, *shape):
        return tf.cast(tf.random.stateless_normal(shape, (seed, 1)), dtype)

    filters = [tf.Variable(0.05 * drawn(n, *(3,) * rank, 16, 16)) for n in range(4)]
    biases = [tf.Variable(drawn(n, 16)) for n in range(4)]
    variables = filters + biases

    @tfckpt.checkpoint(budget="min")
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w, b in zip(filters, biases, strict=True):
                h = tf.nn.tanh(tf.nn.bias_add(tf.nn.convolution(h, w, padding="SAME"), b))
            loss = tf.reduce_mean(tf.square(h))
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * g)
        return loss

    x = drawn(9, *{2: (16, 118, 117), 3: (8, 16, 16, 16)}[rank], 16)
    step(x)
    return step.report, measure_peak(step, x)


@pytest.mark.parametrize(("rank", "dtype"), [(3, tf.float32), (2, tf.float64), (2, tf.float32)],
                         ids=["3d", "2d-float64", "2d"])
def test_a_plan_holds_for_convolutions_with_biases(rank, dtype, apart):
    report, measured = apart.submit(_trained, rank, dtype).result()
    assert report.recomputed_ops, str(report)
    assert measured < 1.04 * report.most_bytes, str(report)
