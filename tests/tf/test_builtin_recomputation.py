"""TensorFlow's own recomputation, reached through `grappler_ext`: counted where it ran."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
from tfckpt.errors import PlanError
from tfckpt.verify import executed

LAYERS = 4


def training_step(hinted=()):
    """Return a stack of products and sigmoids; those of the layers in `hinted` carry the hint."""
    made = np.random.default_rng(0)
    weights = [tf.Variable(made.standard_normal((8, 8)), dtype=tf.float32) for _ in range(LAYERS)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for i, weight in enumerate(weights):
                h = h @ weight
                with (grappler_ext.recompute_hint() if i in hinted else contextlib.nullcontext()):
                    h = tf.sigmoid(h)
            loss = tf.reduce_sum(h)
        return loss, tape.gradient(loss, weights)

    return tf.function(step)


def sigmoids(step) -> int:
    return executed(step, tf.ones((16, 8))).ops["Sigmoid"]


@pytest.mark.parametrize("mode, hinted, again", [
    ("RECOMPUTATION_HEURISTICS", (), LAYERS),
    ("HEURISTICS", (), LAYERS),
    ("MANUAL", (0, 2), 2),
    ("MANUAL", (), 0),
])
def test_what_runs_twice(mode, hinted, again):
    step = training_step(hinted)
    wanted, gradients = step(tf.ones((16, 8)))
    assert sigmoids(step) == LAYERS
    with grappler_ext.builtin_recomputation(mode):
        assert sigmoids(step) == LAYERS + again
        found, others = step(tf.ones((16, 8)))
    assert sigmoids(step) == LAYERS
    assert found.numpy() == wanted.numpy()
    for one, other in zip(gradients, others, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_with_the_default_scope_it_does_nothing():
    """Why nobody gets it in TensorFlow 2: backward ops are looked for under `gradients/`."""
    with grappler_ext.builtin_recomputation(scope="gradients/"):
        assert sigmoids(training_step()) == LAYERS


def test_another_mode_is_refused():
    with pytest.raises(PlanError, match="mode='ALL' must be one of RECOMPUTATION_HEURISTICS"):
        grappler_ext.builtin_recomputation("ALL")
