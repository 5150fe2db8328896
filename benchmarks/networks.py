"""Eight networks of today's kinds, in Keras alone, so that any of its backends can train them.

Each builder returns a model and the shapes of one batch; activations take hundreds of megabytes.
Blocks are layers of their own kind (`Block`), so that a peer can be told to recompute each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import layers, ops


class Network(NamedTuple):
    """A model, and what it is trained on.

    Attributes:
      x, y: shape and dtype of a batch and of its labels.
      classes: below which the labels, and a batch of ints, stay.
    """

    model: Any
    x: tuple[tuple[int, ...], str]
    y: tuple[tuple[int, ...], str]
    classes: int


class Block(layers.Layer):
    """A residual block: layers that are applied one after the other, and what they are added to.

    Args:
      parts: what is called in turn.
      residual: whether the input is added to the result.
    """

    def __init__(self, parts: list, residual: bool = True, **options: Any):
        super().__init__(**options)
        self.parts, self.residual = parts, residual

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Apply the block."""
        h = x
        for part in self.parts:
            h = part(h, training=training) if isinstance(part, _TRAINED) else part(h)
        return x + h if self.residual else h


class SelfAttention(layers.Layer):
    """Multi-head attention of a sequence to itself."""

    def __init__(self, heads: int, width: int, causal: bool, dropout: float = 0.0):
        super().__init__()
        self.inner = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
        self.causal = causal

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Apply it."""
        return self.inner(x, x, use_causal_mask=self.causal, training=training)


class Gate(layers.Layer):
    """tanh of a dilated causal convolution times the sigmoid of another, as in WaveNet."""

    def __init__(self, filters: int, dilation: int):
        super().__init__()
        self.filter, self.gate = (layers.Conv1D(filters, 2, dilation_rate=dilation,
                                                padding="causal") for _ in range(2))

    def call(self, x: Any) -> Any:
        """Apply it."""
        return ops.tanh(self.filter(x)) * ops.sigmoid(self.gate(x))


class Squeeze(layers.Layer):
    """Squeeze and excitation: channels are scaled by what the whole picture says."""

    def __init__(self, channels: int):
        super().__init__()
        self.down = layers.Dense(channels // 4, activation="silu")
        self.up = layers.Dense(channels, activation="sigmoid")

    def call(self, x: Any) -> Any:
        """Apply it."""
        return x * self.up(self.down(ops.mean(x, axis=(1, 2), keepdims=True)))


_TRAINED = (layers.Dropout, layers.BatchNormalization, SelfAttention)


def _transformer(h: Any, width: int, heads: int, depth: int, causal: bool, dropout: float) -> Any:
    for _ in range(depth):
        h = Block([layers.LayerNormalization(), SelfAttention(heads, width, causal, dropout),
                   layers.Dropout(dropout)])(h)
        h = Block([layers.LayerNormalization(), layers.Dense(4 * width, activation="gelu"),
                   layers.Dense(width), layers.Dropout(dropout)])(h)
    return h


def decoder(batch: int = 4, length: int = 1024, width: int = 512, depth: int = 6,
            vocabulary: int = 8192) -> Network:
    """Return a causal decoder of pre-norm blocks."""
    tokens = keras.Input((length,), batch_size=batch, dtype="int32")
    h = layers.Embedding(vocabulary, width)(tokens)
    h = _transformer(h, width, 8, depth, True, 0.0)
    model = keras.Model(tokens, layers.Dense(vocabulary)(layers.LayerNormalization()(h)))
    return Network(model, ((batch, length), "int32"), ((batch, length), "int32"), vocabulary)


def encoder(batch: int = 16, length: int = 256, width: int = 512, depth: int = 6) -> Network:
    """Return an encoder with dropout, and a classifier."""
    tokens = keras.Input((length,), batch_size=batch, dtype="int32")
    h = _transformer(layers.Embedding(8192, width)(tokens), width, 8, depth, False, 0.1)
    model = keras.Model(tokens, layers.Dense(16)(layers.GlobalAveragePooling1D()(h)))
    return Network(model, ((batch, length), "int32"), ((batch,), "int32"), 16)


def wavenet(batch: int = 4, length: int = 8192, filters: int = 64, depth: int = 12) -> Network:
    """Gated dilated convolutions."""
    sound = keras.Input((length, 1), batch_size=batch)
    h = layers.Conv1D(filters, 1)(sound)
    for number in range(depth):
        h = Block([Gate(filters, 2 ** (number % 10)), layers.Conv1D(filters, 1)])(h)
    model = keras.Model(sound, layers.Conv1D(256, 1)(layers.ReLU()(h)))
    return Network(model, ((batch, length, 1), "float32"), ((batch, length), "int32"), 256)


def mbconv(batch: int = 16, side: int = 64, channels: int = 48, depth: int = 6) -> Network:
    """Inverted residual blocks with batch normalization, and squeeze and excitation."""
    pictures = keras.Input((side, side, 3), batch_size=batch)
    h = layers.Conv2D(channels, 3, padding="same")(pictures)
    for _ in range(depth):
        h = Block([layers.Conv2D(4 * channels, 1, use_bias=False), layers.BatchNormalization(),
                   layers.Activation("silu"),
                   layers.DepthwiseConv2D(3, padding="same", use_bias=False),
                   layers.BatchNormalization(), layers.Activation("silu"),
                   Squeeze(4 * channels), layers.Conv2D(channels, 1, use_bias=False),
                   layers.BatchNormalization()])(h)
    model = keras.Model(pictures, layers.Dense(16)(layers.GlobalAveragePooling2D()(h)))
    return Network(model, ((batch, side, side, 3), "float32"), ((batch,), "int32"), 16)


def convnext(batch: int = 16, side: int = 64, channels: int = 64, depth: int = 6) -> Network:
    """Large depthwise kernels, layer normalization and GELU."""
    pictures = keras.Input((side, side, 3), batch_size=batch)
    h = layers.Conv2D(channels, 4, padding="same")(pictures)
    for _ in range(depth):
        h = Block([layers.DepthwiseConv2D(7, padding="same"), layers.LayerNormalization(),
                   layers.Dense(4 * channels, activation="gelu"), layers.Dense(channels)])(h)
    model = keras.Model(pictures, layers.Dense(16)(layers.GlobalAveragePooling2D()(h)))
    return Network(model, ((batch, side, side, 3), "float32"), ((batch,), "int32"), 16)


def mixer(batch: int = 16, patches: int = 256, width: int = 384, depth: int = 6) -> Network:
    """MLPs over patches and over channels in turns."""
    inputs = keras.Input((patches, 48), batch_size=batch)
    h = layers.Dense(width)(inputs)
    for _ in range(depth):
        h = Block([layers.LayerNormalization(), layers.Permute((2, 1)),
                   layers.Dense(2 * patches, activation="gelu"), layers.Dense(patches),
                   layers.Permute((2, 1))])(h)
        h = Block([layers.LayerNormalization(), layers.Dense(4 * width, activation="gelu"),
                   layers.Dense(width)])(h)
    model = keras.Model(inputs, layers.Dense(16)(layers.GlobalAveragePooling1D()(h)))
    return Network(model, ((batch, patches, 48), "float32"), ((batch,), "int32"), 16)


def unet(batch: int = 8, side: int = 128, filters: int = 32, levels: int = 3) -> Network:
    """Down, up, and skip connections, with group normalization."""
    pictures = keras.Input((side, side, 3), batch_size=batch)

    def convolutions(h: Any, count: int) -> Any:
        return Block([part for _ in range(2) for part in (
            layers.Conv2D(count, 3, padding="same"), layers.GroupNormalization(8),
            layers.Activation("silu"))], residual=False)(h)

    skips, h = [], pictures
    for level in range(levels):
        h = convolutions(h, filters << level)
        skips.append(h)
        h = layers.MaxPooling2D()(h)
    h = convolutions(h, filters << levels)
    for level in reversed(range(levels)):
        h = layers.Concatenate()([layers.UpSampling2D()(h), skips[level]])
        h = convolutions(h, filters << level)
    model = keras.Model(pictures, layers.Conv2D(8, 1)(h))
    return Network(model, ((batch, side, side, 3), "float32"), ((batch, side, side), "int32"), 8)


def lm_head(batch: int = 4, length: int = 256, width: int = 256, depth: int = 4,
            vocabulary: int = 50257) -> Network:
    """Return a small decoder below logits over a large vocabulary."""
    return decoder(batch, length, width, depth, vocabulary)


NETWORKS: dict[str, Callable[..., Network]] = {
    made.__name__: made
    for made in (decoder, encoder, wavenet, mbconv, convnext, mixer, unet, lm_head)}
