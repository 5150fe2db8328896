"""Budgets of steps that XLA compiles mean compiled bytes, whichever way a step is trained.

The oracle is `verify.compiled`, which asks XLA about the finished function, as any caller can.
"""

from __future__ import annotations

import dataclasses
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.carriers.dumped import replay
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.report import pictures
from tfckpt.verify import compiled


@pytest.fixture(autouse=True)
def _no_determinism():
    with process.without_determinism():
        yield


LAYERS, WIDTH, ROWS = 8, 64, 4096


@dataclasses.dataclass
class Trial:
    """Layers with residual connections, a batch, and how they are trained."""

    weights: list
    batch: tf.Tensor

    def step(self, x):
        with tf.GradientTape() as tape:
            hidden = x
            for w in self.weights:
                hidden += tf.nn.gelu(hidden @ w)
            loss = tf.reduce_mean(hidden * hidden)
        for w, g in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss


def made(layers=LAYERS, rows=ROWS):
    process.fresh()
    trial = Trial([tf.Variable(0.1 * tf.random.normal([WIDTH, WIDTH])) for _ in range(layers)],
                  tf.random.normal([rows, WIDTH]))
    return trial, tf.function(trial.step, jit_compile=True)


def temporary(step, trial) -> int:
    return compiled(step, trial.batch).temp_bytes


@pytest.fixture(scope="module")
def plain_bytes():
    with process.without_determinism():
        trial, plain = made()
        return temporary(plain, trial)


@pytest.fixture(scope="module")
def middle(plain_bytes):
    """Return a fraction halfway between the compiled bytes of the minimum plan and of plain."""
    with process.without_determinism():
        trial, plain = made()
        return round(0.5 + 0.5 * temporary(tfckpt.checkpoint(plain), trial) / plain_bytes, 2)


@pytest.mark.parametrize("lower", [0.1, 0.0, -0.1])
def test_a_fraction_is_one_of_the_compiled_plain_step(lower, middle, plain_bytes):
    trial, plain = made()
    budget = middle - lower
    step = tfckpt.checkpoint(plain, budget=budget)
    taken = temporary(step, trial)
    told = step.report.compiled
    assert taken <= budget * plain_bytes
    assert (told.before.temp_bytes, told.after.temp_bytes) == (plain_bytes, taken)
    assert 1 <= told.trials <= 3  # two, and the minimum if none of them fits
    assert f"budget             {budget:g} of plain: " in str(step.report)
    for memory in (told.before, told.after):  # XLA packs what is live at once
        assert max(memory.live_bytes) == pytest.approx(memory.temp_bytes, rel=0.01)
        assert sum(b.bytes for b in memory.held) == max(memory.live_bytes)


def test_bytes_of_the_device_count_what_is_resident_too(plain_bytes):
    trial, plain = made()
    smallest = tfckpt.checkpoint(plain)
    smallest(trial.batch)
    resident = smallest.report.resident_bytes
    trial, plain = made()
    step = tfckpt.checkpoint(plain, budget=resident + plain_bytes)
    assert resident + temporary(step, trial) <= resident + plain_bytes


def test_a_refusal_names_what_compiled_steps_need_and_it_suffices(plain_bytes):
    trial, plain = made()
    with pytest.raises(InfeasibleBudgetError, match="XLA was asked about") as refused:
        tfckpt.checkpoint(plain, budget=0.1)(trial.batch)
    named = float(re.search(r"Pass budget=([0-9.]+[0-9])", str(refused.value))[1])
    assert 0.1 < named < 1
    assert refused.value.smallest_bytes <= named * plain_bytes
    trial, plain = made()
    assert temporary(tfckpt.checkpoint(plain, budget=named), trial) <= named * plain_bytes


