"""How gradients are taken: tapes of all kinds, and what a step does around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tests.support.random_steps.draw import Draw
from tests.support.random_steps.optimizers import Update


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to be trained: `loss(features(x), y)` of variables."""

    features: Callable
    loss: Callable
    variables: list[tf.Variable]

    def __call__(self, x, y) -> tf.Tensor:
        return self.loss(self.features(x), y)


Step = Callable[..., object]
TWICE = {"penalty", "curvature", "forward_mode"}
"""Styles that differentiate twice, be it forward."""
EXECUTOR = {"in_a_loop", "jacobian", "forward_mode", "halves", "over_dataset", "compiled_call"}
"""Styles that are not compiled."""


def one_tape(draw: Draw, model: Model, update: Update) -> Step:
    """Return a tape; sometimes gradients are returned."""
    shows, unconnected = draw.chance(0.3), draw.choice(("none", "zero"))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model(x, y)
        found = tape.gradient(loss, model.variables, unconnected_gradients=unconnected)
        shown = update(found)
        return {"loss": loss, "shown": shown, "gradients": found if shows else []}
    return step


def by_gradients(draw: Draw, model: Model, update: Update) -> Step:
    """`tf.gradients`; with gradients that come from outside."""
    weighted = draw.chance(0.4)

    def step(x, y):
        loss = model(x, y)
        given = [tf.cast(1.0 + tf.reduce_mean(loss), tf.float32)] if weighted else None
        found = tf.gradients(loss, [v.handle if draw.seed % 2 else v for v in model.variables],
                             grad_ys=given, stop_gradients=None)
        return loss, update(found)
    return step


def persistent(draw: Draw, model: Model, update: Update) -> Step:
    """Two losses of one persistent tape, their gradients added."""
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            h = model.features(x)
            first = model.loss(h, y)
            second = tf.reduce_mean(tf.square(h)) * 0.1
            with tape.stop_recording():
                shown = tf.reduce_max(h)
        found = tape.gradient(first, model.variables)
        others = tape.gradient(second, model.variables)
        del tape
        both = [a if b is None else b if a is None else
                tf.convert_to_tensor(a) + tf.convert_to_tensor(b)
                for a, b in zip(found, others, strict=True)]
        return (first, second, shown), update(both)
    return step


