"""The two networks on which forward AD is measured, with an activation to choose.

ResNet-50 has it in place of each relu; the encoder, of BERT-base's widths, between the two dense
layers of each block. Activations are written as plain compositions, as people and Guo et al.
write them, or are Keras' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import jobs

GELU_TANH = math.sqrt(2.0 / math.pi)

COMPOSED: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "mish": lambda x: x * tf.tanh(tf.math.softplus(x)),
    "swish": lambda x: x * tf.sigmoid(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + tf.tanh(GELU_TANH * (x + 0.044715 * x ** 3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + tf.math.erf(x / math.sqrt(2.0))),
}
KERAS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "keras_mish": keras.activations.mish,
    "keras_swish": keras.activations.silu,
    "keras_gelu_tanh": lambda x: keras.activations.gelu(x, approximate=True),
    "keras_gelu": keras.activations.gelu,
}
ACTIVATIONS = {**COMPOSED, **KERAS}


def resnet50(activation: Callable, batch: int = 8, size: int = 128, seed: int = 0) -> jobs.Job:
    """ResNet-50 with `activation` in place of relu, SGD with momentum."""
    keras.utils.set_random_seed(seed)
    relu = keras.applications.ResNet50(weights=None, classes=10, input_shape=(size, size, 3))

    def changed(layer: Any) -> Any:
        if getattr(layer, "activation", None) is keras.activations.relu:
            return keras.layers.Activation(activation, name=layer.name)
        return layer.__class__.from_config(layer.get_config())

    return jobs.finish(
        keras.models.clone_model(relu, clone_function=changed),
        keras.optimizers.SGD(0.01, momentum=0.9),
        "sparse_categorical_crossentropy",
        jobs.image_batch(seed, batch, size),
        jobs.labels(seed, 10, (batch,)),
    )


def _block(h: Any, activation: Callable, d: int, heads: int, dropout: float) -> Any:
    """Return an encoder block that normalises after each sum, as BERT does."""
    layers = keras.layers
    a = layers.MultiHeadAttention(num_heads=heads, key_dim=d // heads, dropout=dropout)(h, h)
    h = layers.LayerNormalization(epsilon=1e-12)(layers.Add()([h, layers.Dropout(dropout)(a)]))
    m = layers.Dense(d)(layers.Dense(4 * d, activation=activation)(h))
    return layers.LayerNormalization(epsilon=1e-12)(
        layers.Add()([h, layers.Dropout(dropout)(m)]))


def bert(activation: Callable, batch: int = 8, layers: int = 4, d: int = 768, heads: int = 12,
         seq: int = 128, dropout: float = 0.1, seed: int = 0) -> jobs.Job:
    """Return an encoder of BERT-base's widths, 4 of its 12 layers, a small vocabulary, Adam."""
    keras.utils.set_random_seed(seed)
    vocabulary, classes = 1000, 10
    tokens = keras.Input((seq,), dtype="int32")
    h = jobs.PositionEmbedding()(keras.layers.Embedding(vocabulary, d)(tokens))
    h = keras.layers.Dropout(dropout)(keras.layers.LayerNormalization(epsilon=1e-12)(h))
    for _ in range(layers):
        h = _block(h, activation, d, heads, dropout)
    pooled = keras.layers.Dense(d, activation="tanh")(h[:, 0])
    return jobs.finish(
        keras.Model(tokens, keras.layers.Dense(classes)(pooled)),
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        np.random.default_rng(seed).integers(0, vocabulary, (batch, seq), dtype=np.int32),
        jobs.labels(seed, classes, (batch,)),
    )


MODELS: dict[str, Callable[..., jobs.Job]] = {"resnet50": resnet50, "bert": bert}
TINY: dict[str, dict[str, Any]] = {
    "resnet50": {"size": 32},
    "bert": {"layers": 2, "d": 64, "heads": 2, "seq": 32},
}
"""Arguments that make each small enough to try the program out."""
