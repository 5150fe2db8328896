"""Pieces that contain others: branches, loops, nested functions, gradients of one's own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.support.random_steps.draw import BOXES, Apply, Draw, Shape, piece


def box(*ranks: int, **flags: bool):
    """Decorator: a piece that others are put into."""
    def enter(make):
        BOXES.add(make.__name__)
        return piece(*ranks, **flags)(make)
    return enter


@box(twice=False)
def branch(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """`tf.cond`, `tf.switch_case` or an `if` of autograph."""
    one, other = draw.inner(shape), draw.inner(shape)
    kind = draw.choice(("cond", "case", "counted", "switch"))
    turn = draw.variable(0, "int32")

    def apply(h):
        if kind == "cond":
            return tf.cond(tf.reduce_mean(h) > 0.1, lambda: one(h), lambda: other(h))
        if kind == "case":
            mean = tf.reduce_mean(h)
            return tf.case([(mean > 1.0, lambda: one(h)), (mean > 0.0, lambda: other(h))],
                           default=lambda: tf.identity(h))
        number = turn.assign_add(1)
        if kind == "counted":
            return tf.cond(number % 2 == 0, lambda: one(h), lambda: tf.tanh(h))
        return tf.switch_case(number % 3, [lambda: one(h), lambda: other(h), lambda: h * 0.5])
    return apply, shape


@box(xla=False, twice=False)
def loop(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return the same piece several times in a `tf.while_loop`; how often may depend on data."""
    part, times = draw.inner(shape), draw.integer(1, 4)
    kind = draw.choice(("times", "data", "autograph"))

    def apply(h):
        if kind == "autograph":
            return tf.autograph.to_graph(_repeat)(part, h, times)
        limit = times if kind == "times" else tf.cast(
            tf.reduce_mean(tf.abs(h)) < 1e3, tf.int32) * times
        return tf.while_loop(
            lambda i, _: i < limit, lambda i, x: (i + 1, tf.ensure_shape(part(x), h.shape)),
            (tf.constant(0), h), maximum_iterations=times if kind == "times" else None)[1]
    return apply, shape


def _repeat(part, h, times):
    for _ in tf.range(times):
        h = part(h)
    return h


@box(twice=False)
def nested_function(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a `tf.function` that is called once or several times."""
    part, times = draw.inner(shape, draw.integer(1, 2)), draw.integer(1, 3)
    options: dict[str, Any] = {"reduce_retracing": True} if draw.chance(0.3) else {}
    aside = draw.chance(0.3)
    inner = tf.function(lambda h: (part(h), {"mean": tf.reduce_mean(h)}), **options)

    def apply(h):
        for _ in range(times):
            h, found = inner(h)
            h = h + 0.1 * found["mean"] if aside else h
        return h
    return apply, shape


@box(twice=False)
def recomputed(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """`tf.recompute_grad`."""
    part = draw.inner(shape, draw.integer(1, 2))
    return tf.recompute_grad(part), shape


@box(twice=False)
def own_gradient(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """`tf.custom_gradient`: with variables or without, reversed, clipped, of two."""
    kind = draw.choice(("reversed", "clipped", "variables", "closed", "two"))
    part = draw.inner(shape)
    matrix, weight = draw.weight(shape[-1], shape[-1]), draw.constant_weight(0.8)

    @tf.custom_gradient
    def turned(x):
        return tf.identity(x), lambda g: -0.1 * g

    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda g: tf.clip_by_norm(g, 1.0)

    @tf.custom_gradient
    def closed(x):
        e = tf.exp(-tf.abs(x))
        y = tf.math.log1p(e) + tf.maximum(x, 0.0)
        return y, lambda g: g * (1.0 - e / (1.0 + e))

    @tf.custom_gradient
    def with_variables(x):
        y = tf.tanh(tf.tensordot(x, matrix, 1))

        def gradient(g, variables=None):
            inside = g * (1.0 - tf.square(y))
            back = tf.tensordot(inside, tf.transpose(matrix), 1)
            flat = tf.reshape(x, [-1, shape[-1]])
            own = tf.matmul(flat, tf.reshape(inside, [-1, shape[-1]]), transpose_a=True)
            return back, [own for _ in variables]
        return y, gradient

    @tf.custom_gradient
    def weighed(x, by):
        return x * by, lambda g: (g * by * 0.9, tf.reduce_sum(g * x))

    def apply(h):
        if kind == "variables":
            return with_variables(h)
        if kind == "two":
            return part(weighed(h, weight))
        return part({"reversed": turned, "clipped": clipped, "closed": closed}[kind](h))
    return apply, shape


@box(xla=False, twice=False, rare=True)
def python_call(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Python code in the middle, with a gradient or without."""
    part, kind = draw.inner(shape), draw.choice(("py", "numpy", "print"))

    def apply(h):
        if kind == "py":
            made = tf.py_function(lambda x: tf.tanh(x) * 0.5, [h], tf.float32)
        elif kind == "numpy":
            made = tf.numpy_function(lambda x: x * 0.5, [tf.stop_gradient(h)], tf.float32)
        else:
            tf.print("", end="", output_stream="file:///dev/null")
            made = h
        return part(h + tf.ensure_shape(made, h.shape))
    return apply, shape


@box(xla=False, twice=False, rare=True)
def listed(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a `TensorArray` written and read by hand."""
    parts = [draw.inner(shape) for _ in range(2)]

    def apply(h):
        kept = tf.TensorArray(tf.float32, size=3, clear_after_read=False)
        kept = kept.write(0, h)
        for i, part in enumerate(parts):
            kept = kept.write(i + 1, part(kept.read(i)))
        return tf.ensure_shape(tf.reduce_mean(kept.stack(), 0), h.shape)
    return apply, shape


@box()
def scoped(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Name, devices and a module."""
    part, kind = draw.inner(shape, 2), draw.choice(("scope", "device", "module", "gradients"))

    class Block(tf.Module):
        @tf.Module.with_name_scope
        def __call__(self, h):
            return part(h)
    block = Block("block")

    def apply(h):
        if kind == "module":
            return block(h)
        if kind == "device":
            with tf.device("/CPU:0"):
                return part(h)
        with tf.name_scope("gradients" if kind == "gradients" else "tower/a"):
            return part(h)
    return apply, shape
