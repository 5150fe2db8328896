"""The cost of `tfckpt.keras.PeakMemory()`: its hooks alone, and `fit` with and without it.

    python -m benchmarks.callback_overhead

The two fits take turns in one process, epoch by epoch; each line is a median.
"""

from __future__ import annotations

import statistics
import time

import keras
import numpy as np

import tfckpt

BATCH, BATCHES, ROUNDS = 128, 8, 9


def _model() -> keras.Model:
    made = keras.Sequential([keras.Input((32, 32, 3)),
                             *(keras.layers.Conv2D(32, 3, padding="same", activation="relu")
                               for _ in range(4)),
                             keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(5)])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def _hooks(model, calls: int = 2000) -> float:
    """Return seconds that the two hooks of one batch take together."""
    callback = tfckpt.keras.PeakMemory()
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    started = time.perf_counter()
    for batch in range(calls):
        callback.on_train_batch_begin(batch)
        callback.on_train_batch_end(batch, {})
    return (time.perf_counter() - started) / calls


def main() -> None:
    """Print the comparison."""
    model = _model()
    x = np.random.default_rng(0).standard_normal((BATCH * BATCHES, 32, 32, 3), dtype=np.float32)
    y = np.arange(len(x)) % 5

    def epoch(*callbacks) -> float:
        started = time.perf_counter()
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=list(callbacks))
        return (time.perf_counter() - started) / BATCHES

    epoch()
    epoch(tfckpt.keras.PeakMemory())
    pairs = [(epoch(), epoch(tfckpt.keras.PeakMemory())) for _ in range(ROUNDS)]
    step = statistics.median(plain for plain, _ in pairs)
    hooks = _hooks(model)
    print(f"step without the callback   {1e3 * step:9.3f} ms")
    print(f"hooks of one batch          {1e3 * hooks:9.3f} ms, "
          f"{100 * hooks / step:.3f} % of a step")
    print("fit with / without          "
          f"{statistics.median(with_it / plain for plain, with_it in pairs):9.3f}")


if __name__ == "__main__":
    main()
