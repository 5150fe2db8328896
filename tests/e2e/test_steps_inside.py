"""Steps whose gradients are computed inside of loops, branches and functions of datasets."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tfckpt.capture.files import read_path
from tfckpt.capture.steps import training_steps
from tfckpt.carriers.files import plan_file_step, rewrite
from tfckpt.request.options import make_options
from tfckpt.verify import measure_peak, wait_for_certificates

WIDTH, LAYERS = 96, 6


class Trained:
    """A network of dense layers, its optimizer, and the state of both."""

    def __init__(self):
        drawn = [tf.random.stateless_normal((WIDTH, WIDTH), (n, 3)) * 0.15 for n in range(LAYERS)]
        self.weights = [tf.Variable(w) for w in drawn]
        self.other = [tf.Variable(w * 0.5) for w in drawn[:4]]
        self.filters = [tf.Variable(tf.random.stateless_normal((3, 3, a, 24), (n, 4)) * 0.1)
                        for n, a in enumerate((8, 24, 24, 24, 24))]
        self.biases = [tf.Variable(tf.random.stateless_normal((24,), (n, 4))) for n in range(5)]
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build(self.weights)
        self.sums = [tf.Variable(tf.zeros_like(w)) for w in self.weights]
        self.count = tf.Variable(0)

    def state(self) -> list[np.ndarray]:
        return [v.numpy() for v in (
            *self.weights, *self.other, *self.filters, *self.biases, *self.optimizer.variables,
            *self.sums, self.count)]

    def gradients(self, x):
        with tf.GradientTape() as tape:
            h = x
            for w in self.weights:
                h = tf.nn.gelu(h @ w)
            loss = tf.reduce_mean(h * h)
        return loss, tape.gradient(loss, self.weights)

    def penultimate(self, x):
        for w in self.weights[:-1]:
            x = tf.nn.gelu(x @ w)
        return x

    def update(self, x):
        loss, gradients = self.gradients(x)
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        return loss

    def update_other(self, x):
        """Train the other weights through these."""
        with tf.GradientTape() as tape:
            h = x
            for w in (*self.other, *self.weights):
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean(h)
        for w, g in zip(self.other, tape.gradient(loss, self.other), strict=True):
            w.assign_sub(0.1 * g)
        return loss


def accumulated(net, x):
    """Add gradients of slices up in variables."""
    total, size = 0.0, 1024
    for i in tf.range(4):
        loss, gradients = net.gradients(x[i * size:(i + 1) * size])
        for s, g in zip(net.sums, gradients, strict=True):
            s.assign_add(g)
        total += loss
    net.optimizer.apply_gradients(zip([s / 4.0 for s in net.sums], net.weights, strict=True))
    return total


def carried(net, x):
    """Add gradients of slices up in what the loop hands on: iterations could overlap."""
    sums, size = [tf.zeros_like(w) for w in net.weights], 1024
    for i in tf.range(4):
        _, gradients = net.gradients(x[i * size:(i + 1) * size])
        sums = [s + g for s, g in zip(sums, gradients, strict=True)]
    net.optimizer.apply_gradients(zip(sums, net.weights, strict=True))
    return tf.add_n([tf.reduce_sum(s) for s in sums])


def epochs(net, x):
    """Train on shuffled parts of the data, in two loops."""
    loss = 0.0
    for _ in tf.range(2):
        order = tf.random.experimental.stateless_shuffle(tf.range(4096), [1, 2])
        for i in tf.range(4):
            loss = net.update(tf.gather(x, order[i * 1024:(i + 1) * 1024]))
    return loss


def sometimes(net, x):
    """Train in most calls, in a branch."""
    net.count.assign_add(1)
    return tf.cond(net.count % 8 > 0, lambda: net.update(x), lambda: tf.constant(0.0))


def folded(net, x):
    return tf.foldl(lambda total, part: total + net.update(part),
                    tf.reshape(x, (4, 1024, WIDTH)), initializer=0.0)


def called(net, x):
    """Train in a loop of a function that the step calls."""
    @tf.function
    def inner(x):
        loss = 0.0
        for i in tf.range(4):
            loss = net.update(x[i * 1024:(i + 1) * 1024])
        return loss

    return inner(x)


def critic(net, x):
    """Train one network three times, then another through it."""
    for _ in tf.range(3):
        net.update(x)
    return net.update_other(x)


def convolved(net, x):
    """Add gradients of convolutions up, of which Grappler fuses the first otherwise in a loop."""
    sums, size = [tf.zeros_like(v) for v in (*net.filters, *net.biases)], 8
    for i in tf.range(4):
        part = tf.reshape(x[i * size * 128:(i + 1) * size * 128], (size, 32, 48, 8))
        with tf.GradientTape() as tape:
            h = part
            for k, b in zip(net.filters, net.biases, strict=True):
                h = tf.nn.silu(tf.nn.bias_add(tf.nn.conv2d(h, k, 1, "SAME"), b))
            loss = tf.reduce_mean(h * h)
        gradients = tape.gradient(loss, [*net.filters, *net.biases])
        sums = [s + g for s, g in zip(sums, gradients, strict=True)]
    for v, s in zip((*net.filters, *net.biases), sums, strict=True):
        v.assign_sub(0.1 * s)
    return sums[0]


def called_there(net, x):
    """Train by a function that is called in the loop."""
    train, loss = tf.function(net.update), 0.0
    for i in tf.range(4):
        loss = train(x[i * 1024:(i + 1) * 1024])
    return loss


def delayed(net, x):
    """Train in each iteration, and another network in every other one."""
    loss = 0.0
    for i in tf.range(4):
        part = x[i * 1024:(i + 1) * 1024]
        loss = net.update(part)
        if i % 2 == 0:
            net.update_other(part)
    return loss


def over_dataset(net, x):
    """Train on the elements of a dataset, which runs its function by itself."""
    loss = 0.0
    for part in tf.data.Dataset.from_tensor_slices(x).batch(1024, drop_remainder=True):
        loss += net.update(part)
    return loss


def calls_over_dataset(net, x):
    """Call functions for each element of a dataset, which leaves it to Grappler to inline them."""
    forward = tf.function(net.penultimate)
    update = tf.function(lambda gradients: net.optimizer.apply_gradients(
        zip(gradients, net.weights, strict=True)))
    loss = 0.0
    for part in tf.data.Dataset.from_tensor_slices(x).batch(1024, drop_remainder=True):
        with tf.GradientTape() as tape:
            h = tf.nn.gelu(forward(part) @ net.weights[-1])
            value = tf.reduce_mean(h * h)
        update(tape.gradient(value, net.weights))
        loss += value
    return loss


def epochs_over_dataset(net, x):
    """Train on a dataset twice, until the loss is what it never is."""
    loss = 0.0
    for _ in tf.range(2):
        for part in tf.data.Dataset.from_tensor_slices(x).batch(1024, drop_remainder=True):
            loss += net.update(part)
            if loss < 0.0:
                break
    return loss


def loops_over_dataset(net, x):
    """Train on halves of the elements of a dataset that is reduced, in a loop."""
    def updated(loss, part):
        for i in tf.range(2):
            loss += net.update(part[i * 1024:(i + 1) * 1024])
        return loss

    return tf.data.Dataset.from_tensor_slices(x).batch(2048, drop_remainder=True).reduce(
        0.0, updated)


def truncated(net, x):
    """Train a recurrent loop on a few steps at a time; its last state begins the next ones."""
    h, rows = tf.zeros((2048, WIDTH)), tf.reshape(x, (8, 512, WIDTH))
    for part in tf.range(2):
        with tf.GradientTape() as tape:
            loss = 0.0
            for i in tf.range(4):
                given = tf.tile(rows[part * 4 + i], (4, 1))
                for w in net.other:
                    h = tf.tanh(given + h @ w)
                loss += tf.reduce_mean(h * h)
        for w, g in zip(net.other, tape.gradient(loss, net.other), strict=True):
            w.assign_sub(0.1 * g)
    return h


def recurrent_over_dataset(net, x):
    """Train a recurrent loop on each element of a dataset."""
    total = 0.0
    for rows in tf.data.Dataset.from_tensor_slices(tf.reshape(x, (2, 8, 256, WIDTH))):
        with tf.GradientTape() as tape:
            h = tf.zeros((2048, WIDTH))
            for i in tf.range(8):
                given = tf.tile(rows[i], (8, 1))
                for w in net.other:
                    h = tf.tanh(given + h @ w)
            loss = tf.reduce_mean(h * h)
        for w, g in zip(net.other, tape.gradient(loss, net.other), strict=True):
            w.assign_sub(0.1 * g)
        total += loss
    return total


SEGMENTED = [truncated, recurrent_over_dataset]
KINDS = [accumulated, carried, epochs, sometimes, folded, called, critic, convolved, called_there,
         delayed, over_dataset, calls_over_dataset, epochs_over_dataset, loops_over_dataset]


def data():
    return tf.random.stateless_normal((4096, WIDTH), (5, 6))


def wrapped(kind, **options):
    """Return a network and the function that trains it."""
    net = Trained()

    def step(x):
        return kind(net, x)

    return net, tf.function(step, **options)


def run(net, step, calls=3):
    found = [np.asarray(step(data())) for _ in range(calls)]
    return [*found, *net.state()]


def assert_same_bits(want, found):
    assert len(want) == len(found)
    for n, (one, other) in enumerate(zip(want, found, strict=True)):
        np.testing.assert_array_equal(one, other, strict=True, err_msg=f"number {n}")


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_in_less_memory(kind, monkeypatch):
    monkeypatch.setenv("TFCKPT_CERTIFICATES", "on")
    net, plain = wrapped(kind)
    before, want = measure_peak(plain, data()), run(net, plain)
    net, traced = wrapped(kind)
    step = tfckpt.checkpoint(traced)
    after, found = measure_peak(step, data()), run(net, step)
    assert_same_bits(want, found)
    assert step.report.applied, step.report
    assert after < 0.75 * before, (after, before)
    assert wait_for_certificates()
    assert all(report.identical or kind is calls_over_dataset
               for report in step.reports.values()), step.report


@pytest.mark.parametrize("kind", SEGMENTED)
def test_loops_within_are_segmented(kind, monkeypatch):
    monkeypatch.setenv("TFCKPT_CERTIFICATES", "on")
    net, plain = wrapped(kind)
    before, want = measure_peak(plain, data(), repeats=3), run(net, plain)
    net, traced = wrapped(kind)
    step = tfckpt.checkpoint(traced)
    after, found = measure_peak(step, data(), repeats=3), run(net, step)
    assert_same_bits(want, found)
    assert step.report.segments, step.report
    assert after < 0.75 * before, (after, before)
    assert wait_for_certificates()
    assert step.report.identical is not False


def test_one_iteration_runs_at_a_time():
    """What is planned for is one; plain, two are there at once."""
    net, traced = wrapped(carried)
    step = tfckpt.checkpoint(traced, budget=0.5)
    assert measure_peak(step, data(), repeats=3) < 1.05 * step.report.allowed_bytes
    assert run(net, step, 1)


def test_the_step_around_says_what_is_inside():
    _, traced = wrapped(critic)
    step = tfckpt.checkpoint(traced)
    step(data())
    assert len(step.reports) == 2
    assert step.report.inside and "instead of" in step.report.inside[0]
    assert "\n  inside" in str(step.report)
    inner = next(r for r in step.reports.values() if r is not step.report)
    assert inner.applied and inner.name.endswith("in 'while'")


@pytest.mark.parametrize("kind", [accumulated, epochs, sometimes])
def test_open_batch(kind):
    signature = [tf.TensorSpec((None, WIDTH))]
    net, plain = wrapped(kind, input_signature=signature)
    want = run(net, plain)
    net, traced = wrapped(kind, input_signature=signature)
    step = tfckpt.checkpoint(traced)
    assert_same_bits(want, run(net, step))
    assert step.report.applied, step.report
    assert step.report.baseline_peak_bytes > 1024 * WIDTH * 4 * 2 * LAYERS  # of a slice
    assert "iteration" in step.report.planned_for


@pytest.mark.parametrize("given", [lambda data: data, iter])
def test_a_dataset_says_how_large_its_batches_are(given):
    """The last batch is a smaller one."""
    def batches():
        return given(tf.data.Dataset.from_tensor_slices(data()).shuffle(
            4096, 1, reshuffle_each_iteration=False).batch(1500).prefetch(1))

    def epoch(net):
        def over(parts):
            loss = 0.0
            for part in parts:
                loss += net.update(part)
            return loss

        return over

    net = Trained()
    want = [tf.function(epoch(net))(batches()), *net.state()]
    net = Trained()
    step = tfckpt.checkpoint(tf.function(epoch(net)))
    assert_same_bits(want, [step(batches()), *net.state()])
    assert step.report.applied and step.report.planned_for.endswith("a batch of 1500")
    assert step.report.baseline_peak_bytes > 1500 * WIDTH * 4 * 2 * LAYERS


@pytest.mark.parametrize("in_file", [False, True])
def test_a_saved_step_over_a_dataset(in_file, tmp_path, monkeypatch):
    """What it calls for each element is rewritten before it is saved, or in the file."""
    monkeypatch.setenv("TFCKPT_CERTIFICATES", "on")
    _, plain = wrapped(over_dataset)
    want = run(Trained(), plain)[:3]
    module = tf.Module()
    module.net, step = wrapped(over_dataset, input_signature=[tf.TensorSpec((4096, WIDTH))])
    module.all_of_it = [*module.net.weights, *module.net.optimizer.variables]
    module.step = step if in_file else tfckpt.checkpoint(step)
    tf.saved_model.save(module, str(tmp_path))
    if in_file:
        document = read_path(str(tmp_path))
        results = [plan_file_step(s, make_options()) for s in training_steps(document)]
        assert any(result.report.applied for result in results)
        assert wait_for_certificates()
        assert all(r.report.identical for r in results if r.report.applied)
        (tmp_path / "saved_model.pb").write_bytes(rewrite(document, results).serialized())
    loaded = tf.saved_model.load(str(tmp_path))
    before, after = measure_peak(plain, data()), measure_peak(loaded.step, data())
    assert after < 0.7 * before, (after, before)
    loaded = tf.saved_model.load(str(tmp_path))
    assert_same_bits(want, [loaded.step(data()).numpy() for _ in range(3)])


@pytest.mark.parametrize("loops", [False, True])
def test_a_function_that_xla_compiles_by_itself(loops):
    """It is a step, though the executor runs what calls it."""
    def calling(net):
        train = tf.function(net.update, jit_compile=True)

        def step(x):
            loss = 0.0
            for i in tf.range(2) if loops else range(2):
                loss += train(x[i * 2048:(i + 1) * 2048])
            return loss

        return step

    net = Trained()
    plain = tf.function(calling(net))
    before, want = measure_peak(plain, data()), run(net, plain, 1)
    net = Trained()
    step = tfckpt.checkpoint(tf.function(calling(net)))
    after, found = measure_peak(step, data()), run(net, step, 1)
    for one, other in zip(want, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert step.report.applied and step.report.name.endswith("update'")
    assert len(step.reports) == 2  # the two calls share a plan
    assert after < 0.6 * before, (after, before)


@pytest.mark.parametrize("kind", [accumulated, over_dataset])
def test_exact_applies_what_is_certified(kind):
    net, plain = wrapped(kind)
    want = run(net, plain)
    net, traced = wrapped(kind)
    step = tfckpt.checkpoint(traced, exact=True)
    assert_same_bits(want, run(net, step))
    assert step.report.applied and step.report.identical


def test_a_budget_that_cannot_be_met_is_refused():
    net, traced = wrapped(accumulated)
    before = net.state()
    with pytest.raises(tfckpt.InfeasibleBudgetError, match="cannot be met"):
        tfckpt.checkpoint(traced, budget=0.01)(data())
    assert_same_bits(before, net.state())


def test_a_plan_that_fails_inside_costs_no_step(monkeypatch):
    from tfckpt.capture import tf_adapter

    def fail(*_):
        raise RuntimeError("no")

    net, plain = wrapped(accumulated)
    want = run(net, plain)
    net, traced = wrapped(accumulated)
    monkeypatch.setattr(tf_adapter, "define_function", fail)
    step = tfckpt.checkpoint(traced)
    with pytest.warns(UserWarning, match="trains unchanged: internal error"):
        found = run(net, step)
    assert_same_bits(want, found)
    assert not step.report.applied


def test_what_a_loop_returns_may_be_all_that_counts():
    """Gradients of each example by itself: an iteration takes little, the results much."""
    net = Trained()

    @tf.function
    def step(x):
        return [tf.reduce_sum(g, 0) for g in tf.map_fn(
            lambda row: net.gradients(row[None])[1], x,
            fn_output_signature=[tf.TensorSpec((WIDTH, WIDTH))] * LAYERS)]

    planned = tfckpt.checkpoint(step)
    planned(data()[:64])
    assert not planned.report.applied
    assert "results of the loop" in planned.report.reason


def test_a_tape_around_the_step():
    """A gradient of the step itself needs the loop as it was traced."""
    net, plain = wrapped(penalised)
    want = gradients_through(net, plain)
    net, traced = wrapped(penalised)
    step = tfckpt.checkpoint(traced)
    with pytest.warns(UserWarning, match="a tape around"):
        found = gradients_through(net, step)
    assert_same_bits(want, found)
    assert step.report.applied


def gradients_through(net, step):
    found = []
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = step(data()[:512])
        found += [loss.numpy(), *(g.numpy() for g in tape.gradient(loss, net.weights))]
    return [*found, step(data()[:512]).numpy()]


def penalised(net, x):
    total = 0.0
    for _ in tf.range(3):
        total += tf.add_n([tf.reduce_sum(g * g) for g in net.gradients(x)[1]])
    return total


def test_a_training_step_of_keras():
    def trained(checkpoint):
        keras.utils.set_random_seed(1)
        model = checkpoint(Accumulating())
        model(np.zeros((4, WIDTH), np.float32))
        model.compile("adam", "mse", jit_compile=False)
        x = np.random.RandomState(0).randn(5120, WIDTH).astype(np.float32)
        model.fit(x, x, batch_size=2048, epochs=2, verbose=0)  # the last batch is a half one
        return model, [v.numpy() for v in model.variables]

    _, want = trained(lambda model: model)
    model, found = trained(tfckpt.keras.checkpoint)
    assert_same_bits(want, found)
    assert tfckpt.keras.report(model).applied


class Accumulating(keras.Model):
    """A model that trains on quarters of a batch."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.layers.Dense(WIDTH, "gelu") for _ in range(LAYERS)])

    def call(self, x, training=False):
        return self.body(x, training=training)

    def train_step(self, data):
        x, y = data
        size = tf.shape(x)[0] // 4

        def body(i, *sums):
            part = slice(i * size, (i + 1) * size)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x[part], y=y[part], y_pred=self(x[part], training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            return i + 1, *(s + g for s, g in zip(sums, gradients, strict=True))

        _, *sums = tf.while_loop(lambda i, *_: i < 4, body, [
            0, *(tf.zeros_like(v) for v in self.trainable_variables)])
        self.optimizer.apply_gradients(zip(sums, self.trainable_variables, strict=True))
        return {"sum": tf.reduce_sum(sums[0])}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [folded, sometimes, critic])
def test_compiled_by_xla(kind):
    net, plain = wrapped(kind, jit_compile=True)
    before, want = tfckpt.verify.compiled(plain, data()).temp_bytes, run(net, plain)
    net, traced = wrapped(kind, jit_compile=True)
    step = tfckpt.checkpoint(traced)
    after, found = tfckpt.verify.compiled(step, data()).temp_bytes, run(net, step)
    for one, other in zip(want, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert after < 0.8 * before, (after, before)
