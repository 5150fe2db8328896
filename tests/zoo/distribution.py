"""Distribution over logical CPUs: one schedule and one chain of fences for each device."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.alone import DEVICES
from tests.zoo.entry import NO_GAIN, UNCHANGED, Group, Training
from tests.zoo.steps import BATCH, CLASSES, FEATURES, STEPS, fit, made, sgd, stack, supervised
from tests.zoo.steps import batches as single_batches

layers = keras.layers
GROUP = Group("distribution")


def available() -> bool:
    """Return whether the process has the logical CPUs that the entries need."""
    return len(tf.config.list_logical_devices("CPU")) >= DEVICES


@functools.cache
def mirrored(replicas: int) -> tf.distribute.Strategy:
    """One for each process: TensorFlow numbers groups of collectives from 1 in each strategy, and
    a group of four would meet that of two."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def _fit(wrap, replicas, *inside, **options):
    with mirrored(replicas).scope():
        return fit(wrap, stack(*inside), single_batches(), metrics=["accuracy"], **options)


@GROUP.entry()
def mirrored_fit(wrap):
    return _fit(wrap, 2)


@GROUP.entry(alone=True)
def mirrored_fit_on_four(wrap):
    return _fit(wrap, 4, layers.BatchNormalization)


@GROUP.entry()
def mirrored_fit_with_dropout(wrap):
    return _fit(wrap, 2, functools.partial(layers.Dropout, 0.3, seed=4))


def custom_loop(wrap, replicas, model_of=stack, batch=BATCH):
    """`strategy.run` inside a `tf.function` of one's own."""
    strategy = mirrored(replicas)
    with strategy.scope():
        model, optimizer = model_of(), sgd()
        optimizer.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / batch
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    def step(x, y):
        losses = strategy.run(replica, args=(x, y))
        return strategy.reduce("sum", losses, axis=None), strategy.experimental_local_results(
            losses)

    rng = made(3)
    data = tf.data.Dataset.from_tensor_slices((
        rng.standard_normal((STEPS * batch, FEATURES), dtype=np.float32),
        rng.integers(0, CLASSES, STEPS * batch))).batch(batch, drop_remainder=True)
    return Training(wrap.function(step), list(strategy.experimental_distribute_dataset(data)),
                    lambda: [v for owner in (model, optimizer) for mirror in owner.variables
                             for v in strategy.experimental_local_results(mirror.value)])


@GROUP.entry(smoke=True)
def mirrored_custom_loop(wrap):
    return custom_loop(wrap, 2)


@GROUP.entry(alone=True)
def mirrored_custom_loop_on_four(wrap):
    return custom_loop(wrap, 4)


@GROUP.entry()
def mirrored_recurrent_layers(wrap):
    """Copies of a replica's loops read that replica's variables."""
    def recurrent():
        return keras.Sequential([
            keras.Input((FEATURES,)), layers.Reshape((8, FEATURES // 8)),
            *(layers.LSTM(8, return_sequences=True) for _ in range(3)), layers.LSTM(CLASSES)])
    return custom_loop(wrap, 2, recurrent)


def _synchronised():
    return stack(functools.partial(layers.BatchNormalization, synchronized=True))


@GROUP.entry(expect=UNCHANGED, refused="replicas exchange something before the update")
def mirrored_synchronised_batch_normalization(wrap):
    return custom_loop(wrap, 2, _synchronised)


@GROUP.entry()
def one_device_strategy(wrap):
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        return fit(wrap, stack(), single_batches())


@GROUP.entry(expect=UNCHANGED, refused=NO_GAIN)
def layers_on_two_devices(wrap):
    """Model parallelism by hand: the first half on one device, the second on another."""
    class On(layers.Layer):
        def __init__(self, device):
            super().__init__()
            self.device = device
            self.dense = layers.Dense(32, "tanh")

        def call(self, x):
            with tf.device(self.device):
                return tf.nn.softplus(self.dense(x)) - 0.5

    model = keras.Sequential([keras.Input((FEATURES,)), *(On("CPU:0") for _ in range(3)),
                              *(On("CPU:1") for _ in range(3)), layers.Dense(CLASSES)])
    return supervised(wrap, model, single_batches())
