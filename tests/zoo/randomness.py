"""Randomness: the same mask forward and backward, the generator's state as in the plain step."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tests.zoo.entry import Group, Training
from tests.zoo.steps import (
    CLASSES,
    FEATURES,
    batches,
    by_hand,
    convolutions,
    fit,
    images,
    mean_square,
    stack,
    supervised,
    tokens,
    weights,
)

layers = keras.layers
GROUP = Group("randomness")


def _dropped(layer, *arguments):
    return functools.partial(layer, *arguments, seed=7)


@GROUP.entry(smoke=True)
def dropout(wrap):
    return supervised(wrap, stack(_dropped(layers.Dropout, 0.4)), batches())


@GROUP.entry()
def dropout_fit(wrap):
    return fit(wrap, stack(_dropped(layers.Dropout, 0.4)), batches())


@GROUP.entry()
def alpha_dropout(wrap):
    return supervised(wrap, stack(_dropped(layers.AlphaDropout, 0.3), activation="selu"),
                      batches())


@GROUP.entry()
def spatial_dropout(wrap):
    return supervised(wrap, convolutions(_dropped(layers.SpatialDropout2D, 0.3)), images())


@GROUP.entry()
def gaussian_noise(wrap):
    return supervised(wrap, stack(_dropped(layers.GaussianNoise, 0.3)), batches())


@GROUP.entry()
def gaussian_dropout(wrap):
    return supervised(wrap, stack(_dropped(layers.GaussianDropout, 0.3)), batches())


@GROUP.entry()
def dropout_of_a_shared_generator(wrap):
    seeds = keras.random.SeedGenerator(3)

    class Drop(layers.Layer):
        def call(self, x, training=False):
            return keras.random.dropout(x, 0.3, seed=seeds) if training else x

    return supervised(wrap, stack(Drop), batches(), extra=[seeds.state])


def _noise(wrap, draw, **options):
    ws = weights()

    def forward(x):
        h = x
        for i, w in enumerate(ws):
            h = tf.tanh(h @ w) * draw(h, i)
        return mean_square(h)

    return by_hand(wrap, forward, ws, **options)


@GROUP.entry(smoke=True)
def stateful_dropout(wrap):
    tf.random.set_seed(5)
    return _noise(wrap, lambda h, i: tf.nn.dropout(tf.ones_like(h), 0.3, seed=i))


@GROUP.entry()
def stateful_uniform(wrap):
    tf.random.set_seed(5)
    return _noise(wrap, lambda h, i: tf.random.uniform(h.shape, seed=i))


@GROUP.entry()
def stateful_normal_of_unknown_shape(wrap):
    tf.random.set_seed(5)
    return _noise(wrap, lambda h, i: tf.random.normal(tf.shape(h), seed=i))


@GROUP.entry()
def stateless_normal(wrap):
    return _noise(wrap, lambda h, i: tf.random.stateless_normal(tf.shape(h), (i, 3)))


@GROUP.entry()
def stateless_seed_from_data(wrap):
    return _noise(wrap, lambda h, i: tf.random.stateless_uniform(
        tf.shape(h), tf.stack([i, tf.cast(tf.reduce_sum(h), tf.int32)])))


@GROUP.entry(smoke=True)
def generator_object(wrap):
    generator = tf.random.Generator.from_seed(3)
    training = _noise(wrap, lambda h, i: generator.normal(tf.shape(h)))
    state = training.state
    return Training(training.step, training.batches, lambda: [*state(), generator.state])


@GROUP.entry()
def generator_split_and_shuffle(wrap):
    generator = tf.random.Generator.from_seed(3)
    ws = weights()

    def forward(x):
        h = x
        for w in ws:
            seed = generator.make_seeds(1)[:, 0]
            order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(h)[0]), seed)
            h = tf.tanh(tf.gather(h, order) @ w)
        return mean_square(h)

    return by_hand(wrap, forward, ws, extra=[generator.state])


@GROUP.entry()
def multinomial_sampling(wrap):
    ws = weights()

    def forward(x):
        h = x
        for i, w in enumerate(ws):
            h = tf.tanh(h @ w)
            picked = tf.random.stateless_categorical(h, 1, (i, 2))
            h = h * (0.5 + tf.one_hot(picked[:, 0], FEATURES))
        return mean_square(h)

    return by_hand(wrap, forward, ws)


@GROUP.entry()
def gumbel_softmax(wrap):
    def gumbel(h, i):
        noise = tf.random.stateless_uniform(tf.shape(h), (i, 9), 1e-6, 1.0)
        return tf.nn.softmax(h - tf.math.log(-tf.math.log(noise)))
    return _noise(wrap, gumbel)


@GROUP.entry(smoke=True)
def augmentation_layers(wrap):
    inside = [keras.Input((16, 16, 3)), layers.RandomFlip(seed=1), layers.RandomRotation(
        0.1, seed=2), layers.RandomContrast(0.2, seed=3), layers.RandomTranslation(
        0.1, 0.1, seed=4)]
    return supervised(wrap, keras.Sequential([*inside, *convolutions().layers]), images())


@GROUP.entry()
def augmentation_zoom_and_brightness(wrap):
    inside = [keras.Input((16, 16, 3)), layers.RandomZoom(0.2, seed=2),
              layers.RandomBrightness(0.2, value_range=(-3, 3), seed=3),
              layers.RandomCrop(12, 12, seed=5)]
    return fit(wrap, keras.Sequential([*inside, *convolutions(size=12).layers]), images())


@GROUP.entry()
def dropout_in_attention(wrap):
    text = keras.Input((16,), dtype="int32")
    h = layers.Embedding(50, 16)(text)
    for i in range(3):
        h = layers.Add()([h, layers.MultiHeadAttention(2, 8, dropout=0.2, seed=i)(h, h)])
    model = keras.Model(text, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))
    return supervised(wrap, model, tokens())


@GROUP.entry()
def stochastic_depth(wrap):
    class Depth(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(32, "tanh")
            self.seeds = keras.random.SeedGenerator(11)

        def call(self, x, training=False):
            shape = (tf.shape(x)[0], 1)
            keep = tf.floor(0.7 + keras.random.uniform(shape, seed=self.seeds))
            return x + self.dense(x) * keep / 0.7

    return supervised(wrap, stack(Depth), batches())
