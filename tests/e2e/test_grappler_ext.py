"""The native pass: what it rewrites, what it leaves alone, and what happens when it cannot."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from grappler_ext import bridge
from tests.support import process, saved
from tests.support.models import MODELS, arrays, stack
from tfckpt.common import clock
from tfckpt.request.options import make_options
from tfckpt.verify.executed import executed
from tfckpt.verify.memory import measure_peak

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _off():
    yield
    process.without_pass()


def train(name, on, batches=3):
    """Peak in bytes, losses and variables as bytes, of a model trained without the decorator."""
    process.fresh()
    made = MODELS[name](gradients=False)
    step = tf.function(made.step)
    if on:
        grappler_ext.enable()
    peak = measure_peak(step, *made.batches[0], repeats=3)
    losses = [tf.nest.flatten(step(*batch))[0].numpy().tobytes()
              for batch in made.batches[:batches]]
    return peak, losses + [v.numpy().tobytes() for v in made.variables()], step, made


@pytest.mark.parametrize("name", [
    "dense_gelu", "residual", *(pytest.param(n, marks=pytest.mark.nightly)
                                for n in ("transformer", "keras_dropout"))])
def test_unmodified_steps_train_in_less_memory_to_the_bit(name):
    plain, wanted, *_ = train(name, on=False)
    peak, found, step, made = train(name, on=True)
    report = grappler_ext.reports()["step"]
    assert found == wanted
    assert report.applied and report.recomputed_ops
    assert peak < (plain + report.planned_peak_bytes) / 2
    # counted in what ran, after the very last pass (a constant is no copy)
    assert executed(step, *made.batches[0]).copy_count >= 0.9 * report.recomputed_ops


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_peaks_are_the_decorators(name):
    """Small steps, so there is room; `python -m benchmarks.native_pass` has the large ones."""
    process.fresh()
    made = MODELS[name](gradients=False)
    step = tfckpt.checkpoint(tf.function(made.step))
    wanted = measure_peak(step, *made.batches[0], repeats=3)
    peak, *_ = train(name, on=True)
    assert peak <= 1.15 * wanted
    planned = grappler_ext.reports()["step"].planned_peak_bytes
    assert planned <= 1.2 * step.report.planned_peak_bytes


def test_an_unmodified_fit():
    x, y = arrays(2048)
    history = []
    for on in (False, True):
        process.fresh()
        model = stack()
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
        if on:
            grappler_ext.enable()
        history.append(model.fit(x, y, batch_size=1024, epochs=2, verbose=0,
                                 shuffle=False).history["loss"])
    reports = grappler_ext.reports().values()
    assert history[0] == history[1]
    assert any(r.applied for r in reports)


@pytest.mark.parametrize("options", [{}, {"batch_size": 1024}, {"budget": "1GB"}], ids=str)
def test_a_batch_that_the_trace_leaves_open(options):
    """Where nobody says what it is, it is taken for some; bytes are promised for no such batch."""
    x, y = arrays(1500)
    found = []
    for on in (False, True):
        process.fresh()
        model = stack()
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
        with contextlib.ExitStack() as stacked:
            if on:
                stacked.enter_context(grappler_ext.enabled(**options))
            model.fit(x, y, batch_size=1024, verbose=0, shuffle=False)
        found.append([v.numpy().tobytes() for v in model.variables])
    assert found[0] == found[1]
    reports = [r for r in grappler_ext.reports().values() if r.applied]
    assert bool(reports) == ("budget" not in options)
    said = "a batch of 1024" if options else (
        "a batch of 32: nothing says what it is; pass batch_size=")
    assert [r.planned_for for r in reports] == [said] * len(reports)


def test_graphs_without_gradients_are_skipped_at_once():
    calls = []

    class Watched(bridge.Rewriter):
        def __call__(self, graph, item):
            calls.append(item)
            return bridge.UNCHANGED, b""

    grappler_ext.enable()
    grappler_ext._bridge.connect(Watched(make_options(), strict=False))

    @tf.function
    def forward(x):
        for _ in range(500):
            x = tf.tanh(x) * 1.5
        return x

    seconds = []
    for body in (forward, tf.function(forward.python_function), tf.function(lambda x: forward(x))):
        before = grappler_ext.skipped()[0]
        body(tf.ones((2, 2)))
        assert grappler_ext.skipped()[0] > before
        seconds.append(grappler_ext.skipped()[1])
    assert list(tf.data.Dataset.range(4).map(lambda v: v * 2).as_numpy_iterator()) == [0, 2, 4, 6]
    assert not calls
    assert min(seconds) < 1e-3  # of 1000 ops; python -m benchmarks.native_pass --skip measures it


def test_a_decorated_step_is_left_to_its_decorator():
    process.fresh()
    x, y = arrays(2048)
    model = tfckpt.keras.checkpoint(stack())
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    grappler_ext.enable(batch_size=1024)
    model.fit(x, y, batch_size=1024, epochs=1, verbose=0)
    assert tfckpt.keras.report(model).recomputed_ops
    assert not grappler_ext.reports()


def test_the_training_function_of_a_saved_model(tmp_path):
    """Loaded, it is called as it was saved; nobody could put a decorator on it."""
    saved.save_trainer(tmp_path / "m", signatures=False)
    weights = []
    for on in (False, True):
        loaded = tf.saved_model.load(str(tmp_path / "m"))
        if on:
            grappler_ext.enable(batch_size=saved.BATCH)
        for seed in range(3):
            features, targets = saved.batch(seed)
            loaded.train(tf.constant(features), tf.constant(targets))
        weights.append([w.numpy().tobytes() for w in (*loaded.weights, *loaded.slots)])
    assert weights[0] == weights[1]
    (report,) = grappler_ext.reports().values()
    assert report.applied and report.recomputed_ops
    before = set(grappler_ext.reports())
    copied = executed(loaded.train, *map(tf.constant, saved.batch(0))).copy_count
    # what is executed to be looked at is a function of its own, with a plan of its own
    (looked_at,) = set(grappler_ext.reports()) - before
    assert copied >= 0.9 * grappler_ext.reports()[looked_at].recomputed_ops > 0


def test_turned_off_functions_run_as_tensorflow_makes_them():
    _, _, step, made = train("dense_gelu", on=True)
    assert executed(step, *made.batches[0]).copy_count
    grappler_ext.disable()
    assert not executed(step, *made.batches[0]).copy_count
    grappler_ext.disable()
    with grappler_ext.enabled(budget=0.8):
        assert executed(step, *made.batches[0]).copy_count
    assert not executed(step, *made.batches[0]).copy_count


def optimizers():
    """Return names and parameters of the passes that this thread's calls are configured for."""
    from tensorflow.python.eager import context

    config = tf.compat.v1.ConfigProto.FromString(
        context.context().function_call_options.config_proto_serialized)
    return config.graph_options.rewrite_options.custom_optimizers


