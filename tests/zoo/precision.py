"""Precision: half types with loss scaling, double precision, integers and booleans in between."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import Group, Training
from tests.zoo.steps import (
    BATCH,
    FEATURES,
    batches,
    by_hand,
    convolutions,
    crossentropy,
    fit,
    images,
    mean_square,
    sgd,
    stack,
    supervised,
    weights,
)

layers = keras.layers
GROUP = Group("precision")


def _policy(name: str) -> None:
    keras.mixed_precision.set_global_policy(name)


@GROUP.entry()
def bfloat16(wrap):
    _policy("mixed_bfloat16")
    return supervised(wrap, stack(), batches())


@GROUP.entry()
def bfloat16_convolutions(wrap):
    _policy("mixed_bfloat16")
    return supervised(wrap, convolutions(layers.BatchNormalization), images())


def _scaled(wrap, data, **options):
    _policy("mixed_float16")
    model = stack()
    optimizer = keras.optimizers.LossScaleOptimizer(sgd(), **options)
    optimizer.build(model.trainable_variables)
    loss = crossentropy()

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(value)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return Training(wrap.function(step), data, lambda: [*model.variables, *optimizer.variables])


@GROUP.entry()
def float16_with_loss_scaling(wrap):
    return _scaled(wrap, batches())


@GROUP.entry()
def float16_scale_grows(wrap):
    return _scaled(wrap, batches(), initial_scale=1024.0, dynamic_growth_steps=2)


@GROUP.entry(smoke=True)
def float16_step_with_infinite_gradients_is_skipped(wrap):
    """Return the second batch overflows: weights stay, the scale is halved."""
    data = batches()
    data[1] = (data[1][0] * 1e6, data[1][1])
    return _scaled(wrap, data, initial_scale=2.0 ** 14)


@GROUP.entry()
def float16_fit(wrap):
    _policy("mixed_float16")
    return fit(wrap, stack(), batches())


@GROUP.entry()
def float64(wrap):
    ws = weights(dtype="float64")
    return by_hand(wrap, lambda x: mean_square(_double(x, ws)), ws)


def _double(x, ws):
    h = tf.cast(x, tf.float64)
    for w in ws:
        h = tf.math.softplus(h @ w) - 0.5
    return h


@GROUP.entry()
def float64_keras(wrap):
    keras.backend.set_floatx("float64")
    _policy("float64")
    model = stack()
    data = [(tf.cast(x, tf.float64), y) for x, y in batches()]
    return supervised(wrap, model, data)


@GROUP.entry(smoke=True)
def integers_and_booleans(wrap):
    """Indices and masks computed from activations, kept for the backward pass."""
    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            h = tf.tanh(h @ w)
            order = tf.argsort(h, axis=1)
            h = tf.where(h > -0.5, tf.gather(h, order, batch_dims=1), 0.25 * h)
        return mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def one_hot_and_counts(wrap):
    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            h = tf.nn.relu(h @ w)
            bucket = tf.cast(tf.clip_by_value(h * 4.0, 0.0, 7.0), tf.uint8)
            h = h + tf.reduce_sum(tf.one_hot(bucket, 8), -1) * h
        return mean_square(tf.tanh(h))

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def complex_spectrum(wrap):
    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            h = tf.math.real(tf.signal.ifft(tf.signal.fft(tf.cast(tf.tanh(h @ w), tf.complex64))
                                            * tf.complex(0.7, 0.1)))
        return mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def quantisation_aware(wrap):
    """Return a straight-through estimator: rounded forward, identity backward."""
    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            h = tf.quantization.fake_quant_with_min_max_args(tf.tanh(h @ w), -1.0, 1.0)
        return mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def bytes_as_input(wrap):
    ws = weights()
    rng = np.random.default_rng(0)
    data = [(tf.constant(rng.integers(0, 255, (2 * BATCH, FEATURES), dtype=np.uint8)),
             tf.zeros(())) for _ in range(3)]
    return by_hand(wrap, lambda x: mean_square(_single(x, ws)), ws, data)


def _single(x, ws):
    h = tf.cast(x, tf.float32) / 255.0
    for w in ws:
        h = tf.nn.elu(h @ w)
    return h


@GROUP.entry(smoke=True)
def float16_weights_by_hand(wrap):
    masters = weights()

    def forward(x):
        h = tf.cast(x, tf.float16)
        for w in masters:
            h = tf.nn.gelu(h @ tf.cast(w, tf.float16))
        return tf.reduce_mean(tf.square(tf.cast(h, tf.float32)))

    return by_hand(wrap, forward, masters)


@GROUP.entry()
def float8_cast(wrap):
    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            h = tf.tanh(h @ w)
            small = tf.cast(tf.stop_gradient(h), tf.dtypes.experimental.float8_e4m3fn)
            rounded = tf.cast(small, tf.float32)
            h = h + tf.stop_gradient(rounded - h)
        return mean_square(h)

    return by_hand(wrap, forward, ws)
