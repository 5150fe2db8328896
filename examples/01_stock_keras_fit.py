"""Stock Keras: `compile` and `fit`, with one line more.

    python -m examples.01_stock_keras_fit [--small]

A network with batch normalization and dropout learns scikit-learn's digits, once plainly and once
with tfckpt. `PeakMemory` measures both: the peak is that of the whole device, with variables,
optimizer state and inputs.
"""

from __future__ import annotations

import keras

import tfckpt
from examples import data, saving


def build(blocks: int) -> keras.Model:
    """Convolutions, each with normalization and dropout."""
    saving.seed()
    image = keras.Input((8, 8, 1))
    h = image
    for _ in range(blocks):
        h = keras.layers.Conv2D(32, 3, padding="same", use_bias=False)(h)
        h = keras.layers.ReLU()(keras.layers.BatchNormalization()(h))
        h = keras.layers.Dropout(0.1)(h)
    return keras.Model(image, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(h)))


def train(model: keras.Model, images, labels, batch: int) -> saving.Run:
    """Two epochs of ordinary Keras."""
    # jit_compile=False: under XLA, Keras' choice on a GPU, losses agree to rounding only
    model.compile(keras.optimizers.Adam(1e-3),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    history = model.fit(images, labels, batch_size=batch, epochs=2, verbose=2,
                        callbacks=[tfckpt.keras.PeakMemory()]).history
    return saving.Run(int(history["peak_memory_mib"][-1] * 2**20), tuple(history["loss"]))


def main() -> None:
    """Train both."""
    small = saving.small(__doc__)
    saving.repeatable()
    images, labels = data.digits(768 if small else None)
    blocks, batch = (4, 256) if small else (8, 512)
    plain = train(build(blocks), images, labels, batch)
    model = tfckpt.keras.checkpoint(build(blocks), budget="min")  # the line that is new
    ours = train(model, images, labels, batch)
    report = tfckpt.keras.report(model)
    print(f"\n{report}\n\n{report.explain(top=5)}")
    saving.show(plain, ours)


if __name__ == "__main__":
    main()
