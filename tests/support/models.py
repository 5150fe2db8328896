"""Small networks and their training steps, each made twice with equal weights and equal data.

Sizes are chosen so that activations matter: most take 256 KiB or more, since TensorFlow's CPU
allocator does not count less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import jobs

layers = keras.layers


@dataclasses.dataclass
class Trial:
    """A model, one training step as a plain Python function, and batches to train on.

    `step(x, y)` returns the loss and, where `gradients` is set, every gradient.
    """

    step: Callable
    batches: list[tuple[tf.Tensor, tf.Tensor]]
    variables: Callable[[], list]
    model: Any = None


def trial(model, optimizer, loss, batches, *, gradients: bool = True) -> Trial:
    """Return a compiled model's step on the given batches."""
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            value = model.compute_loss(x=x, y=y, y_pred=prediction, training=True)
        found = tape.gradient(value, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return (value, found) if gradients else (value, [])

    return Trial(step, batches, lambda: [*model.variables, *optimizer.variables], model)


def numbers(shape, classes, target=None, seed=0, steps=3):
    """Batches of made-up features and labels."""
    made = np.random.default_rng(seed)
    target = shape[:1] if target is None else target
    return [(tf.constant(made.standard_normal(shape, dtype=np.float32)),
             tf.constant(made.integers(0, classes, target, dtype=np.int32)))
            for _ in range(steps)]


def _crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _adam():
    """With a large epsilon: rounding errors in gradients that are zero in truth stay small."""
    return keras.optimizers.Adam(1e-3, epsilon=1e-2)


def _normalised(h, filters, size, strides=1):
    h = layers.Conv2D(filters, size, strides=strides, padding="same")(h)
    return layers.BatchNormalization()(h)


def _bottleneck(h, filters, strides):
    shortcut = _normalised(h, 4 * filters, 1, strides)
    if strides == 1 and h.shape[-1] == 4 * filters:
        shortcut = h
    h = layers.ReLU()(_normalised(h, filters, 1, strides))
    h = layers.ReLU()(_normalised(h, filters, 3))
    return layers.ReLU()(layers.Add()([shortcut, _normalised(h, 4 * filters, 1)]))


def residual(**options) -> Trial:
    """Bottleneck blocks with BatchNorm, as in ResNet-50, SGD with momentum."""
    image = keras.Input((32, 32, 3))
    h = layers.ReLU()(_normalised(image, 16, 3))
    for filters, strides in ((8, 1), (8, 1), (8, 1), (16, 2), (16, 1)):
        h = _bottleneck(h, filters, strides)
    model = keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(h)))
    return trial(model, _momentum(), _crossentropy(), numbers((8, 32, 32, 3), 5), **options)


def transformer(**options) -> Trial:
    """Return the benchmark's encoder with dropout, small, Adam."""
    job = jobs.transformer(layers=2, d=64, heads=4, mlp=128, seq=64, batch=16)
    made = np.random.default_rng(1)
    batches = [(tf.constant(made.integers(0, 1000, job.x.shape, dtype=np.int32)),
                tf.constant(made.integers(0, 10, job.y.shape, dtype=np.int32))) for _ in range(3)]
    return trial(job.model, _adam(), _crossentropy(), batches, **options)


def unet(**options) -> Trial:
    """Return the benchmark's U-Net, small, Adam."""
    job = jobs.unet(levels=2, filters=8, size=32, batch=8)
    batches = numbers(tuple(job.x.shape), 4, tuple(job.y.shape))
    return trial(job.model, _adam(), _crossentropy(), batches, **options)


def dense_gelu(**options) -> Trial:
    """Dense + GELU on 2-D input: TensorFlow fuses the plain chain."""
    model = keras.Sequential([keras.Input((32,)), *(layers.Dense(48, activation="gelu")
                                                    for _ in range(5)), layers.Dense(5)])
    return trial(model, _adam(), _crossentropy(), numbers((2048, 32), 5), **options)


def dense_relu(**options) -> Trial:
    """Dense + bias + ReLU."""
    model = keras.Sequential([keras.Input((32,)), *(layers.Dense(48, activation="relu")
                                                    for _ in range(6)), layers.Dense(5)])
    return trial(model, _momentum(), _crossentropy(), numbers((2048, 32), 5), **options)


def conv_relu(**options) -> Trial:
    """Convolution + bias + ReLU."""
    model = keras.Sequential([keras.Input((32, 32, 3)),
                              *(layers.Conv2D(8, 3, padding="same", activation="relu")
                                for _ in range(6)), layers.GlobalMaxPooling2D(), layers.Dense(5)])
    return trial(model, _momentum(), _crossentropy(), numbers((8, 32, 32, 3), 5), **options)


def shared(**options) -> Trial:
    """Return the same layers several times: their gradients are sums over the uses."""
    features = keras.Input((40,))
    first, second = layers.Dense(40, activation="tanh"), layers.Dense(40, activation="gelu")
    h = features
    for _ in range(3):
        h = layers.Add()([h, second(first(h))])
    model = keras.Model(features, layers.Dense(5)(h))
    return trial(model, _momentum(), _crossentropy(), numbers((2048, 40), 5), **options)


DROPOUTS = 4


def keras_dropout(**options) -> Trial:
    """Keras' Dropout: a seed state that must advance once per step and layer."""
    stack = []
    for i in range(DROPOUTS):
        stack += [layers.Dense(64, activation="relu"), layers.Dropout(0.3, seed=i)]
    model = keras.Sequential([keras.Input((32,)), *stack, layers.Dense(5)])
    return trial(model, _momentum(), _crossentropy(), numbers((1024, 32), 5), **options)


def stateful_dropout(**options) -> Trial:
    """`tf.nn.dropout` with a stateful generator: drawing again would give another mask."""
    tf.random.set_seed(11)
    made = np.random.default_rng(5)
    sizes = [32, 64, 64, 64, 64, 5]
    weights = [tf.Variable(made.standard_normal(pair).astype(np.float32) * 0.2)
               for pair in zip(sizes, sizes[1:], strict=False)]
    gradients = options.get("gradients", True)

    def step(x, y):
        with tf.GradientTape() as tape:
            h = x
            for i, weight in enumerate(weights[:-1]):
                h = tf.nn.dropout(tf.nn.gelu(h @ weight), 0.4, seed=i)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, h @ weights[-1])
            loss = tf.reduce_mean(losses)
        found = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.1 * gradient)
        return (loss, found) if gradients else (loss, [])

    return Trial(step, numbers((1024, 32), 5), lambda: list(weights))


MODELS: dict[str, Callable[..., Trial]] = {
    "residual": residual,
    "transformer": transformer,
    "unet": unet,
    "dense_gelu": dense_gelu,
    "dense_relu": dense_relu,
    "conv_relu": conv_relu,
    "shared": shared,
    "keras_dropout": keras_dropout,
    "stateful_dropout": stateful_dropout,
}


def stack(width=64, depth=3, **options) -> keras.Model:
    """Return a Keras model for `fit`: Dense + ReLU and BatchNorm on 32 features, five classes."""
    inside = [layer for _ in range(depth) for layer in (layers.Dense(width, activation="relu"),
                                                        layers.BatchNormalization())]
    return keras.Sequential([keras.Input((32,), **options), *inside, layers.Dense(5)])


def arrays(count=4096, seed=2):
    """Features and labels for `stack` as numpy arrays."""
    made = np.random.default_rng(seed)
    return (made.standard_normal((count, 32), dtype=np.float32),
            made.integers(0, 5, (count,), dtype=np.int32))
