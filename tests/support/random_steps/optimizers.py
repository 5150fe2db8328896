"""Uses of the gradients: optimizers by hand, by TensorFlow's kernels, by Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tests.support.random_steps.draw import Draw

Update = Callable[[Sequence], list]
"""Takes gradients (None and IndexedSlices among them), returns numbers to show."""
RATE = 0.02


def _slots(draw: Draw, variables: Sequence[tf.Variable], value: float = 0.0) -> list[tf.Variable]:
    return [draw.variable(tf.fill(v.shape, value).numpy()) for v in variables]


def _pairs(gradients: Sequence, *others: Sequence):
    """Rows of a gradient that is there, made dense, and what belongs to it."""
    for gradient, *rest in zip(gradients, *others, strict=True):
        if gradient is not None:
            yield tf.convert_to_tensor(gradient), *rest


def sgd(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Plain descent; sparse gradients stay sparse."""
    decay = draw.choice((0.0, 0.01))

    def update(gradients):
        for gradient, v in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                v.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
            elif gradient is not None:
                v.assign_sub(RATE * (gradient + decay * v) if decay else RATE * gradient)
        return []
    return update


def momentum(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Momentum, Nesterov's or not, by hand."""
    slots, nesterov = _slots(draw, variables), draw.chance(0.5)

    def update(gradients):
        for gradient, v, slot in _pairs(gradients, variables, slots):
            slot.assign(0.9 * slot - RATE * gradient)
            v.assign_add(0.9 * slot - RATE * gradient if nesterov else slot)
        return []
    return update


def adam(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Adam by hand, with decay of the weights and a step counter."""
    first, second = _slots(draw, variables), _slots(draw, variables)
    step, decay = draw.variable(0, "int64"), draw.choice((0.0, 0.01))

    def update(gradients):
        t = tf.cast(step.assign_add(1), tf.float32)
        rate = 1e-3 * tf.sqrt(1.0 - tf.pow(0.999, t)) / (1.0 - tf.pow(0.9, t))
        for gradient, v, m, s in _pairs(gradients, variables, first, second):
            m.assign_add(0.1 * (gradient - m))
            s.assign_add(0.001 * (tf.square(gradient) - s))
            v.assign_sub(rate * (m / (tf.sqrt(s) + 1e-2) + decay * v))
        return [rate]
    return update


def kernels(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """TensorFlow's fused kernels."""
    slots, others = _slots(draw, variables), _slots(draw, variables)
    kind = draw.choice(("momentum", "adam", "descent", "rmsprop", "adagrad"))
    raw = tf.raw_ops

    def update(gradients):
        for gradient, v, slot, other in _pairs(gradients, variables, slots, others):
            if kind == "momentum":
                raw.ResourceApplyMomentum(var=v.handle, accum=slot.handle, lr=RATE, grad=gradient,
                                          momentum=0.9, use_nesterov=True)
            elif kind == "adam":
                raw.ResourceApplyAdam(var=v.handle, m=slot.handle, v=other.handle, beta1_power=0.9,
                                      beta2_power=0.999, lr=1e-3, beta1=0.9, beta2=0.999,
                                      epsilon=1e-2, grad=gradient)
            elif kind == "rmsprop":
                raw.ResourceApplyRMSProp(var=v.handle, ms=slot.handle, mom=other.handle, lr=1e-3,
                                         rho=0.9, momentum=0.5, epsilon=1e-2, grad=gradient)
            elif kind == "adagrad":
                raw.ResourceApplyAdagradV2(var=v.handle, accum=slot.handle, lr=RATE, epsilon=1e-2,
                                           grad=gradient)
            else:
                raw.ResourceApplyGradientDescent(var=v.handle, alpha=RATE, delta=gradient)
        return []
    return update


def clipped(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Gradients clipped by their global norm, each by its own, or by value."""
    then, kind = _basic(draw, variables), draw.integer(0, 2)

    def update(gradients):
        if kind == 0:
            gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
            return [norm, *then(gradients)]
        clip = tf.clip_by_norm if kind == 1 else lambda g, by: tf.clip_by_value(g, -by, by)
        return then([g if g is None else clip(tf.convert_to_tensor(g), 0.5) for g in gradients])
    return update


def averaged(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Averages of the weights, written after each update or every few."""
    then, averages = _basic(draw, variables), [draw.variable(v.numpy()) for v in variables]
    step, every = draw.variable(0, "int32"), draw.choice((1, 2))

    def update(gradients):
        shown = then(gradients)
        number = step.assign_add(1)

        def average():
            for v, mean in zip(variables, averages, strict=True):
                mean.assign_sub(0.1 * (mean - v))
            return number
        if every == 1:
            average()
            return shown
        return [*shown, tf.cond(number % every == 0, average, lambda: number)]
    return update


def accumulated(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Gradients of two steps, applied together."""
    then, sums = _basic(draw, variables), _slots(draw, variables)
    step = draw.variable(0, "int32")

    def update(gradients):
        for gradient, total in _pairs(gradients, sums):
            total.assign_add(gradient)

        def apply():
            then([total.read_value() * 0.5 for total in sums])
            for total in sums:
                total.assign(tf.zeros_like(total))
            return True
        return [tf.cond(tf.equal(step.assign_add(1) % 2, 0), apply, lambda: False)]
    return update


def guarded(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Applied where all gradients are finite; a scale grows and shrinks."""
    then, scale = _basic(draw, variables), draw.variable(128.0)

    def update(gradients):
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g, in _pairs(gradients)])

        def apply():
            then(gradients)
            return scale.assign(scale * 1.5)
        return [tf.cond(finite, apply, lambda: scale.assign(scale * 0.5))]
    return update


def by_keras(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    """Return an optimizer of Keras."""
    made = draw.choice((
        lambda: keras.optimizers.SGD(RATE, momentum=0.9),
        lambda: keras.optimizers.Adam(1e-3, epsilon=1e-2, global_clipnorm=1.0),
        lambda: keras.optimizers.AdamW(1e-3, epsilon=1e-2),
        lambda: keras.optimizers.RMSprop(1e-3),
        lambda: keras.optimizers.Lion(1e-4)))()
    made.build(list(variables))
    draw.state += [v.value for v in made.variables]

    def update(gradients):
        made.apply(list(gradients), list(variables))
        return [made.learning_rate]
    return update


BASIC = (sgd, momentum, adam, kernels)
OPTIMIZERS = {f.__name__: f for f in (*BASIC, clipped, averaged, accumulated, guarded, by_keras)}


def _basic(draw: Draw, variables: Sequence[tf.Variable]) -> Update:
    return draw.choice(BASIC)(draw, variables)
