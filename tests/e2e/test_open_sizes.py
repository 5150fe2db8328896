"""Sizes that a trace leaves open: told by the call, by Keras' first batch, or by nothing."""

from __future__ import annotations

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.models import arrays, stack
from tfckpt.keras.batches import look

ROWS = 1024


def _compiled(model, wrap, optimizer="adam", **options):
    if wrap:
        tfckpt.keras.checkpoint(model, **options)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  jit_compile=False)
    return model


def _pairs(x, y, sizes):
    """Batches of changing sizes, again and again."""
    def batches():
        start = 0
        for size in sizes:
            yield x[start:start + size], y[start:start + size]
            start += size
    return batches


def _generator(model, x, y):
    def forever():
        while True:
            yield from _pairs(x, y, (ROWS, ROWS // 2))()
    model.fit(forever(), steps_per_epoch=3, epochs=2, verbose=0)


def _from_generator(model, x, y):
    data = tf.data.Dataset.from_generator(_pairs(x, y, (ROWS, ROWS // 2, 7)), output_signature=(
        tf.TensorSpec((None, *x.shape[1:]), tf.float32), tf.TensorSpec((None,), tf.int64)))
    model.fit(data, epochs=2, verbose=0)


def _partial(model, x, y):
    model.fit(x[:2 * ROWS - 300], y[:2 * ROWS - 300], batch_size=ROWS, epochs=2, shuffle=False,
              verbose=0)


def _shuffled_pipeline(model, x, y):
    """Return what looking at a batch must not disturb: a shuffle that goes on from epoch to epoch.
    """
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4 * ROWS, seed=5).batch(700)
    model.fit(data, epochs=3, verbose=0)


def _on_batches(model, x, y):
    for size in (ROWS, 700, ROWS, 300, 2 * ROWS):  # TensorFlow leaves the batch open from 700 on
        model.train_on_batch(x[:size], y[:size])


def _several_steps(model, x, y):
    model.steps_per_execution = 2
    model.fit(x[:3 * ROWS - 5], y[:3 * ROWS - 5], batch_size=ROWS, epochs=2, shuffle=False,
              verbose=0)


class _Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(index * ROWS, (index + 1) * ROWS - 10 * index)
        return self.x[rows], self.y[rows], np.ones(len(self.y[rows]), np.float32)


def _weighted_sequence(model, x, y):
    model.fit(_Sequence(x, y), epochs=2, shuffle=False, verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras, of an unknown number
@pytest.mark.parametrize("train", [_generator, _from_generator, _partial, _shuffled_pipeline,
                                   _on_batches, _several_steps, _weighted_sequence],
                         ids=lambda f: f.__name__.strip("_"))
def test_every_way_to_feed_fit_trains_as_plain(train):
    x, y = arrays(3 * ROWS)
    found = []
    for wrap in (False, True):
        process.fresh()
        model = _compiled(stack(), wrap)
        larger = wrap and train is _on_batches  # the last is larger than what was planned for
        with pytest.warns(UserWarning, match=f"planned for 700x.*with {2 * ROWS}x") if larger else (
                contextlib.nullcontext()):
            train(model, x, np.asarray(y, np.int64))
        found.append([v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)])
    assert found[0] == found[1]
    report = tfckpt.keras.report(model)
    assert report.applied, report.reason
    rows = 700 if train is _shuffled_pipeline else ROWS
    if train is not _on_batches:  # its first trace knows all sizes
        assert report.planned_for.startswith(f"{rows}x"), report.planned_for


def _ragged(rows):
    made = np.random.default_rng(1)
    values = [list(made.integers(0, 50, made.integers(1, 9))) for _ in range(rows)]
    return tf.ragged.constant(values, dtype=tf.int32)


def _ragged_model():
    return keras.Sequential([
        keras.Input((None,), dtype="int32", ragged=True), keras.layers.Embedding(50, 32),
        keras.layers.Lambda(lambda r: tf.reduce_sum(r, 1)),
        *[keras.layers.Dense(32, activation="relu") for _ in range(4)], keras.layers.Dense(5)])


def _sparse(rows):
    made = np.random.default_rng(2)
    return tf.sparse.from_dense(
        (made.random((rows, 20)) * (made.random((rows, 20)) < .2)).astype(np.float32))


def _sparse_model():
    return keras.Sequential([
        keras.Input((20,), sparse=True),
        *[keras.layers.Dense(32, activation="relu") for _ in range(4)], keras.layers.Dense(5)])


@pytest.mark.parametrize("make, data", [(_ragged_model, _ragged), (_sparse_model, _sparse)],
                         ids=["ragged", "sparse"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 64}], ids=["told", "batch_size"])
def test_parts_of_composites_keep_their_own_sizes(make, data, options):
    x, y = data(256), np.arange(256) % 5
    found = []
    for wrap in (False, True):
        process.fresh()
        model = _compiled(make(), wrap, "sgd", **options)
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(60), verbose=0)
        found.append([v.numpy().tobytes() for v in model.variables])
    assert found[0] == found[1]
    report = tfckpt.keras.report(model)
    assert report.baseline_peak_bytes > 0 and "60" in report.planned_for


