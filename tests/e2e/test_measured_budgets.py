"""Budgets of steps that the executor runs, against what TensorFlow's allocator counts.

The step that Grappler optimises keeps other tensors than the traced graph says: of
0.5 * x * erfc(...) it computes 0.5 * erfc(...) in the forward, for the backward.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support.gelu_steps import gelu_step
from tfckpt.driving import answers
from tfckpt.report import observed
from tfckpt.verify import executed, measure_peak
from tfckpt.verify.memory import memory_info

LAYERS, WIDTH, ROWS = 8, 512, 2048


def made(rows: int = ROWS):
    step, x, variables = gelu_step(LAYERS, WIDTH, rows)
    return tf.function(step), x, variables


@pytest.mark.parametrize("budget", [
    pytest.param(.9, marks=pytest.mark.nightly), .7, pytest.param(.5, marks=pytest.mark.nightly)])
def test_a_budget_is_what_the_allocator_counts(budget):
    plain, x, _ = made()
    step = tfckpt.checkpoint(plain, budget=budget)
    measured = measure_peak(step, x, repeats=5)
    assert measured <= 1.03 * budget * max(measure_peak(plain, x, repeats=5),
                                           step.report.expected_bytes[0])
    assert measured == pytest.approx(step.report.expected_bytes[1], rel=.12)
    assert "simulated on what Grappler makes of the step" in str(step.report)


def test_factors_of_gradients_wait_for_them_and_change_no_bit(monkeypatch):
    monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")  # else nothing has to wait for Grappler
    plain, x, variables = made()
    losses = [plain(x).numpy() for _ in range(3)]
    expected = [v.numpy() for v in variables]
    plain, x, variables = made()
    step = tfckpt.checkpoint(plain, budget=.6)
    assert [step(x).numpy() for _ in range(3)] == losses
    for found, value in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(found.numpy(), value)
    nodes = executed(step, x).nodes
    late = {node.name for node in nodes if "-tfckpt_late" in node.name}
    read = [node for node in nodes if node.op == "Mul" and late & set(node.input)]
    constants = {node.name for node in nodes if node.op == "Const"}
    # Grappler has moved the constant to what the pass-through hands on, as in the plain step
    assert len(late) >= LAYERS and any(constants & set(node.input) for node in read)


def test_small_steps_are_planned_without_asking():
    plain, x, _ = made(rows=64)
    step = tfckpt.checkpoint(plain)
    step(x)
    assert step.report.compiled is None and "as it runs" not in str(step.report)


def test_a_missed_budget_is_said_once():
    plain, x, _ = made()
    step = tfckpt.checkpoint(plain, budget=.6)
    step.get_concrete_function(x)
    step.report.allowed_bytes //= 2  # as if the simulation had been wrong
    tf.function(lambda a: tf.reduce_sum(tf.sin(a) * tf.cos(a)))(tf.zeros((4096, 4096)))  # more
    with pytest.warns(UserWarning, match=r"was measured at .* more than its budget allows"):
        step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(x)
    assert step.report.measured_peak_bytes > step.report.allowed_bytes


@pytest.mark.parametrize("device, first", [("CPU:0", True), ("GPU:0", False)])
def test_on_a_gpu_a_call_that_tries_kernels_out_is_not_measured(monkeypatch, device, first):
    """It takes more than later ones: cuDNN is given gigabytes for that."""
    monkeypatch.setattr(observed, "default_device", lambda: device)
    monkeypatch.setattr(observed, "memory_info", lambda _, reset=False: memory_info("CPU:0", reset))
    plain, x, _ = made()
    step = tfckpt.checkpoint(plain, budget=.6)
    tf.config.experimental.reset_memory_stats("CPU:0")  # other tests took more
    step(x)
    assert (step.report.measured_peak_bytes is not None) is first
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(x)
    assert step.report.measured_peak_bytes == pytest.approx(
        step.report.expected_bytes[1], rel=.12)


def test_a_plain_step_that_misses_the_budget_it_was_said_to_fit_is_told():
    plain, x, _ = made()
    step = tfckpt.checkpoint(plain, budget="4GiB")
    step.get_concrete_function(x)
    assert not step.report.applied
    step.report.allowed_bytes = step.report.baseline_peak_bytes // 2  # as if that had been wrong
    with pytest.warns(UserWarning, match=r"more than its budget allows .* trains unchanged"):
        step(x)
    assert step.report.missed


def test_a_plan_that_is_likely_to_fit_is_taken_where_none_is_sure_to(monkeypatch):
    """Of every plan five times the bytes are said to be possible: none is sure to fit."""
    simulated = answers.executed_peaks

    def unsure(*arguments, **options):
        middle, _ = simulated(*arguments, **options)
        return middle, 5 * middle

    monkeypatch.setattr(answers, "executed_peaks", unsure)
    plain, x, _ = made()
    step = tfckpt.checkpoint(plain, budget=.6)
    step(x)
    report = step.report
    assert report.applied and report.expected_bytes[1] <= report.allowed_bytes
    assert report.compiled.after.bound > report.allowed_bytes
    assert f"at most {report.compiled.after.bound / 1e6:.1f} MB" in str(report)
    plain, x, _ = made()
    with pytest.raises(tfckpt.InfeasibleBudgetError):
        tfckpt.checkpoint(plain, budget=.05)(x)
