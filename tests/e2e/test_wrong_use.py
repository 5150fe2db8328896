"""Wrong use: one sentence says what to write instead, and reports belong to who trained."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.models import arrays, stack

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Decorated(keras.Model):
    """A model whose class decorates its step."""

    @tfckpt.checkpoint(budget="min")
    def train_step(self, data):
        return super().train_step(data)


def _decorated():
    plain = stack()
    return Decorated(plain.inputs, plain.outputs)


def _callable_module():
    class Trainer(tf.Module):
        @tf.function
        def __call__(self, x):
            return x

    return Trainer()


async def _coroutine():
    pass


def _generator():
    yield


@pytest.mark.parametrize("given, said", [
    (lambda: stack(), r"model = tfckpt\.keras\.checkpoint\(model"),
    (lambda: keras.Model, r"not a class; write model = tfckpt\.keras"),
    (lambda: keras.layers.Dense(2), "not a layer"),
    (lambda: tfckpt.checkpoint(tf.function(lambda: None)), "decorated.*already"),
    (lambda: tf.function(lambda: tf.constant(1)).get_concrete_function(), "the tf.function"),
    (lambda: staticmethod(lambda: None), "put @staticmethod above"),
    (_callable_module, "what trains is Trainer.__call__, a tf.function; decorate that method"),
    (lambda: _coroutine, "coroutine or generator"), (lambda: _generator, "coroutine or generator"),
    (lambda: dict, "the class dict"), (lambda: 0.5, "not float; options are keyword-only"),
], ids=range(11))
@pytest.mark.parametrize("bare", [True, False], ids=["bare", "options"])
def test_what_the_decorator_does_not_take(given, said, bare):
    decorate = tfckpt.checkpoint if bare else tfckpt.checkpoint(budget=0.5)
    with pytest.raises(tfckpt.PlanError, match=said):
        decorate(given())


def test_a_class_is_no_model():
    with pytest.raises(tfckpt.PlanError, match="not the class Decorated"):
        tfckpt.keras.checkpoint(Decorated)


def test_reports_belong_to_the_model_that_trained():
    process.fresh()
    trained, idle = _decorated(), _decorated()
    x, y = arrays(700)
    trained.compile("sgd", LOSS, jit_compile=False)
    trained.fit(x, y, batch_size=512, verbose=0)
    report = trained.train_step.report
    assert report.applied and report.planned_for.startswith("512x")
    assert idle.train_step.report is None and idle.train_step.reports == {}
    assert tfckpt.keras.report(trained) is report is tfckpt.report_of(trained)
    assert tfckpt.keras.report(idle) is None

    idle.compile("sgd", LOSS, run_eagerly=True)
    with pytest.warns(UserWarning, match="runs eagerly"):
        idle.fit(x[:8], y[:8], verbose=0)
    assert idle.train_step.report is None
    with pytest.raises(tfckpt.PlanError, match="Decorated.train_step is decorated.*already"):
        tfckpt.keras.checkpoint(idle, budget=0.9)


class Heir(Decorated):
    """Its own step calls the decorated one."""

    def train_step(self, data):
        return super().train_step(data)


def test_a_class_may_put_its_own_step_before_a_decorated_one():
    process.fresh()
    plain = stack()
    model = Heir(plain.inputs, plain.outputs)
    model.compile("sgd", LOSS, jit_compile=False)
    x, y = arrays(700)
    model.fit(x, y, batch_size=512, verbose=0)
    assert Decorated.train_step.__get__(model).report.applied


def test_a_callback_reports_on_a_model_with_a_decorated_step():
    process.fresh()
    model = _decorated()
    model.compile("sgd", LOSS, jit_compile=False)
    x, y = arrays(8192)
    model.fit(x, y, batch_size=4096, verbose=0, callbacks=[tfckpt.keras.PeakMemory()])
    assert model.train_step.report.measured_peak_bytes > 0


def test_a_function_above_the_decorator_has_a_report():
    weight = tf.Variable(tf.eye(64))

    @tf.function
    @tfckpt.checkpoint
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for _ in range(5):
                h = tf.tanh(h @ weight)
            loss = tf.reduce_sum(h)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    assert tfckpt.report_of(step) is None
    step(tf.ones((2048, 64)))
    assert tfckpt.report_of(step).applied
    with pytest.raises(tfckpt.PlanError, match="has no report; pass a step"):
        tfckpt.report_of(tf.function(lambda: None))


@pytest.mark.parametrize("budget", [np.float32(0.5), np.float64(0.5), np.int64(10**9),
                                    np.uint32(10**9), "1g", "1000 M", "0.9GiB"])
def test_numbers_as_people_have_them(budget):
    assert callable(tfckpt.checkpoint(tf.function(lambda: None), budget=budget,
                                      batch_size=np.int64(4)))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_model_that_is_not_built_yet(optimizer):
    found = []
    x, y = arrays(1024)
    for wrap in (False, True):
        process.fresh()
        model = keras.Sequential([keras.layers.Dense(64, activation="relu") for _ in range(5)]
                                 + [keras.layers.Dense(5)])
        if wrap:
            tfckpt.keras.checkpoint(model)
        model.compile(optimizer, LOSS, jit_compile=False)
        model.fit(x, y, batch_size=500, verbose=0, shuffle=False)
        found.append([v.numpy().tobytes() for v in model.variables])
    assert found[0] == found[1]
    assert tfckpt.keras.report(model).applied


def test_a_fresh_optimizer_is_planned_once_and_for_the_step_that_trains():
    """The trace in which an optimizer makes its slots is thrown away: no plan, no refusal."""
    process.fresh()
    built, fresh = stack(), stack()
    optimizers = [keras.optimizers.Adam(), keras.optimizers.Adam()]
    optimizers[0].build(built.trainable_variables)
    x, y = arrays(1024)
    for model, optimizer in zip((built, fresh), optimizers, strict=True):
        tfckpt.keras.checkpoint(model, budget=0.8)
        model.compile(optimizer, LOSS, jit_compile=False)
        model.fit(x, y, batch_size=512, verbose=0)
    one, other = (tfckpt.keras.wrapping.records_of(m).reports for m in (built, fresh))
    assert len(one) == len(other) == 1
    (one,), (other,) = one.values(), other.values()
    assert (one.applied, one.planned_peak_bytes, one.baseline_peak_bytes, one.op_count) == (
        other.applied, other.planned_peak_bytes, other.baseline_peak_bytes, other.op_count)


def test_a_decorated_step_with_a_fresh_optimizer_is_planned_once():
    process.fresh()
    model, optimizer = stack(), keras.optimizers.RMSprop()

    @tfckpt.checkpoint(budget=0.75)
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables),
                                      model.trainable_variables, strict=True))
        return loss

    x, y = arrays(1024)
    step(x, y)
    assert len(step.reports) == 1 and step.report.applied


def _run(script: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, **environment}, check=False)


_KERAS_2 = """
import sys
import numpy as np, tensorflow as tf, tf_keras, tfckpt
x = np.random.default_rng(0).random((1500, 64), dtype=np.float32)
y = x[:, :1]
found = []
for wrap in (False, True):
    for jit in (False, True):
        tf_keras.utils.set_random_seed(1)
        model = tf_keras.Sequential([tf_keras.layers.Dense(64, activation="relu")
                                     for _ in range(6)] + [tf_keras.layers.Dense(1)])
        model.build((None, 64))
        if wrap:
            tfckpt.keras.checkpoint(model)
        model.compile("adam", "mse", jit_compile=jit)
        model.fit(x, y, batch_size=1024, verbose=0, shuffle=False,
                  callbacks=[tfckpt.keras.PeakMemory(compare=True)] if wrap else [])
        found.append([v.numpy() for v in model.variables])
        if wrap:
            report = tfckpt.keras.report(model)
            assert report.applied and report.planned_for.startswith("1024x64"), str(report)
            assert report.measured_peak_bytes is not None
assert all((a == b).all() for a, b in zip(found[0], found[2]))
assert all(np.allclose(a, b, 1e-4) for a, b in zip(found[1], found[3]))
"""


def test_keras_2_works():
    pytest.importorskip("tf_keras")
    done = _run(_KERAS_2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("planned peak") >= 2


_JAX = """
import keras, numpy as np, tfckpt
image = keras.Input((4,))
outcomes = []
class Decorated(keras.Model):
    @tfckpt.checkpoint
    def train_step(self, data):
        return {}
for make in (lambda: tfckpt.keras.checkpoint(keras.Model(image, keras.layers.Dense(2)(image))),
             lambda: Decorated(image, keras.layers.Dense(2)(image))):
    try:
        model = make()
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
    except tfckpt.PlanError as error:
        print(error)
"""


@pytest.mark.nightly
def test_another_backend_is_refused_by_name(tmp_path):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path),
                    "jax"], check=True)
    done = _run(_JAX, KERAS_BACKEND="jax", PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    assert done.stdout.count("Keras runs on 'jax'") == 2, done.stderr[-2000:]
