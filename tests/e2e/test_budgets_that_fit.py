"""Budgets that plain meets, and budgets that the machine sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tensorflow as tf

import tfckpt


def _products():
    """Return a step whose minimum planned peak lies above its plain one."""
    made = [tf.Variable(tf.random.stateless_normal((1024, 1024), (1, i)) * .02) for i in range(2)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ made[0]) @ made[1])
        for variable, gradient in zip(made, tape.gradient(loss, made), strict=True):
            variable.assign_sub(.1 * gradient)
        return loss

    return tf.function(step)


def _planned(budget, **options):
    step = tfckpt.checkpoint(_products(), budget=budget, **options)
    step.get_concrete_function(tf.TensorSpec((8192, 1024)))
    return step.report


@pytest.mark.parametrize("options", [{}, {"solver": "store_all"}, {"objective": "memory"}], ids=str)
def test_a_budget_that_plain_meets(options):
    smallest = _planned("min", **options)
    plain, resident = smallest.expected_bytes[0], smallest.resident_bytes
    for budget in (1.0, plain + resident, int(1.02 * plain) + resident,
                   int(1.2 * plain) + resident, "1TB"):
        report = _planned(budget, **options)
        assert not report.applied and report.reason == "the plain step fits the budget"
        assert report.planned_peak_bytes == report.baseline_peak_bytes
    said = r"found is 1\.0 .*Pass budget=1\.0, with which the step trains unchanged"
    with pytest.raises(tfckpt.InfeasibleBudgetError, match=said) as caught:
        _planned(0.98, **options)
    assert caught.value.smallest_bytes == plain


def _adapted(tasks=3, steps=2):
    """Return a step that trains through inner steps of training, and its arguments."""
    def normal(shape, seed, scale=1.0):
        return scale * tf.random.stateless_normal(shape, (seed, 9))

    shapes = (32, 256), (256, 256), (256, 1)
    weights = [tf.Variable(normal(shape, k, 0.1)) for k, shape in enumerate(shapes)]

    def loss(x, y, w):
        return tf.reduce_mean((tf.nn.relu(tf.tanh(x @ w[0]) @ w[1]) @ w[2] - y) ** 2)

    def step(x, y, other_x, other_y):
        with tf.GradientTape() as tape:
            total = 0.0
            for task in range(tasks):
                w = [tf.identity(v) for v in weights]
                for _ in range(steps):
                    with tf.GradientTape() as inner:
                        inner.watch(w)
                        value = loss(x[task], y[task], w)
                    w = [a - 0.1 * d for a, d in zip(w, inner.gradient(value, w), strict=True)]
                total += loss(other_x[task], other_y[task], w)
        for variable, gradient in zip(weights, tape.gradient(total, weights), strict=True):
            variable.assign_sub(0.05 * gradient)
        return total, *weights

    return tf.function(step), [normal((tasks, 1024, n), k)
                               for k, n in enumerate((32, 1, 32, 1), 4)]


def test_a_plan_that_fits_is_taken_though_the_planner_thinks_that_plain_does():
    """As it runs the plain step takes twice what the planner counts, and a plan less."""
    step, arguments = _adapted()
    wanted = [t.numpy().tobytes() for t in tf.nest.flatten(step(*arguments))]
    for budget in (0.9, 0.8):
        ours = tfckpt.checkpoint(_adapted()[0], budget=budget)
        found = [t.numpy().tobytes() for t in tf.nest.flatten(ours(*arguments))]
        assert ours.report.applied and found == wanted, str(ours.report)


_ON_THE_DEVICE = """
import re, resource, sys
import tensorflow as tf, tfckpt
from tfckpt.verify.memory import free_bytes

weights = [tf.Variable(tf.random.stateless_normal((256, 256), (1, i)) / 16) for i in range(24)]
@tfckpt.checkpoint(budget="device")
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        h = x
        for weight in weights:
            h = tf.tanh(h @ weight)
        loss = tf.reduce_mean(h * h)
    for weight, gradient in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(.1 * gradient)
    return loss
