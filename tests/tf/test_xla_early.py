"""Ops that XLA could run at any time wait for their turn: random numbers, zeros, gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt.rewrite.build as build
from tests.support import process
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.ir.edits import Clone, Create
from tfckpt.request.devices import find_device
from tfckpt.request.options import make_options
from tfckpt.rewrite.passes import copies
from tfckpt.rewrite.xla import updates as xla_updates

H100 = find_device("H100-80GB").target()
ROWS, WIDTH, SEGMENTS = 1 << 14, 64, 300


def model_step():
    """Return a step with dropout, a scatter into zeros, and layers that are worth recomputing."""
    process.fresh()
    layers = [keras.layers.Dense(WIDTH, activation="gelu") for _ in range(6)]
    table = tf.Variable(np.random.default_rng(0).normal(size=(SEGMENTS, WIDTH)).astype("float32"))
    for layer in layers:
        layer.build((ROWS, WIDTH))
    variables = [table] + [v.value for layer in layers for v in layer.trainable_variables]

    @tf.function(jit_compile=True)
    def step(ids, segments):
        with tf.GradientTape() as tape:
            h = tf.gather(table, ids)
            for number, layer in enumerate(layers):
                h = h + layer(h)
                seed = tf.stack([tf.reduce_sum(ids), number])
                h *= tf.cast(tf.random.stateless_uniform(h.shape, seed) > 0.1, tf.float32)
            found = tf.math.unsorted_segment_sum(h, segments, SEGMENTS)
            logits = tf.matmul(h[:2048], table, transpose_b=True)  # the table's other gradient
            loss = tf.reduce_mean(tf.square(found)) + tf.reduce_mean(tf.square(logits))
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss, found

    return step, variables


def batch(dtype):
    ids = np.arange(ROWS, dtype="int32") % SEGMENTS
    segments = (2 * (np.arange(ROWS) * 7 % 150)).astype(dtype)
    segments[3] = segments[100] = -1  # dropped, as TensorFlow says
    segments[5:9] = 16
    return tf.constant(ids), tf.constant(segments)


def edits_of(monkeypatch, dtype="int32"):
    """Return the edits of a step that is planned for a GPU, what it returns, and its variables
    then.
    """
    found = []

    def noted(*arguments, **options):
        found.append(original(*arguments, **options))
        return found[-1]

    original = build.build_edits
    monkeypatch.setattr(copies, "build_edits", noted)
    step, variables = model_step()
    ours = CheckpointedStep(step, make_options("min", xla_trials=0, target=H100))
    result = ours(*batch(dtype))
    assert ours.report.applied and ours.report.recomputed_ops
    return found[-1], result, variables


@pytest.mark.parametrize("dtype", [pytest.param("int32", marks=pytest.mark.nightly), "int64"])
def test_numbers_are_those_of_the_plain_step(monkeypatch, dtype):
    """Segments that are negative, that repeat and that nothing falls into among them."""
    plain, wanted_variables = model_step()
    wanted = plain(*batch(dtype))
    edits, found, variables = edits_of(monkeypatch, dtype=dtype)
    assert any(c.type == "TensorScatterAdd" for c in edits.added if isinstance(c, Create))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5, atol=3e-6)
    assert not np.any(found[1][1])  # no row falls into the second segment
    for one, other in zip(variables, wanted_variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def test_random_numbers_wait_for_the_tensor_before_them(monkeypatch):
    """All but the first, which nothing may precede that could be waited for."""
    edits, _, _ = edits_of(monkeypatch)
    guarded = [r for r in edits.rewires if "_early" in r.tensor]
    drawn = {r.op for r in guarded if "StatelessRandomUniform" in r.op}
    assert len(drawn) in (5, 6)
    made = {c.name: c for c in edits.added if not isinstance(c, Clone)}
    for rewire in guarded:
        select = made[rewire.tensor.removesuffix(":0")]
        assert select.type == "SelectV2" and select.inputs[0].endswith("armed:0")


def test_zeros_come_with_what_is_scattered(monkeypatch):
    edits, _, _ = edits_of(monkeypatch)
    made = {f"{c.name}:0": c for c in edits.added if isinstance(c, Create)}
    scatters = [c for c in made.values() if c.type == "TensorScatterAdd"]
    for scatter in scatters:
        zeros, _, data = scatter.inputs
        barrier = made[data]
        assert barrier.type == "XlaOptimizationBarrier"
        assert made[zeros].type == "Fill" and made[zeros].inputs[1] == f"{barrier.name}:1"
        assert any(r.tensor == f"{scatter.name}:0" for r in edits.rewires)
    assert len(scatters) == 2  # one of the forward, one where both gradients meet


def test_gradients_are_read_after_those_of_weights(monkeypatch):
    """The inputs of a layer's gradient do not stay in memory until that of its weights is there."""
    edits, _, _ = edits_of(monkeypatch)
    read = {(r.op, r.index): r.tensor for r in edits.rewires}
    found = 0
    for barrier in (c for c in edits.added if c.name.startswith("tfckpt/after_")):
        for weights in (t for t in barrier.inputs[1:] if t.endswith("/MatMul/MatMul_1:0")):
            layer = weights.removesuffix("_1:0"), 0
            if read.get(layer) == f"{barrier.name}:0":
                found += 1
    assert found >= 4


def test_weights_are_updated_after_the_last_that_reads_them(monkeypatch):
    """The gradient of a layer's input, where that of its weights comes before it."""
    monkeypatch.setattr(xla_updates, "LARGE", 1024)  # the layers are small
    edits, _, _ = edits_of(monkeypatch)
    barriers = [c for c in edits.added if c.name.startswith("tfckpt/update_")]
    for barrier in barriers:
        weights, last = (t.removesuffix(":0") for t in barrier.inputs)
        assert weights == f"{last}_1" and last.endswith("/MatMul/MatMul")
        readers = [r.op for r in edits.rewires if r.tensor == f"{barrier.name}:0"]
        assert len(readers) == 1 and not readers[0].startswith("gradient_tape")
    assert len(barriers) >= 4


def test_what_products_read_passes_barriers(monkeypatch):
    """A select would make one more copy of a product's input; inputs of fused ops pass selects."""
    edits, _, _ = edits_of(monkeypatch)
    made = {f"{c.name}:0": c.type for c in edits.added if isinstance(c, Create)}
    reads = [(c.name, t) for c in edits.added if isinstance(c, Clone) for t in c.inputs]
    reads += [(r.op, r.tensor) for r in edits.rewires]
    delayed = [(op, made[t]) for op, t in reads if t in made and ("_guard" in t or "_wait" in t)]
    products = [kind for op, kind in delayed if "MatMul" in op]
    assert len(products) >= 4 and set(products) == {"XlaOptimizationBarrier"}
    assert {kind for op, kind in delayed if "Gelu/mul" in op} == {"SelectV2"}