def test_other_options_are_for_functions_that_ran_before_too():
    """Counted in the step itself: `executed` makes a function of its own around it."""
    process.fresh()
    made = MODELS["dense_gelu"](gradients=False)
    step = tf.function(made.step)
    peaks = {}
    for budget in (1.0, 0.6, "min"):
        grappler_ext.enable(budget=budget)
        peaks[budget] = measure_peak(step, *made.batches[0], repeats=3)
        assert grappler_ext.reports()["step"].planned_peak_bytes
    assert peaks["min"] < peaks[0.6] < peaks[1.0]
    seen = grappler_ext.reports()["step"]
    grappler_ext.enable()
    step(*made.batches[0])
    assert grappler_ext.reports()["step"] is seen  # nothing is planned twice
    with grappler_ext.enabled(budget=0.01, strict=True), pytest.raises(
            tf.errors.InvalidArgumentError):
        step(*made.batches[0])


def test_what_was_in_force_is_so_again_after_a_with_statement():
    grappler_ext.enable(budget=0.6)
    before = optimizers()
    with grappler_ext.enabled(budget=0.7):
        assert optimizers() != before
        with pytest.raises(ZeroDivisionError), grappler_ext.enabled(budget=0.8):
            raise ZeroDivisionError
    assert optimizers() == before
    grappler_ext.disable()
    with grappler_ext.enabled(budget=0.6):
        assert optimizers() == before
    assert not optimizers()


@pytest.mark.parametrize("where", ["run", "Names"])  # the latter before anybody looks out
def test_control_c_reaches_the_caller(where, monkeypatch, caplog):
    """At the end of the call, when TensorFlow is back in Python; the step runs as it was."""
    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)

    escaped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: escaped.append(said.exc_type))
    monkeypatch.setattr(bridge, where, types.SimpleNamespace(parse=interrupted)
                        if where == "Names" else interrupted)
    made = MODELS["dense_gelu"](gradients=False)
    before = [v.numpy() for v in made.variables()]
    grappler_ext.enable()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            tf.function(made.step)(*made.batches[0])
            time.sleep(1)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert any((v.numpy() != b).any() for v, b in zip(made.variables(), before, strict=True))
    assert escaped == [KeyboardInterrupt] * (where == "Names")
    assert ("step is not rewritten: interrupted" in caplog.text) is (where == "run")


def test_an_error_of_no_kind_of_ours_is_named(monkeypatch, caplog):
    def wrong(*args):
        raise KeyError("weight")

    monkeypatch.setattr(bridge, "run", wrong)
    made = MODELS["dense_gelu"](gradients=False)
    grappler_ext.enable()
    loss, _ = tf.function(made.step)(*made.batches[0])
    assert np.isfinite(float(loss))
    assert "step is not rewritten: KeyError('weight')" in caplog.text


