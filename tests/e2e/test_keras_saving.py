"""A wrapped Keras model saves, loads and is copied as the plain one, and goes on training."""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.models import arrays, stack

BATCH = 1024


@keras.saving.register_keras_serializable("tests")
class Custom(keras.Model):
    """A subclassed model with a configuration and a `train_step` of its own."""

    def __init__(self, width=64, **options):
        super().__init__(**options)
        self.width = width
        self.inner = keras.Sequential([keras.layers.Dense(width, activation="relu")
                                       for _ in range(6)])
        self.last = keras.layers.Dense(5)

    def build(self, shape):
        self.inner.build(shape)
        self.last.build((*shape[:-1], self.width))
        self.built = True

    def call(self, x):
        return self.last(self.inner(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width}

    def train_step(self, data):
        return {**super().train_step(data), "steps": 1.0}


def custom():
    model = Custom()
    model.build((None, 32))
    return model


MODELS = {"sequential": stack, "custom": custom}


def compiled(kind: str, wrapped: bool):
    process.fresh()
    model = MODELS[kind]()
    if wrapped:
        tfckpt.keras.checkpoint(model, solver="approx_dp")  # plans fast
    compile_(model)
    return model


@pytest.fixture(scope="module", params=[
    "sequential", pytest.param("custom", marks=pytest.mark.nightly)])
def trained(request):
    """Kind, and a wrapped model and the plain one after an epoch each."""
    process.seed()
    wrapped, plain = compiled(request.param, True), compiled(request.param, False)
    for model in (wrapped, plain):
        fit(model)
    assert rewritten(wrapped) and state(wrapped) == state(plain)
    return request.param, wrapped, plain


def compile_(model):
    model.compile(keras.optimizers.Adam(1e-3),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)


def fit(model, *callbacks, epochs=1, **options):
    x, y = arrays(2 * BATCH)
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0,
                     callbacks=list(callbacks), **options)


def state(model) -> list[bytes]:
    return [v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables]]


def rewritten(model) -> bool:
    report = tfckpt.keras.report(model)
    return report is not None and report.applied


def is_wrapped(model) -> bool:
    try:
        tfckpt.keras.report(model)
    except tfckpt.PlanError:
        return False
    return True


def test_save_load_wrap_again_and_go_on(trained, tmp_path):
    kind, model, _ = trained
    wanted = compiled(kind, False)
    fit(wanted, epochs=2)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded) is type(model) and not is_wrapped(loaded) and is_wrapped(model)
    assert state(loaded) == state(model)
    tfckpt.keras.checkpoint(loaded, solver="approx_dp")
    fit(loaded)
    assert rewritten(loaded) and state(loaded) == state(wanted)


def test_what_describes_a_model_does_not_see_the_wrapper(trained):
    kind, _, _ = trained
    plain, model = compiled(kind, False), compiled(kind, True)
    assert model.get_config() == plain.get_config()
    assert keras.saving.serialize_keras_object(model) == keras.saving.serialize_keras_object(plain)
    assert model.get_compile_config() == plain.get_compile_config()
    assert [w.path for w in model.weights] == [w.path for w in plain.weights]
    if kind != "custom":
        assert model.to_json() == plain.to_json()


@pytest.mark.parametrize("copied", [
    keras.models.clone_model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)),
    lambda model: type(model).from_config(model.get_config())],
    ids=["clone_model", "deepcopy", "pickle", "from_config"])
def test_copies_are_plain_models_of_their_own(trained, copied):
    kind, model, _ = trained
    if kind == "custom" and copied is keras.models.clone_model:
        pytest.skip("Keras clones no subclassed models")
    other = copied(model)
    if not other.built:
        other.build((None, 32))
    assert type(other) is type(model) and not is_wrapped(other) and is_wrapped(model)
    before = state(model)
    compile_(other)
    other.set_weights(model.get_weights())
    fit(other)  # trains itself, not the one it was copied from
    assert state(model) == before
    assert not np.array_equal(other.get_weights()[0], model.get_weights()[0])


def test_weights_files_are_read_by_either(trained, tmp_path):
    kind, model, plain = trained
    for written in (model, plain):
        path = tmp_path / "w.weights.h5"
        written.save_weights(path)
        for wrapped in (False, True):
            other = compiled(kind, wrapped)
            other.optimizer.build(other.trainable_variables)
            other.load_weights(path)
            assert state(other) == state(plain)


def test_an_interrupted_fit_is_resumed(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("the power is gone")

    plain = compiled("sequential", False)
    fit(plain, epochs=2)
    with pytest.raises(RuntimeError, match="power"):
        fit(compiled("sequential", True), keras.callbacks.BackupAndRestore(tmp_path / "backup"),
            Stop(), epochs=2)
    model = compiled("sequential", True)
    fit(model, keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras"), epochs=2)
    assert state(model) == state(plain) and rewritten(model)
    assert state(keras.models.load_model(tmp_path / "best.keras")) == state(plain)


def test_tf_checkpoints(trained, tmp_path):
    kind, model, plain = trained
    paths = [tf.train.Checkpoint(model=m).save(str(tmp_path / "c")) for m in (model, plain)]
    names = [tf.train.list_variables(path) for path in paths]
    assert names[0] == names[1]
    for path in paths:
        for wrapped in (False, True):
            restored = compiled(kind, wrapped)
            tf.train.Checkpoint(model=restored).restore(path).expect_partial()
            assert [w.tobytes() for w in restored.get_weights()] == [
                w.tobytes() for w in plain.get_weights()]


def test_exported_models_serve(trained, tmp_path):
    _, model, plain = trained
    x, _ = arrays(BATCH)
    model.export(str(tmp_path / "e"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "e"))
    np.testing.assert_array_equal(loaded.serve(x).numpy(),
                                  plain.predict(x, batch_size=BATCH, verbose=0))
