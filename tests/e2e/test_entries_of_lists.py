"""Lists of the entries that a loop reads of another list lie in the memory of that."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process


def _trained():
    """Return the expected and the measured plain peak of two recurrent layers."""
    process.fresh()
    model = keras.Sequential([
        keras.Input((32, 16), batch_size=512),
        keras.layers.LSTM(128, return_sequences=True, use_cudnn=False),
        keras.layers.LSTM(128, use_cudnn=False)])
    weights = [v.value for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    x = tf.random.stateless_normal((512, 32, 16), (1, 2))
    ours = tfckpt.checkpoint(tf.function(step), budget=1.0)
    ours(x)
    plain = tf.function(step)
    plain(x)
    return ours.report.expected_bytes[0], tfckpt.verify.measure_peak(plain, x, repeats=3)


def test_entries_of_an_input_that_is_read_again_later_are_counted_once(apart):
    """Zeros like the sequence, with which its gradient begins, may be made after the loop."""
    expected, measured = apart.submit(_trained).result()
    assert expected == pytest.approx(measured, rel=0.03)
