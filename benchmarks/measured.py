"""Training steps on which budgets are measured on the executor: six of this project's, and others.

Each builder returns a Python function that trains one step, and its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks import jobs, networks
from benchmarks.network_steps import adam_step

Made = tuple[Callable, tuple[Any, ...]]


def _with_adam(model: Any, x: tf.Tensor, y: tf.Tensor) -> Made:
    return adam_step(model), (x, y)


def _image(model: Any, batch: int, size: int) -> Made:
    return _with_adam(model, tf.random.stateless_uniform((batch, size, size, 3), (1, 2)),
                      tf.zeros((batch,), tf.int32))


def mlp(batch: int = 2048) -> Made:
    """Ten Dense(512, gelu)."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((512,))
    for _ in range(10):
        x = keras.layers.Dense(512, "gelu")(x)
    return _with_adam(keras.Model(inputs, keras.layers.Dense(10)(x)),
                      tf.random.normal((batch, 512)), tf.zeros((batch,), tf.int32))


def vit(batch: int = 16, size: int = 64, patch: int = 4, width: int = 192, depth: int = 5) -> Made:
    """Return a vision transformer with dropout."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((size, size, 3))
    h = keras.layers.Conv2D(width, patch, patch)(inputs)
    h = keras.layers.Reshape(((size // patch) ** 2, width))(h)
    for _ in range(depth):
        a = keras.layers.LayerNormalization()(h)
        h = h + keras.layers.MultiHeadAttention(4, width // 4, dropout=0.1)(a, a)
        a = keras.layers.LayerNormalization()(h)
        a = keras.layers.Dropout(0.1)(keras.layers.Dense(4 * width, "gelu")(a))
        h = h + keras.layers.Dropout(0.1)(keras.layers.Dense(width)(a))
    h = keras.layers.GlobalAveragePooling1D()(h)
    return _image(keras.Model(inputs, keras.layers.Dense(10)(h)), batch, size)


def mobilenet(batch: int = 16, size: int = 96) -> Made:
    """MobileNetV2 of keras.applications."""
    keras.utils.set_random_seed(0)
    return _image(keras.applications.MobileNetV2(
        (size, size, 3), weights=None, classes=10, classifier_activation=None), batch, size)


def efficientnet(batch: int = 8, size: int = 96) -> Made:
    """EfficientNet-B0 of keras.applications."""
    keras.utils.set_random_seed(0)
    return _image(keras.applications.EfficientNetB0(
        input_shape=(size, size, 3), weights=None, classes=10, classifier_activation=None),
        batch, size)


def convnext_tiny(batch: int = 4, size: int = 64) -> Made:
    """ConvNeXt-Tiny of keras.applications."""
    keras.utils.set_random_seed(0)
    return _image(keras.applications.ConvNeXtTiny(
        input_shape=(size, size, 3), weights=None, classes=10, classifier_activation=None),
        batch, size)


def _of_jobs(name: str, **sizes: int) -> Made:
    job = jobs.JOBS[name](**sizes)
    return job.train_step, (job.x, job.y)


def _of_networks(name: str, **sizes: int) -> Made:
    keras.utils.set_random_seed(0)
    network = networks.NETWORKS[name](**sizes)
    x, y = (tf.zeros(shape, dtype) if dtype == "int32" else tf.random.stateless_normal(
        shape, (1, 2), dtype=dtype) for shape, dtype in (network.x, network.y))
    return _with_adam(network.model, x, y)


NETWORKS: dict[str, Callable[..., Made]] = {
    **{made.__name__: made for made in (mlp, vit, mobilenet, efficientnet, convnext_tiny)},
    **{name: functools.partial(_of_jobs, name, **sizes) for name, sizes in (
        ("resnet50", {"size": 96}), ("unet", {}), ("transformer", {"batch": 4}),
        ("densenet121", {"size": 64}))},
    **{name: functools.partial(_of_networks, name, **sizes) for name, sizes in (
        ("mixer", {"batch": 4}), ("mbconv", {"batch": 4}), ("wavenet", {"batch": 1}),
        ("decoder", {"batch": 1, "length": 512}))}}
