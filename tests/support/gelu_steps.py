"""A training step of dense layers with GELU, whose backward Grappler rearranges."""

from __future__ import annotations

import tensorflow as tf

from tests.support import process


def gelu_loss(weights, x):
    """Return the loss of dense layers with GELU, without biases."""
    hidden = x
    for w in weights:
        hidden = tf.nn.gelu(hidden @ w)
    return tf.reduce_mean(tf.square(hidden))


def gelu_step(layers: int, width: int, rows: int, scale: float = .05):
    """Return a step with momentum as a Python function, a batch, and its variables.

    Each layer makes several tensors of rows * width * 4 bytes.
    """
    process.fresh()
    weights = [tf.Variable(tf.random.stateless_normal((width, width), (1, i)) * scale)
               for i in range(layers)]
    slots = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def step(x):
        with tf.GradientTape() as tape:
            loss = gelu_loss(weights, x)
        for w, slot, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            w.assign_sub(.1 * slot.assign(.9 * slot + gradient))
        return loss

    return step, tf.random.stateless_normal((rows, width), (2, 3)), weights + slots
