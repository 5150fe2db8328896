"""What loops and branches hold while they run is part of what a step takes."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt


def _refining(around):
    """Return a step with layers, and something without a gradient that takes memory while it runs.

    Args:
      around: takes what refines a tensor, and a tensor.
    """
    drawn = [tf.random.stateless_normal((128, 128), (n, 9)) * 0.08 for n in range(6)]
    weights = [tf.Variable(w) for w in drawn]
    wide = tf.Variable(tf.tile(drawn[0], [1, 6])), tf.Variable(tf.tile(drawn[1], [6, 1]))

    def refine(h):
        return 0.1 * tf.nn.softmax(tf.tanh(2.0 * tf.sin(h @ wide[0])) * tf.cos(
            h @ wide[0])) @ wide[1] + h

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.gelu(h @ weight)
            h = h + tf.stop_gradient(around(refine, h))
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


@pytest.mark.parametrize("around", [
    lambda refine, h: tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, refine(h)), (0, h))[1],
    lambda refine, h: tf.cond(tf.reduce_sum(h) < 1e9, lambda: refine(h), lambda: h)],
    ids=["loop", "cond"])
def test_what_a_body_holds_while_it_runs_is_counted(around):
    x = tf.random.stateless_normal((2048, 128), (1, 2))
    plain = tfckpt.verify.measure_peak(tf.function(_refining(around)), x, repeats=3)
    step = tfckpt.checkpoint(tf.function(_refining(around)), budget=0.7)
    after = tfckpt.verify.measure_peak(step, x, repeats=3)
    report = step.report
    assert report.applied and report.baseline_peak_bytes == pytest.approx(plain, rel=0.15)
    assert after < 1.05 * report.allowed_bytes, (after, report.allowed_bytes)


def _adjoint(parallel):
    """Return a step with four differential equations, whose gradients are loops of their own."""
    weights = [tf.Variable(0.1 * tf.random.stateless_normal(shape, (n, 9)))
               for n, shape in enumerate([(64, 128), (128, 64)])]

    def slope(h):
        return tf.tanh(h @ weights[0]) @ weights[1]

    @tf.custom_gradient
    def solved(start):
        end = tf.while_loop(lambda i, h: i < 10, lambda i, h: (i + 1, h + 0.1 * slope(h)),
                            (0, start), parallel_iterations=parallel)[1]

        def gradient(upstream, variables=None):
            def body(i, h, adjoint, *sums):
                h = h - 0.1 * slope(h)
                with tf.GradientTape() as tape:
                    tape.watch(h)
                    out = slope(h)
                first, *rest = tape.gradient(out, [h, *variables], output_gradients=adjoint)
                return (i + 1, h, adjoint + 0.1 * first,
                        *(s + 0.1 * d for s, d in zip(sums, rest, strict=True)))

            found = tf.while_loop(lambda i, *_: i < 10, body, (
                0, end, upstream, *(tf.zeros_like(v) for v in variables)),
                parallel_iterations=parallel)
            return found[2], list(found[3:])

        return end, gradient

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for _ in range(4):
                h = solved(tf.nn.gelu(h))
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss, *weights

    return tf.function(step)


@pytest.mark.parametrize("parallel, room", [(1, 1.45), (10, 2.0)])
def test_loops_of_the_backward_begin_with_what_they_are_handed(parallel, room):
    """They ran ahead with what needs no gradient: seven times what was planned was measured."""
    x = tf.random.stateless_normal((8192, 64), (1, 2))
    wanted = [t.numpy().tobytes() for t in _adjoint(parallel)(x)]
    step = tfckpt.checkpoint(_adjoint(parallel))
    assert [t.numpy().tobytes() for t in step(x)] == wanted and step.report.applied
    assert any("_given" in name for name in _waits(step, x))
    assert tfckpt.verify.measure_peak(step, x, repeats=3) < room * step.report.planned_peak_bytes


def _waits(step, x):
    return [c.name for op in step.get_concrete_function(x).graph.get_operations()
            if op.type.endswith("While") for c in op.control_inputs]
