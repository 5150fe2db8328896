"""Plans settled by running them: the choice, and everything as it was before."""

from __future__ import annotations

import dataclasses
import statistics
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.gelu_steps import gelu_step
from tfckpt.request.options import make_options
from tfckpt.store import files
from tfckpt.tuning import kept, measuring
from tfckpt.tuning.result import Measured, choice
from tfckpt.tuning.shares import next_share

WIDTH, ROWS = 256, 4096


def dense(layers: int = 6):
    return gelu_step(layers, WIDTH, ROWS, .06)


def model(policy: str = "float32"):
    """Return a model with statistics, dropout, metrics and Adam, trained by a custom loop."""
    process.fresh()
    keras.utils.set_random_seed(5)
    made = keras.Sequential([keras.Input((64,))] + [layer for _ in range(4) for layer in (
        keras.layers.Dense(WIDTH, "gelu", dtype=policy), keras.layers.BatchNormalization(),
        keras.layers.Dropout(.2))] + [keras.layers.Dense(3, dtype="float32")])
    optimizer = keras.optimizers.Adam(1e-3)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    metric, loss_of = keras.metrics.Mean(), keras.losses.SparseCategoricalCrossentropy(
        from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, made(x, training=True))
            scaled = optimizer.scale_loss(loss)
        variables = made.trainable_variables
        optimizer.apply(tape.gradient(scaled, variables), variables)
        metric.update_state(loss)
        return loss

    rows = ROWS // 16 if policy == "mixed_float16" else ROWS  # its products are slow on a CPU
    x = tf.random.stateless_normal((rows, 64), (1, 2))
    return step, (x, tf.zeros((rows,), tf.int32)), lambda: (
        *made.variables, *optimizer.variables, *metric.variables)


@pytest.mark.parametrize("budget", [.5, "min"])
def test_the_fastest_that_fits_is_taken(budget):
    step, x, variables = dense()
    before = [v.numpy() for v in variables]
    tuned = tfckpt.checkpoint(tf.function(step), budget=budget)
    found = tfckpt.tune(tuned, x, steps=2)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    rows = [found.plain, *found.plans]
    most = [r.most_bytes or r.peak_bytes for r in rows]
    allowed = found.allowed_bytes or 1.02 * min(most)
    assert found.chosen.most_bytes <= allowed and len(found.plans) >= 1
    assert found.chosen.seconds == min(
        r.seconds for r, peak in zip(rows, most, strict=True) if peak <= allowed)
    assert tuned.report.applied and tuned.report.measured_peak_bytes == found.chosen.peak_bytes
    assert tuned.report.measured_baseline_bytes == found.plain.peak_bytes
    peaks = []
    for _ in range(4):
        tf.config.experimental.reset_memory_stats("CPU:0")
        start = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tuned(x).numpy()
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - start)
    assert statistics.median(peaks) == pytest.approx(found.chosen.peak_bytes, rel=.15)
    assert str(found).count("->") == 1


def test_training_goes_on_as_if_nothing_had_run():
    step, x, variables = dense()
    plain = tf.function(step)
    losses = [plain(x).numpy() for _ in range(3)]
    step, x, variables = dense()
    tuned = tfckpt.checkpoint(tf.function(step), budget=.6)
    tfckpt.tune(tuned, x, steps=1)
    assert [tuned(x).numpy() for _ in range(3)] == losses


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_every_bit_is_put_back(policy):
    """A fresh optimizer too: what it makes when it is first traced has its first values."""
    step, args, variables = model(policy)
    tuned = tfckpt.checkpoint(tf.function(step), budget="min")
    known = {v.path: np.array(v.numpy()) for v in variables()}
    tfckpt.tune(tuned, *args, steps=1)
    for variable in variables():
        value = np.array(variable.numpy())
        expected = known.get(variable.path)
        if expected is None:  # made when the step was first traced: a slot, or the loss's scale
            expected = np.full_like(value, 2. ** 15 if "dynamic_scale" in variable.path else 0)
        np.testing.assert_array_equal(value.view(np.uint8) if value.ndim else value,
                                      expected.view(np.uint8) if value.ndim else expected)


def test_a_budget_that_plain_meets_leaves_the_step_as_it_is():
    step, x, _ = dense()
    tuned = tfckpt.checkpoint(tf.function(step), budget=1.0)
    found = tfckpt.tune(tuned, x, steps=1)
    assert found.chosen is found.plain and not tuned.report.applied
    tuned(x)


def test_a_budget_that_nothing_meets():
    step, x, variables = dense()
    before = [v.numpy() for v in variables]
    tuned = tfckpt.checkpoint(tf.function(step), budget=.05)
    with pytest.raises(tfckpt.InfeasibleBudgetError, match=r"Measured on CPU:0"):
        tfckpt.tune(tuned, x, steps=1)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def prints(x):
    tf.print("loss")


def calls_python(x):
    tf.py_function(lambda: None, [], [])


def fills_a_table(x):
    TABLE.insert(tf.constant("a"), tf.constant(1))


