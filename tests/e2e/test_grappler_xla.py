"""`grappler_ext.enable()`: what XLA compiles is rewritten where it is traced, once."""

from __future__ import annotations

import logging
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import process, training
from tests.support.models import MODELS, arrays, stack
from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.inline import is_rewritten
from tfckpt.verify import compiled

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _conditions():
    with process.without_determinism():
        yield
    process.without_pass()


@pytest.fixture
def traces():
    """The graphs traced during a test, as tfckpt's own hook has left them."""
    from tensorflow.python.eager.polymorphic_function import transform

    before = list(transform.FUNC_GRAPH_TRANSFORMS)
    seen: list = []

    def spy():
        tf_adapter.install_trace_hook(seen.append)
        return seen

    yield spy
    transform.FUNC_GRAPH_TRANSFORMS[:] = before


def build(name="dense_gelu"):
    process.fresh()
    made = MODELS[name]()
    return made, tf.function(made.step, jit_compile=True)


def test_a_compiled_function_is_rewritten_and_nothing_is_merged():
    plain_trial, plain = build()
    wanted = training.train(plain, plain_trial)
    before = compiled(plain, *plain_trial.batches[0]).heavy_count
    grappler_ext.enable()
    made, step = build()
    found = training.train(step, made)
    report = grappler_ext.reports()["step"]
    assert report.applied and report.recomputed_ops
    assert training.relative_difference(found, wanted) <= 1e-5
    copies = training.copies_in(step.get_concrete_function(*made.batches[0]).graph)
    heavy = sum(training.heavy([op.type for op in copies]).values())
    assert heavy > 0 and compiled(step, *made.batches[0]).heavy_count - before == heavy


def test_a_compiled_model(traces):
    x, y = arrays(2048)
    losses, copies = [], []
    for on in (False, True):
        process.fresh()
        model = stack()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
        if on:
            grappler_ext.enable(batch_size=1024)
            seen = traces()
        losses += model.fit(x, y, batch_size=1024, epochs=1, verbose=0,
                            shuffle=False).history["loss"]
    copies = [training.copies_in(graph) for graph in seen]
    applied = [r for r in grappler_ext.reports().values() if r.applied]
    assert len(applied) == 1 and applied[0].recomputed_ops
    names = [copy.name for found in copies for copy in found]
    assert len(names) >= applied[0].recomputed_ops  # some of those are several ops
    assert all(name.count("-tfckpt") == 1 for name in names)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_prediction_and_evaluation_of_a_compiled_model_are_left_alone(traces):
    x, y = arrays(512)
    process.fresh()
    model = stack()
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    grappler_ext.enable()
    seen = traces()
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert seen and not grappler_ext.reports()
    assert not any(is_rewritten(op.name) for graph in seen for op in graph.get_operations())


def test_what_the_gradient_of_a_loop_or_branch_consists_of_is_no_step():
    made = np.random.default_rng(0).standard_normal((4, 6, 8)).astype("f")
    weight = tf.Variable(made[0, 0, :, None] * made[1, 0])

    @tf.function(jit_compile=True)
    def recurrent(x):
        with tf.GradientTape() as tape:
            h = tf.zeros_like(x[:, 0])
            for t in tf.range(6):
                h = tf.tanh(x[:, t] + h @ weight)
            h = tf.cond(tf.reduce_sum(h) > 0, lambda: tf.sin(h) * h, lambda: tf.exp(h))
            loss = tf.reduce_sum(h * h)
        return tape.gradient(loss, weight)

    wanted = recurrent(made)
    grappler_ext.enable()
    step = tf.function(recurrent.python_function, jit_compile=True)
    np.testing.assert_allclose(step(made), wanted, rtol=1e-5, atol=1e-6)
    assert list(grappler_ext.reports()) == ["recurrent"]


def test_a_decorated_function_is_not_rewritten_twice():
    made, plain = build("dense_relu")
    step = tfckpt.checkpoint(plain)
    grappler_ext.enable()
    step(*made.batches[0])
    assert step.report.recomputed_ops and not grappler_ext.reports()
    copies = training.copies_in(step.get_concrete_function(*made.batches[0]).graph)
    assert len(copies) >= step.report.recomputed_ops
    assert all(copy.name.count("-tfckpt") == 1 for copy in copies)


def test_without_xla_and_after_disable_traces_stay_as_they_are():
    grappler_ext.enable()
    for stop in (lambda: grappler_ext.enable(xla=False), grappler_ext.disable):
        stop()
        made, step = build("dense_relu")
        step(*made.batches[0])
        graph = step.get_concrete_function(*made.batches[0]).graph
        assert not any(is_rewritten(op.name) for op in graph.get_operations())


def test_failures_are_said_once_or_raised(caplog):
    made, step = build("dense_relu")
    grappler_ext.enable(budget=0.01)
    with caplog.at_level(logging.WARNING, logger="absl"):
        for batch in made.batches:
            loss, _ = step(*batch)
    assert np.isfinite(float(loss))
    assert len([r for r in caplog.records if "step is not rewritten" in r.getMessage()]) == 1
    grappler_ext.enable(budget=0.01, strict=True)
    made, step = build("dense_relu")
    with pytest.raises(tfckpt.InfeasibleBudgetError, match="0.01"):
        step(*made.batches[0])
