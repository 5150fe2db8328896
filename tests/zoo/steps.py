"""What many entries are made of: data, small stacks of layers, and the usual training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import Training, Wrap

layers = keras.layers
FEATURES, CLASSES, WIDTH, BATCH, STEPS = 16, 5, 32, 256, 3


def made(seed: int = 0) -> np.random.Generator:
    """Return a generator of numbers."""
    return np.random.default_rng(seed)


def batches(shape: Sequence[int] = (BATCH, FEATURES), classes: int = CLASSES,
            target: Sequence[int] | None = None, steps: int = STEPS) -> list[tuple]:
    """Batches of features and labels."""
    rng = made()
    return [(tf.constant(rng.standard_normal(shape, dtype=np.float32)),
             tf.constant(rng.integers(0, classes, shape[:1] if target is None else target,
                                      dtype=np.int32)))
            for _ in range(steps)]


def images(size: int = 16, batch: int = 16, **options) -> list[tuple]:
    """Batches of small pictures and labels."""
    return batches((batch, size, size, 3), **options)


def tokens(length: int = 16, batch: int = 32, vocabulary: int = 50, target=None,
           classes: int = CLASSES) -> list[tuple]:
    """Batches of texts and labels."""
    rng = made(1)
    return [(tf.constant(rng.integers(1, vocabulary, (batch, length), dtype=np.int32)),
             tf.constant(rng.integers(0, classes, target or (batch,), dtype=np.int32)))
            for _ in range(STEPS)]


def crossentropy() -> keras.losses.Loss:
    """Of integer labels and logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd() -> keras.optimizers.Optimizer:
    """With momentum."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


def stack(*inside: Callable[[], Any], depth: int = 4, features: int = FEATURES,
          activation: str = "tanh", last: bool = True) -> keras.Model:
    """Dense layers, each followed by what `inside` makes."""
    parts: list[Any] = [keras.Input((features,))]
    for _ in range(depth):
        parts += [layers.Dense(WIDTH, activation=activation), *(make() for make in inside)]
    return keras.Sequential([*parts, layers.Dense(CLASSES)] if last else parts)


def convolutions(*inside: Callable[[], Any], depth: int = 4, size: int = 16,
                 filters: int = 8) -> keras.Model:
    """Convolutions, each followed by what `inside` makes."""
    parts: list[Any] = [keras.Input((size, size, 3))]
    for _ in range(depth):
        parts += [layers.Conv2D(filters, 3, padding="same", activation="relu"),
                  *(make() for make in inside)]
    return keras.Sequential([*parts, layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)])


def supervised(wrap: Wrap, model: keras.Model, data: list[tuple], optimizer=None, loss=None,
               extra: Sequence = (), **function) -> Training:
    """Return a loop of one's own: tape, gradient, `optimizer.apply`; returns loss and gradients."""
    optimizer = sgd() if optimizer is None else optimizer
    loss = crossentropy() if loss is None else loss
    if wrap.partial:
        return fit(wrap, model, data, optimizer, loss, extra=extra)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
            if model.losses:
                value += tf.add_n(model.losses)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value, gradients

    return Training(wrap.function(step, **function), data,
                    lambda: [*model.variables, *optimizer.variables, *extra])


def fit(wrap: Wrap, model: keras.Model, data: list[tuple], optimizer=None, loss=None,
        metrics: Sequence = (), jit_compile: bool | str = False, calls: int = 3,
        fit_options: dict | None = None, extra: Sequence = (), **compiled) -> Training:
    """`compile` and `fit`: all batches in one call, a few calls."""
    model = wrap.model(model)
    model.compile(optimizer or sgd(), loss or crossentropy(), metrics=list(metrics),
                  jit_compile=jit_compile, **compiled)
    arrays = [np.concatenate([np.asarray(batch[i]) for batch in data])
              for i in range(len(data[0]))]
    size = int(data[0][0].shape[0])
    if wrap.partial:
        arrays = [array[:-(size // 3)] for array in arrays]
    options = {"batch_size": size, "shuffle": False, "verbose": 0, **(fit_options or {})}

    def step():
        return model.fit(arrays[0], arrays[1], **options).history

    return Training(step, [()] * calls,
                    lambda: [*model.variables, *model.optimizer.variables, *extra])


def weights(count: int = 8, width: int = FEATURES, dtype: str = "float32") -> list[tf.Variable]:
    """Square matrices."""
    rng = made(2)
    return [tf.Variable((rng.standard_normal((width, width)) * 0.25).astype(dtype))
            for _ in range(count)]


def by_hand(wrap: Wrap, forward: Callable, variables: list, data: list[tuple] | None = None,
            extra: Sequence = (), **function) -> Training:
    """Return a step without Keras: `forward(x)` gives the loss; plain gradient descent."""
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = forward(x)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss, gradients

    return Training(wrap.function(step, **function), data or batches((2 * BATCH, FEATURES)),
                    lambda: [*variables, *extra])


def chain(h, variables, activation: Callable = tf.tanh):
    """Products and activations, one for each variable."""
    for variable in variables:
        h = activation(h @ variable)
    return h


def mean_square(h):
    """Return a loss."""
    return tf.reduce_mean(tf.square(h))
