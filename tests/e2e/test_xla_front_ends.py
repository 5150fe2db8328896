"""Every front end with `jit_compile=True`: plain numbers to rounding, in less memory.

Measured is with TensorFlow's own statistics (`get_memory_info`), around every step: on a CPU XLA
takes its temporary buffers from TensorFlow's allocator as well.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import process, saved
from tests.support.cli import BATCH, files, tool  # noqa: F401 (fixtures)
from tfckpt.keras import peak_memory

DEPTH, WIDTH, ROWS, LENGTH = 6, 64, 64, 64  # of the models
LAYERS = 16  # of the steps, as wide as what tests.support.saved trains
LESS = 0.5
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _conditions():
    with process.without_determinism():
        yield
    process.without_pass()


def peak_of(call) -> tuple[int, object]:
    """Return bytes allocated above what was there before a call, at most, and what it returns."""
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    result = call()
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before, result


@dataclasses.dataclass
class Trained:
    """The results of three steps: losses, weights, and the peak of the last of them."""

    losses: list[float]
    weights: list[np.ndarray]
    peak: int


def assert_same_in_less(ours: Trained, plain: Trained) -> None:
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=1e-5)
    for found, wanted in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert ours.peak < 0.9 * plain.peak  # a buffer counts as its chunk, which may be twice as large


def assert_answered(report) -> None:
    """XLA was asked about the step, and said that it takes less now."""
    assert report.applied and report.recomputed_ops, report.reason
    told = report.compiled
    assert told.after.temp_bytes < LESS * told.before.temp_bytes
    assert f"({told.after.temp_bytes / told.before.temp_bytes:.2f} of plain)" in str(report)


def layers(h):
    """Residual GELU layers, with all their activations of one size."""
    for _ in range(DEPTH):
        h += keras.layers.Dense(WIDTH, activation="gelu")(h)
    return keras.layers.Dense(4)(keras.layers.Flatten()(h))


class Ordinary(keras.Model):
    """A model with a step of its own, which does what Keras' does."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Decorated(Ordinary):
    """The same, with the decorator on the method."""

    @tfckpt.checkpoint
    def train_step(self, data):
        return super().train_step(data)


def build(kind=keras.Model):
    process.fresh()
    inputs = keras.Input((LENGTH, WIDTH))
    return kind(inputs, layers(inputs))


def batches():
    made = np.random.default_rng(0)
    return (made.standard_normal((3 * ROWS, LENGTH, WIDTH), dtype=np.float32),
            made.integers(0, 4, 3 * ROWS))


class Measured(keras.callbacks.Callback):
    """Notes loss and peak of every batch."""

    def __init__(self):
        super().__init__()
        self.losses, self.peaks, self._before = [], [], 0

    def on_train_batch_begin(self, batch, logs=None):
        tf.config.experimental.reset_memory_stats("CPU:0")
        self._before = tf.config.experimental.get_memory_info("CPU:0")["current"]

    def on_train_batch_end(self, batch, logs=None):
        self.peaks.append(
            tf.config.experimental.get_memory_info("CPU:0")["peak"] - self._before)
        self.losses.append(float(logs["loss"]))


def fit(model, *callbacks) -> Trained:
    noted = Measured()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  jit_compile=True)
    model.fit(*batches(), batch_size=ROWS, shuffle=False, verbose=0,
              callbacks=[*callbacks, noted])
    return Trained(noted.losses, model.get_weights(), noted.peaks[-1])


@pytest.fixture(scope="module")
def plain_fit():
    with process.without_determinism():
        return fit(build())


def test_checkpoint_of_a_model(plain_fit):
    model = tfckpt.keras.checkpoint(build())
    assert_same_in_less(fit(model), plain_fit)
    assert_answered(tfckpt.keras.report(model))


def test_the_decorator_on_a_train_step():
    plain, model = fit(build(Ordinary)), build(Decorated)
    assert_same_in_less(fit(model), plain)
    assert_answered(model.train_step.report)
    assert tfckpt.keras.report(model) is model.train_step.report


@needs_compiler
def test_the_native_pass_on_a_model(plain_fit):
    grappler_ext.enable()
    assert_same_in_less(fit(build()), plain_fit)
    (report,) = grappler_ext.reports().values()
    assert_answered(report)


def test_the_callback_measures_one_buffer_of_xla(plain_fit, capsys):
    model = tfckpt.keras.checkpoint(build())
    callback = tfckpt.keras.PeakMemory(compare=True)
    assert_same_in_less(fit(model, callback), plain_fit)
    report = tfckpt.keras.report(model)
    taken = report.compiled.after.temp_bytes
    assert taken <= report.measured_peak_bytes < 2.1 * taken  # see `assert_same_in_less`
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    assert [line[0] for line in said] == ["plain", "planned", "measured", "peak"]
    off = float(said[2][4])
    assert off == pytest.approx(100 * (report.measured_peak_bytes / taken - 1), abs=0.1)
    assert said[2][6:8] == ["of", "planned,"] and report.planned_peak_bytes == taken