def test_a_larger_batch_is_planned_anew():
    x, y = arrays(2 * ROWS)
    process.fresh()
    model = _compiled(stack(), True)
    model.fit(x, y, batch_size=200, verbose=0)
    small = tfckpt.keras.report(model)
    model.fit(x, y, batch_size=900, verbose=0)
    large = tfckpt.keras.report(model)
    assert small.planned_for.startswith("200x") and large.planned_for.startswith("900x")
    assert large.baseline_peak_bytes > 3 * small.baseline_peak_bytes
    model.fit(x, y, batch_size=200, verbose=0)  # fits into the plan for more
    assert tfckpt.keras.report(model) is large


def test_a_larger_batch_that_divides_the_data_is_planned_anew():
    """TensorFlow has a trace for any batch after the second size, and uses that for the third."""
    x, y = arrays(1024)
    process.fresh()
    model = _compiled(stack(), True)
    peaks = []
    for batch in (128, 256, 1024):
        model.fit(x, y, batch_size=batch, verbose=0)
        peaks.append(tfckpt.keras.report(model).baseline_peak_bytes)
    assert peaks[2] > 3 * peaks[1] and peaks[1] > 1.5 * peaks[0], peaks


def test_a_larger_call_of_an_open_signature_is_warned_about():
    step = tfckpt.checkpoint(tf.function(_tanh_step(), input_signature=[
        tf.TensorSpec([None, 64])]))
    step(tf.ones((ROWS, 64)))
    assert step.report.planned_for == f"{ROWS}x64"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(tf.ones((ROWS // 2, 64)))
        step(tf.ones((ROWS + 50, 64)))
    with pytest.warns(UserWarning, match=rf"planned for {ROWS}x64.*with {3 * ROWS}x64"):
        step(tf.ones((3 * ROWS, 64)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(tf.ones((3 * ROWS, 64)))  # said once


def _tanh_step(depth=6, width=64):
    weights = [tf.Variable(tf.random.stateless_normal((width, width), (1, i)) / width ** .5)
               for i in range(depth)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(.1 * gradient)
        return loss

    return step


@pytest.mark.parametrize("budget", ["min", 0.6])
def test_a_batch_that_nothing_tells_has_a_stand_in(budget):
    step = tfckpt.checkpoint(tf.function(_tanh_step(), input_signature=[
        tf.TensorSpec([None, 64])]), budget=budget)
    concrete = step.get_concrete_function()
    assert step.report.applied and "a batch of 32" in step.report.planned_for
    assert "planned for" in str(step.report)
    x = tf.random.stateless_normal((ROWS, 64), (3, 4))
    assert concrete(x).numpy() == tf.function(_tanh_step())(x).numpy()


@tf.function(input_signature=[tf.TensorSpec([None, None])])
def _any_size(x):
    weight = tf.fill([tf.shape(x)[1]] * 2, .01)
    with tf.GradientTape() as tape:
        tape.watch(weight)
        h = x
        for _ in range(4):
            h = tf.tanh(h @ weight)
        loss = tf.reduce_mean(h)
    return loss, tape.gradient(loss, weight)


@pytest.mark.parametrize("budget", ["min", 0.9])
def test_sizes_that_nothing_tells_leave_the_step_unchanged(budget):
    step = tfckpt.checkpoint(_any_size, budget=budget)
    with pytest.warns(UserWarning, match="trains unchanged: cost: tensor x:0.*call the step"):
        concrete = step.get_concrete_function()
    assert step.report is None
    x = tf.random.stateless_normal((ROWS, 64), (3, 4))
    for found, wanted in zip(concrete(x), _any_size(x), strict=True):
        assert found.numpy().tobytes() == wanted.numpy().tobytes()


def test_sizes_that_nothing_tells_raise_before_training_under_a_budget_in_bytes():
    with pytest.raises(tfckpt.CostError, match="tensor x:0"):
        tfckpt.checkpoint(_any_size, budget="1GB").get_concrete_function()


def test_a_step_that_has_trained_is_never_stopped():
    """A batch that no plan fits comes late: it is planned for the minimum peak, with a warning."""
    process.fresh()
    model = _compiled(stack(), True, budget="6MB")
    x, y = arrays(4 * ROWS)
    model.train_on_batch(x[:64], y[:64])
    with pytest.warns(UserWarning, match="was traced again.*cannot be met.*minimum peak instead"):
        model.train_on_batch(x, y)
    assert tfckpt.keras.report(model).applied


def test_a_first_batch_that_no_plan_fits_is_refused_before_training():
    process.fresh()
    model = _compiled(stack(), True, budget="1MB")
    x, y = arrays(4 * ROWS)
    before = [v.numpy().tobytes() for v in model.variables]
    with pytest.raises(tfckpt.InfeasibleBudgetError):
        model.fit(x, y, batch_size=4 * ROWS - 3, verbose=0)
    assert [v.numpy().tobytes() for v in model.variables] == before


def test_looking_takes_no_batch_away():
    data = tf.data.Dataset.range(10).batch(3)
    iterator = iter(data)
    sizes, instead = look(iterator)
    assert sizes.leaves == (((3,),),)
    assert instead.element_spec == iterator.element_spec
    assert [list(b.numpy()) for b in (*instead, *iterator)] == [
        list(b.numpy()) for b in data]
    sizes, instead = look(iterator := iter(data), steps=3)
    assert [len(b) for b in instead] == [3, 3, 3] and [len(b) for b in iterator] == [1]
    assert look(iter(data.take(0)))[0] is None
