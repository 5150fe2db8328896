"""Bad input gives a clear error that says what to change, and the model still trains untouched."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, training
from tests.support.models import arrays, dense_relu, stack

BATCH = 1024


@pytest.mark.parametrize("budget, said", [
    ("lots", "lots"), ("", "budget="), ("2 parsecs", "2 parsecs"), ("-1GiB", "-1GiB"),
    ("0GiB", "positive"), ("1.2.3GB", "1.2.3GB"), (0, "positive"), (-5, "positive"),
    (0.0, "fraction"), (1.5, "fraction"), (-0.5, "fraction"), (float("nan"), "fraction"),
    (float("inf"), "fraction"), (True, "True"), (None, "None"), ([1], "[1]"),
    (np.float32(1.5), "fraction"), (np.bool_(True), "True"), (np.array([1]), "[1]"),
    (8e9, "budget=8000000000"), ("16X", "16X"),
])
def test_malformed_budgets(budget, said):
    with pytest.raises(tfckpt.PlanError, match=re.escape(said)) as caught:
        tfckpt.checkpoint(tf.function(lambda: None), budget=budget)
    assert '"6GiB"' in str(caught.value) and '"min"' in str(caught.value)  # what may be written
    model = stack()
    with pytest.raises(tfckpt.PlanError):
        tfckpt.keras.checkpoint(model, budget=budget)
    assert "train_step" not in vars(model) and "fit" not in vars(model)


@pytest.mark.parametrize("option, value, said", [
    ("solver", "simplex", "auto"), ("solver", None, "auto"), ("objective", "money", "memory"),
    ("batch_size", 0, "positive"), ("batch_size", -1, "positive"), ("batch_size", True, "positive"),
    ("batch_size", 2.5, "positive"), ("free_moves", "no", "True or False"),
    ("free_moves", 1, "True or False"),
])
def test_malformed_options(option, value, said):
    with pytest.raises(tfckpt.PlanError, match=said) as caught:
        tfckpt.checkpoint(tf.function(lambda: None), **{option: value})
    assert repr(value) in str(caught.value)


def test_what_is_no_function_or_model():
    with pytest.raises(tfckpt.PlanError, match="function"):
        tfckpt.checkpoint(0.5)
    with pytest.raises(tfckpt.PlanError, match="keras.Model"):
        tfckpt.keras.checkpoint(lambda: None)
    with pytest.raises(tfckpt.PlanError, match="not wrapped"):
        tfckpt.keras.report(stack())


def _fit(model):
    x, y = arrays(BATCH)
    model.compile(keras.optimizers.SGD(0.1),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


def _assert_trains_untouched(trial, step):
    """The plain function of a refused step trains as if tfckpt had never been there."""
    found = training.train(step.plain, trial)
    process.fresh()
    other = dense_relu()
    training.assert_same_bits(found, training.train(tf.function(other.step), other))


@pytest.mark.parametrize("unit", ["fraction", "int", "text"])
def test_infeasible_budget_names_the_smallest_feasible_one(unit):
    process.fresh()
    trial = dense_relu()
    budget = {"fraction": 0.01, "int": 400_000, "text": "400kB"}[unit]
    step = tfckpt.checkpoint(tf.function(trial.step), budget=budget)
    with pytest.raises(tfckpt.InfeasibleBudgetError) as caught:
        step(*trial.batches[0])
    message = str(caught.value)
    smallest = re.search(r"Pass budget=([0-9.]+) or", message)[1]
    assert step.report is None
    _assert_trains_untouched(trial, step)

    process.fresh()
    again = dense_relu()
    exact = float(smallest) if unit == "fraction" else int(smallest)
    assert 0 < exact <= 1 if unit == "fraction" else exact > 400_000
    other = tfckpt.checkpoint(tf.function(again.step), budget=exact)
    other(*again.batches[0])
    report = other.report
    assert report.applied
    limit = (exact * report.baseline_peak_bytes if unit == "fraction"
             else exact - report.resident_bytes)
    assert report.planned_peak_bytes <= limit
    assert caught.value.budget == exact


def test_infeasible_budget_in_fit_leaves_the_model_trainable():
    process.fresh()
    plain = stack()
    wanted = _fit(plain)
    process.fresh()
    model = tfckpt.keras.checkpoint(stack(), budget=0.001)
    with pytest.raises(tfckpt.InfeasibleBudgetError, match="smallest feasible fraction"):
        _fit(model)
    assert tfckpt.keras.report(model) is None
    tfckpt.keras.checkpoint(model, budget=0.9)  # as the message says: a larger one
    assert _fit(model) == wanted


def _with_unknown_batch():
    weights = [tf.Variable(tf.ones((32, 32)) * 0.01) for _ in range(4)]

    @tf.function(input_signature=[tf.TensorSpec((None, 32))])
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    return weights, step


def test_unknown_dimensions_under_a_budget_in_bytes():
    weights, step = _with_unknown_batch()
    wrapped = tfckpt.checkpoint(step, budget="1GB")
    named = r"(?s)tensor (x|matmul):0.*\[None, 32\].*batch_size"
    with pytest.raises(tfckpt.CostError, match=named):
        wrapped.get_concrete_function()
    before = weights[0].numpy()
    assert np.isfinite(step(tf.ones((8, 32))).numpy())
    assert (weights[0].numpy() != before).any()


def test_unknown_dimensions_with_batch_size():
    _, step = _with_unknown_batch()
    wrapped = tfckpt.checkpoint(step, batch_size=4096)
    wrapped.get_concrete_function()
    # three tanh results at least are kept: 4096 x 32 floats each
    assert wrapped.report.baseline_peak_bytes >= 3 * 4096 * 32 * 4


def test_unknown_dimensions_from_the_real_arguments():
    _, step = _with_unknown_batch()
    wrapped = tfckpt.checkpoint(step)
    wrapped(tf.ones((8192, 32)))
    assert wrapped.report.baseline_peak_bytes >= 3 * 8192 * 32 * 4
