"""Loops recomputed segment by segment train as plain ones, in every bit, in less memory."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import loops, process
from tests.support.loops import SEGMENT
from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler.question import question
from tfckpt.capture.loops import compiled
from tfckpt.capture.nodes import op_of
from tfckpt.plan.loops import choice
from tfckpt.plan.loops.segments import MARK
from tfckpt.rewrite import realise
from tfckpt.verify.arithmetic import loop_bodies
from tfckpt.verify.arithmetic.certified import Arithmetic
from tfckpt.verify.arithmetic.single_loops import with_single_loops

BATCH, LENGTH, WIDTH = 8, 11, 16
"""No length of a segment but 1 and 11 leaves none over."""
forced = loops.forced


def _inputs(*shape):
    return np.random.default_rng(0).standard_normal(shape or (BATCH, LENGTH, WIDTH)).astype("f")


def _weight(seed=1):
    made, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)))
    return tf.Variable(made.astype("f"))


def _train(make, wrap, steps=3, spec=None, inputs=None):
    """Return the results of some steps with the state after them, and the step."""
    return loops.train(make, wrap, [_inputs() if inputs is None else inputs], steps, spec,
                       lambda loss, gradients: (loss, *gradients))


def _alike(make, count=1, **options):
    """Train both ways, and return the report of a step with so many loops in segments."""
    wanted, _ = _train(make, lambda f: f, **options)
    found, step = _train(make, tfckpt.checkpoint, **options)
    report = step.report
    assert report.applied and len(report.segments) == count, str(report)
    assert {length for _, length, *_ in report.segments} == {SEGMENT}
    assert [n for n, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b] == []
    given = options.get("inputs")
    certificate = tfckpt.verify.same_arithmetic(
        step, tf.constant(_inputs() if given is None else given))
    assert certificate.same, certificate
    return report


def _layers(*layers, shape=(LENGTH, WIDTH), batch=BATCH):
    def make():
        model = keras.Sequential([keras.Input(shape, batch_size=batch),
                                  *(layer() for layer in layers)])
        return (lambda x: model(x, training=True)), [v.value for v in model.trainable_variables]

    return make


def _compiled(build, spec=None):
    """Return how a step is decorated that XLA compiles, by what decorates others."""
    return lambda f: build(tf.function(f.python_function, spec, jit_compile=True))


_UNITS = dict(units=WIDTH, use_cudnn=False)


@pytest.mark.parametrize("layer", [
    lambda: keras.layers.LSTM(**_UNITS),
    lambda: keras.layers.GRU(**_UNITS),
    lambda: keras.layers.SimpleRNN(WIDTH),
    lambda: keras.layers.LSTM(return_sequences=True, **_UNITS),
    lambda: keras.layers.LSTM(go_backwards=True, **_UNITS),
    lambda: keras.layers.GRU(reset_after=False, **_UNITS),
    lambda: keras.layers.LSTM(dropout=0.3, **_UNITS),
], ids=["lstm", "gru", "simple", "sequences", "backwards", "reset_before", "dropout"])
def test_a_recurrent_layer(layer, forced):
    _alike(_layers(layer))


@pytest.mark.nightly
@pytest.mark.parametrize("layer, shape", [
    (lambda: keras.layers.ConvLSTM1D(4, 3), (LENGTH, 8, 2)),
    (lambda: keras.layers.LSTM(recurrent_dropout=0.2, **_UNITS), (LENGTH, WIDTH)),
    (lambda: keras.layers.LSTM(stateful=True, **_UNITS), (LENGTH, WIDTH)),
    (lambda: keras.layers.RNN([keras.layers.LSTMCell(WIDTH), keras.layers.GRUCell(WIDTH)]),
     (LENGTH, WIDTH)),
], ids=["convolutions", "recurrent_dropout", "stateful", "cells"])
def test_a_less_usual_layer(layer, shape, forced):
    _alike(_layers(layer, shape=shape), inputs=_inputs(BATCH, *shape))


def test_a_layer_begins_with_what_another_ends_with(forced):
    def make():
        given = keras.Input((LENGTH, WIDTH), batch_size=BATCH)
        _, *states = keras.layers.LSTM(return_state=True, **_UNITS)(given)
        found = keras.layers.LSTM(return_sequences=True, **_UNITS)(given, initial_state=states)
        model = keras.Model(given, found)
        return (lambda x: model(x, training=True)), [v.value for v in model.trainable_variables]

    _alike(make, count=2)


def test_layers_in_a_row_with_a_mask(forced):
    _alike(_layers(lambda: keras.layers.Masking(),
                   lambda: keras.layers.LSTM(return_sequences=True, **_UNITS),
                   lambda: keras.layers.GRU(**_UNITS)), count=2,
           inputs=_inputs() * (np.arange(LENGTH) < 7)[None, :, None].astype("f"))


def test_both_directions(forced):
    _alike(_layers(lambda: keras.layers.Bidirectional(keras.layers.LSTM(**_UNITS))), count=2)


def test_an_open_batch(forced):
    _alike(_layers(lambda: keras.layers.LSTM(**_UNITS), batch=None),
           spec=[tf.TensorSpec((None, LENGTH, WIDTH))])


def _of_weight(step_of):
    """Return what a model of its input and one weight is made by."""
    def make():
        weight = _weight()
        return (lambda x: step_of(x, weight)), [weight]

    return make


def _swapped(x):
    return tf.transpose(x, [1, 0, 2])


def _while(x, weight):
    return tf.while_loop(lambda i, h: i < tf.shape(x)[1],
                         lambda i, h: (i + 1, tf.tanh(h @ weight + x[:, i])),
                         (0, tf.zeros_like(x[:, 0])))[1]


@pytest.mark.filterwarnings("ignore:tfckpt. step was planned for 8x9x16")
@pytest.mark.parametrize("make, count", [
    (_layers(lambda: keras.layers.LSTM(return_sequences=True, **_UNITS),
             lambda: keras.layers.GRU(**_UNITS), shape=(None, WIDTH), batch=None), 2),
    (_layers(keras.layers.Masking, lambda: keras.layers.Bidirectional(keras.layers.LSTM(
        return_sequences=True, **_UNITS)), shape=(None, WIDTH), batch=None), 2),
    (_of_weight(_while), 1),
    (_of_weight(lambda x, w: tf.scan(lambda h, row: tf.tanh(h @ w + row), _swapped(x))), 1),
    (_of_weight(lambda x, w: tf.foldl(lambda h, row: tf.tanh(h @ w + row), _swapped(x))), 1),
    (_of_weight(lambda x, w: tf.map_fn(lambda row: tf.tanh(row @ w), _swapped(x))), 1),
], ids=["layers", "both_ways", "while", "scan", "fold", "map"])
def test_lengths_that_differ_from_call_to_call(make, count, forced):
    """What is planned for the first call runs with more segments, and with a single one."""
    def trained(wrap):
        process.fresh()
        forward, weights = make()

        @wrap
        @tf.function(input_signature=[tf.TensorSpec((None, None, WIDTH))])
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(forward(x)))
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return [step(_inputs(BATCH, n, WIDTH)).numpy().tobytes() for n in (9, 23, 3, 1, 9)] + [
            w.numpy().tobytes() for w in weights], step

    (wanted, _), (found, step) = trained(lambda f: f), trained(tfckpt.checkpoint)
    report = step.report
    assert report.applied and len(report.segments) == count, str(report)
    assert found == wanted
    assert tfckpt.verify.same_arithmetic(step, _inputs(BATCH, 9, WIDTH)).same


def test_weights_that_are_updated_in_a_branch(forced):
    """As where an optimizer scales losses: with gradients that are not finite nothing is updated.

    The branch may write the weights that the copy of the loop reads, and waits for it.
    """
    found = []
    for on in (False, True):
        process.fresh()
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((None, WIDTH)), *(keras.layers.LSTM(
            dtype="mixed_float16", return_sequences=n < 1, **_UNITS) for n in range(2))])
        if on:
            model = tfckpt.keras.checkpoint(model)
        model.compile(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse",
                      jit_compile=False)
        history = model.fit(_inputs(3 * BATCH, LENGTH, WIDTH), _inputs(3 * BATCH, WIDTH),
                            batch_size=BATCH, epochs=2, verbose=0, shuffle=False).history
        found.append((history["loss"], [v.numpy().tobytes() for v in model.variables]))
    report = tfckpt.keras.report(model)
    assert report.applied and len(report.segments) == 2, str(report)
    assert found[0] == found[1]


def _loop(body, **options):
    """Return a loop over rows of its argument, its weight trained."""
    def make():
        weight = _weight()

        def forward(x):
            return tf.while_loop(
                lambda i, h: i < LENGTH, lambda i, h: (i + 1, body(h, x, i, weight)),
                (0, tf.zeros((BATCH, WIDTH))), **options)[1]

        return forward, [weight]

    return make


def _cell(h, x, i, weight):
    return tf.tanh(h @ weight + x[:, i])


@pytest.mark.parametrize("options", [{}, {"maximum_iterations": 9}, {"parallel_iterations": 1}],
                         ids=["bare", "bounded", "serial"])
def test_a_loop(options, forced):
    _alike(_loop(_cell, **options))


def _growing(places, reads=False):
    """Return a loop that puts rows into a list that grows, of which the gradient reads lengths."""
    def make():
        weight = _weight()

        def forward(x):
            h, rows = x[:, 0], tf.TensorArray(tf.float32, size=0, dynamic_size=True,
                                              clear_after_read=False)
            for i in tf.range(LENGTH):
                h = _cell(h, x, i, weight)
                for place in places:
                    rows = rows.write(place(i), h * 0.5 if place is not places[0] else h)
                if reads:
                    h = h + rows.read(i)
            return rows.stack()

        return forward, [weight]

    return make


@pytest.mark.parametrize("places", [
    [lambda i: i], [lambda i: 2 * i, lambda i: 2 * i + 1], [lambda i: LENGTH - 1 - i],
    [lambda i: i // 3]], ids=["in order", "two a time", "backwards", "anew"])
def test_a_list_that_grows(places, forced):
    _alike(_growing(places))


def test_a_list_that_grows_and_is_read_is_left_alone(forced):
    made = _growing([lambda i: i], reads=True)
    wanted, _ = _train(made, lambda f: f)
    found, step = _train(made, tfckpt.checkpoint)
    assert found == wanted and not step.report.segments


@pytest.mark.parametrize("body", [
    lambda h, x, i, weight: h + 0.1 * tf.tanh(h @ weight + x[:, i]),
    lambda h, x, i, weight: h + 0.1 * _called(h, weight),
    lambda h, x, i, weight: (h - 0.3 * tf.sin(h @ weight) * x[:, i]) / 1.1,
], ids=["Euler", "calls", "divided"])
def test_a_loop_that_multiplies_by_constants(body, forced):
    """Grappler puts the operands of a product in the order of names, which differ in segments."""
    def make():
        forward, weights = _loop(body)()

        def twice(x):  # so that an AddN makes the gradient that the loop begins with
            h = forward(x)
            return h + tf.sin(h)

        return twice, weights

    _alike(make)


def test_a_loop_that_ends_when_the_data_say_so(forced):
    def make():
        weight = _weight()

        def forward(x):
            return tf.while_loop(
                lambda i, h: tf.reduce_sum(tf.abs(h)) < 120.0,
                lambda i, h: (i + 1, h + tf.tanh(h @ weight + 0.3)), (0, 0.1 * x[:, 0]),
                maximum_iterations=LENGTH)

        return (lambda x: forward(x)[1]), [weight]

    _alike(make)


def test_a_state_that_no_iteration_reads(forced):
    """Grappler gives such a loop a scalar in the place of what it begins with."""
    def step(x, weight):
        kernel = tf.convert_to_tensor(weight)  # of a loop that reads variables all stays
        begun = x[:, 0] @ kernel

        def body(i, h, _, total):
            h = tf.tanh(h @ kernel + x[:, i])
            return i + 1, h, tf.sin(h), total + tf.reduce_sum(h, -1)

        *_, total = tf.while_loop(lambda i, *_: i < LENGTH, body,
                                  (0, begun, tf.cos(begun), tf.zeros(BATCH)))
        return tf.reduce_mean(total)

    _alike(_of_weight(step))


def test_a_product_with_a_constant_that_is_no_part_of_the_body(forced):
    """What is kept for the gradient of the constant nothing needs; a longer product is no other."""
    mask = tf.constant((np.random.default_rng(1).random((WIDTH, WIDTH)) < 0.5).astype("f"))

    def step(x, weight):
        return tf.while_loop(
            lambda i, h: i < LENGTH,
            lambda i, h: (i + 1, tf.reduce_sum(
                weight * tf.sigmoid(h[:, None] + x[:, i, :, None]) * mask, 1)), (0, x[:, 0]))[1]

    _alike(_of_weight(step))


def test_a_loop_that_does_not_run(forced):
    def make():
        weight = _weight()
        return (lambda x: tf.while_loop(
            lambda i, h: tf.reduce_sum(h) < 1e9 * tf.cast(i, tf.float32) - 1.0,
            lambda i, h: (i + 1, tf.tanh(h @ weight)), (0, tf.abs(x[:, 0])),
            maximum_iterations=LENGTH)[1] + weight[0, 0]), [weight]

    _alike(make)


def test_scan_fold_and_map(forced):
    def make():
        weight, other = _weight(), _weight(2)

        def forward(x):
            rows = tf.transpose(x, (1, 0, 2))
            rows = tf.scan(lambda h, t: tf.tanh(tf.sin(h @ weight) + t), rows)
            rows = tf.map_fn(lambda t: tf.tanh(t @ other), rows)
            return tf.foldl(lambda h, t: tf.sin(h @ weight) * t, rows)

        return forward, [weight, other]

    _alike(make, count=3)


def test_a_loop_in_a_loop(forced):
    def make():
        weight = _weight()

        def inner(h):
            return tf.while_loop(lambda j, t: j < 3, lambda j, t: (j + 1, tf.tanh(t @ weight)),
                                 (0, h))[1]

        return (lambda x: tf.while_loop(
            lambda i, h: i < LENGTH, lambda i, h: (i + 1, inner(h) + x[:, i]),
            (0, x[:, 0]))[1]), [weight]

    _alike(make)


def _scaled(*factors):
    def make():
        weight = _weight()
        bias = _inputs(WIDTH)

        def scaled(h):
            for factor in factors:
                h = factor * h
            return h

        def forward(x):
            shifted = tf.sigmoid(weight)
            return tf.while_loop(
                lambda i, h: i < LENGTH,
                lambda i, h: (i + 1, tf.nn.relu(scaled(h @ shifted) + bias)), (0, x[:, 0]))[1]

        return forward, [weight]

    return make


def test_what_a_body_is_handed_may_be_a_constant_or_a_tensor_made_before(forced):
    _alike(_scaled(0.35))


def test_what_is_folded_in_the_plain_loop_is_folded_in_segments(forced):
    """The product of two constants: a list that nothing needs would be a reader more of one."""
    wanted, _ = _train(_scaled(0.7, 0.3), lambda f: f)
    found, step = _train(_scaled(0.7, 0.3), tfckpt.checkpoint)
    assert found == wanted and step.report.identical is not False


def test_a_loop_is_left_alone_whose_arithmetic_would_change(forced, monkeypatch):
    """A product of another kind stands for what Grappler makes otherwise in a segment."""
    def spoilt(plain, edited, edits):
        for node in edited.node:
            if "/tfckpt_loop/body/" in node.name and "MatMul" in node.op:
                node.op = "BatchMatMulV2"
        return differences(plain, edited, edits)

    differences = loop_bodies.differences
    monkeypatch.setattr(loop_bodies, "differences", spoilt)
    _, step = _train(_scaled(0.7), tfckpt.checkpoint)
    assert not step.report.segments
    assert any("not known to compute in the same arithmetic: while/" in line
               for line in step.report.rejected)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_sums_with_what_a_body_is_handed(steps, forced):
    """Of Runge-Kutta's: the gradient's are added in another order in loops over segments."""
    def make():
        weight = _weight()

        def forward(x):
            h = x[:, 0]
            for _ in tf.range(LENGTH):
                k, total = tf.tanh(h @ weight), 0.0
                for n in range(1, steps):
                    total = total + k / n
                    k = tf.tanh((h + 0.05 * k) @ weight)
                h = h + 0.1 * (total + k)
            return h

        return forward, [weight]

    wanted, _ = _train(make, lambda f: f)
    found, step = _train(make, tfckpt.checkpoint)
    certificate = tfckpt.verify.same_arithmetic(step, tf.constant(_inputs()))
    assert found == wanted, (step.report.segments, certificate)


def test_it_needs_less():
    """Measured, and not much less than planned."""
    batch, length = 1024, 36  # an entry takes 256 KiB, since the CPU's allocator counts no less

    def make():
        weight = _weight()
        wide = tf.Variable(tf.random.stateless_normal((64, 64), (1, 2)) * 0.1)

        def forward(x):
            return tf.while_loop(
                lambda i, h: i < length,
                lambda i, h: (i + 1, tf.tanh(tf.nn.softplus(h @ wide) - 0.5)), (0, x))[1]

        return (lambda x: forward(x) + weight[0, 0]), [wide, weight]

    x = _inputs(batch, 64)
    wanted, plain = _train(make, lambda f: f, inputs=x)
    found, ours = _train(make, tfckpt.checkpoint, inputs=x)
    assert found == wanted and ours.report.segments
    before = tfckpt.verify.measure_peak(plain, tf.constant(x), repeats=3)
    after = tfckpt.verify.measure_peak(ours, tf.constant(x), repeats=3)
    assert after < 0.5 * before, (after, before)
    assert 0.9 * after < ours.report.planned_peak_bytes < 1.6 * after


def _stack(count, units, length, batch):
    """Return recurrent layers in a row, each of which hands a sequence on but the last."""
    return _layers(*(lambda n=n: keras.layers.SimpleRNN(units, return_sequences=n < count - 1)
                     for n in range(count)), shape=(length, WIDTH), batch=batch)


def _copies_of_loops(step, x):
    operations = step.get_concrete_function(x).graph.get_operations()
    return [op for op in operations if op.type in ("While", "StatelessWhile")
            and (MARK + "-tfckpt") in op.name]


@pytest.mark.parametrize("forced", [loops.Cut(SEGMENT)], ids=["all"], indirect=True)
def test_they_are_recomputed_as_wholes_too(forced):
    """Of layers in a row what one hands to the next is kept no more either."""
    make = _stack(5, WIDTH, LENGTH, BATCH)
    wanted, _ = _train(make, lambda f: f)
    found, step = _train(make, lambda f: tfckpt.checkpoint(f, objective="memory", exact=True))
    assert _copies_of_loops(step, tf.constant(_inputs())) and len(step.report.segments) == 5
    assert found == wanted and step.report.identical is True, step.report.certificate
    certificate = tfckpt.verify.same_arithmetic(step, tf.constant(_inputs()))
    assert certificate.same, certificate


@pytest.mark.parametrize("forced", [loops.Cut(SEGMENT)], ids=["all"], indirect=True)
def test_a_difference_in_a_copy_of_one_is_seen(forced, monkeypatch):
    """A product of another kind stands for what Grappler makes otherwise in the copy."""
    asked = []

    def spoilt(plain, edited, edits):
        copies = [clone.name for clone in edits.clones if clone.source.endswith(MARK)]
        products = [node for node in edited.node if node.name.startswith(f"{copies[0]}/")
                    and "MatMul" in node.op]
        asked.append(differences(plain, edited, edits))
        for node in products:
            node.op = "BatchMatMulV2"
        asked.append(differences(plain, edited, edits))
        return asked[0]

    differences = loop_bodies.differences
    monkeypatch.setattr(loop_bodies, "differences", spoilt)
    make = _stack(5, WIDTH, LENGTH, BATCH)
    _train(make, lambda f: tfckpt.checkpoint(f, objective="memory"), steps=1)
    assert asked[0] == () != asked[1]


@pytest.mark.parametrize("budget", [0.35, 0.6, 0.85])
def test_a_larger_budget_runs_fewer_iterations_twice(budget, monkeypatch):
    """Measured: it is met, and most of it is used. Where no entries are computed again instead."""
    monkeypatch.setattr(choice, "choices_of_entries", lambda graph, rates: [])
    make, x = _layers(lambda: keras.layers.GRU(64, use_cudnn=False), shape=(64, WIDTH),
                      batch=1024), _inputs(1024, 64, WIDTH)
    wanted, plain = _train(make, lambda f: f, inputs=x)
    found, step = _train(make, lambda f: tfckpt.checkpoint(f, budget=budget), inputs=x)
    ((_, length, last, _),) = step.report.segments
    assert found == wanted and 64 * (budget - 0.35) < last < 64 * budget + length, step.report
    before, after = (tfckpt.verify.measure_peak(s, x, repeats=3) for s in (plain, step))
    assert 0.6 * budget < after / before < 1.03 * budget, step.report


def test_a_larger_budget_has_xla_run_fewer_iterations_twice():
    make, x = _layers(lambda: keras.layers.GRU(64, use_cudnn=False), shape=(48, WIDTH),
                      batch=256), _inputs(256, 48, WIDTH)

    with process.without_determinism():
        wanted, _ = _train(make, _compiled(lambda f: f), inputs=x)
        found, step = _train(make, _compiled(lambda f: tfckpt.checkpoint(f, budget=0.6)), inputs=x)
    ((_, length, last, _),) = step.report.segments
    assert found == wanted and length < last < 48, step.report
    told = step.report.compiled
    assert 0.4 < told.after.temp_bytes / told.before.temp_bytes <= 0.6, step.report


@pytest.mark.parametrize("compiled", [False, True])
def test_a_small_budget_has_segments_in_segments(compiled):
    """What segments alone cannot meet; measured, and for one run of the loop more."""
    weight = _weight()
    wide = tf.Variable(np.linalg.qr(np.random.default_rng(1).standard_normal((64, 64)))[0].astype(
        "f"))

    def make():
        return (lambda x: tf.while_loop(
            lambda i, h: i < 256,
            lambda i, h: (i + 1, tf.tanh(tf.nn.softplus(h @ wide) - weight[0, 0])), (0, x),
            maximum_iterations=256)[1]), [wide, weight]

    x, start = _inputs(1024, 64), (wide.numpy(), weight.numpy())
    found, steps = [], []
    for build in (lambda f: f, lambda f: tfckpt.checkpoint(f, budget="min"),
                  lambda f: tfckpt.checkpoint(f, budget=0.06)):
        wide.assign(start[0])
        weight.assign(start[1])
        with process.without_determinism():
            results, step = _train(make, _compiled(build) if compiled else build, inputs=x)
        found.append(results)
        steps.append(step)
    _, alone, inside = (getattr(step, "report", None) for step in steps)
    assert found[0] == found[1] == found[2]
    assert [len(within) for r in (alone, inside) for *_, within in r.segments] == [0, 1], inside
    assert alone.overhead < inside.overhead < 1
    plain, least, less = (
        tfckpt.verify.compiled(step, tf.constant(x)).temp_bytes if compiled else
        tfckpt.verify.measure_peak(step, tf.constant(x), repeats=3) for step in steps)
    assert less <= 0.06 * plain < 0.8 * least, (plain, least, less)


def test_a_budget_is_not_spent_on_computing_a_whole_loop_again():
    """With all lists of one direction kept, that direction would be, and nothing gained."""
    make, x = _layers(lambda: keras.layers.Bidirectional(keras.layers.GRU(64, use_cudnn=False)),
                      shape=(24, WIDTH), batch=4096), _inputs(4096, 24, WIDTH)
    wanted, plain = _train(make, lambda f: f, inputs=x)
    found, step = _train(make, lambda f: tfckpt.checkpoint(f, budget=0.6), inputs=x)
    assert found == wanted and step.report.overhead < 0.3, step.report
    before, after = (tfckpt.verify.measure_peak(s, x, repeats=3) for s in (plain, step))
    assert 0.3 * before < after < 0.61 * before, step.report


def test_a_stack_needs_less_than_its_sequences():
    """Measured, and about what is planned; zeros of a list do not keep that list."""
    make, x = _stack(8, 64, 16, 1024), _inputs(1024, 16, WIDTH)
    wanted, plain = _train(make, lambda f: f, inputs=x)
    found, ours = _train(make, lambda f: tfckpt.checkpoint(f, objective="memory"), inputs=x)
    assert found == wanted and _copies_of_loops(ours, tf.constant(x))
    before, after = (tfckpt.verify.measure_peak(step, tf.constant(x), repeats=3)
                     for step in (plain, ours))
    sequences = 7 * 16 * 1024 * 64 * 4
    assert after < 0.9 * sequences and after < 0.3 * before, (after, before)
    assert 0.7 * after < ours.report.planned_peak_bytes < 1.4 * after


def test_the_plan_store_knows_loops_in_segments(forced, tmp_path, monkeypatch):
    monkeypatch.setenv("TFCKPT_CACHE", str(tmp_path))
    wanted, first = _train(_loop(_cell), tfckpt.checkpoint)
    found, later = _train(_loop(_cell), tfckpt.checkpoint)
    assert later.report.stored and not first.report.stored
    assert later.report.segments == first.report.segments != ()
    assert found == wanted


def test_exact_plans_may_have_them(forced):
    wanted, _ = _train(_loop(_cell), lambda f: f)
    found, step = _train(_loop(_cell), lambda f: tfckpt.checkpoint(f, exact=True))
    assert found == wanted and step.report.segments and step.report.identical is True


def test_what_is_computed_otherwise_around_them_is_seen(forced):
    """The plain step of another loss stands for one that Grappler rearranges."""
    def graph_of(loss, wrap):
        process.fresh()
        forward, (weight,) = _loop(_cell)()

        def step(x):
            with tf.GradientTape() as tape:
                found = tf.reduce_mean(loss(forward(x)))
            return found, tape.gradient(found, weight)

        return wrap(tf.function(step)).get_concrete_function(tf.constant(_inputs())).graph

    ours = graph_of(tf.square, tfckpt.checkpoint)
    for loss, alike in ((tf.square, True), (lambda h: tf.square(h) + h, False)):
        plain = question(graph_of(loss, lambda step: step))
        assert Arithmetic(ours, plain, marked=True).after().same == alike


def test_what_waits_before_the_last_iterations_is_left_out_with_these(forced):
    """A plan may have what the gradient's loop over them is given wait: for how many there are."""
    _, step = _train(_loop(_cell), tfckpt.checkpoint)
    live = step.get_concrete_function(tf.constant(_inputs())).graph
    definition = tf_adapter.shown_definition(live)
    for ran in [node.name for node in definition.node if node.name.endswith("_ran")]:
        for node in definition.node:
            node.input[:] = [f"{ran}_waits" if text == ran else text for text in node.input]
        waits = definition.node.add(name=f"{ran}_waits", op="Identity", input=[ran])
        waits.attr["T"].type = tf.int32.as_datatype_enum
    single = with_single_loops(definition, live)
    names = {node.name for node in single.node}
    assert {op_of(text) for node in single.node for text in node.input} <= names
    assert not any(name.endswith("_waits") for name in names)