def test_options_change_while_another_thread_plans(monkeypatch):
    """The call that is under way ends with the options with which it began."""
    inside, go = threading.Event(), threading.Event()
    plan = bridge.run

    def slow(item, options):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go.wait(60)
        return plan(item, options)

    monkeypatch.setattr(bridge, "run", slow)
    made = MODELS["dense_gelu"](gradients=False)
    grappler_ext.enable(budget=0.7)
    thread = threading.Thread(target=lambda: tf.function(made.step)(*made.batches[0]))
    thread.start()
    assert inside.wait(60)
    pointer = ctypes.cast(grappler_ext._bridge._callback, ctypes.c_void_p).value
    grappler_ext.enable(budget=0.9)
    assert ctypes.cast(grappler_ext._bridge._callback, ctypes.c_void_p).value == pointer
    go.set()
    thread.join()
    assert not grappler_ext.reports()
    grappler_ext.enable(budget=0.7)
    assert grappler_ext.reports()["step"].applied


def test_a_budget_that_nothing_fits_is_logged_once_and_changes_nothing(caplog):
    made = MODELS["dense_gelu"](gradients=False)
    step = tf.function(made.step)
    grappler_ext.enable(budget=0.01)
    with caplog.at_level(logging.WARNING, logger="absl"):
        for batch in made.batches:
            step(*batch)
    said = [r.getMessage() for r in caplog.records if "not rewritten" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("tfckpt: step is not") and "0.01" in said[0]
    assert not grappler_ext.reports()
    assert grappler_ext.failures()["step"] in said[0]
    assert not executed(step, *made.batches[0]).copy_count


def test_strict_failures_reach_the_caller():
    made = MODELS["dense_gelu"](gradients=False)
    step = tf.function(made.step)
    with grappler_ext.enabled(budget=0.01, strict=True), pytest.raises(
            tf.errors.InvalidArgumentError, match="tfckpt: step is not rewritten.*0.01"):
        step(*made.batches[0])


def test_options_are_checked_when_given():
    with pytest.raises(tfckpt.PlanError, match="unknown solver"):
        grappler_ext.enable(solver="nobody")
    with pytest.raises(tfckpt.PlanError, match="budget"):
        grappler_ext.enable(budget="much")


def test_functions_of_several_threads():
    process.fresh()
    steps = [MODELS["dense_gelu"](gradients=False) for _ in range(3)]
    grappler_ext.enable()
    losses: list = [None] * 3

    def work(i):
        made = steps[i]
        losses[i] = float(tf.nest.flatten(tf.function(made.step)(*made.batches[0]))[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.isfinite(loss) for loss in losses)
    assert grappler_ext.reports()["step"].applied


def test_a_session_with_its_own_configuration():
    definition = saved.tf1_graph().as_graph_def()
    wanted = saved.run_graph_def(definition)
    grappler_ext.enable()
    found = saved.run_graph_def(definition, config=grappler_ext.session_config())
    assert found == wanted
    assert any(r.applied for r in grappler_ext.reports().values())


def test_a_configuration_without_options_is_refused(monkeypatch):
    monkeypatch.setattr(grappler_ext, "_rewriter", None)
    with pytest.raises(tfckpt.PlanError, match=r"call grappler_ext\.enable\(\) first"):
        grappler_ext.session_config()


@pytest.mark.parametrize("seconds", [1, 20])
def test_a_search_ends_when_its_time_is_over(monkeypatch, seconds):
    """The clock of a step that is hard to plan, which goes much faster here."""
    ticks = iter(range(10 ** 6))
    monkeypatch.setattr(clock, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    trained = []
    for on in (False, True):
        process.fresh()
        made = MODELS["dense_gelu"](gradients=False)
        if on:
            grappler_ext.enable(time_limit=seconds)
        step = tf.function(made.step)
        for batch in made.batches:
            step(*batch)
        trained.append([v.numpy().tobytes() for v in made.variables()])
    assert trained[0] == trained[1]
    assert seconds < next(ticks) < 100
    report = grappler_ext.reports()["step"]
    assert f"time_limit={seconds} seconds ended the search" in str(report)
    if seconds > 1:  # the first proposals are there by then
        assert report.applied
        assert report.planned_peak_bytes < 0.9 * report.baseline_peak_bytes
    with grappler_ext.enabled(budget=0.01, time_limit=seconds, strict=True), pytest.raises(
            tf.errors.InvalidArgumentError, match=f"time_limit={seconds} seconds ended the search"):
        step(*made.batches[0])
    with pytest.raises(tfckpt.PlanError, match="time_limit='x' must be a positive number"):
        grappler_ext.enable(time_limit="x")
