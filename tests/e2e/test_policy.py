"""`keep=` and `recompute=` on networks: obeyed, shown, priced, and the same bits."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import models, process, training

NETWORKS = {  # what is kept, what is recomputed
    "residual": ("re_lu*", "conv2d*/BiasAdd"),
    "transformer": ("multi_head_attention*/*/Softmax", "*dense"),
    "unet": ("concatenate*", "conv2d*/Relu"), "dense_gelu": ("Erfc", "mul_1"),
    "keras_dropout": ("dropout*", "dense*")}


def trained(name, wrap):
    """Return a network made anew and trained; what it was trained by, and its history."""
    process.fresh()
    made = getattr(models, name)()
    step = wrap(tf.function(made.step))
    return step, training.train(step, made)


@pytest.mark.parametrize("name", NETWORKS)
def test_on_five_networks(name):
    keep, recompute = NETWORKS[name]
    _, wanted = trained(name, lambda step: step)
    step, found = trained(name, lambda step: tfckpt.checkpoint(
        step, keep=keep, recompute=[recompute]))
    training.assert_same_bits(found, wanted)
    assert step.report.applied, step.report.reason
    fates = {policy: {f.fate for f in step.report.fates if f.asked == policy}
             for policy in ("keep", "recompute")}
    assert fates == {"keep": {"kept"}, "recompute": {"recomputed"}}
    text = str(step.report)
    assert "keep asked" in text and "recompute asked" in text


def test_recompute_alone_is_priced_and_lowers_what_is_saved():
    process.fresh()
    made = models.dense_gelu()
    before = tfckpt.saved_tensors(tf.function(made.step), *made.batches[0])
    step = tfckpt.checkpoint(tf.function(made.step), budget=1.0, recompute=["mul*", "Erfc"])
    after = tfckpt.saved_tensors(step, *made.batches[0])
    names = {t.op for t in before.tensors if t.op.rpartition("/")[2].startswith(("mul", "Erfc"))}
    assert names and not before.recomputed
    assert names <= {t.op for t in after.recomputed} and after.bytes < before.bytes
    assert step.report.overhead > 0 and step.report.recomputed_ops >= len(names)
    assert "saved for the backward pass" in str(before) and "float32[" in str(before)


def test_a_name_that_matches_nothing_is_an_error_before_anything_trains():
    made = models.dense_relu()
    step = tfckpt.checkpoint(tf.function(made.step), keep="dens_99")
    with pytest.raises(tfckpt.PlanError, match="keep='dens_99' matches no layer.*'dense"):
        step(*made.batches[0])


def test_the_native_pass_and_a_keras_model_obey():
    process.fresh()
    made = models.dense_gelu()
    with grappler_ext.enabled(strict=True, recompute=["mul_1"]):
        tf.function(made.step)(*made.batches[0])
        report, = (r for r in grappler_ext.reports().values() if r.applied)
    process.without_pass()
    assert {f.fate for f in report.fates if f.asked == "recompute"} == {"recomputed"}
    model = tfckpt.keras.checkpoint(models.stack(depth=6), keep="dense*")
    model.compile("sgd", "mse", jit_compile=False)
    x, _ = models.arrays(256)
    model.fit(x, x[:, :5], batch_size=128, verbose=0)
    report = tfckpt.keras.report(model)
    assert report.applied and {f.fate for f in report.fates if f.asked == "keep"} == {"kept"}


UNITS = {"dense": 32, "dense_1": 48, "dense_2": 64}


def _three_layers():
    process.fresh()
    inputs = x = keras.Input((32,))
    for units in UNITS.values():
        x = keras.layers.Dense(units, "gelu")(x)
    return keras.Model(inputs, keras.layers.Dense(5)(x))


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("layer", UNITS)
def test_a_keras_models_layer_is_meant_by_its_name(layer, by_name):
    """TensorFlow numbers the scopes of layers, so that one has the name of the next layer."""
    model = _three_layers()
    tfckpt.keras.checkpoint(model, recompute=layer if by_name else model.get_layer(layer))
    names = [each.name for each in model.layers if each.name.startswith("dense")]
    assert names == ["dense", "dense_1", "dense_2", "dense_3"]
    model.compile("sgd", "mse", jit_compile=False)
    x, _ = models.arrays(256)
    model.fit(x, x[:, :5], batch_size=128, verbose=0)
    report = tfckpt.keras.report(model)
    assert {f.op.split("/")[1] for f in report.fates if f.asked} == {layer}
    assert f"operations in {model.name}/{layer}\n" in str(report)
    assert {f.shape[-1] for f in report.fates if f.asked} == {UNITS[layer]}


def test_what_the_backward_does_not_read_is_said():
    made = models.dense_relu()
    process.fresh()
    step = tfckpt.checkpoint(tf.function(made.step), budget=1.0, keep="*/BiasAdd")
    step(*made.batches[0])
    assert re.search(r"the backward reads no tensor of 8 operations in \w+/dense", str(step.report))


class Block(keras.layers.Layer):
    """A layer with layers inside, which Keras' `model.layers` does not list."""

    def __init__(self, units):
        super().__init__()
        self.inside = [keras.layers.Dense(units, "gelu"), keras.layers.Dense(32, "gelu")]

    def call(self, inputs):
        for layer in self.inside:
            inputs = layer(inputs)
        return inputs


