"""Random steps whose gradients are sums of slices' gradients: bits and certificates."""

from __future__ import annotations

import random

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.verify import same_arithmetic

SEEDS = 30
"""Of which a quarter is put side by side at least; others overlap, leave gaps, or save little."""
ODD = (0.0, -0.0, 1e-39, -1e-39, 1.0, -1.0, 0.3)
"""Factors whose products are 0, -0, too small for a normal number, or none of these."""


def _slices(rng, dims, axis):
    """Return indices of slices along an axis, and how long that is for them."""
    count, width = rng.choice((4, 6, 9, 16)), rng.choice((1, 1, 1, 2, 3))
    before, after = rng.choice((0, 0, 0, 2)), rng.choice((0, 0, 0, 3))
    length = before + count * width + after
    overlap, gap = rng.random() < 0.15, rng.random() < 0.15
    shrunk = width == 1 and not overlap and rng.random() < 0.7
    negative, ellipsis = rng.random() < 0.2, rng.random() < 0.3
    found = []
    for n in range(count):
        begin = before + n * width - (length if negative else 0)
        end = begin + width + (overlap and n + 1 < count)
        own = begin if shrunk else slice(begin, end or None)
        if not (gap and n == count // 2):
            rest = len(dims) - 1 - axis
            found.append((..., own, *[slice(None)] * rest) if ellipsis
                         else (*[slice(None)] * axis, own))
    if rng.random() < 0.4:
        rng.shuffle(found)
    return found, length


def _made(seed, wrap):
    """Return a random step, its state and an input."""
    process.fresh()
    rng = random.Random(seed)
    dims = [rng.choice((4, 8, 12)) for _ in range(rng.choice((2, 3, 3, 4)))]
    axis = rng.randrange(len(dims))
    indices, dims[axis] = _slices(rng, dims, axis)
    dtype = rng.choice(("float32", "float32", "float32", "bfloat16", "float16", "float64"))
    opened, of_variable = axis != 0 and rng.random() < 0.4, rng.random() < 0.3
    others, factors = rng.choice((0, 0, 0, 1, 2)), [rng.choice(ODD) for _ in indices]
    factors = tf.unstack(tf.constant(factors, dtype))
    x, start = (tf.cast(tf.random.stateless_normal(dims, (seed, n)), dtype) for n in range(2))
    weight = tf.Variable(start if of_variable else tf.ones([], dtype))

    def step(x):
        with tf.GradientTape() as tape:
            z = tf.convert_to_tensor(weight) if of_variable else tf.tanh(x * weight)
            tape.watch(z)
            parts = [tf.reduce_sum(tf.sin(z[i]) * factor) if n % 2 else tf.reduce_mean(
                tf.square(z[i]) * factor)
                     for n, (i, factor) in enumerate(zip(indices, factors, strict=True))]
            loss = tf.add_n([*parts, *(tf.reduce_sum(z ** (n + 2)) for n in range(others))])
        of_z, of_weight = tape.gradient(loss, [z, weight])
        weight.assign_sub(tf.cast(0.01, dtype) * (of_z if of_weight is None else of_weight))
        return loss, 1.0 / of_z  # of -0 another number than of 0

    spec = [None if opened and n == 0 else size for n, size in enumerate(dims)]
    return wrap(tf.function(step, input_signature=[tf.TensorSpec(spec, dtype)])), weight, x


@pytest.mark.parametrize("first", [
    0, *(pytest.param(n * SEEDS, marks=pytest.mark.nightly) for n in range(1, 10))])
@pytest.mark.filterwarnings("ignore:tfckpt")
def test_random_slices(first):
    side_by_side = 0
    for seed in range(first, first + SEEDS):
        states = []
        for wrap in (lambda f: f, tfckpt.checkpoint):
            step, weight, x = _made(seed, wrap)
            results = [[part.numpy().tobytes() for part in step(x)] for _ in range(2)]
            states.append((results, weight.numpy().tobytes()))
        assert states[0] == states[1], seed
        if step.report.side_by_side:
            side_by_side += 1
            assert same_arithmetic(step, x).same, seed
    assert side_by_side > SEEDS / 4
