"""`tfckpt.keras.checkpoint`: compile and fit as ever, and the same numbers come out."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.models import arrays, stack

BATCH = 1024


def build(checkpoint: bool, jit_compile: bool | str = False, **options):
    """Return the same compiled model each time, wrapped or not."""
    process.fresh()
    model = stack()
    if checkpoint:
        assert tfckpt.keras.checkpoint(model, **options) is model
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"], jit_compile=jit_compile, steps_per_execution=1)
    return model


def state(model) -> list[np.ndarray]:
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def assert_same_state(found, wanted) -> None:
    for variable, a, b in zip([*wanted.variables, *wanted.optimizer.variables], state(found),
                              state(wanted), strict=True):
        assert a.tobytes() == b.tobytes(), variable.path


def fit_on(kind: str, model):
    x, y = arrays()
    common = {"epochs": 2, "shuffle": False, "verbose": 0}
    if kind == "arrays":
        return model.fit(x, y, batch_size=BATCH, **common).history
    data = tf.data.Dataset.from_tensor_slices((x, y))
    if kind == "batched":  # unknown leading dimension: drop_remainder is not set
        return model.fit(data.batch(BATCH).prefetch(1), **common).history
    return model.fit(data.batch(BATCH, drop_remainder=True), **common).history


@pytest.mark.parametrize("kind", ["arrays", "batched", "static"])
def test_fit_gives_the_same_history_and_weights(kind):
    plain = build(False)
    wanted = fit_on(kind, plain)
    model = build(True)
    assert tfckpt.keras.report(model) is None
    assert fit_on(kind, model) == wanted
    assert_same_state(model, plain)
    report = tfckpt.keras.report(model)
    assert report.applied and report.recomputed_ops > 0, report.reason
    assert report.planned_peak_bytes < report.baseline_peak_bytes
    # the first hidden layer's activations alone: batch x width floats, several times kept
    assert report.baseline_peak_bytes > 4 * BATCH * 64 * 4


def test_fit_compiled_by_xla_stays_within_rounding():
    with process.without_determinism():
        wanted_model = build(False, True)
        wanted = fit_on("arrays", wanted_model)
        model = build(True, True)
        found = fit_on("arrays", model)
    assert model.jit_compile
    report = tfckpt.keras.report(model)
    assert report.applied and report.recomputed_ops > 0, report.reason
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    for a, b in zip(state(model), state(wanted_model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def test_fit_with_automatic_choice_of_the_compiler():
    plain = build(False, "auto")
    wanted = fit_on("arrays", plain)
    model = build(True, "auto")
    assert fit_on("arrays", model) == wanted  # on a CPU "auto" is the executor
    assert_same_state(model, plain)
    assert not model.jit_compile and tfckpt.keras.report(model).applied


def test_train_on_batch():
    x, y = arrays(BATCH)
    plain, model = build(False), build(True, batch_size=BATCH)
    for _ in range(3):
        wanted = plain.train_on_batch(x, y)
        assert model.train_on_batch(x, y) == wanted
    assert_same_state(model, plain)
    assert tfckpt.keras.report(model).recomputed_ops > 0


def test_train_on_batch_takes_the_batch_from_its_arguments():
    x, y = arrays(BATCH)
    plain, model = build(False), build(True)
    assert model.train_on_batch(x, y) == plain.train_on_batch(x, y)
    assert tfckpt.keras.report(model).applied


def test_a_model_may_be_wrapped_after_compile_and_after_training():
    x, y = arrays()
    plain = build(False)
    late = build(False)
    for model in (plain, late):
        model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    tfckpt.keras.checkpoint(late)
    for model in (plain, late):
        model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    assert_same_state(late, plain)
    assert tfckpt.keras.report(late).applied


def test_evaluate_predict_and_save_still_work(tmp_path):
    x, y = arrays(BATCH)
    plain, model = build(False), build(True)
    for trained in (plain, model):
        trained.fit(x, y, batch_size=BATCH, verbose=0)
    before = plain.predict(x, batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(model.predict(x, batch_size=BATCH, verbose=0), before)
    common = {"batch_size": BATCH, "verbose": 0, "return_dict": True}
    assert model.evaluate(x, y, **common) == plain.evaluate(x, y, **common)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, batch_size=BATCH, verbose=0), before)


def test_run_eagerly_says_that_there_is_nothing_to_rewrite():
    x, y = arrays(64)
    model = build(True)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", run_eagerly=True)
    before = model.get_weights()[0].copy()
    with pytest.warns(UserWarning, match="eagerly.*no graph to rewrite"):
        model.fit(x, y, batch_size=64, verbose=0)
    assert tfckpt.keras.report(model) is None
    assert (model.get_weights()[0] != before).any()


class Decorated(keras.Model):
    """A model whose own `train_step` is decorated."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def _learn(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    train_step = tfckpt.checkpoint(_learn, budget=0.9, batch_size=BATCH)


class Undecorated(Decorated):
    """The same, plain."""

    def train_step(self, data):
        return self._learn(data)


def test_train_step_as_a_decorated_method():
    x, y = arrays()
    trained = []
    for kind in (Undecorated, Decorated):
        process.fresh()
        model = kind(stack())
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9),
                      keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        trained.append((model, history))
    (plain, wanted), (model, found) = trained
    assert found == wanted
    assert_same_state(model, plain)
    report = model.train_step.report
    assert report.applied and report.recomputed_ops > 0, report.reason
    assert report.planned_peak_bytes <= 0.9 * report.baseline_peak_bytes