class _Trainer:
    """Code as people write it: a step that reaches its model by an attribute."""

    def __init__(self, model):
        self.model, self.optimizer = model, keras.optimizers.SGD()

    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


@pytest.mark.parametrize("method", [False, True])
def test_a_decorated_step_knows_the_layers_that_it_reaches(method):
    process.fresh()
    trainer = _Trainer(keras.Sequential([Block(48), Block(64), keras.layers.Dense(5)]))
    body = trainer.step if method else lambda x, y: trainer.step(x, y)
    step = tfckpt.checkpoint(tf.function(body), budget=1.0, recompute="dense_2", keep="block/dense")
    x, _ = models.arrays(256)
    step(x, x[:, :5])
    asked = {f.asked: (f.layer, f.shape[-1]) for f in step.report.fates if f.asked}
    assert asked == {"keep": ("sequential/block/dense", 48),
                     "recompute": ("sequential/block_1/dense_2", 64)}
    names = {f.layer for f in step.report.fates}
    assert {"sequential/block/dense_1", "sequential/block_1/dense_3"} <= names
    assert "sequential/block_1/dense_3's gradient" in step.report.explain(40)


class _Module(tf.Module):
    """What it is given as a tuple it keeps in a proxy that adds itself to other things."""

    def __init__(self):
        super().__init__()
        self.layers = (keras.layers.Dense(48, "gelu"), keras.layers.Dense(5, "gelu"))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class _Closed:
    """An object that does not say what it holds, such as a handle to what is gone."""

    @property
    def __dict__(self):
        raise RuntimeError("it is gone")


def test_a_decorated_step_knows_the_layers_in_the_tuple_of_a_module():
    process.fresh()
    module, closed = _Module(), _Closed()

    def body(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(module(x) - y)) if closed is not None else 0.0
        return loss, tape.gradient(loss, [layer.kernel for layer in module.layers])

    step = tfckpt.checkpoint(tf.function(body), budget=1.0, keep="dense")
    x, _ = models.arrays(256)
    step(x, x[:, :5])
    assert {f.layer for f in step.report.fates if f.asked} == {"dense"}


def test_a_layer_itself_means_no_other_of_its_name():
    """Its path does; a path that is misspelt is answered with paths."""
    process.fresh()
    inner = [keras.Sequential([keras.layers.Dense(n, "gelu", name="inner")], name=f"part{n}")
             for n in (48, 64)]
    model = tfckpt.keras.checkpoint(keras.Sequential([*inner, keras.layers.Dense(5)], name="net"),
                                    keep=[inner[0].layers[0]], recompute=[inner[1]])
    x, _ = models.arrays(256)
    model.build(x.shape)
    tfckpt.keras.checkpoint(keras.Sequential(), keep=inner[0])  # not built: it has a name
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(x, x[:, :5], batch_size=128, verbose=0)
    fates = tfckpt.saved_tensors(model)
    asked = {(f.asked, f.layer) for f in (*fates.tensors, *fates.recomputed) if f.asked}
    assert asked == {("keep", "net/part48/inner"), ("recompute", "net/part64/inner")}
    wrong = tfckpt.keras.checkpoint(keras.Sequential(inner, name="net"), keep="net/part48/iner")
    wrong.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(tfckpt.PlanError, match="there are 'net/part48/inner', "):
        wrong.fit(x, np.zeros((256, 64), "f"), batch_size=128, verbose=0)


def test_a_misspelt_layer_is_answered_with_layers():
    model = tfckpt.keras.checkpoint(_three_layers(), keep="dense_7")
    model.compile("sgd", "mse", jit_compile=False)
    x, _ = models.arrays(256)
    near = "there are 'dense_3', 'dense_2', 'dense_1', 'dense', "
    with pytest.raises(tfckpt.PlanError, match=near):
        model.fit(x, x[:, :5], batch_size=128, verbose=0)


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_a_factor_of_the_derivative_is_not_kept_in_place_of_a_layer(budget):
    """GELU's derivative has a square that could run as soon as the layer has."""
    x = np.random.default_rng(1).standard_normal((1024, 128), np.float32)

    def trained(wrap):
        process.fresh()
        model = keras.Sequential([keras.Input((128,)), *(
            keras.layers.Dense(128, "gelu", name=f"block{n}") for n in range(6))])

        @wrap
        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            variables = model.trainable_variables
            for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
                v.assign_sub(g)
            return loss

        return step, [step(x).numpy().tobytes() for _ in range(3)]

    _, wanted = trained(lambda step: step)
    step, found = trained(tfckpt.checkpoint(budget=budget, recompute="block3"))
    assert found == wanted
    fates = [fate.fate for fate in step.report.fates if fate.asked == "recompute"]
    assert len(fates) >= 3 and set(fates) == {"recomputed"}, fates
