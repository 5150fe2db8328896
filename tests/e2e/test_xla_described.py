"""Plans for a GPU that is not here: the same numbers, and XLA asked where its compiler is."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import networks
from tests.support import process
from tfckpt.capture import tf_adapter
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.request.devices import find_device
from tfckpt.request.options import make_options
from tfckpt.verify import compiled_for
from tfckpt.verify.asking import elsewhere

H100 = find_device("H100-80GB").target()
JAX = os.environ.get(elsewhere.PYTHON) or (
    sys.executable if importlib.util.find_spec("jax_plugins") else None)
SIZES = {"decoder": {"batch": 2, "length": 64, "width": 64, "depth": 2, "vocabulary": 128},
         "encoder": {"batch": 2, "length": 64, "width": 64, "depth": 2},
         "wavenet": {"batch": 2, "length": 512, "filters": 16, "depth": 3},
         "mbconv": {"batch": 4, "side": 16, "channels": 16, "depth": 2},
         "convnext": {"batch": 8, "side": 32, "channels": 16, "depth": 2},
         "mixer": {"batch": 4, "patches": 64, "width": 64, "depth": 2}}


def made(name):
    """Return a step of a network with plain gradient descent, its batch, and the variables it
    changes.
    """
    process.fresh()
    network = networks.NETWORKS[name](**SIZES[name])
    model, random = network.model, np.random.default_rng(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    shape, dtype = network.x
    x = (random.integers(0, network.classes, shape) if dtype == "int32"
         else random.normal(size=shape)).astype(dtype)
    y = random.integers(0, network.classes, network.y[0]).astype("int32")

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = [v.value for v in model.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(value, variables), strict=True):
            variable.assign_sub(0.01 * tf.convert_to_tensor(gradient))
        return value

    return step, (tf.constant(x), tf.constant(y)), model


def trained(step, batch, model):
    losses = [float(step(*batch)) for _ in range(2)]
    return np.concatenate([losses, *(np.ravel(v) for v in model.weights)]).astype(np.float64)


@pytest.mark.parametrize("name, otherwise", [
    pytest.param(name, otherwise, id=f"{name}-{way} way",
                 marks=[] if (name == "encoder") or (name == "mbconv" and not otherwise)
                 else pytest.mark.nightly)
    for name in SIZES for otherwise, way in ((False, "first"), (True, "second"))])
def test_numbers_of_plans_for_a_gpu(name, otherwise):
    """XLA for CPUs runs them too, barriers and all."""
    wanted = trained(*made(name))
    plain, batch, model = made(name)
    step = CheckpointedStep(plain, make_options("min", xla_trials=0, target=dataclasses.replace(
        H100, otherwise=otherwise)))
    found = trained(step, batch, model)
    assert step.report.applied and step.report.recomputed_ops
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["decoder", "mbconv"])
def test_numbers_of_the_second_way_on_a_cpu(name):
    from tfckpt.driving.here import target_of

    wanted = trained(*made(name))
    plain, batch, model = made(name)
    step = CheckpointedStep(plain, make_options("min", xla_trials=0, target=dataclasses.replace(
        target_of(), otherwise=True)))
    found = trained(step, batch, model)
    assert step.report.recomputed_ops
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("python, said", [
    ("", "no compiler for the described device"), (sys.executable, "has no JAX"),
    ("/nowhere/python", "cannot be run")])
def test_what_is_said_where_there_is_no_compiler(monkeypatch, python, said):
    """A step is planned by simulation then; this interpreter has TensorFlow and may have no JAX."""
    if JAX and python in ("", sys.executable):
        pytest.skip("JAX is here")
    elsewhere._process.cache_clear()
    monkeypatch.setenv(elsewhere.PYTHON, python)
    plain, batch, _ = made("mixer")
    step = CheckpointedStep(plain, make_options("min", target=H100))
    step.get_concrete_function(*batch)
    assert step.report.recomputed_ops and step.report.compiled.before is None
    assert said in step.report.compiled.reason


@pytest.mark.skipif(not JAX, reason="jax[cuda12] is not here")
def test_a_budget_is_one_of_what_the_gpu_s_compiler_says(monkeypatch):
    monkeypatch.setenv(elsewhere.PYTHON, JAX)
    plain, batch, _ = made("mbconv")
    before = compiled_for("h100", plain, *batch)
    step = CheckpointedStep(plain, make_options(0.97, target=H100))
    after = compiled_for("h100", step, *batch)
    told = step.report.compiled
    assert told.before.temp_bytes == before.temp_bytes
    assert told.after.temp_bytes == after.temp_bytes <= 0.97 * before.temp_bytes
    assert max(told.after.live_bytes) <= after.temp_bytes and told.after.held


@pytest.mark.skipif(not JAX, reason="jax[cuda12] is not here")
@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_biases_that_cublas_adds_are_counted_as_folded(monkeypatch, name):
    """The calls themselves say what they add; nothing of what is recomputed is merged."""
    monkeypatch.setenv(elsewhere.PYTHON, JAX)
    plain, batch, _ = made(name)
    step = CheckpointedStep(plain, make_options("min", xla_trials=0, target=H100))
    found = compiled_for("h100", step, *batch)
    hlo = elsewhere.compiled_elsewhere(tf_adapter.lowered_hlo(step, batch, {}), "h100")
    calls = [json.loads(i.backend_config)["gemm_backend_config"]
             for part in hlo.hlo_module.computations for i in part.instructions
             if i.custom_call_target == "__cublas$lt$matmul" and "-tfckpt" in i.metadata.op_name]
    assert found.folded["BiasAdd"] == sum("BIAS" in call["epilogue"] for call in calls) > 0
    assert not found.merged
    assert found.copy_count + found.folded_count == found.planned_count