TABLE = tf.lookup.experimental.MutableHashTable(tf.string, tf.int32, 0)


@pytest.mark.parametrize("effect, op", [(prints, "PrintV2"), (calls_python, "EagerPyFunc"),
                                        (fills_a_table, "LookupTableInsert")])
def test_what_cannot_be_undone_is_found_before_it_runs(effect, op):
    step, x, variables = dense(layers=1)

    def with_effect(x):
        effect(x)
        return step(x)

    tuned = tfckpt.checkpoint(tf.function(with_effect))
    with pytest.raises(tfckpt.PlanError, match=f"cannot be tuned: .*{op}"):
        tfckpt.tune(tuned, x)
    assert TABLE.size() == 0


def test_wrong_use_is_named():
    step, x, _ = dense(layers=1)
    with pytest.raises(tfckpt.PlanError, match="decorate the function that trains"):
        tfckpt.tune(tf.function(step), x)
    with pytest.raises(tfckpt.PlanError, match="must be positive"):
        tfckpt.tune(tfckpt.checkpoint(tf.function(step)), x, steps=0)


def test_a_plan_that_runs_out_of_memory_does_not_fit():
    full = Measured("0.9", failure="out of memory")
    slow, fast = Measured("0.5", 1, 50, 2.0), Measured("0.7", 1, 70, 1.0)
    assert choice([full, slow, fast], 60) is slow and choice([full, slow, fast], 80) is fast
    assert choice([full, slow, fast], None) is slow and choice([full], 100) is None


def test_the_largest_peak_has_to_fit_and_the_median_where_none_does():
    fast, slow = Measured("0.7", 1, 55, 1.0, "", 65), Measured("0.5", 1, 50, 2.0, "", 58)
    assert choice([fast, slow], 60) is slow and choice([fast, slow], 70) is fast
    assert choice([fast, slow], 56) is fast and choice([fast, slow], 49) is None


def test_out_of_memory_is_an_answer(monkeypatch):
    """The plain step fails, as on a device that is too small for it."""
    step, x, _ = dense()
    once, calls = measuring.Bench._once, []

    def failing(self, function):
        calls.append(function)
        if function is calls[0]:
            raise tf.errors.ResourceExhaustedError(None, None, "for this test")
        return once(self, function)

    monkeypatch.setattr(measuring.Bench, "_once", failing)
    tuned = tfckpt.checkpoint(tf.function(step), budget=.6)
    found = tfckpt.tune(tuned, x, steps=1)
    assert found.plain.failure == "out of memory" and found.chosen.peak_bytes
    assert "out of memory" in str(found)


def fitted(**options):
    """Weights, losses and slots of a model after an epoch whose last batch is partial."""
    process.fresh()
    keras.utils.set_random_seed(7)
    made = keras.Sequential([keras.Input((64,))] + [layer for _ in range(4) for layer in (
        keras.layers.Dense(WIDTH, "gelu"), keras.layers.BatchNormalization(),
        keras.layers.Dropout(.2))] + [keras.layers.Dense(3)])
    if options:
        tfckpt.keras.checkpoint(made, **options)
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                 metrics=["accuracy"], jit_compile=False)
    x = np.random.default_rng(1).normal(size=(3 * ROWS + 100, 64)).astype("float32")
    y = np.random.default_rng(2).integers(0, 3, len(x))
    history = made.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    return made, [v.numpy() for v in (*made.variables, *made.optimizer.variables)], history.history


