"""Optimizers: all of Keras', their options, accumulation, and sparse gradients."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import LESS, Entry, Group, Training, Wrap
from tests.zoo.steps import (
    CLASSES,
    batches,
    by_hand,
    crossentropy,
    fit,
    mean_square,
    stack,
    supervised,
    tokens,
    weights,
)

layers = keras.layers
GROUP = Group("optimizers")

_ALL = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "amsgrad": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "adamax": lambda: keras.optimizers.Adamax(1e-2),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "nadam": lambda: keras.optimizers.Nadam(1e-2),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.5),
    "rmsprop_centered": lambda: keras.optimizers.RMSprop(1e-2, centered=True),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-1),
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "lamb": lambda: keras.optimizers.Lamb(1e-2),
    "muon": lambda: keras.optimizers.Muon(1e-2),
    "clipnorm": lambda: keras.optimizers.Adam(1e-2, clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.Adam(1e-2, clipvalue=0.001),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.01),
    "global_clipnorm_adam": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.01),
    "ema": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9),
    "ema_overwrites": lambda: keras.optimizers.SGD(0.1, use_ema=True,
                                                   ema_overwrite_frequency=2),
    "weight_decay": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.05),
    "accumulates": lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
    "accumulates_and_averages": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=3, use_ema=True),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 10, warmup_target=0.2, warmup_steps=2)),
    "loss_scale_factor": lambda: keras.optimizers.Adam(1e-2, loss_scale_factor=8.0),
}
_SMOKE = ("adam", "global_clipnorm")


def _entry(name: str) -> Entry:
    def build(wrap: Wrap) -> Training:
        return supervised(wrap, stack(), batches(), _ALL[name]())
    return Entry(name, GROUP.name, build, smoke=name in _SMOKE)


GROUP.extend(_entry(name) for name in _ALL)


@GROUP.entry()
def accumulation_in_fit(wrap):
    return fit(wrap, stack(), batches(),
               keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2))


@GROUP.entry()
def legacy_clipping_by_hand(wrap):
    ws = weights()

    def step(x, y):
        with tf.GradientTape() as tape:
            h = x
            for w in ws:
                h = tf.tanh(h @ w)
            loss = mean_square(h)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, ws), 0.01)
        for w, g in zip(ws, gradients, strict=True):
            w.assign_sub(0.5 * g)
        return loss, norm

    return Training(wrap.function(step), batches(), lambda: list(ws))


@GROUP.entry()
def accumulation_by_hand(wrap):
    ws = weights()
    sums = [tf.Variable(tf.zeros_like(w)) for w in ws]
    count = tf.Variable(0)

    def step(x, y):
        with tf.GradientTape() as tape:
            h = x
            for w in ws:
                h = tf.tanh(h @ w)
            loss = mean_square(h)
        for total, g in zip(sums, tape.gradient(loss, ws), strict=True):
            total.assign_add(g)
        count.assign_add(1)
        if count % 2 == 0:
            for w, total in zip(ws, sums, strict=True):
                w.assign_sub(0.05 * total)
                total.assign(tf.zeros_like(total))
        return loss

    return Training(wrap.function(step), batches(), lambda: [*ws, *sums, count])


@GROUP.entry(expect=LESS)
def microbatches_in_one_step(wrap):
    """Accumulation unrolled inside the step: several tapes over slices of a batch."""
    model, optimizer, loss = stack(), keras.optimizers.Adam(1e-2), crossentropy()
    optimizer.build(model.trainable_variables)

    def step(x, y):
        total = [tf.zeros_like(v) for v in model.trainable_variables]
        values = []
        for xs, ys in zip(tf.split(x, 4), tf.split(y, 4), strict=True):
            with tf.GradientTape() as tape:
                values.append(loss(ys, model(xs, training=True)))
            found = tape.gradient(values[-1], model.trainable_variables)
            total = [a + b for a, b in zip(total, found, strict=True)]
        optimizer.apply(total, model.trainable_variables)
        return values, total

    return Training(wrap.function(step), batches(),
                    lambda: [*model.variables, *optimizer.variables])


def _text_model():
    text = keras.Input((16,), dtype="int32")
    h = layers.Embedding(50, 16)(text)
    for _ in range(4):
        h = layers.Dense(32, "tanh")(h)
    return keras.Model(text, layers.Dense(CLASSES)(layers.GlobalMaxPooling1D()(h)))


@GROUP.entry(smoke=True)
def sparse_gradients_adam(wrap):
    return supervised(wrap, _text_model(), tokens(), keras.optimizers.Adam(1e-2))


@GROUP.entry()
def sparse_gradients_sgd_momentum(wrap):
    return supervised(wrap, _text_model(), tokens())


@GROUP.entry()
def sparse_gradients_adagrad_fit(wrap):
    return fit(wrap, _text_model(), tokens(), keras.optimizers.Adagrad(0.1))


@GROUP.entry()
def indexed_slices_by_hand(wrap):
    table, ws = tf.Variable(tf.random.stateless_normal((50, 16), (1, 2))), weights()
    rng = np.random.default_rng(0)
    data = [(tf.constant(rng.integers(0, 50, (256,), dtype=np.int32)), tf.zeros(()))
            for _ in range(3)]

    def step(x, y):
        with tf.GradientTape() as tape:
            h = tf.nn.embedding_lookup(table, x)
            for w in ws:
                h = tf.tanh(h @ w)
            loss = mean_square(h)
        found = tape.gradient(loss, [table, *ws])
        table.scatter_sub(tf.IndexedSlices(0.1 * found[0].values, found[0].indices))
        for w, g in zip(ws, found[1:], strict=True):
            w.assign_sub(0.1 * g)
        return loss, found

    return Training(wrap.function(step), data, lambda: [table, *ws])


@GROUP.entry()
def weights_tied_to_the_embedding(wrap):
    table, ws = tf.Variable(tf.random.stateless_normal((50, 16), (1, 2))), weights()

    def forward(x):
        h = tf.gather(table, tf.cast(tf.abs(x[:, :8]) * 20.0, tf.int32) % 50)
        for w in ws:
            h = tf.tanh(h @ w)
        return tf.reduce_mean(tf.nn.log_softmax(tf.einsum("btd,vd->btv", h, table)))

    return by_hand(wrap, forward, [*ws, table])


@GROUP.entry()
def two_optimizers(wrap):
    model = stack()
    first, second = keras.optimizers.Adam(1e-2), keras.optimizers.SGD(0.1)
    half = len(model.trainable_variables) // 2
    parts = model.trainable_variables[:half], model.trainable_variables[half:]
    first.build(parts[0])
    second.build(parts[1])
    loss = crossentropy()

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        found = tape.gradient(value, model.trainable_variables)
        first.apply(found[:half], parts[0])
        second.apply(found[half:], parts[1])
        return value, found

    return Training(wrap.function(step), batches(),
                    lambda: [*model.variables, *first.variables, *second.variables])


@GROUP.entry()
def sharpness_aware_minimisation(wrap):
    """Two passes per step: the second at weights that the first has moved."""
    ws = weights()

    def step(x, y):
        def loss():
            h = x
            for w in ws:
                h = tf.tanh(h @ w)
            return mean_square(h)

        with tf.GradientTape() as tape:
            first = loss()
        moved = [0.05 * g for g in tape.gradient(first, ws)]
        for w, e in zip(ws, moved, strict=True):
            w.assign_add(e)
        with tf.GradientTape() as tape:
            second = loss()
        found = tape.gradient(second, ws)
        for w, e, g in zip(ws, moved, found, strict=True):
            w.assign_sub(e + 0.1 * g)
        return first, second, found

    return Training(wrap.function(step), batches((512, 16)), lambda: list(ws))


@GROUP.entry()
def compat_v1_optimizer(wrap):
    ws = weights()
    optimizer = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)

    def step(x, y):
        h = x
        for w in ws:
            h = tf.tanh(h @ w)
        loss = mean_square(h)
        found = tf.gradients(loss, ws)
        optimizer.apply_gradients(zip(found, ws, strict=True))
        return loss, found

    return Training(wrap.function(step), batches((512, 16)),
                    lambda: [*ws, *optimizer.variables()])
