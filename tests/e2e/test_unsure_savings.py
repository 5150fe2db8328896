"""Steps of which no plan is sure to save: what is applied may not cost more than it saves."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process


@pytest.mark.filterwarnings("ignore:tfckpt. step trains unchanged")
def test_a_plan_without_a_budget_is_expected_to_save_more_than_it_may_cost():
    """An attention decoder, unrolled: its memory is what the gradients of its sources add up."""
    process.fresh()
    units, steps = 128, 24

    def drawn(seed, *shape):
        return tf.Variable(0.05 * tf.random.stateless_normal(shape, (seed, 7)))

    encode, keys_of, score = drawn(1, 80, units), drawn(2, units, units), drawn(3, units, 1)
    query, gates, again = drawn(4, units, units), drawn(5, units, 4 * units), drawn(
        6, units, 4 * units)
    variables = [encode, keys_of, score, query, gates, again]

    def step(x):
        with tf.GradientTape() as tape:
            memory = tf.nn.relu(tf.matmul(x, encode))
            keys = tf.matmul(memory, keys_of)
            state = cell = context = tf.zeros((tf.shape(x)[0], units))
            loss = 0.0
            for _ in range(steps):
                forget, take, new, out = tf.split(context @ gates + state @ again, 4, -1)
                cell = tf.sigmoid(forget) * cell + tf.sigmoid(take) * tf.tanh(new)
                state = tf.sigmoid(out) * tf.tanh(cell)
                seen = tf.matmul(tf.tanh(keys + (state @ query)[:, None]), score)[..., 0]
                context = tf.einsum("bt,btd->bd", tf.nn.softmax(seen), memory)
                loss += tf.reduce_mean(tf.abs(context))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    ours = tfckpt.checkpoint(tf.function(step), budget="min")
    ours(tf.random.stateless_normal((16, 128, 80), (1, 2)))
    report = ours.report
    assert not report.applied or (
        report.expected_bytes[1] + report.most_bytes <= 2 * report.expected_bytes[0])
