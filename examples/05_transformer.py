"""A transformer with dropout, where recomputation and kept derivatives work together.

    python -m examples.05_transformer [--small]

An encoder learns which of scikit-learn's descriptions a piece of text is from. It is trained three
times: plainly, with tfckpt (`budget="min"`), and with `fad="auto"`, which may also keep the
derivative of a GELU instead of the tensors that the GELU is computed from. Recomputation changes
no bit; a kept derivative may change rounding.
"""

from __future__ import annotations

import keras
import tensorflow as tf

import tfckpt
from examples import data, saving


def encoder(length: int, layers: int, width: int) -> keras.Model:
    """Attention and MLP with dropout, normalization first."""
    layer = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    h = layer.Embedding(data.BYTE_VALUES, width)(tokens)
    for _ in range(layers):
        a = layer.LayerNormalization()(h)
        a = layer.MultiHeadAttention(4, width // 4, dropout=0.1)(a, a)
        h = layer.Add()([h, layer.Dropout(0.1)(a)])
        m = layer.Dense(4 * width, activation="gelu")(layer.LayerNormalization()(h))
        h = layer.Add()([h, layer.Dropout(0.1)(layer.Dense(width)(m))])
    h = layer.GlobalAveragePooling1D()(layer.LayerNormalization()(h))
    return keras.Model(tokens, layer.Dense(data.TEXT_CLASSES)(h))


def train(batches, sizes: dict[str, int], **options) -> saving.Run:
    """Train on every batch; options are those of tfckpt, or none for plain Keras."""
    saving.seed()
    model = encoder(**sizes)
    if options:
        tfckpt.keras.checkpoint(model, **options)
    # jit_compile=False: under XLA, Keras' choice on a GPU, losses agree to rounding only
    model.compile(keras.optimizers.Adam(1e-3),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    losses = []
    for x, y in batches:
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x, y)))
    if options:
        print(f"\n{tfckpt.keras.report(model)}", flush=True)
    peak = tfckpt.verify.measure_peak(model.train_on_batch, *batches[-1], repeats=3)
    return saving.Run(peak, tuple(losses))


def main() -> None:
    """Train all three."""
    small = saving.small(__doc__)
    saving.repeatable()
    sizes = {"length": 96 if small else 128, "layers": 2 if small else 4,
             "width": 32 if small else 128}
    batches = [(tf.constant(x), tf.constant(y)) for x, y in
               data.text_batches(3, 16 if small else 8, sizes["length"], seed=7)]
    plain = train(batches, sizes)
    ours = train(batches, sizes, budget="min")
    derivatives = train(batches, sizes, budget="min", fad="auto")
    print("\nrecomputation alone", end="")
    saving.show(plain, ours)
    print("\nwith kept derivatives", end="")
    saving.show(plain, derivatives)


if __name__ == "__main__":
    main()
