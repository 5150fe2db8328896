"""Gradients of slices of one tensor are put side by side instead of added up."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.loops import train
from tfckpt.plan.loops import choice
from tfckpt.verify import same_arithmetic

STEPS, WIDTH, BATCH = 24, 128, 64
SHAPES = {"rows": (STEPS, BATCH, WIDTH), "last axis": (BATCH, WIDTH, 2 * STEPS)}
SLICES = {
    "steps": lambda z, t: z[:, t],
    "open batch": lambda z, t: z[:, t],
    "from the end": lambda z, t: z[:, t - STEPS],
    "windows": lambda z, t: z[:, t:t + 1],
    "rows": lambda z, t: z[t],
    "last axis": lambda z, t: z[..., 2 * t:2 * t + 2],
    "not all": lambda z, t: z[:, t],
    "once more": lambda z, t: z[:, t],
}


def _step(form):
    """Return a step that goes through slices of a tensor, with its state and its input."""
    process.fresh()
    shape = SHAPES.get(form, (BATCH, STEPS, WIDTH))
    weights = [tf.Variable(tf.random.stateless_normal((n, n), (1, i)) * 0.1)
               for i, n in enumerate((shape[-1], 2 * BATCH if form == "last axis" else WIDTH))]
    spec = (None, *shape[1:]) if form == "open batch" else shape
    # so that of the gradients some are 0, -0, or too small for a normal number
    tiny = tf.constant([0.0, 1e-38, -1e-38, 1.0] * (weights[1].shape[0] // 4))

    @tf.function(input_signature=[tf.TensorSpec(spec)])
    def step(x):
        with tf.GradientTape() as tape:
            z = tf.tanh(x @ weights[0])
            tape.watch(z)
            h = 0.0
            for t in range(1, STEPS - 2) if form == "not all" else range(STEPS):
                part = SLICES[form](z, t)
                if form == "last axis":
                    part = tf.reshape(tf.transpose(part, [1, 0, 2]), (-1, 2 * BATCH))
                h = tf.tanh(h + part @ weights[1]) if t % 3 else h - part * tiny
            loss = tf.reduce_mean(tf.square(h))
            if form == "once more":
                loss += tf.reduce_mean(z ** 4)
        *gradients, of_z = tape.gradient(loss, [*weights, z])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, 1.0 / of_z  # of -0 another number than of 0

    return step, weights, tf.random.stateless_normal(shape, (3, 4))


@pytest.mark.parametrize("form", SLICES)
def test_bits_are_the_same_and_no_slice_takes_the_whole_tensor(form):
    states, steps = [], []
    for wrap in (lambda f: f, tfckpt.checkpoint):
        step, weights, x = _step(form)
        step = wrap(step)
        results = [[part.numpy().tobytes() for part in step(x)] for _ in range(2)]
        states.append((results, [w.numpy().tobytes() for w in weights]))
        steps.append((step, x))
    ours = steps[1][0]
    assert ours.report.applied, ours.report.reason
    assert states[0] == states[1]
    assert len(ours.report.side_by_side) == 1
    assert same_arithmetic(*steps[1]).same
    plain, measured = (tfckpt.verify.measure_peak(step, x, repeats=3) for step, x in steps)
    assert measured < 0.5 * plain


def _accumulated(wrap):
    """Return results of a step whose sum of gradients of slices is an accumulator, and the step."""
    process.fresh()
    weight = tf.Variable(tf.random.stateless_normal((256, 256), (1, 1)) * 0.1)
    other = tf.random.stateless_normal((256, 256), (1, 2)) * 0.1

    @wrap
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            z = tf.tanh(x @ weight)
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.tanh(z[:, t] @ other)))
                             for t in range(64)])
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    x = tf.random.stateless_normal((64, 64, 256), (3, 4))
    return [step(x).numpy() for _ in range(3)] + [weight.numpy().tobytes()], step, x


def test_accumulators_that_grappler_makes_of_large_sums_give_way(monkeypatch):
    kinds = []
    found = choice.sums_of_slices

    def seen(graph, cost):
        names = found(graph, cost)
        kinds.extend(op.type for op in graph.ops if op.name in names)
        return names

    monkeypatch.setattr(choice, "sums_of_slices", seen)
    plain, *_ = _accumulated(lambda f: f)
    results, step, x = _accumulated(tfckpt.checkpoint)
    assert kinds == ["DestroyTemporaryVariable"]
    assert results == plain
    assert len(step.report.side_by_side) == 1 and same_arithmetic(step, x).same
    assert step.report.expected_bytes[1] < 0.2 * step.report.expected_bytes[0]


def _stacked():
    """Return layers whose weights are slices of one variable, as a function, and that."""
    weights = tf.Variable(tf.random.stateless_normal((16, 128, 128), (1, 1)) * 0.1)

    def forward(x):
        for layer in range(16):
            x = tf.tanh(x @ weights[layer])
        return x

    return forward, [weights]


def test_gradients_of_the_layers_of_one_variable_are_no_larger_than_it():
    x = tf.random.stateless_normal((64, 128), (3, 4))
    plain, plain_step = train(_stacked, lambda f: f, [x])
    results, step = train(_stacked, tfckpt.checkpoint, [x])
    assert results == plain
    assert len(step.report.side_by_side) == 1 and same_arithmetic(step, x).same
    before, after = (tfckpt.verify.measure_peak(s, x, repeats=3) for s in (plain_step, step))
    assert after < 0.3 * before
