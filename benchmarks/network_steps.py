"""Training steps of `benchmarks.networks` for TensorFlow, and batches of their shapes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.networks import Network


def adam_step(model: Any) -> Any:
    """Return a training step of a classifier as a plain Python function; its slots exist."""
    optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
        return value

    return step


def step_of(network: Network) -> Any:
    """Return a training step with Adam, as a `tf.function` for XLA."""
    return tf.function(adam_step(network.model), jit_compile=True)


def batch_of(network: Network) -> list[tf.Tensor]:
    """Return zeros of the batch's and the labels' shapes: only these matter here."""
    return [tf.zeros(shape, dtype) for shape, dtype in (network.x, network.y)]
