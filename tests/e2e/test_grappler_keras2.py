"""The native pass under Keras 2 (tf_keras), where that is installed."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

import grappler_ext
from tests.support import process

keras2 = pytest.importorskip("tf_keras")
pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")


def fitted(on, *layers):
    """Losses and weights as bytes."""
    keras2.backend.clear_session()
    keras2.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 16, 32), dtype=np.float32)
    y = rng.integers(0, 8, 64)
    model = keras2.Sequential([keras2.layers.Input((16, 32)), *(make() for make in layers),
                               keras2.layers.GlobalAveragePooling1D(), keras2.layers.Dense(8)])
    model.compile("adam", keras2.losses.SparseCategoricalCrossentropy(from_logits=True))
    if on:
        grappler_ext.enable(batch_size=32)
    losses = model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False).history["loss"]
    found = list(grappler_ext.reports().values())
    process.without_pass()
    return losses, [w.numpy().tobytes() for w in model.weights], found


@pytest.mark.parametrize("layers", [
    [lambda: keras2.layers.Dense(64, "gelu")] * 4 + [lambda: keras2.layers.Dropout(0.2)],
    pytest.param([lambda: keras2.layers.Dense(64, "gelu"), lambda: keras2.layers.LSTM(
        32, return_sequences=True), lambda: keras2.layers.BatchNormalization()],
        marks=pytest.mark.nightly)],
    ids=["dense", "lstm"])
def test_a_model_of_keras_2_trains_alike_in_less_memory(layers):
    losses, weights, _ = fitted(False, *layers)
    found, others, reports = fitted(True, *layers)
    assert found == losses and others == weights
    assert any(r.applied for r in reports)
