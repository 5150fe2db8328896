"""The networks that tfckpt is measured on.

Every builder returns a `Job`: a compiled model whose variables and optimizer slots exist, a
plain Python function `train_step(x, y)` that runs one training step and returns the scalar loss,
and one batch of made-up data. Nothing is wrapped in `tf.function` here: the caller decides.
Two calls of a builder with equal arguments give models with equal weights, equal random state
and equal data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Job(NamedTuple):
    """One training job; unpacks as `model, train_step, x, y`."""

    model: Any
    train_step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    x: tf.Tensor
    y: tf.Tensor


def make_train_step(
    model: Any, forward: Callable[[tf.Tensor], tf.Tensor] | None = None
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return one training step of a compiled model as a plain Python function.

    It does what `model.train_step((x, y))` does (forward pass, loss with the model's own
    additional losses, gradients, optimizer update) except that it returns the loss of the batch
    itself, where Keras returns a running mean. `forward` computes the prediction in place of the
    model's own call.
    """

    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            prediction = forward(x) if forward else model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=prediction, training=True)
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return train_step


def finish(model: Any, optimizer: Any, loss: Any, x: np.ndarray, y: np.ndarray) -> Job:
    """Compile, create the optimizer's slots and put the batch into tensors."""
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    optimizer.build(model.trainable_variables)
    return Job(model, make_train_step(model), tf.constant(x), tf.constant(y))