@tf.function
def _called(h, weight):
    return tf.tanh(_twice(h @ weight))


@tf.function
def _twice(h):
    return h + tf.sin(h)


def _calling(h, x, i, weight):
    return _called(h, weight) + x[:, i]


def _branching(h, x, i, weight):
    return tf.cond(tf.reduce_sum(h) > 0.0, lambda: tf.tanh(h @ weight + x[:, i]),
                   lambda: tf.switch_case(i % 3, [lambda: tf.sin(h), lambda: _called(h, weight),
                                                  lambda: h * x[:, i]]))


@pytest.mark.parametrize("count", [LENGTH, None], ids=["fixed", "open"])
def test_lists_whose_entries_the_trace_says_nothing_of(count, forced):
    """`tf.map_fn` says no shape of what it makes; XLA has to be told."""
    spec = [tf.TensorSpec((count, 64, WIDTH))]

    def make():
        weight = _weight()
        return (lambda x: tf.map_fn(lambda t: tf.tanh(tf.sin(t @ weight)), x)), [weight]
    wrap = functools.partial(_compiled, spec=spec)

    x = _inputs(40, 64, WIDTH) if count is None else _inputs(count, 64, WIDTH)
    with process.without_determinism():
        wanted, _ = _train(make, wrap(lambda f: f), inputs=x)
        found, step = _train(make, wrap(tfckpt.checkpoint), inputs=x)
    assert found == wanted and len(step.report.segments) == 1, str(step.report)


