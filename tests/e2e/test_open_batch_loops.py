"""Recurrent layers as `fit` trains them with XLA: the batch is open, and the last one is partial.

XLA compiles each size of a batch anew. It has to be told the shapes of what a loop's lists hold,
in which the size of the batch occurs.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import loops, process
from tfckpt.carriers.dumped import replay

forced = loops.forced
BATCH, LENGTH, WIDTH, UNITS = 8, 11, 6, 16
"""No length of a segment but 1 and 11 leaves none over."""


@pytest.fixture(autouse=True)
def _no_determinism():
    with process.without_determinism():
        yield


def _stacked():
    return [keras.layers.LSTM(UNITS, return_sequences=True), keras.layers.LSTM(UNITS)]


def _masked():
    return [keras.layers.Masking(), keras.layers.GRU(UNITS, return_sequences=True),
            keras.layers.LSTM(UNITS, dropout=0.2)]


def _both_ways():
    return [keras.layers.Bidirectional(keras.layers.GRU(UNITS, reset_after=False))]


def _simple():
    return [keras.layers.SimpleRNN(UNITS, go_backwards=True)]


def _cells():
    return [keras.layers.RNN([keras.layers.LSTMCell(UNITS), keras.layers.GRUCell(UNITS)])]


def _images():
    return [keras.layers.Reshape((LENGTH, WIDTH, 1)), keras.layers.ConvLSTM1D(4, 3),
            keras.layers.Flatten()]


def _shared():
    """One layer whose batch is twice that of the step."""
    class Twice(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.LSTM(UNITS)

        def call(self, x):
            both = self.inner(keras.ops.concatenate([x, -x], axis=0))
            return both[:keras.ops.shape(x)[0]] * 2.0

    return [Twice()]


def _fitted(layers, around, rows=20):
    """Train on arrays, the last batch a partial one; return the weights and the model."""
    process.fresh()
    model = around(keras.Sequential([keras.Input((LENGTH, WIDTH)), *layers(),
                                     keras.layers.Dense(4, dtype="float32")]))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  jit_compile=True)
    values = np.random.default_rng(0)
    x = values.standard_normal((rows, LENGTH, WIDTH)).astype("f")
    x[:, 7:] *= values.integers(0, 2, (rows, 1, 1))
    model.fit(x, values.integers(0, 4, rows), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), model


@pytest.mark.parametrize("layers, count", [
    (_stacked, 2),
    *(pytest.param(made, count, marks=pytest.mark.nightly) for made, count in (
        (_both_ways, 2), (_masked, 2), (_simple, 1), (_cells, 1), (_images, 1), (_shared, 1)))])
def test_loops_of_an_open_batch(layers, count, forced):
    wanted, _ = _fitted(layers, lambda model: model)
    found, model = _fitted(layers, tfckpt.keras.checkpoint)
    report = tfckpt.keras.report(model)
    assert report.applied and len(report.segments) == count, str(report)
    assert [np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)].count(False) == 0


@pytest.mark.nightly
def test_loops_of_an_open_batch_in_half_precision(forced):
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        wanted, _ = _fitted(_stacked, lambda model: model)
        found, model = _fitted(_stacked, tfckpt.keras.checkpoint)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    assert len(tfckpt.keras.report(model).segments) == 2
    for ours, plain in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-2, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("masked", [False, True])
def test_sequences_of_different_lengths(masked, forced):
    """As `padded_batch` makes them, each batch as long as its longest."""
    values = np.random.default_rng(0)
    texts = [values.integers(1, 50, length) for length in values.integers(5, 14, 20)]

    def batches():
        return tf.data.Dataset.from_generator(
            lambda: ((text, int(text[0]) % 4) for text in texts), output_signature=(
                tf.TensorSpec((None,), tf.int64), tf.TensorSpec((), tf.int32))).padded_batch(
                    BATCH).apply(tf.data.experimental.assert_cardinality(3))

    def fitted(around):
        process.fresh()
        layers = keras.layers
        model = around(keras.Sequential([
            keras.Input((None,)), layers.Embedding(50, WIDTH, mask_zero=masked),
            layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)), layers.GRU(UNITS),
            layers.Dense(4)]))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      jit_compile=True)
        for _ in range(2):
            model.fit(batches(), verbose=0)
        return model.get_weights(), model

    wanted, _ = fitted(lambda model: model)
    found, model = fitted(tfckpt.keras.checkpoint)
    assert len(tfckpt.keras.report(model).segments) == 3
    assert [np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)].count(False) == 0


def test_a_budget_of_an_open_batch_is_met(tmp_path, monkeypatch):
    """By plans that are not forced: sizes at which a loop in segments saves most."""
    monkeypatch.setenv("TFCKPT_DUMP", str(tmp_path))
    process.fresh()
    model = keras.Sequential([keras.Input((64, 16)),
                              keras.layers.LSTM(64, return_sequences=True), keras.layers.LSTM(64),
                              keras.layers.Dense(4)])
    tfckpt.keras.checkpoint(model, budget=0.4)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  jit_compile=True)
    x = np.random.default_rng(0).standard_normal((80, 64, 16)).astype("f")
    model.fit(x, np.arange(80) % 4, batch_size=32, verbose=0)
    report = tfckpt.keras.report(model)
    assert report.applied and report.segments, str(report)
    assert report.compiled.after.temp_bytes <= 0.4 * report.compiled.before.temp_bytes
    monkeypatch.delenv("TFCKPT_DUMP")
    (folder,) = tmp_path.iterdir()
    outcome, different = replay(str(folder))
    assert outcome.report.segments and not different
