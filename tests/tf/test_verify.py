"""Measured peaks and counted executions."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tfckpt.errors import VerificationError
from tfckpt.verify import executed, measure_peak

SIDE = 512
TENSOR = 4 * SIDE * SIDE  # bytes
LANES = 128
"""The allocator hands out a free chunk whole unless it is twice as large as the request, so each
hole on the heap may cost up to a tensor. Of many tensors, what earlier tests left concerns few."""
HOLES = 6


@pytest.fixture
def square():
    return tf.constant(np.random.default_rng(0).standard_normal((SIDE, SIDE)) / SIDE, tf.float32)


@pytest.fixture(params=[0, HOLES])
def holes(request):
    """Yield a heap as other tests left it, and with some more holes in it."""
    sizes = np.random.default_rng(1).integers(SIDE * SIDE, 2 * SIDE * SIDE, 2 * request.param)
    allocated = [tf.zeros((size,)) for size in sizes]
    del allocated[::2]
    yield
    del allocated


def kept(x):
    """Return tensors that leave the step: all are live at its end."""
    made = [tf.roll(x, 1, 0)]
    for _ in range(LANES - 1):
        made.append(tf.roll(made[-1], 1, 0))
    return made


def layers(x):
    """Three layers of tensors: as one is made, that before it is freed tensor by tensor."""
    h = [tf.roll(x, i + 1, 0) for i in range(LANES)]
    for _ in range(3):
        with tf.control_dependencies(h):  # the whole layer before, so that no lane runs ahead
            h = [tf.roll(lane, 1, 1) for lane in h]
    return tf.add_n([tf.reduce_sum(lane) for lane in h])


@pytest.mark.parametrize("body, live", [(kept, LANES), (layers, LANES + 1)])
def test_peaks_that_can_be_counted_by_hand(square, holes, body, live):
    assert measure_peak(tf.function(body), square) == pytest.approx(live * TENSOR, rel=0.05)


def test_median_of_several_calls(square, holes):
    counts = iter([0, LANES // 4, LANES, 0])  # the first call is not measured
    peak = measure_peak(lambda: [tf.roll(square, i, 0) for i in range(next(counts))], repeats=3)
    # room for chunks reused whole; the mean of the three would be at 1.67
    assert peak == pytest.approx(LANES // 4 * TENSOR, rel=0.25)


def test_variables_and_slots_are_put_back():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8),
                              keras.layers.BatchNormalization(), keras.layers.Dropout(0.5),
                              keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    x = tf.ones((16, 8)) * tf.range(16.0)[:, None]
    before = [v.numpy() for v in variables]
    measure_peak(step, x, repeats=3)
    for variable, value in zip(variables, before, strict=True):
        assert variable.numpy().tobytes() == value.tobytes(), variable.path
    step(x)
    changed = sum(v.numpy().tobytes() != b.tobytes()
                  for v, b in zip(variables, before, strict=True))
    assert changed > 10  # the step does change weights, statistics, seed state and slots


def test_variables_are_put_back_after_a_failure():
    variable = tf.Variable(1.0)

    @tf.function
    def step(x):
        variable.assign_add(1.0)
        with tf.control_dependencies([variable]):
            return tf.raw_ops.CheckNumerics(tensor=x / 0.0, message="made up")

    with pytest.raises(tf.errors.InvalidArgumentError, match="made up"):
        measure_peak(step, tf.constant(1.0))
    assert variable.numpy() == 1.0


_CHILD = """
import os
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import tensorflow as tf
import tfckpt
step = tf.function(lambda x: x @ x)
try:
    tfckpt.verify.measure_peak(step, tf.ones((1024, 1024)))
except tfckpt.VerificationError as error:
    print("SAID", error)
"""


def test_without_statistics_the_error_names_the_environment_variable():
    root = pathlib.Path(tfckpt.__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPU_ALLOCATOR_USE_BFC"}
    out = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, cwd=root,
                         env=environment, timeout=300, check=True).stdout
    said = out[out.index("SAID"):]
    assert "verify" in said and "TF_CPU_ALLOCATOR_USE_BFC=1" in said
    assert "TF_ENABLE_ONEDNN_OPTS" in said and "CPU:0" in said


# Executions.


def test_executed_counts_ops_after_all_optimisations(square):
    def body(x):
        merged = tf.cumsum(x) + tf.cumsum(x)  # the same twice: TensorFlow runs it once
        return merged @ x, tf.cumsum(x, reverse=True)

    found = executed(tf.function(body), square)
    assert found.ops["Cumsum"] == 2
    assert found.copies == {} and found.copy_count == 0
    assert len(found.nodes) == sum(found.ops.values())


def test_executed_is_about_this_call_alone(square):
    small = tf.function(tf.cumsum)
    large = tf.function(lambda x: tf.math.cumprod(tf.math.cumprod(x)))
    executed(small, square)
    large(square)
    assert "Cumprod" not in executed(small, square).ops
    assert executed(large, square).ops["Cumprod"] == 2


def test_nothing_executed_is_an_error():
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(VerificationError, match="tf.function"):
            executed(lambda: None)
    finally:
        tf.config.run_functions_eagerly(False)
