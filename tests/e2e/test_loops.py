"""Loops: what they keep for each iteration is part of the plain peak."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process

WIDTH, BATCH, LENGTH = 64, 1024, 12
"""An entry of a list takes 256 KiB, since the CPU's allocator counts no less."""


def _recurrent(layer_type):
    layer = layer_type(WIDTH)
    layer.build((BATCH, LENGTH, WIDTH))
    return layer, [v.value for v in layer.trainable_variables]


def lstm():
    return _recurrent(keras.layers.LSTM)


def gru():
    return _recurrent(keras.layers.GRU)


def scan():
    weight = tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (1, 2)) * 0.1)
    return (lambda x: tf.scan(lambda state, t: tf.tanh(tf.nn.softplus(state @ weight) + t),
                              tf.transpose(x, (1, 0, 2)))), [weight]


@pytest.mark.parametrize("make", [lstm, gru, scan])
def test_what_a_loop_keeps_is_in_the_planned_plain_peak(make):
    """Not less than measured, and up to 1.8 times that: lists that share entries count twice."""
    process.fresh()
    forward, weights = make()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(x)))
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    x = tf.constant(np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH),
                                                             dtype=np.float32))
    measured = tfckpt.verify.measure_peak(tf.function(step), x, repeats=3)
    marked = tfckpt.checkpoint(tf.function(step), solver="store_all")
    marked(x)
    planned = marked.report.baseline_peak_bytes
    assert 0.88 * measured <= planned <= 2 * measured, (planned, measured)
    assert not marked.report.refused
