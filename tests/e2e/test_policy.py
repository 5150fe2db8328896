"""`keep=` and `recompute=` on networks: obeyed, shown, priced, and the same bits."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import models, process, training

NETWORKS = {  # what is kept, what is recomputed
    "residual": ("re_lu*", "conv2d*/BiasAdd"),
    "transformer": ("multi_head_attention*/*/Softmax", "*dense_1"),
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


def _three_layers():
    process.fresh()
    inputs = x = keras.Input((32,))
    for _ in range(3):
        x = keras.layers.Dense(32, "gelu")(x)
    return keras.Model(inputs, keras.layers.Dense(5)(x))


@pytest.mark.parametrize("layer, scope", [("dense", "dense_1"), ("dense_1", "dense_1_2"),
                                          ("dense_2", "dense_2_1")])
def test_a_keras_models_layer_is_meant_by_its_name(layer, scope):
    """TensorFlow numbers the scopes of layers, so that one has the name of the next layer."""
    model = tfckpt.keras.checkpoint(_three_layers(), recompute=layer)
    names = [each.name for each in model.layers if each.name.startswith("dense")]
    assert names == ["dense", "dense_1", "dense_2", "dense_3"]
    model.compile("sgd", "mse", jit_compile=False)
    x, _ = models.arrays(256)
    model.fit(x, x[:, :5], batch_size=128, verbose=0)
    asked = {f.op.split("/")[1] for f in tfckpt.keras.report(model).fates if f.asked}
    assert asked == {scope}


def test_what_the_backward_does_not_read_is_said():
    made = models.dense_relu()
    process.fresh()
    step = tfckpt.checkpoint(tf.function(made.step), budget=1.0, keep="*/BiasAdd")
    step(*made.batches[0])
    assert "the backward reads no tensor of what is named: 8 operations" in str(step.report)