def _looping(h, x, i, weight):
    inner = tf.while_loop(lambda j, t: j < 3, lambda j, t: (j + 1, tf.tanh(t @ weight)), (0, h),
                          maximum_iterations=3)[1]
    return tf.scan(lambda a, b: tf.tanh(a + b @ weight), tf.stack([inner, x[:, i]]))[-1]


@pytest.mark.parametrize("sizes", [(BATCH, LENGTH, WIDTH), (None, LENGTH, WIDTH)],
                         ids=["fixed", "open"])
def test_a_loop_in_a_loop_compiled_by_xla(sizes, forced):
    """XLA ended the process where it was handed lists of lists that stay empty."""
    spec = [tf.TensorSpec(sizes)]
    wrap = functools.partial(_compiled, spec=spec)

    make = _loop(_looping, maximum_iterations=LENGTH)
    with process.without_determinism():
        wanted, _ = _train(make, wrap(lambda f: f))
        found, step = _train(make, wrap(tfckpt.checkpoint))
    assert len(step.report.segments) == 1 and step.report.applied, str(step.report)
    assert found == wanted
    assert step.report.compiled.after.temp_bytes < step.report.compiled.before.temp_bytes


@pytest.mark.parametrize("make", [
    _loop(_cell, maximum_iterations=LENGTH), _layers(lambda: keras.layers.LSTM(**_UNITS)),
    _layers(lambda: keras.layers.GRU(return_sequences=True, **_UNITS)),
    _loop(_calling, maximum_iterations=LENGTH), _loop(_branching, maximum_iterations=LENGTH)],
    ids=["loop", "lstm", "sequences", "functions", "branches"])