@pytest.mark.parametrize("measured, warned", [(190, False), (250, True)])
def test_a_peak_below_the_compiled_plain_step_is_no_surprise(measured, warned):
    """The simulated peak of a plain step may be far below what XLA needs for it."""
    report = SimpleNamespace(
        name="step", applied=True, measured_peak_bytes=None, simulated_bytes=(100, 80),
        baseline_peak_bytes=200, allowed_bytes=None, missed=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        peak_memory._note(report, measured)
    assert report.measured_peak_bytes == measured
    assert [str(w.message).startswith("tfckpt: step was measured") for w in said] == [True] * warned


class Stack:
    """Layers whose step is a plain Python function."""

    def __init__(self):
        process.fresh()
        self.weights = [tf.Variable(saved.start(i)) for i in range(LAYERS)]

    def __call__(self, x, y):
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean((h - y) ** 2)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss


def loop(step, weights) -> Trained:
    """Three steps of a loop of one's own."""
    losses = []
    for number in range(3):
        x, y = map(tf.constant, saved.batch(number))
        peak, loss = peak_of(lambda x=x, y=y: step(x, y))
        losses.append(float(loss))
    return Trained(losses, [weight.numpy() for weight in weights], peak)


@pytest.fixture(scope="module")
def plain_loop():
    with process.without_determinism():
        stack = Stack()
        return loop(tf.function(stack, jit_compile=True), stack.weights)


@pytest.mark.parametrize("way", [
    "above", "below", pytest.param("native pass", marks=needs_compiler)])
def test_a_step_of_ones_own(plain_loop, way):
    stack = Stack()
    step = tf.function(stack.__call__, jit_compile=True)
    if way == "above":
        step = tfckpt.checkpoint(step)
    elif way == "below":
        step = tf.function(tfckpt.checkpoint(stack.__call__), jit_compile=True)
    else:
        grappler_ext.enable()
    assert_same_in_less(loop(step, stack.weights), plain_loop)
    reports = grappler_ext.reports().values() if way == "native pass" else [tfckpt.report_of(step)]
    for report in reports:
        assert_answered(report)


class Compiled(tf.Module):
    """A module that is saved with a compiled step."""

    def __init__(self):
        super().__init__()
        self.stack = Stack()
        self.weights = self.stack.weights

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec((None, saved.WIDTH))] * 2)
    def train(self, x, y):
        return {"loss": self.stack(x, y)}


def says_that_xla_was_not_asked(path) -> bool:
    return "compiled by XLA    not asked: " in path.read_text() and "read from a file" in (
        path.read_text())


@pytest.mark.parametrize("signature", [False, True])
def test_a_compiled_function_of_a_saved_model(tool, tmp_path, signature):  # noqa: F811
    module = Compiled()
    tf.saved_model.save(module, str(tmp_path / "model"), signatures={"learn": module.train})
    code, _, said = tool("rewrite", "model", "smaller", *BATCH)
    assert not code, said
    trained = []
    for name in ("model", "smaller"):
        loaded = tf.saved_model.load(str(tmp_path / name))
        learn = loaded.signatures["learn"]
        step = (lambda x, y, f=learn: f(x=x, y=y)) if signature else loaded.train
        trained.append(loop(lambda x, y, s=step: s(x, y)["loss"], loaded.weights))
    assert_same_in_less(trained[1], trained[0])
    assert says_that_xla_was_not_asked(tmp_path / "smaller.report.txt")


def compiled_graph() -> tf.compat.v1.GraphDef:
    """Return a TF1 graph whose op `train` calls a compiled function; `loss` is what it returns."""
    v1, graph = tf.compat.v1, tf.Graph()
    with graph.as_default():
        x, y = (v1.placeholder(tf.float32, (saved.BATCH, saved.WIDTH), name=name) for name in "xy")
        weights = [v1.get_variable(f"w{i}", initializer=saved.start(i), use_resource=True)
                   for i in range(LAYERS)]

        @tf.function(jit_compile=True, autograph=False)
        def step(x, y):
            read = [weight.read_value() for weight in weights]
            for weight in read:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_mean((x - y) ** 2)
            for weight, gradient in zip(weights, tf.gradients(loss, read), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        loss = tf.identity(step(x, y), name="loss")
        v1.group(loss.op, name="train")
        v1.group(*[weight.initializer for weight in weights], name="init")
    return graph.as_graph_def(add_shapes=True)


def session(definition) -> Trained:
    v1, graph = tf.compat.v1, tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    losses = []
    with v1.Session(graph=graph) as running:
        running.run("init")
        for number in range(3):
            x, y = saved.batch(number)
            peak, (loss, _) = peak_of(
                lambda x=x, y=y: running.run(["loss:0", "train"], {"x:0": x, "y:0": y}))
            losses.append(float(loss))
        weights = running.run([f"w{i}/Read/ReadVariableOp:0" for i in range(LAYERS)])
    return Trained(losses, weights, peak)


def test_a_compiled_function_of_a_graph_in_a_file(tool, tmp_path):  # noqa: F811
    definition = compiled_graph()
    (function,) = [f for f in definition.library.function if f.attr["_XlaMustCompile"].b]
    (tmp_path / "graph.pb").write_bytes(definition.SerializeToString())
    code, _, said = tool("rewrite", "graph.pb", "smaller.pb")
    assert not code, said
    smaller = tf.compat.v1.GraphDef.FromString((tmp_path / "smaller.pb").read_bytes())
    (rewritten,) = [f for f in smaller.library.function if f.attr["_XlaMustCompile"].b]
    assert rewritten.signature.name == function.signature.name
    assert_same_in_less(session(smaller), session(definition))
    assert says_that_xla_was_not_asked(tmp_path / "smaller.pb.report.txt")
