"""Certificates that are made while a step trains: whether its arithmetic is the plain step's."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tfckpt
from tests.e2e.test_exact import LAYERS, ROWS, WIDTH, looping, states, trained
from tests.support import process
from tests.support.executed_ops import counted
from tests.support.gelu_steps import gelu_step
from tests.support.random_steps import trial
from tests.support.random_steps.assembly import build, draw_spec
from tests.zoo import entry as zoo
from tfckpt.capture import tf_adapter
from tfckpt.capture.files import read_path
from tfckpt.capture.grappler.question import question
from tfckpt.capture.steps import training_steps
from tfckpt.carriers.files import plan_file_step, rewrite
from tfckpt.request.options import make_options
from tfckpt.verify import same_arithmetic, wait_for_certificates
from tfckpt.verify.arithmetic import background
from tfckpt.verify.arithmetic.certified import doubt
from tfckpt.verify.arithmetic.same import UNDECIDED


@pytest.fixture(autouse=True)
def certificates(monkeypatch):
    monkeypatch.setenv("TFCKPT_CERTIFICATES", "on")


def test_a_report_has_its_certificate_a_while_after_the_trace(monkeypatch):
    step, _ = trained(tfckpt.checkpoint)
    report = step.report
    assert report.applied and report.identical is None
    assert "identical          being compared in the background" in str(report)
    assert wait_for_certificates()
    assert report.identical is True
    assert "identical          the same arithmetic" in str(report)
    _, x, _ = gelu_step(LAYERS, WIDTH, ROWS)
    assert same_arithmetic(step, x).same
    monkeypatch.setenv("TFCKPT_CERTIFICATES", "off")
    step, _ = trained(tfckpt.checkpoint)
    assert wait_for_certificates() and step.report.identical is None
    assert "identical" not in str(step.report)


@pytest.mark.parametrize("seed", [120, 280])
def test_what_trains_otherwise_is_said(seed, monkeypatch):
    """Steps of which numbers differ where Grappler is not asked first."""
    monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    made, wanted = trial._plain(draw_spec(seed))
    found, _ = trial._rewritten(made.spec)
    assert zoo.differences(found, wanted, False)
    assert wait_for_certificates()
    assert [r.identical for r in found.reports if r.applied] == [False]
    text = next(text for text in said if "last bits" in text)
    assert "computed otherwise, from" in text and "exact=True" in text


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [
    2022, 2052, 2067, 2089, 2131, 2203, 3511, 3521, 3687, 3809, 4053, 4073, 5145, 5148, 5169, 6098,
    7021, 7103, 9017, 9082, 9131])
@pytest.mark.filterwarnings("default:tfckpt. step trains unchanged")
def test_steps_that_were_said_to_train_otherwise(seed):
    """Sums that read copies, sorted otherwise; reshapes, truth values and choices that Grappler
    takes out of one graph alone; what nothing orders in the plain step; what is around loops."""
    found = next((f for f in map(trial.try_seed, (seed, seed)) if f.kind != trial.UNREPEATABLE),
                 None)
    if found is None:
        pytest.skip("the plain step did not repeat its own numbers")
    if found.kind == trial.APPLIED:
        assert found.identical == "True" or UNDECIDED in found.certificate, found
    else:  # nothing is rewritten any more, or loops are left whole since nobody knows them to agree
        assert found.kind == trial.NO_GAIN or "not known to compute in" in found.text, found


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(9200, 9300, 20))
def test_what_grappler_makes_when_it_is_asked_is_what_runs(first):
    """Random steps, plain: the ops that TensorFlow instantiates, and those that are asked for.

    Known are a branch that TensorFlow places otherwise once its input is folded (9275), a size that
    is read of another equal tensor, and loops that Grappler itself does not inline (9202).
    """
    otherwise = []
    for seed in range(first, first + 20):
        process.fresh()
        step = build(draw_spec(seed))
        function = tf.function(step.function, input_signature=step.signature)
        try:
            concrete = function.get_concrete_function(*step.batches[0])
        except Exception:  # TensorFlow has no gradient for it
            continue
        if step.spec.compiled or doubt(concrete.graph, compiled=False):
            continue
        runs = tf_adapter.instantiated(concrete, step.batches[0], {})
        try:
            asked = question(concrete.graph).answer(lower=True)
        except ValueError:
            otherwise.append(seed)
        else:
            if counted([asked]) != counted(runs):
                otherwise.append(seed)
    assert len(otherwise) <= 1, otherwise


def test_a_plain_step_that_is_rewritten_wrongly_is_not_certified(monkeypatch):
    """The rewritten graph itself is compared, not the edits that were planned."""
    from tfckpt.carriers import traced

    applied = traced.apply

    def wrong(graph, *arguments, **options):
        applied(graph, *arguments, **options)
        op = next(op for op in graph.get_operations()
                  if op.type == "AssignSubVariableOp" and "tfckpt" not in op.name)
        with graph.as_default():
            op._update_input(1, op.inputs[1] * 1.5)

    monkeypatch.setattr(traced, "apply", wrong)
    step, _ = trained(tfckpt.checkpoint)
    assert wait_for_certificates() and step.report.identical is False


def test_steps_with_loops_and_ragged_rows():
    weight = tf.Variable(tf.eye(WIDTH))
    step = tfckpt.checkpoint(tf.function(looping(weight)))
    step(tf.random.stateless_normal((2048, WIDTH), (1, 2)))
    table = tf.Variable(tf.random.stateless_normal((100, WIDTH), (1, 2)))

    @tfckpt.checkpoint
    @tf.function(input_signature=[tf.RaggedTensorSpec((None, None), tf.int32)])
    def ragged(rows):
        with tf.GradientTape() as tape:
            h = tf.ragged.map_flat_values(tf.nn.embedding_lookup, table, rows)
            h = tf.nn.gelu(tf.reduce_mean(h, axis=1) * 3.0)
            for _ in range(4):
                h = tf.nn.gelu(h @ weight, approximate=True)
            loss = tf.reduce_mean(h)
        table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    ragged(tf.ragged.constant([[i % 100] * (i % 5 + 1) for i in range(512)]))
    assert wait_for_certificates()
    assert [s.report.identical for s in (step, ragged) if s.report.applied] == [True, True]


def encoder():
    """Of the kind of BERT: post-normalised, GELU by erf."""
    words = keras.Input((16,), dtype="int32")
    h = keras.layers.Embedding(50, 32)(words)
    for _ in range(2):
        seen = keras.layers.MultiHeadAttention(2, 16)(h, h)
        h = keras.layers.LayerNormalization(epsilon=1e-12)(h + seen)
        inner = keras.layers.Dense(64, activation=lambda x: keras.activations.gelu(
            x, approximate=False))(h)
        h = keras.layers.LayerNormalization(epsilon=1e-12)(h + keras.layers.Dense(32)(inner))
    return keras.Model(words, keras.layers.Dense(1)(h[:, 0]))


def test_an_encoder_with_open_batches_trains_to_the_same_bits_in_fit():
    """With a last batch that is smaller. It was 118 of 133 variables that differed."""
    rng = np.random.default_rng(0)
    x, y, kept = rng.integers(0, 50, (300, 16)), rng.normal(size=(300, 1)), []
    for wrap in (False, True):
        process.fresh()
        model = encoder()
        if wrap:
            tfckpt.keras.checkpoint(model)
        model.compile("adam", "mse", jit_compile=False)
        model.fit(x, y, batch_size=128, epochs=2, verbose=0, shuffle=False)
        kept.append(states(model.variables))
    assert kept[0] == kept[1]
    assert wait_for_certificates()
    report = tfckpt.keras.report(model)
    assert report.applied and report.identical is True


def test_a_saved_model_with_nested_functions_and_open_batches(tmp_path):
    made, x, variables = gelu_step(LAYERS, WIDTH, ROWS)
    inner = tf.function(made)
    module = tf.Module()
    module.variables_of_it = variables
    module.step = tf.function(lambda x: inner(x), input_signature=[tf.TensorSpec((None, WIDTH))])
    tf.saved_model.save(module, str(tmp_path))
    document = read_path(str(tmp_path))
    results = [plan_file_step(step, make_options()) for step in training_steps(
        document, batch_size=ROWS)]
    assert wait_for_certificates()
    assert all(r.report.identical for r in results if r.report.applied)
    assert any(r.report.applied for r in results)
    wanted = [module.step(x).numpy().tobytes() for _ in range(3)]
    (tmp_path / "saved_model.pb").write_bytes(rewrite(document, results).serialized())
    loaded = tf.saved_model.load(str(tmp_path))
    assert [loaded.step(x).numpy().tobytes() for _ in range(3)] == wanted


def test_what_is_compiled_is_said_to_be_unknown():
    with process.without_determinism():
        step, _ = trained(tfckpt.checkpoint(budget=0.5), jit_compile=True)
    assert wait_for_certificates() and step.report.applied
    assert step.report.identical is None and "XLA compiles the step" in step.report.certificate


@pytest.mark.parametrize("steps", [1, 2])
def test_of_a_step_that_a_loop_calls_nothing_is_known(steps):
    """Plain Keras has other bits with two steps in one execution, where TensorFlow fuses less."""
    process.fresh()
    model = tfckpt.keras.checkpoint(keras.Sequential(
        [keras.layers.Input((64,)), *(keras.layers.Dense(64, "gelu") for _ in range(4))]))
    model.compile("sgd", "mse", steps_per_execution=steps)
    x = np.ones((2048, 64), np.float32)
    model.fit(x, x, batch_size=1024, verbose=0)
    assert wait_for_certificates()
    report = tfckpt.keras.report(model)
    assert report.applied
    assert report.identical is (True if steps == 1 else None), report.certificate
    assert ("called in a loop" in report.certificate) == (steps == 2)


@pytest.mark.parametrize("delay", [100.0, 0.0])
def test_a_process_ends_in_good_order_whatever_is_pending(delay):
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(f"""
        import tests.conftest
        from tfckpt.verify.arithmetic import background
        import tfckpt
        from tests.e2e.test_exact import trained
        background.DELAY = {delay}
        step, _ = trained(tfckpt.checkpoint)
        print(step.report.applied)
    """)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and found.stdout.endswith("True\n"), found.stderr


def test_what_fails_is_logged_and_the_next_is_made(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "info", lambda text, *values: said.append(text % values))
    step, _ = trained(tfckpt.checkpoint)
    assert wait_for_certificates()
    before = step.report.identical
    step.report.identical = None
    background.certify(step.report, lambda: 1 / 0)
    assert wait_for_certificates() and step.report.identical is None and before
    assert "ZeroDivisionError: division by zero" in step.report.certificate
    assert any("ZeroDivisionError: division by zero" in text for text in said)