@pytest.fixture(scope="module")
def halves():
    """Return what fits a network of half precision for a budget, and returns its report.

    Its normalization and dropout are fused into what reads them, or not: plans of fewer bytes take
    up to twice as many as planned.
    """
    x, y = np.random.default_rng(0).normal(size=(64, 24, 24, 3)).astype("f"), np.arange(64) % 10

    def report_of(budget):
        process.fresh()
        layers = []
        for width in (16, 32, 32):
            layers += [keras.layers.Conv2D(width, 3, padding="same"),
                       keras.layers.BatchNormalization(), keras.layers.Activation("gelu"),
                       keras.layers.Dropout(0.2, seed=1)]
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        try:
            model = keras.Sequential([
                keras.Input((24, 24, 3), batch_size=32), *layers,
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(10, dtype="float32")])
        finally:
            keras.mixed_precision.set_dtype_policy("float32")
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)),
                      "sparse_categorical_crossentropy", jit_compile=True)
        tfckpt.keras.checkpoint(model, budget=budget)
        model.fit(x, y, batch_size=32, verbose=0)
        return tfckpt.keras.report(model)

    return report_of


@pytest.mark.nightly
def test_the_minimum_is_looked_for_between_plans(halves):
    """The plan of the fewest bytes takes nearly as many as the plain step."""
    told = halves("min").compiled
    assert told.after.temp_bytes <= 0.8 * told.before.temp_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("budget", [0.3, 0.5])
def test_the_budget_that_is_named_is_met(halves, budget):
    with pytest.raises(InfeasibleBudgetError) as refused:
        halves(budget)
    named = float(re.search(r"Pass budget=([0-9.]+[0-9])", str(refused.value))[1])
    told = halves(named).compiled
    assert told.after.temp_bytes <= named * told.before.temp_bytes


@pytest.mark.nightly
def test_a_refusal_knows_of_what_the_minimum_takes(halves):
    """Before, plans were asked about that the minimum's search never saw, and none of its own."""
    told = halves("min").compiled
    share = told.after.temp_bytes / told.before.temp_bytes
    with pytest.raises(InfeasibleBudgetError) as refused:
        halves(0.1)
    assert refused.value.smallest_bytes <= told.after.temp_bytes
    again = halves(share + 1e-3).compiled
    assert again.after.temp_bytes <= (share + 1e-3) * again.before.temp_bytes


def test_xla_tells_which_results_it_writes_to_memory():
    """As the text of its program names them; what is computed within a loop alone is not told."""
    trial, plain = made()
    step = tfckpt.checkpoint(plain)
    step(trial.batch)
    told = step.report.compiled.before.in_memory
    text = made()[1].experimental_get_compiler_ir(trial.batch)(stage="optimized_hlo")
    within, entry = text.split("ENTRY", 1)
    named = re.compile(r'op_name="([^"]+)"')
    products = [size for name, size in told if "MatMul" in name]
    assert len(products) > LAYERS and max(products) == ROWS * WIDTH
    assert set(named.findall(entry)) <= set(dict(told)) and told == tuple(sorted(told))
    assert set(named.findall(within)) - set(dict(told))


def test_words_and_pictures_are_of_what_xla_allocates(tmp_path):
    pytest.importorskip("matplotlib")
    trial, plain = made()
    step = tfckpt.checkpoint(plain)
    step(trial.batch)
    report = step.report
    explained = report.explain(3)
    assert explained.count("buffers of XLA") == 2
    after = explained.partition("live at the planned peak")[2].splitlines()[1:4]
    largest = sorted((b.bytes for b in report.compiled.after.held), reverse=True)[:3]
    assert [float(line.split()[0]) for line in after] == [round(b / 1e6, 1) for b in largest]
    before, ours = pictures.step_figure({"": report}).axes
    for axes, memory in ((before, report.compiled.before), (ours, report.compiled.after)):
        curve = max(axes.lines, key=lambda line: len(line.get_ydata()))
        assert max(curve.get_ydata()) * 1e6 == pytest.approx(memory.temp_bytes, rel=0.01)
    report.html(str(tmp_path / "page.html"))
    assert "compiled by XLA" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("trials", [0, 1, 4])