x = tf.ones((65536, 256))
tf.function(lambda: tf.constant(1.0) + 1)()
virtual = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
if sys.argv[1] != "0":
    resource.setrlimit(resource.RLIMIT_AS, (virtual + int(sys.argv[1]), -1))
free = free_bytes("CPU:0")
try:
    report = step.get_concrete_function(x) and step.report
except tfckpt.InfeasibleBudgetError as error:
    print("refused", error)
else:
    print(free, report.baseline_peak_bytes, report.planned_peak_bytes, report.reason)
"""


def _on_the_device(limit: int) -> str:
    done = subprocess.run([sys.executable, "-c", _ON_THE_DEVICE, str(limit)], text=True,
                          capture_output=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_what_is_free_on_the_device_is_a_budget():
    """The kernel limits the process: 1.6 GB plain, and the plan has to fit what is left."""
    free, plain, planned, reason = _on_the_device(0).split(maxsplit=3)
    assert int(plain) > 1.5e9 and int(planned) <= int(free)
    free, plain, planned, *reason = _on_the_device(1_000_000_000).split()
    assert int(planned) <= int(free) <= 1_000_000_000 < int(plain) and not reason
    assert "budget=\"device\" cannot be met: " in _on_the_device(250_000_000)


def test_a_plan_that_is_applied_is_not_given_up():
    """It fits, a faster one was looked for, and there is none: a report names other plans only."""
    made = [tf.Variable(tf.random.stateless_normal((512, 512), (1, i)) * .04) for i in range(8)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for variable in made:
                h = tf.nn.gelu(h @ variable)
            loss = tf.reduce_mean(h * h)
        for variable, gradient in zip(made, tape.gradient(loss, made), strict=True):
            variable.assign_sub(.1 * gradient)
        return loss

    for budget in (0.6, 0.5, 0.4):
        planned = tfckpt.checkpoint(tf.function(step), budget=budget)
        planned.get_concrete_function(tf.TensorSpec((2048, 512)))
        report = planned.report
        assert report.applied
        assert not [line for line in report.rejected
                    if f", {report.planned_peak_bytes:,} bytes: " in line]


def _unet():
    """Return a step with connections over its lower levels, and its arguments."""
    def kernel(seed, rows, into):
        return tf.Variable(0.1 * tf.random.stateless_normal((3, 3, rows, into), (seed, 9)))

    down = [kernel(n, 16, 16) for n in range(4)]
    up = [kernel(9 + n, 32, 16) for n in range(4)]

    def step(x):
        with tf.GradientTape() as tape:
            kept, h = [], x
            for weight in down:
                h = tf.nn.silu(tf.nn.conv2d(h, weight, 1, "SAME"))
                kept.append(h)
                h = tf.nn.avg_pool2d(h, 2, 2, "SAME")
            for weight, other in zip(up, reversed(kept), strict=True):
                h = tf.image.resize(h, other.shape[1:3])
                h = tf.nn.silu(tf.nn.conv2d(tf.concat([h, other], -1), weight, 1, "SAME"))
            loss = tf.reduce_mean((h - x) ** 2)
        weights = down + up
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return tf.function(step), [tf.random.stateless_normal((8, 64, 64, 16), (4, 2))]


@pytest.mark.parametrize("make", [_adapted, _unet])
def test_the_smallest_budget_that_is_named_is_the_smallest(make):
    """It is no more than what is taken without a budget, and is met where it is passed."""
    step, arguments = make()
    free = tfckpt.checkpoint(step)
    free.get_concrete_function(*arguments)
    with pytest.raises(tfckpt.InfeasibleBudgetError) as caught:
        tfckpt.checkpoint(make()[0], budget=0.05).get_concrete_function(*arguments)
    least = caught.value.smallest_bytes
    assert least <= free.report.planned_peak_bytes
    for more in (1.0, 1.01, 1.05):
        budget = int(more * least) + free.report.resident_bytes
        ours = tfckpt.checkpoint(make()[0], budget=budget)
        ours.get_concrete_function(*arguments)
        assert ours.report.applied
        assert ours.report.planned_peak_bytes <= ours.report.allowed_bytes