def two_tapes(draw: Draw, model: Model, update: Update) -> Step:
    """Two tapes record one forward; each has its own variables."""
    cut = max(len(model.variables) // 2, 1)

    def step(x, y):
        with tf.GradientTape() as one, tf.GradientTape() as other:
            h = model.features(x)
            loss, rival = model.loss(h, y), -tf.reduce_mean(tf.tanh(h))
        found = [*one.gradient(loss, model.variables[:cut]),
                 *other.gradient(rival + loss, model.variables[cut:])]
        return {"loss": loss, "rival": rival}, update(found)
    return step


def twice(draw: Draw, model: Model, update: Update) -> Step:
    """Two forwards, backwards and updates in one step."""
    def step(x, y):
        losses = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                losses.append(model(x, y))
            update(tape.gradient(losses[-1], model.variables))
        return losses
    return step


def halves(draw: Draw, model: Model, update: Update) -> Step:
    """Return the batch in two halves, gradients added."""
    def step(x, y):
        sums, total = None, 0.0
        count = tf.shape(y)[0] // 2
        for cut in (slice(None, count), slice(count, None)):
            with tf.GradientTape() as tape:
                loss = model(tf.nest.map_structure(lambda t, c=cut: t[c], x), y[cut])
            found = tape.gradient(loss, model.variables, unconnected_gradients="zero")
            found = [tf.convert_to_tensor(g) for g in found]
            sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
            total += loss
        return total, update(sums)
    return step


def in_a_loop(draw: Draw, model: Model, update: Update) -> Step:
    """Whole training steps inside of a `tf.while_loop`."""
    def step(x, y):
        def body(i, last):
            with tf.GradientTape() as tape:
                loss = model(x, y)
            update(tape.gradient(loss, model.variables))
            return i + 1, loss + 0.0 * last
        return tf.while_loop(lambda i, _: i < 2, body, (tf.constant(0), tf.constant(0.0)))[1]
    return step


def over_dataset(draw: Draw, model: Model, update: Update) -> Step:
    """Whole training steps for each element of a dataset."""
    def step(x, y):
        def train(last, element):
            with tf.GradientTape() as tape:
                loss = model(*element)
            update(tape.gradient(loss, model.variables))
            return loss + 0.0 * last
        return tf.data.Dataset.from_tensors((x, y)).repeat(2).reduce(tf.constant(0.0), train)
    return step


def compiled_call(draw: Draw, model: Model, update: Update) -> Step:
    """Whole training steps in a function that XLA compiles by itself."""
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = model(x, y)
        update(tape.gradient(loss, model.variables))
        return loss

    compiled = tf.function(train, jit_compile=True)
    return lambda x, y: compiled(x, y) + compiled(x, y)


def penalty(draw: Draw, model: Model, update: Update) -> Step:
    """Return a penalty on the gradient by the features."""
    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = model(x, y)
            norm = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
            total = loss + 0.1 * norm
        return (loss, norm), update(outer.gradient(total, model.variables))
    return step


def curvature(draw: Draw, model: Model, update: Update) -> Step:
    """Return a product of the Hessian with the gradient, taken in place of the gradient."""
    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = model(x, y)
            found = inner.gradient(loss, model.variables, unconnected_gradients="zero")
            found = [tf.convert_to_tensor(g) for g in found]
            along = tf.add_n([tf.reduce_sum(g * tf.stop_gradient(g)) for g in found])
        bent = outer.gradient(along, model.variables, unconnected_gradients="zero")
        return loss, update([g + 0.01 * tf.convert_to_tensor(b)
                             for g, b in zip(found, bent, strict=True)])
    return step


def jacobian(draw: Draw, model: Model, update: Update) -> Step:
    """Return a Jacobian of three numbers by a small variable, beside the gradient."""
    smallest = min(model.variables, key=lambda v: (v.shape.num_elements() or 10**9, v.name))

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            h = model.features(x)
            loss = model.loss(h, y)
            three = tf.stack([loss, tf.reduce_mean(h), tf.reduce_mean(tf.square(h))])
        rows = tape.jacobian(three, smallest, unconnected_gradients="zero",
                             experimental_use_pfor=draw.seed % 3 > 0)
        return (loss, rows), update(tape.gradient(loss, model.variables))
    return step


def forward_mode(draw: Draw, model: Model, update: Update) -> Step:
    """Return a derivative along the weights, by forward accumulation, beside the gradient."""
    first = model.variables[0]

    def step(x, y):
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(first, tf.ones_like(first)) as along:
                loss = model(x, y)
        slope = along.jvp(loss, unconnected_gradients="zero")
        return (loss, slope), update(tape.gradient(loss, model.variables))
    return step


def scaled(draw: Draw, model: Model, update: Update) -> Step:
    """Return the loss scaled up, the gradients down; and a penalty on the weights."""
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model(x, y) + 1e-4 * tf.add_n(
                [tf.nn.l2_loss(v) for v in model.variables])
            large = loss * 1024.0
        found = tape.gradient(large, model.variables)
        found = [g if g is None else tf.convert_to_tensor(g) / 1024.0 for g in found]
        return loss, update(found)
    return step


def intermediate(draw: Draw, model: Model, update: Update) -> Step:
    """Return the gradient by features in the middle is an output, and so are they."""
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            h = model.features(x)
            tape.watch(h)
            loss = model.loss(h, y)
        by = tape.gradient(loss, h)
        return (loss, tf.reduce_sum(by, -1), h[:1]), update(tape.gradient(loss, model.variables))
    return step


def nested(draw: Draw, model: Model, update: Update) -> Step:
    """Forward and update are `tf.function`s that the step calls."""
    forward, apply = tf.function(model.__call__), tf.function(lambda g: tf.stack(
        [tf.zeros([]), *(tf.cast(tf.reduce_sum(tf.cast(s, tf.float32)), tf.float32)
                         for s in update(g))]))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = forward(x, y)
        found = tape.gradient(loss, model.variables, unconnected_gradients="zero")
        return loss, apply([tf.convert_to_tensor(g) for g in found])
    return step


STYLES: dict[str, Callable[[Draw, Model, Update], Step]] = {f.__name__: f for f in (
    one_tape, by_gradients, persistent, two_tapes, twice, halves, in_a_loop, penalty, curvature,
    jacobian, forward_mode, scaled, intermediate, nested, over_dataset, compiled_call)}
SHARES = {"one_tape": 8, "in_a_loop": 1, "jacobian": 1, "forward_mode": 1, "over_dataset": 0,
          "compiled_call": 0}
"""How often a style is drawn; 2 unless given."""
INSTEAD = {"over_dataset": 0.15}
"""How often one takes the place of `one_tape`, by a draw of its own: they came later, and the
others are to stay what they were."""