def test_compiled_by_xla(make, forced):
    with process.without_determinism():
        wanted, _ = _train(make, _compiled(lambda f: f))
        found, step = _train(make, _compiled(tfckpt.checkpoint))
    assert len(step.report.segments) == 1 and step.report.applied, str(step.report)
    assert found == wanted
    told = step.report.compiled
    assert told.after.temp_bytes < told.before.temp_bytes


def _entries(which, kernel=lambda weight: weight):
    """Return a loop that sets entries of a list, which ones a function of the iteration says."""
    def make():
        weight = _weight()

        def forward(x):
            rows = tf.TensorArray(tf.float32, LENGTH + 1, element_shape=(BATCH, WIDTH))

            def body(i, h, rows):
                h = tf.tanh(h @ kernel(weight) + x[:, i])
                return i + 1, h, rows.write(which(i), h)

            rows = tf.while_loop(lambda i, *_: i < LENGTH, body, (0, x[:, 0], rows),
                                 maximum_iterations=LENGTH)[2]
            return tf.transpose(rows.stack(), (1, 0, 2))[:, 1:-1]

        return forward, [weight]

    return make


@pytest.mark.parametrize("forced", [loops.Cut(SEGMENT)], ids=["all"], indirect=True)
@pytest.mark.parametrize("make, less", [
    (_entries(lambda i: i), True),
    (_entries(lambda i: i + 1), False),  # what no iteration hands on is not known to differ
    (_entries(lambda i: i // 2), False),  # later entries take the places of earlier ones
], ids=["each", "shifted", "twice"])
def test_xla_is_spared_zeros_that_nothing_reads(make, less, forced, monkeypatch):
    _spared(make, less, monkeypatch, "_read_once", lambda *_: ())


@pytest.mark.parametrize("forced", [loops.Cut(SEGMENT)], ids=["all"], indirect=True)
@pytest.mark.parametrize("kernel, less", [
    (lambda weight: weight, True),
    (lambda weight: tf.sin(weight) * 2.0, True),
    (lambda weight: tf.cast(tf.cast(weight, tf.bfloat16), tf.float32), True),
], ids=["variable", "computed", "cast"])
def test_xla_keeps_once_what_each_iteration_has_alike(kernel, less, forced, monkeypatch):
    _spared(_entries(lambda i: i, kernel), less, monkeypatch, "_is_invariant", lambda *_: False)


def _spared(make, less, monkeypatch, what, nothing):
    """Train compiled steps, and check that XLA takes less than where nothing is spared."""
    with process.without_determinism():
        wanted, _ = _train(make, _compiled(lambda f: f))
        found, ours = _train(make, _compiled(tfckpt.checkpoint))
        monkeypatch.setattr(compiled, what, nothing)
        _, other = _train(make, _compiled(tfckpt.checkpoint))
    assert len(ours.report.segments) == 1 and ours.report.applied, str(ours.report)
    assert found == wanted
    sizes = ours.report.compiled.after.temp_bytes, other.report.compiled.after.temp_bytes
    assert sizes[0] < sizes[1] if less else sizes[0] == sizes[1]


def test_lists_of_zeros_are_not_shared_by_the_loops_that_xla_compiles(forced, monkeypatch):
    """XLA merges equal zeros, keeps them from the first loop to the last, and copies them."""
    x = _inputs(64, 16, 32)

    def trained(wrap):
        process.fresh()
        model = keras.Sequential([keras.Input(x.shape[1:], batch_size=64), *(
            keras.layers.LSTM(32, return_sequences=True) for _ in range(3))])

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x)))
            return loss, tape.gradient(loss, model.trainable_variables)

        made = wrap(tf.function(step, jit_compile=True))
        return [t.numpy().tobytes() for t in tf.nest.flatten(made(x))], made

    with process.without_determinism():
        wanted, _ = trained(lambda f: f)
        found, ours = trained(tfckpt.checkpoint)
        monkeypatch.setattr(realise, "PASSES", realise.PASSES[:-1])
        _, shared = trained(tfckpt.checkpoint)
    assert found == wanted and len(ours.report.segments) == len(shared.report.segments) == 3
    assert ours.report.compiled.after.temp_bytes < shared.report.compiled.after.temp_bytes


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.filterwarnings("ignore:tfckpt. step trains unchanged")
def test_xla_has_to_be_told_how_often_a_loop_runs_at_most(told, forced):
    """Its lists have room for a number of entries that is known when it compiles."""
    weight = _weight()

    def step(x):
        most = tf.shape(x)[1] if told else LENGTH + 4
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.while_loop(
                lambda i, h: i < tf.shape(x)[1], lambda i, h: (i + 1, tf.tanh(h @ weight)),
                (0, x[:, 0]), maximum_iterations=most)[1])
        return loss, tape.gradient(loss, weight)

    spec = [tf.TensorSpec((None, None, WIDTH))]
    with process.without_determinism():
        plain = tf.function(step, spec, jit_compile=True)
        ours = tfckpt.checkpoint(tf.function(step, spec, jit_compile=True))
        for shape in ((BATCH, LENGTH, WIDTH), (5, LENGTH + 3, WIDTH), (3, 2, WIDTH)):
            for one, other in zip(plain(_inputs(*shape)), ours(_inputs(*shape)), strict=True):
                assert one.numpy().tobytes() == other.numpy().tobytes(), shape
    assert len(ours.report.segments) == 1, str(ours.report)
