"""Convolutions in bfloat16 are planned as Grappler fuses them, with biases and activations."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfckpt
from tests.support.loops import train
from tfckpt.verify import same_arithmetic


def _forward():
    """Return densely connected convolutions as a function, and their weights."""
    layers = keras.layers
    given = keras.Input((32, 32, 3))
    h = layers.Conv2D(32, 3, padding="same", dtype="mixed_bfloat16")(given)
    for _ in range(4):
        c = layers.ReLU(dtype="mixed_bfloat16")(h)
        c = layers.Conv2D(16, 3, padding="same", activation="relu", dtype="mixed_bfloat16")(c)
        h = layers.Concatenate(dtype="mixed_bfloat16")([h, c])
    model = keras.Model(given, layers.Dense(4)(layers.GlobalAveragePooling2D()(h)))
    return lambda x: model(x, training=True), [v.value for v in model.trainable_variables]


def test_the_fused_ops_are_planned_and_train_alike():
    x = np.random.default_rng(1).standard_normal((16, 32, 32, 3), dtype=np.float32)
    spec = [tf.TensorSpec((None, 32, 32, 3))]
    plain, _ = train(_forward, lambda f: f, [x], spec=spec)
    found, step = train(_forward, tfckpt.checkpoint, [x], spec=spec)
    assert found == plain
    assert step.report.applied and "Grappler" in str(step.report)
    x = tf.constant(x)
    assert same_arithmetic(step, x).same
    assert tfckpt.verify.measure_peak(step, x, repeats=3) < 1.1 * step.report.expected_bytes[1]
