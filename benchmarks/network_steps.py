"""Training steps of `benchmarks.networks` for TensorFlow, and batches of their shapes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.networks import Network


def step_of(network: Network) -> Any:
    """Return a training step with Adam, as a `tf.function` for XLA."""
    model, optimizer = network.model, keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
        return value

    return tf.function(step, jit_compile=True)


def batch_of(network: Network) -> list[tf.Tensor]:
    """Return zeros of the batch's and the labels' shapes: only these matter here."""
    return [tf.zeros(shape, dtype) for shape, dtype in (network.x, network.y)]
