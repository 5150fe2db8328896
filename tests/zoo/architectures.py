"""Architectures: the families of `keras.applications` and those of the usual tutorials, small."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tests.zoo.entry import (
    LESS,
    NO_GAIN,
    RECOMPUTES,
    UNCHANGED,
    Entry,
    Group,
    Training,
    Wrap,
)
from tests.zoo.steps import CLASSES, batches, images, made, mean_square, sgd, supervised, tokens

layers = keras.layers
GROUP = Group("architectures")

# what makes it, height and width, batch, expectation. Where parameters are most of what a step of
# this size holds, its peak is at the update, and order alone lowers it
_FAMILIES: dict[str, tuple[Callable, int, int, str]] = {
    "resnet50_v2": (keras.applications.ResNet50V2, 64, 8, LESS),
    "vgg16": (keras.applications.VGG16, 64, 16, RECOMPUTES),
    "mobilenet_v3": (keras.applications.MobileNetV3Small, 96, 8, RECOMPUTES),
    "efficientnet_v2": (keras.applications.EfficientNetV2B0, 64, 4, LESS),
    "convnext": (keras.applications.ConvNeXtTiny, 64, 4, LESS),
    "densenet": (keras.applications.DenseNet121, 64, 4, RECOMPUTES),
    "xception": (keras.applications.Xception, 71, 4, LESS),
    "nasnet_mobile": (keras.applications.NASNetMobile, 64, 4, RECOMPUTES),
    "inception_resnet": (keras.applications.InceptionResNetV2, 75, 4, LESS),
}
_LARGE = ("resnet50_v2", "xception", "inception_resnet")


def _family(name: str) -> Entry:
    make, size, batch, expect = _FAMILIES[name]

    def build(wrap: Wrap) -> Training:
        model = make(weights=None, classes=CLASSES, input_shape=(size, size, 3),
                     classifier_activation=None)
        return supervised(wrap, model, images(size, batch=batch)[:2])
    return Entry(name, GROUP.name, build, expect=expect, alone=True,
                 large=name in _LARGE)


GROUP.extend(_family(name) for name in _FAMILIES)


def _encoder(h, heads=2, size=16, dropout=0.1, seed=0):
    attended = layers.MultiHeadAttention(heads, size // heads, dropout=dropout, seed=seed)(h, h)
    h = layers.LayerNormalization(epsilon=1e-6)(h + attended)
    inside = layers.Dense(size)(layers.Dense(32, "gelu")(h))
    return layers.LayerNormalization(epsilon=1e-6)(
        h + layers.Dropout(dropout, seed=seed + 50)(inside))


@GROUP.entry()
def text_classification_transformer(wrap):
    text = keras.Input((16,), dtype="int32")
    h = layers.Embedding(50, 16)(text) + layers.Embedding(16, 16)(tf.range(16))
    for i in range(2):
        h = _encoder(h, seed=i)
    model = keras.Model(text, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))
    return supervised(wrap, model, tokens(), keras.optimizers.Adam(1e-3))


def _activated(wrap, activation):
    features = keras.Input((16,))
    h = layers.Dense(64)(features)
    for _ in range(3):
        residual = h
        h = layers.Activation(activation)(layers.LayerNormalization()(h))
        h = layers.Add()([layers.Dense(64, activation=activation)(h), residual])
    return supervised(wrap, keras.Model(features, layers.Dense(CLASSES)(h)), batches())


@GROUP.entry(smoke=True)
def gelu_by_tanh(wrap):
    """x^3, of which Grappler and the gradient make x^2; before it a name on each side of theirs."""
    return _activated(wrap, lambda x: keras.activations.gelu(x, approximate=True))


@GROUP.entry()
def silu(wrap):
    """Without residuals: x * sigmoid(1 * x), in which the product with one goes away."""
    model = keras.Sequential([keras.Input((16,)), *[layers.Dense(64, "silu") for _ in range(6)],
                              layers.Dense(CLASSES)])
    return supervised(wrap, model, batches())


@GROUP.entry(expect=UNCHANGED, refused=NO_GAIN)
def variational_autoencoder(wrap):
    picture = keras.Input((16, 16, 1))
    h = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(picture)
    h = layers.Flatten()(layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(h))
    encoder = keras.Model(picture, [layers.Dense(4)(h), layers.Dense(4)(h)])
    code = keras.Input((4,))
    h = layers.Reshape((4, 4, 16))(layers.Dense(256, "relu")(code))
    for _ in range(2):
        h = layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(h)
    decoder = keras.Model(code, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(h))
    seeds, optimizer = keras.random.SeedGenerator(7), keras.optimizers.Adam(1e-3)
    both = [*encoder.trainable_variables, *decoder.trainable_variables]
    optimizer.build(both)

    def step(x, y):
        with tf.GradientTape() as tape:
            mean, spread = encoder(x, training=True)
            noise = keras.random.normal(tf.shape(mean), seed=seeds)
            again = decoder(mean + tf.exp(0.5 * spread) * noise, training=True)
            seen = tf.nn.sigmoid(x)
            loss = tf.reduce_mean(tf.reduce_sum(keras.losses.binary_crossentropy(
                seen, again), axis=(1, 2)))
            loss += tf.reduce_mean(-0.5 * tf.reduce_sum(
                1.0 + spread - tf.square(mean) - tf.exp(spread), 1))
        found = tape.gradient(loss, both)
        optimizer.apply(found, both)
        return loss, found

    return Training(wrap.function(step), batches((32, 16, 16, 1)),
                    lambda: [*both, *optimizer.variables, seeds.state])


@GROUP.entry()
def wasserstein_with_gradient_penalty(wrap):
    generator = keras.Sequential([keras.Input((8,)), layers.Dense(64, "relu"),
                                  layers.Dense(64, "relu"), layers.Dense(16)])
    critic = keras.Sequential([keras.Input((16,)), *(layers.Dense(64, layers.LeakyReLU())
                                                     for _ in range(3)), layers.Dense(1)])
    ours, theirs = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
    ours.build(generator.trainable_variables)
    theirs.build(critic.trainable_variables)

    def step(x, y):
        size = tf.shape(x)[0]
        for i in range(2):
            noise = tf.random.stateless_normal((size, 8), (i, 1))
            with tf.GradientTape() as tape:
                fake = generator(noise, training=True)
                part = tf.random.stateless_uniform((size, 1), (i, 2))
                between = x + part * (fake - x)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    scores = critic(between, training=True)
                norm = tf.norm(inner.gradient(scores, between) + 1e-6, axis=1)
                loss = (tf.reduce_mean(critic(fake, training=True))
                        - tf.reduce_mean(critic(x, training=True))
                        + 10.0 * mean_square(norm - 1.0))
            theirs.apply(tape.gradient(loss, critic.trainable_variables),
                         critic.trainable_variables)
        with tf.GradientTape() as tape:
            noise = tf.random.stateless_normal((size, 8), (9, 1))
            other = -tf.reduce_mean(critic(generator(noise, training=True), training=True))
        found = tape.gradient(other, generator.trainable_variables)
        ours.apply(found, generator.trainable_variables)
        return loss, other, found

    return Training(wrap.function(step), batches((256, 16)), lambda: [
        *generator.variables, *critic.variables, *ours.variables, *theirs.variables])


def _separable(h, filters, **options):
    h = layers.SeparableConv2D(filters, 3, padding="same", **options)(layers.ReLU()(h))
    return layers.BatchNormalization()(h)


@GROUP.entry(smoke=True)
def unet_segmentation(wrap):
    picture = keras.Input((16, 16, 3))
    h = layers.Conv2D(8, 3, padding="same")(picture)
    levels = []
    for filters in (8, 16):
        h = _separable(h, filters)
        levels.append(h)
        h = layers.MaxPooling2D(2)(h)
    h = _separable(h, 16)
    for filters, skip in zip((16, 8), levels[::-1], strict=True):
        h = layers.Concatenate()([layers.UpSampling2D(2)(h), skip])
        h = layers.Conv2DTranspose(filters, 3, padding="same", activation="relu")(h)
    model = keras.Model(picture, layers.Conv2D(CLASSES, 1)(h))
    return supervised(wrap, model, images(batch=8, target=(8, 16, 16)))


@GROUP.entry()
def siamese_with_triplet_loss(wrap):
    embed = keras.Sequential([keras.Input((16, 16, 3)),
                              *(layers.Conv2D(8, 3, padding="same", activation="relu")
                                for _ in range(3)),
                              layers.GlobalAveragePooling2D(), layers.Dense(8)])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(embed.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            anchor, good, bad = (embed(t, training=True) for t in (x, x[::-1], 1.0 - x))
            near = tf.reduce_sum(tf.square(anchor - good), -1)
            far = tf.reduce_sum(tf.square(anchor - bad), -1)
            loss = tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))
        found = tape.gradient(loss, embed.trainable_variables)
        optimizer.apply(found, embed.trainable_variables)
        return loss, found

    return Training(wrap.function(step), images(),
                    lambda: [*embed.variables, *optimizer.variables])


@GROUP.entry(expect=LESS)
def sequence_to_sequence_with_attention(wrap):
    source, target = keras.Input((10,), dtype="int32"), keras.Input((8,), dtype="int32")
    coded, state = layers.GRU(16, return_sequences=True, return_state=True)(
        layers.Embedding(50, 16)(source))
    h = layers.GRU(16, return_sequences=True)(layers.Embedding(50, 16)(target),
                                              initial_state=state)
    h = layers.Concatenate()([h, layers.Attention()([h, coded])])
    h = layers.Dense(32, "tanh")(h)
    model = keras.Model([source, target], layers.Dense(50)(h))
    optimizer, loss = keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(
        from_logits=True)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y[:, 1:], model([x, y[:, :-1]], training=True))
        found = tape.gradient(value, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return value, found

    return Training(wrap.function(step), tokens(10, 32, target=(32, 9), classes=50),
                    lambda: [*model.variables, *optimizer.variables])


@GROUP.entry()
def graph_convolution(wrap):
    """Messages along the edges of a graph, gathered and summed by node."""
    rng = made(4)
    edges = tf.constant(rng.integers(0, 128, (512, 2)))
    parts = [keras.Sequential([layers.Dense(32, "gelu"), layers.BatchNormalization()])
             for _ in range(6)]

    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = parts
            self.last = layers.Dense(CLASSES)

        def call(self, x, training=False):
            for message, update in zip(self.parts[::2], self.parts[1::2], strict=True):
                sent = message(tf.gather(x, edges[:, 0]), training=training)
                received = tf.math.unsorted_segment_mean(sent, edges[:, 1], 128)
                x = tf.math.l2_normalize(update(tf.concat([x, received], 1), training=training))
            return self.last(x)

    model = Network()
    model(tf.zeros((128, 16)))
    return supervised(wrap, model, batches((128, 16)), keras.optimizers.Adam(1e-3))


def _patches(h, size=4, width=16):
    h = layers.Conv2D(width, size, strides=size)(h)
    return layers.Reshape((-1, width))(h)


@GROUP.entry()
def vision_transformer(wrap):
    picture = keras.Input((16, 16, 3))
    h = _patches(picture) + layers.Embedding(16, 16)(tf.range(16))
    for i in range(3):
        h = _encoder(h, seed=i)
    model = keras.Model(picture, layers.Dense(CLASSES)(layers.Flatten()(h)))
    return supervised(wrap, model, images(), keras.optimizers.AdamW(1e-3))


@GROUP.entry()
def masked_image_modelling(wrap):
    """Most patches are hidden; a small decoder restores them, the loss sees those alone."""
    picture = keras.Input((16, 16, 3))
    shown = keras.Input((16, 1))
    h = _patches(picture) * shown + layers.Embedding(16, 16)(tf.range(16))
    for i in range(2):
        h = _encoder(h, seed=i)
    h = _encoder(layers.Dense(16)(h), seed=9)
    model = keras.Model([picture, shown], layers.Dense(48)(h))
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    generator = tf.random.Generator.from_seed(5)

    def step(x, y):
        kept = tf.cast(generator.uniform((16, 16, 1)) < 0.25, tf.float32)
        wanted = tf.reshape(tf.image.extract_patches(
            x, (1, 4, 4, 1), (1, 4, 4, 1), (1, 1, 1, 1), "VALID"), (16, 16, 48))
        with tf.GradientTape() as tape:
            gap = tf.square(model([x, kept], training=True) - wanted) * (1.0 - kept)
            loss = tf.reduce_sum(gap) / tf.reduce_sum(1.0 - kept)
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return loss, found

    return Training(wrap.function(step), images(),
                    lambda: [*model.variables, *optimizer.variables, generator.state])


@GROUP.entry()
def diffusion_model(wrap):
    """Noise of a drawn strength is added; the network predicts it."""
    picture, strength = keras.Input((16, 16, 3)), keras.Input((1, 1, 1))
    h = layers.Concatenate()([layers.Conv2D(8, 1)(picture), layers.UpSampling2D(16)(strength)])
    for _ in range(3):
        kept = layers.Conv2D(16, 1)(h)
        h = layers.BatchNormalization(center=False, scale=False)(h)
        h = layers.Conv2D(16, 3, padding="same", activation="swish")(h)
        h = layers.Add()([layers.Conv2D(16, 3, padding="same")(h), kept])
    model = keras.Model([picture, strength], layers.Conv2D(3, 1)(h))
    generator, optimizer = tf.random.Generator.from_seed(3), keras.optimizers.AdamW(1e-3)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        noise, part = generator.normal((16, 16, 16, 3)), generator.uniform((16, 1, 1, 1))
        mixed = tf.cos(part) * x + tf.sin(part) * noise
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(noise - model([mixed, part], training=True)))
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return loss, found

    return Training(wrap.function(step), images(),
                    lambda: [*model.variables, *optimizer.variables, generator.state])


@GROUP.entry()
def gated_mixture_of_experts(wrap):
    text = keras.Input((16,))
    h = text
    for _ in range(2):
        gate = layers.Dense(4, "softmax")(h)
        experts = [layers.Dense(16, "gelu")(h) for _ in range(4)]
        h = layers.Add()([layers.Multiply()([gate[:, i:i + 1], e])
                          for i, e in enumerate(experts)])
    return supervised(wrap, keras.Model(text, layers.Dense(CLASSES)(h)), batches(),
                      keras.optimizers.Adam(1e-3))


@GROUP.entry()
def mlp_mixer(wrap):
    picture = keras.Input((16, 16, 3))
    h = _patches(picture)
    for _ in range(2):
        t = layers.Permute((2, 1))(layers.LayerNormalization()(h))
        h = h + layers.Permute((2, 1))(layers.Dense(16)(layers.Dense(32, "gelu")(t)))
        t = layers.LayerNormalization()(h)
        h = h + layers.Dense(16)(layers.Dense(32, "gelu")(t))
    model = keras.Model(picture, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))
    return supervised(wrap, model, images())


@GROUP.entry()
def causal_language_model(wrap):
    text = keras.Input((16,), dtype="int32")
    h = layers.Embedding(50, 16)(text) + layers.Embedding(16, 16)(tf.range(16))
    for i in range(2):
        attended = layers.MultiHeadAttention(2, 8, dropout=0.1, seed=i)(
            h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(h + attended)
        h = layers.LayerNormalization()(h + layers.Dense(16)(layers.Dense(32, "relu")(h)))
    model = keras.Model(text, layers.Dense(50)(h))
    return supervised(wrap, model, tokens(target=(32, 16), classes=50),
                      keras.optimizers.Adam(1e-3))


@GROUP.entry()
def temporal_convolutions(wrap):
    series = keras.Input((32, 4))
    h = series
    for rate in (1, 2, 4):
        inside = layers.Conv1D(16, 3, padding="causal", dilation_rate=rate, activation="relu")(h)
        h = layers.Add()([layers.Conv1D(16, 1)(h), inside])
    model = keras.Model(series, layers.Dense(CLASSES)(layers.GlobalMaxPooling1D()(h)))
    return supervised(wrap, model, batches((32, 32, 4)), sgd())


@GROUP.entry()
def volumes(wrap):
    volume = keras.Input((8, 8, 8, 2))
    h = volume
    for _ in range(3):
        h = layers.BatchNormalization()(layers.Conv3D(8, 3, padding="same", activation="relu")(h))
    model = keras.Model(volume, layers.Dense(CLASSES)(layers.GlobalAveragePooling3D()(h)))
    return supervised(wrap, model, batches((4, 8, 8, 8, 2)))
