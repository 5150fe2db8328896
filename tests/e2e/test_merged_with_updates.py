"""Steps whose forward and update compute something alike, which Grappler merges."""

from __future__ import annotations

import tensorflow as tf

import tfckpt
from tests.support import process

PLACES, WIDTH = 96, 64


def _made(wrap):
    """Return a step of an open batch, with embeddings, whose update adds up equal rows."""
    process.fresh()

    def variable(seed, *shape):
        return tf.Variable(tf.random.stateless_normal(shape, (1, seed)) * 0.1)

    kinds, places = variable(1, 4, WIDTH), variable(2, PLACES, WIDTH)
    weights = [variable(3 + i, WIDTH, WIDTH) for i in range(12)]

    @wrap
    @tf.function(input_signature=[tf.TensorSpec((None, PLACES, WIDTH))])
    def step(x):
        with tf.GradientTape() as tape:
            filled = tf.fill([tf.shape(x)[0], PLACES], 1)
            h = x + tf.gather(kinds, filled) + tf.gather(places, tf.range(PLACES))
            for weight in weights:
                h = tf.tanh(h @ weight) + h
            loss = tf.reduce_mean(tf.square(h))
        of_kinds, of_places, *gradients = tape.gradient(loss, [kinds, places, *weights])
        rows = tf.unique(of_places.indices)
        places.scatter_sub(tf.IndexedSlices(0.1 * tf.math.unsorted_segment_sum(
            of_places.values, rows.idx, tf.shape(rows.y)[0]), rows.y))
        for weight, gradient in zip((kinds, *weights), (of_kinds, *gradients), strict=True):
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step, [kinds, places, *weights]


def test_a_forward_that_shares_a_constant_with_the_update_is_recomputed():
    """The number of rows is the number of places: one constant, under the update's name."""
    x = tf.random.stateless_normal((32, PLACES, WIDTH), (1, 1))
    states = []
    for wrap in (lambda f: f, tfckpt.checkpoint):
        step, weights = _made(wrap)
        states.append([step(x).numpy() for _ in range(3)] + [w.numpy().tobytes() for w in weights])
    assert states[0] == states[1]
    assert step.report.applied
    assert step.report.expected_bytes[1] < 0.4 * step.report.expected_bytes[0]