def image_batch(seed: int, batch: int, size: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.random((batch, size, size, 3), dtype=np.float32)


def labels(seed: int, classes: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed + 1).integers(0, classes, shape, dtype=np.int32)


# --- networks from keras.applications ----------------------------------------------------------


def _classifier(builder: Callable[..., Any], batch: int, size: int, classes: int, seed: int) -> Job:
    keras.utils.set_random_seed(seed)
    model = builder(weights=None, classes=classes, input_shape=(size, size, 3))
    return finish(
        model,
        keras.optimizers.SGD(0.01, momentum=0.9),
        "sparse_categorical_crossentropy",
        image_batch(seed, batch, size),
        labels(seed, classes, (batch,)),
    )


def resnet50(batch: int = 16, size: int = 128, classes: int = 10, seed: int = 0) -> Job:
    """ResNet-50 on `size` by `size` images, SGD with momentum."""
    return _classifier(keras.applications.ResNet50, batch, size, classes, seed)


def resnet152(batch: int = 16, size: int = 128, classes: int = 10, seed: int = 0) -> Job:
    """ResNet-152 on `size` by `size` images, SGD with momentum."""
    return _classifier(keras.applications.ResNet152, batch, size, classes, seed)


def densenet121(batch: int = 16, size: int = 128, classes: int = 10, seed: int = 0) -> Job:
    """DenseNet-121 on `size` by `size` images, SGD with momentum."""
    return _classifier(keras.applications.DenseNet121, batch, size, classes, seed)


def vgg16(batch: int = 16, size: int = 128, classes: int = 10, seed: int = 0) -> Job:
    """VGG-16 on `size` by `size` images, SGD with momentum."""
    return _classifier(keras.applications.VGG16, batch, size, classes, seed)


def inception_v3(batch: int = 16, size: int = 128, classes: int = 10, seed: int = 0) -> Job:
    """Inception-v3 on `size` by `size` images (75 or more), SGD with momentum."""
    return _classifier(keras.applications.InceptionV3, batch, size, classes, seed)


# --- transformer -----------------------------------------------------------------------------


class PositionEmbedding(keras.layers.Layer):
    """Adds one learned vector per position to a sequence shaped (batch, seq, d)."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(
            shape=(input_shape[-2], input_shape[-1]), initializer="random_normal", name="table"
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + self.table


def _encoder_layer(h: Any, d: int, heads: int, mlp: int, dropout: float) -> Any:
    """One encoder layer that normalises before attention and before the MLP."""
    layers = keras.layers
    a = layers.LayerNormalization(epsilon=1e-6)(h)
    a = layers.MultiHeadAttention(num_heads=heads, key_dim=d // heads, dropout=dropout)(a, a)
    h = layers.Add()([h, layers.Dropout(dropout)(a)])
    m = layers.LayerNormalization(epsilon=1e-6)(h)
    m = layers.Dense(mlp, activation="gelu")(m)
    m = layers.Dropout(dropout)(m)
    m = layers.Dense(d)(m)
    return layers.Add()([h, layers.Dropout(dropout)(m)])


def transformer_model(
    layers: int,
    d: int,
    heads: int,
    mlp: int,
    seq: int,
    dropout: float,
    vocabulary: int,
    classes: int,
) -> Any:
    """Return an encoder over `seq` token ids with mean pooling and a classifier (not compiled)."""
    tokens = keras.Input((seq,), dtype="int32")
    h = keras.layers.Embedding(vocabulary, d)(tokens)
    h = keras.layers.Dropout(dropout)(PositionEmbedding()(h))
    for _ in range(layers):
        h = _encoder_layer(h, d, heads, mlp, dropout)
    h = keras.layers.LayerNormalization(epsilon=1e-6)(h)
    h = keras.layers.GlobalAveragePooling1D()(h)
    return keras.Model(tokens, keras.layers.Dense(classes)(h))


def transformer(
    layers: int = 8,
    d: int = 256,
    heads: int = 4,
    mlp: int = 1024,
    seq: int = 256,
    batch: int = 16,
    dropout: float = 0.1,
    vocabulary: int = 1000,
    classes: int = 10,
    seed: int = 0,
) -> Job:
    """Return a transformer encoder with dropout (also on the attention weights), Adam."""
    keras.utils.set_random_seed(seed)
    model = transformer_model(layers, d, heads, mlp, seq, dropout, vocabulary, classes)
    return finish(
        model,
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        np.random.default_rng(seed).integers(0, vocabulary, (batch, seq), dtype=np.int32),
        labels(seed, classes, (batch,)),
    )


# --- U-Net -----------------------------------------------------------------------------------


def _two_convolutions(h: Any, filters: int) -> Any:
    for _ in range(2):
        h = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(h)
    return h


def unet_model(levels: int, filters: int, size: int, classes: int) -> Any:
    """Return a U-Net with skip connections by concatenation (not compiled)."""
    image = keras.Input((size, size, 3))
    h, skips = image, []
    for level in range(levels):
        h = _two_convolutions(h, filters << level)
        skips.append(h)
        h = keras.layers.MaxPooling2D()(h)
    h = _two_convolutions(h, filters << levels)
    for level in reversed(range(levels)):
        h = keras.layers.Conv2DTranspose(filters << level, 2, strides=2, padding="same")(h)
        h = keras.layers.Concatenate()([skips[level], h])
        h = _two_convolutions(h, filters << level)
    return keras.Model(image, keras.layers.Conv2D(classes, 1)(h))


def unet(
    levels: int = 4,
    filters: int = 32,
    size: int = 128,
    batch: int = 8,
    classes: int = 4,
    seed: int = 0,
) -> Job:
    """Return a U-Net that labels every pixel; `size` must be a multiple of 2**levels. Adam."""
    if size % (1 << levels):
        raise ValueError(f"size {size} is not a multiple of 2**{levels}")
    keras.utils.set_random_seed(seed)
    return finish(
        unet_model(levels, filters, size, classes),
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        image_batch(seed, batch, size),
        labels(seed, classes, (batch, size, size)),
    )


# --- recurrent network -----------------------------------------------------------------------


def lstm(
    layers: int = 3,
    units: int = 128,
    features: int = 64,
    seq: int = 64,
    batch: int = 512,
    classes: int = 10,
    seed: int = 0,
) -> Job:
    """LSTM layers on top of each other, the last of which reads the sequence to its end. Adam.

    An iteration keeps eight tensors of 256 KiB, the smallest that the CPU's statistics count.
    """
    keras.utils.set_random_seed(seed)
    sequence = keras.Input((seq, features))
    h = sequence
    for layer in range(layers):
        h = keras.layers.LSTM(units, return_sequences=layer < layers - 1)(h)
    return finish(
        keras.Model(sequence, keras.layers.Dense(classes)(h)),
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        np.random.default_rng(seed).standard_normal((batch, seq, features), dtype=np.float32),
        labels(seed, classes, (batch,)),
    )


JOBS: dict[str, Callable[..., Job]] = {
    "resnet50": resnet50,
    "resnet152": resnet152,
    "densenet121": densenet121,
    "vgg16": vgg16,
    "inception_v3": inception_v3,
    "transformer": transformer,
    "unet": unet,
    "lstm": lstm,
}

# Arguments that make each job small enough for a test (a second or two per step).
TINY: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 2, "size": 32},
    "resnet152": {"batch": 2, "size": 32},
    "densenet121": {"batch": 2, "size": 32},
    "vgg16": {"batch": 2, "size": 32},
    "inception_v3": {"batch": 2, "size": 75},
    "transformer": {"layers": 2, "d": 32, "heads": 2, "mlp": 64, "seq": 16, "batch": 2},
    "unet": {"levels": 2, "filters": 4, "size": 16, "batch": 2},
    "lstm": {"layers": 2, "units": 8, "features": 4, "seq": 8, "batch": 2},
}

# Between the two: most activations count (256 KiB and more), a step takes about a second.
SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 8, "size": 64},
    "densenet121": {"batch": 8, "size": 64},
    "vgg16": {"batch": 8, "size": 64},
    "inception_v3": {"batch": 8, "size": 96},
    "transformer": {"layers": 4, "d": 128, "mlp": 512, "seq": 128, "batch": 16},
    "unet": {"levels": 3, "filters": 16, "size": 64},
    "lstm": {"batch": 32},
}
