"""Convolutions in bfloat16 are planned as Grappler fuses them, with biases and activations."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.verify import same_arithmetic


def _made(wrap):
    """Return a step of densely connected convolutions, and its state."""
    process.fresh()
    process.seed()
    layers = keras.layers
    given = keras.Input((32, 32, 3))
    h = layers.Conv2D(32, 3, padding="same", dtype="mixed_bfloat16")(given)
    for _ in range(4):
        c = layers.ReLU(dtype="mixed_bfloat16")(h)
        c = layers.Conv2D(16, 3, padding="same", activation="relu", dtype="mixed_bfloat16")(c)
        h = layers.Concatenate(dtype="mixed_bfloat16")([h, c])
    model = keras.Model(given, layers.Dense(4)(layers.GlobalAveragePooling2D()(h)))
    weights = [v.value for v in model.trainable_variables]

    @wrap
    @tf.function(input_signature=[tf.TensorSpec((None, 32, 32, 3))])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step, weights


def test_the_fused_ops_are_planned_and_train_alike():
    x = tf.random.stateless_normal((16, 32, 32, 3), (1, 2))
    states = []
    for wrap in (lambda f: f, tfckpt.checkpoint):
        step, weights = _made(wrap)
        states.append([step(x).numpy().tobytes() for _ in range(3)]
                      + [w.numpy().tobytes() for w in weights])
    assert states[0] == states[1]
    assert step.report.applied and "Grappler" in str(step.report)
    assert same_arithmetic(step, x).same
    assert tfckpt.verify.measure_peak(step, x, repeats=3) < 1.1 * step.report.expected_bytes[1]