@pytest.mark.parametrize("budget", [.6, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_fit_goes_on_as_if_nothing_had_run(budget):
    _, expected, losses = fitted()
    tuned, found, history = fitted(budget=budget, tune=True)
    assert history == losses
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, other)
    report = tfckpt.keras.report(tuned)
    assert (report is not None and report.applied) == (budget < 1)


def test_the_next_plan_for_what_the_last_has_taken():
    def after(peak, expected=100, adds=False):
        return next_share(1.0, Measured("plan", expected, peak), 100, adds)

    assert after(97) == 0 and after(100) == 0  # near enough
    assert after(110) == pytest.approx(.9) and after(90) == pytest.approx(1.1)
    assert after(300) == .8 and after(10) == 1.25 and after(None) == .85  # never far at once
    assert after(130, adds=True) == pytest.approx(.99 * .7)  # 30 are added to any plan
    assert after(101, expected=99, adds=True) == .95


def test_the_step_compiled_by_xla_is_tried_too():
    step, x, variables = dense()
    before = [v.numpy() for v in variables]
    tuned = tfckpt.checkpoint(tf.function(step), budget=.6)
    found = tfckpt.tune(tuned, x, steps=1, xla=True)
    assert found.chosen.name in found.summary and "was chosen" in found.summary
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    names = [row.name for row in found.plans]
    assert "plain, XLA" in names and any(name.endswith("of plain, XLA") for name in names)
    assert found.chosen.peak_bytes <= found.allowed_bytes
    fitting = [r.seconds for r in (found.plain, *found.plans) if r.fits(found.allowed_bytes)]
    assert found.chosen.seconds == min(fitting)
    tuned(x)


@pytest.mark.parametrize("fastest", [
    pytest.param("plain, XLA", marks=pytest.mark.nightly), "0.6 of plain, XLA"])
def test_what_xla_compiles_is_taken_where_it_is_the_fastest(monkeypatch, fastest):
    """Its time is set to nothing, and with it what the plain step takes to a few bytes."""
    note = measuring.Ran.note

    def noted(self, failure):
        note(self, failure)
        if self.row.name == fastest:
            self.row = dataclasses.replace(self.row, seconds=0., peak_bytes=1, most_bytes=1)

    monkeypatch.setattr(measuring.Ran, "note", noted)
    step, x, _ = dense()
    tuned = tfckpt.checkpoint(tf.function(step), budget=.6)
    found = tfckpt.tune(tuned, x, steps=1, xla=True)
    assert found.chosen.name == fastest
    assert tuned.experimental_get_compiler_ir(x)(stage="hlo")  # only where it is made for XLA
    assert tuned.report.applied == (fastest != "plain, XLA")


def test_what_xla_cannot_compile_is_left_out():
    step, x, _ = dense(layers=3)

    def with_text(x):
        tf.strings.as_string(tf.reduce_sum(x))  # XLA has no kernel for it
        tf.debugging.assert_none_equal(tf.strings.as_string(x[0, 0]), "")
        return step(x)

    tuned = tfckpt.checkpoint(tf.function(with_text), budget=.7)
    found = tfckpt.tune(tuned, x, steps=1, xla=True)
    failed = [row for row in found.plans if row.failure]
    assert [row.name for row in failed] == ["plain, XLA"] and "not compiled" in str(found)


def test_the_next_process_takes_what_was_chosen(monkeypatch, tmp_path):
    """Here the same process, with another trace."""
    monkeypatch.setenv("TFCKPT_CACHE", str(tmp_path))
    found = []
    for again in (False, True):
        step, x, _ = dense()
        if again:
            monkeypatch.setattr(measuring.Bench, "_once", None)  # nothing runs
        tuned = tfckpt.checkpoint(tf.function(step), budget=.6)
        found.append(tfckpt.tune(tuned, x, steps=1))
        assert tuned.report.applied
        assert tuned.report.measured_peak_bytes == found[0].chosen.peak_bytes
        tuned(x)
    first, second = found
    assert (second.plain, second.plans, second.chosen) == (first.plain, first.plans, first.chosen)
    assert "and kept" in str(second) and "kept" not in str(first)
    other = tfckpt.checkpoint(tf.function(dense()[0]), budget=.7)
    with pytest.raises(TypeError):  # another budget was not tuned: it would run
        tfckpt.tune(other, x, steps=1)


def test_damaged_choices_are_dropped(monkeypatch, tmp_path):
    monkeypatch.setenv("TFCKPT_CACHE", str(tmp_path))
    step, x, _ = dense()
    place = kept.place_of("step", tf.function(step).get_concrete_function(x).graph,
                          make_options(.6), False)
    files.write(tmp_path, place.key, {"made": "2026-01-01"}, {"rows": [{}]})
    assert place.read() is None and files.read(tmp_path, place.key) is None


def test_seconds_of_ops():
    """In the sum about what a step takes; the products are there, whatever they were fused with."""
    step, x, variables = dense(layers=3)
    before = [v.numpy() for v in variables]
    function = tf.function(step)
    taken = tfckpt.op_seconds(function, x)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    began = time.perf_counter()
    for _ in range(3):
        function(x).numpy()
    whole = (time.perf_counter() - began) / 3
    assert .2 * whole < sum(taken.values()) < 8 * whole
    assert any("matmul" in name.lower() for name in taken)
    planned = tfckpt.checkpoint(function, budget=.6, op_seconds=taken)
    planned(x)
    slow = tfckpt.checkpoint(function, budget=.6, op_seconds={
        name: 100 * s if "gradient" in name else s for name, s in taken.items()})
    slow(x)
    assert slow.report.overhead < planned.report.overhead  # recomputing is a smaller part of it


def test_wrong_use_of_seconds_is_named():
    step, x, _ = dense(layers=1)
    with pytest.raises(tfckpt.PlanError, match="op_seconds takes a tf.function"):
        tfckpt.op_seconds(step, x)
    with pytest.raises(tfckpt.PlanError, match="op_seconds takes a tf.function"):
        tfckpt.op_seconds(tf.function(step, jit_compile=True), x)
    with pytest.raises(tfckpt.PlanError, match="op_seconds must map"):
        tfckpt.checkpoint(tf.function(step), op_seconds={"op": "1"})
    tf.profiler.experimental.start("")
    try:
        with pytest.raises(tfckpt.PlanError, match="another one is being taken"):
            tfckpt.op_seconds(tf.function(step), x)
    finally:
        tf.profiler.experimental.stop(save=False)