def test_no_more_is_compiled_than_was_allowed(trials, middle, plain_bytes):
    trial, plain = made()
    step = tfckpt.checkpoint(plain, budget=middle, xla_trials=trials)
    taken = temporary(step, trial)
    told = step.report.compiled
    # and the minimum, if none of them fits, and as many between it and these
    assert told.trials <= 2 * trials + (trials > 0)
    if trials:
        assert taken <= middle * plain_bytes
    else:
        assert told.before is None and told.reason == "switched off (xla_trials=0)"
        assert "peaks here are simulated" in str(step.report)


def test_options_are_checked():
    for wrong in (-1, True, "two", 1.5):
        with pytest.raises(PlanError, match="xla_trials"):
            tfckpt.checkpoint(tf.function(lambda x: x), xla_trials=wrong)


def test_a_step_is_left_alone_where_no_plan_compiles_to_less():
    """Of a step this small, all that is saved is less than what guards and copies add."""
    trial, plain = made(layers=2, rows=64)
    before = temporary(plain, trial)
    ours = tfckpt.checkpoint(tf.function(trial.step, jit_compile=True))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        after = temporary(ours, trial)
    assert after <= before
    if not ours.report.applied:
        assert after == before
        assert any("takes less than the plain step" in str(w.message) for w in said)


def network():
    process.fresh()
    inputs = keras.Input((64, 64))
    hidden = inputs
    for _ in range(4):
        hidden += keras.layers.Dense(64, activation="gelu")(hidden)
    outputs = keras.layers.Dense(4)(keras.layers.Flatten()(hidden))
    return keras.Model(inputs, outputs)


def fitted(model, how, **options):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  jit_compile=True, **options)
    rows = np.random.default_rng(0)
    x = rows.standard_normal((76, 64, 64), dtype=np.float32)
    y = rows.integers(0, 4, 76)
    if how == "arrays":
        model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    elif how == "dataset":
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(32), epochs=2, verbose=0)
    else:
        for start in (0, 32, 64):
            model.train_on_batch(x[start:start + 32], y[start:start + 32])
    return model.get_weights()


@pytest.mark.parametrize("how, options", [
    ("arrays", {}), pytest.param("dataset", {}, marks=pytest.mark.nightly), ("batches", {}),
    pytest.param("arrays", {"steps_per_execution": 2}, marks=pytest.mark.nightly)],
    ids=["arrays", "dataset", "train_on_batch", "steps_per_execution"])
def test_fit_is_asked_about_and_trains_the_same(how, options):
    wanted = fitted(network(), how, **options)
    model = tfckpt.keras.checkpoint(network(), budget=0.8)
    found = fitted(model, how, **options)
    report = tfckpt.keras.report(model)
    assert report.applied and report.compiled.after is not None, report
    assert report.compiled.after.temp_bytes <= 0.8 * report.compiled.before.temp_bytes
    for ours, plain in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_asking_changes_no_variable():
    trial, plain = made()
    before = [v.numpy() for v in trial.weights]
    tfckpt.checkpoint(plain).get_concrete_function(trial.batch)
    for old, variable in zip(before, trial.weights, strict=True):
        assert np.array_equal(old, variable.numpy())


def test_a_dump_is_replayed_with_what_xla_answered(tmp_path, monkeypatch, middle):
    monkeypatch.setenv("TFCKPT_DUMP", str(tmp_path))
    trial, plain = made()
    step = tfckpt.checkpoint(plain, budget=middle)
    step(trial.batch)
    monkeypatch.delenv("TFCKPT_DUMP")
    (folder,) = tmp_path.iterdir()
    outcome, different = replay(str(folder))
    assert not different
    again, told = (r.compiled for r in (outcome.report, step.report))
    assert (again.before, again.after, again.trials) == (told.before, told.after, told.trials)
