"""Sizes that values decide: counted as the first call makes them, without a trace in the step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.capture.shapes import concrete_shapes

WIDTH = 64


def _normal(shape, seed):
    return 0.1 * tf.random.stateless_normal(shape, (seed, 9))


def trained(rows, wrap, arguments):
    """Return results and weights after two steps on rows that a function of the call makes."""
    weights = [tf.Variable(_normal((WIDTH, WIDTH), seed)) for seed in range(6)]

    @wrap
    @tf.function
    def step(*arguments):
        with tf.GradientTape() as tape:
            h = rows(*arguments)
            for weight in weights:
                h = h + tf.nn.gelu(h @ weight)
            loss = tf.reduce_mean(h ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    found = [step(*arguments).numpy().tobytes() for _ in range(2)]
    return found + [weight.numpy().tobytes() for weight in weights], step


LENGTHS = np.random.default_rng(1).integers(20, 100, 64)
TABLE = _normal((300, WIDTH), 7)


def _drawn(n):
    return tf.random.stateless_normal((n, WIDTH), (1, 2))


def _ragged():
    ids = np.random.default_rng(2).integers(0, 300, LENGTHS.sum())
    return tf.RaggedTensor.from_row_lengths(ids, LENGTHS)


CASES = {
    "ragged": (lambda ids: tf.gather(TABLE, ids.to_tensor()), lambda: (_ragged(),)),
    "drawn": (_drawn, lambda: (tf.constant(5000),)),
    "repeated": (lambda lengths: tf.repeat(TABLE[:64], lengths, axis=0),
                 lambda: (tf.constant(LENGTHS),)),
    "padded": (lambda x, n: tf.pad(x, [[0, n], [0, 0]]), lambda: (TABLE, tf.constant(5000))),
    "decoded": (lambda text: tf.reshape(tf.io.decode_raw(text, tf.float32), (-1, WIDTH)),
                lambda: (tf.constant(np.ones((5000, WIDTH), "f").tobytes()),)),
    "words": (lambda text: tf.gather(TABLE, tf.strings.to_hash_bucket_fast(
        tf.strings.split(text).to_tensor(), 300)),
        lambda: (tf.constant([" ".join("ab" * n) for n in LENGTHS // 2]),))}
"""What makes rows of what a call is made with, and that."""


@pytest.mark.parametrize("name", CASES)
def test_a_budget_is_kept(name):
    rows, arguments = CASES[name]
    given = arguments()
    wanted, plain = trained(rows, lambda f: f, given)
    found, ours = trained(rows, lambda f: tfckpt.checkpoint(f, budget=0.5), given)
    report = ours.report
    assert report.applied and found == wanted, str(report)
    assert "values decide" in report.planned_for
    before = tfckpt.verify.measure_peak(plain, *given, repeats=3)
    after = tfckpt.verify.measure_peak(ours, *given, repeats=3)
    assert report.expected_bytes[0] == pytest.approx(before, rel=0.15)
    assert after <= 1.1 * report.allowed_bytes, str(report)


def test_grappler_is_told_these_sizes(monkeypatch):
    """Of a step that is planned as it was traced it is asked what runs; copies have them too."""
    monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")
    given = (tf.constant(5000),)
    wanted, plain = trained(_drawn, lambda f: f, given)
    found, ours = trained(_drawn, lambda f: tfckpt.checkpoint(f, budget=0.5), given)
    report = ours.report
    assert "Grappler makes of the step" in str(report) and found == wanted
    before = tfckpt.verify.measure_peak(plain, *given, repeats=3)
    after = tfckpt.verify.measure_peak(ours, *given, repeats=3)
    assert report.expected_bytes[0] == pytest.approx(before, rel=0.15)
    assert after <= 1.1 * report.allowed_bytes, str(report)


@pytest.mark.parametrize("batch", [48, 32], ids=["partial", "whole"])
def test_texts_that_keras_reads(batch):
    """Batches that are all of one size are looked at too: it is no size that is asked for."""
    words = np.random.default_rng(0).choice([f"w{n}" for n in range(99)], (64, 60))
    texts, labels = np.array([" ".join(row) for row in words]), np.arange(64) % 3
    reader = keras.layers.TextVectorization()
    reader.adapt(texts)

    def model():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((), dtype="string")
        h = keras.layers.Embedding(120, WIDTH)(reader(inputs))
        for _ in range(6):
            h = h + keras.layers.Dense(WIDTH, "gelu")(h)
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalMaxPooling1D()(h)))

    found = []
    for wrap in (lambda m: m, tfckpt.keras.checkpoint):
        process.fresh()
        made = wrap(model())
        made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                     jit_compile=False)
        history = made.fit(tf.constant(texts), labels, batch_size=batch, shuffle=False, epochs=2,
                           verbose=0).history["loss"]
        found.append((history, [v.numpy().tobytes() for v in made.trainable_variables]))
    assert found[0] == found[1]
    report = tfckpt.keras.report(made)
    wide = batch * 60 * WIDTH * 4  # a result of a layer: each keeps several
    assert report.applied and 10 * wide < report.baseline_peak_bytes < 60 * wide, str(report)


def test_what_is_asked_leaves_nothing_behind():
    """A generator goes on as in the plain step, and a table is read and not written."""
    def rows():
        generator = tf.random.Generator.from_seed(3)
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        count = tf.Variable(0)

        def made(n):
            count.assign_add(1)
            table.insert(tf.range(3, dtype=tf.int64), tf.range(3, dtype=tf.int64))
            more = tf.cast(table.lookup(tf.constant([2], tf.int64))[0], tf.int32)
            return generator.normal((n + more, WIDTH)) + tf.random.normal((n + more, WIDTH))

        return made, count

    states = []
    for wrap in (lambda f: f, tfckpt.checkpoint):
        process.fresh()
        made, count = rows()
        found, _ = trained(made, wrap, (tf.constant(2000),))
        states.append((found, int(count)))
    assert states[0] == states[1] and states[0][1] == 2


def test_a_size_that_nothing_reads_beside_a_loop():
    """Such as one of what a gradient sums over; the graph was said to have no op of its name."""
    @tf.function
    def step(n, x):
        tf.raw_ops.BroadcastGradientArgs(s0=tf.stack([n, 3]), s1=tf.stack([1, n]), name="sums")
        return tf.while_loop(lambda h: tf.reduce_sum(h) < 9.0, lambda h: (h + 1.0,), (x,))

    graph = step.get_concrete_function(tf.TensorSpec((), tf.int32), tf.TensorSpec((4, 4))).graph
    name = next(op.name for op in graph.get_operations() if op.type == "BroadcastGradientArgs")
    found = concrete_shapes(graph, None, {}, told={
        f"{name}:{slot}": tf.TensorSpec((slot,), tf.int32) for slot in (0, 1)})
    assert [t.shape.as_list() for t in found.get_operation_by_name(name).outputs] == [[0], [1]]


def test_what_a_python_function_returns_has_a_sensible_bound():
    """Each residual connection doubled it: 2 TB were counted for 45 MB."""
    def rows(x):
        return tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), (None, None, WIDTH))

    given = (_normal((64, 100, WIDTH), 1),)
    wanted, plain = trained(rows, lambda f: f, given)
    found, ours = trained(rows, tfckpt.checkpoint, given)
    before = tfckpt.verify.measure_peak(plain, *given, repeats=3)
    assert found == wanted and ours.report.applied
    assert before < ours.report.expected_bytes[0] < 2 * before


def test_what_a_gradient_sums_over_is_no_value():
    """It is computed from shapes, though shape inference does not know it."""
    inputs = keras.Input((16, WIDTH))
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 16)(inputs, inputs))

    @tfckpt.checkpoint
    @tf.function(input_signature=[tf.TensorSpec((None, 16, WIDTH))])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    x = _normal((8, 16, WIDTH), 3)
    step(x)
    assert step.report.planned_for == "8x16x64"
