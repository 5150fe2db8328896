"""`exact=True`: only plans are applied of which it is certain that they change no bit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import process
from tests.support.gelu_steps import gelu_step
from tests.support.models import arrays, stack
from tests.support.random_steps import trial
from tests.support.random_steps.assembly import draw_spec
from tests.zoo import entry as zoo
from tfckpt.capture.files import read_path
from tfckpt.capture.steps import training_steps
from tfckpt.carriers.files import plan_file_step, rewrite
from tfckpt.driver import EXECUTOR_TRIALS
from tfckpt.request.options import make_options
from tfckpt.verify import same_arithmetic
from tfckpt.verify.arithmetic.certified import Arithmetic
from tfckpt.verify.arithmetic.same import Certificate

LAYERS, WIDTH, ROWS = 4, 64, 512
OPEN = [tf.TensorSpec((None, WIDTH), tf.float32)]


def states(variables) -> list[bytes]:
    return [v.numpy().tobytes() for v in variables]


def trained(wrap, steps=3, **traced):
    """Return the step, and what it has trained to."""
    step, x, variables = gelu_step(LAYERS, WIDTH, ROWS)
    process.fresh()
    function = wrap(tf.function(step, **traced))
    return function, [[function(x).numpy().tobytes() for _ in range(steps)], states(variables)]


@pytest.mark.parametrize("traced", [{}, {"input_signature": OPEN}], ids=["static", "open"])
@pytest.mark.parametrize("optimised", ["on", "off"])
def test_a_plan_is_certified_before_it_is_applied(traced, optimised, monkeypatch):
    """Also as the graph is instantiated, asked independently."""
    monkeypatch.setenv("TFCKPT_OPTIMIZED", optimised)
    _, wanted = trained(lambda step: step, **traced)
    step, found = trained(tfckpt.checkpoint(exact=True), **traced)
    assert found == wanted
    assert step.report.applied and step.report.recomputed_ops and step.report.identical is True
    assert "identical          the same arithmetic" in str(step.report)
    _, x, _ = gelu_step(LAYERS, WIDTH, ROWS)
    assert same_arithmetic(step, x).same


def test_nothing_is_said_unless_it_is_asked():
    step, _ = trained(tfckpt.checkpoint)
    assert step.report.applied and step.report.identical is None
    assert "identical" not in str(step.report)
    _, x, _ = gelu_step(LAYERS, WIDTH, ROWS)
    assert same_arithmetic(step, x).same and step.report.identical is True


@pytest.mark.parametrize("seed", [280, pytest.param(120, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("default:tfckpt. step trains unchanged")
def test_a_plan_that_changes_bits_gives_way(seed, monkeypatch):
    """Of these steps to the plain one; where it gives way to another plan, say so here."""
    monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")
    made, wanted = trial._plain(draw_spec(seed))
    steps = []

    def train(options):
        def decorated(_, function):
            steps.append(tfckpt.checkpoint(function, **{**options, "exact": True}))
            return steps[-1]
        return trial._trained(made.spec, decorated)[1]

    found, refusal = trial._within_budget(made.spec, train, dict(made.spec.options))
    assert not refusal and not zoo.differences(found, wanted, made.spec.compiled)
    report = steps[-1].report
    assert not report.applied and report.identical is None
    assert any("exact=True" in text and "computed otherwise" in text for text in report.rejected)


def looped(x, weight):
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ weight)), (0, x))[1]


def looping(weight):
    """Return a step with a loop, and products around it."""
    def step(x):
        with tf.GradientTape() as tape:
            h = looped(x, weight)
            for _ in range(4):
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss
    return step


def test_a_step_with_a_loop_is_compared_as_it_is_lowered():
    x, made = tf.random.stateless_normal((2048, WIDTH), (1, 2)), []
    for wrap in (lambda step: step, tfckpt.checkpoint(exact=True)):
        weight = tf.Variable(tf.eye(WIDTH))
        step = wrap(tf.function(looping(weight)))
        made.append([[step(x).numpy() for _ in range(3)], states([weight])])
    assert made[0] == made[1]
    assert step.report.applied and step.report.identical is True
    assert same_arithmetic(step, x).same


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
def test_a_budget_is_no_reason_where_no_plan_is_exact(budget, monkeypatch):
    """None is certified here: larger budgets were named, and refused in their turn.

    As many plans are looked at as may be for the budget, and before it is refused.
    """
    made, x, _ = gelu_step(LAYERS, 256, 2048)
    compared = []
    monkeypatch.setattr(Arithmetic, "before", lambda self, edits: compared.append(edits) or (
        Certificate(False, ("Gelu/mul",))))
    step = tfckpt.checkpoint(tf.function(made), exact=True, budget=budget)
    with pytest.warns(UserWarning, match="trains unchanged: exact=True"):
        step(x)
    assert step.report.reason.startswith("exact=True: "), str(step.report)
    assert step.report.baseline_peak_bytes > 16 << 20 and (
        1 <= len(compared) <= 4 * EXECUTOR_TRIALS + 2)


def test_what_xla_compiles_is_refused():
    with process.without_determinism(), pytest.warns(UserWarning, match="exact=True: XLA compiles"):
        step, _ = trained(tfckpt.checkpoint(exact=True, budget=0.5), jit_compile=True)
    assert not step.report.applied and step.report.identical is None


def test_keras_trains_exactly_with_a_smaller_last_batch():
    kept = []
    for wrap in (False, True):
        process.fresh()
        model = stack()
        if wrap:
            tfckpt.keras.checkpoint(model, exact=True)
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
        x, y = arrays(1100)
        model.fit(x, np.abs(y), batch_size=512, verbose=0, shuffle=False)
        kept.append(states(model.variables))
    assert kept[0] == kept[1]
    report = tfckpt.keras.report(model)
    assert report.applied and report.identical is True


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_the_native_pass_compares_what_it_is_given():
    _, wanted = trained(lambda step: step)
    try:
        with grappler_ext.enabled(exact=True, strict=True):
            _, found = trained(lambda step: step)
            reports = grappler_ext.reports().values()
    finally:
        process.without_pass()
    assert found == wanted
    assert [r.identical for r in reports if r.applied] == [True]


def test_functions_of_a_saved_model_are_compared(tmp_path):
    made, x, variables = gelu_step(LAYERS, WIDTH, ROWS)
    module = tf.Module()
    module.variables_of_it = variables
    module.step = tf.function(made, input_signature=[tf.TensorSpec((ROWS, WIDTH))])
    tf.saved_model.save(module, str(tmp_path))
    document = read_path(str(tmp_path))
    results = [plan_file_step(step, make_options(exact=True)) for step in training_steps(document)]
    assert [(r.report.applied, r.report.identical) for r in results] == [(True, True)]
    wanted = module.step(x).numpy()
    (tmp_path / "saved_model.pb").write_bytes(rewrite(document, results).serialized())
    assert tf.saved_model.load(str(tmp_path)).step(x).numpy() == wanted


def test_derivatives_that_round_are_not_exact():
    with pytest.raises(tfckpt.PlanError, match="with exact=True it must be False"):
        tfckpt.checkpoint(exact=True, fad=True)
    with pytest.raises(tfckpt.PlanError, match="exact=1 must be True or False"):
        tfckpt.checkpoint(exact=1)


def gated_step(layers=2, width=64, rows=512):
    """Return a step whose gradients are sums of four, and its input."""
    rng = np.random.default_rng(0)
    weights = [[tf.Variable(rng.standard_normal(shape).astype("float32") / 8) for shape in (
        (width,), (width, 2 * width), (width, 2 * width), (2 * width, width))]
        for _ in range(layers)]

    def step(x):
        with tf.GradientTape() as tape:
            for scale, gate, up, down in weights:
                normed = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * scale
                x += (tf.nn.silu(normed @ gate) * (normed @ up)) @ down
            loss = tf.reduce_mean(x * x)
        variables = [v for layer in weights for v in layer]
        for v, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * gradient)
        return loss
    return step, tf.constant(rng.standard_normal((rows, width)), tf.float32)


@pytest.mark.filterwarnings("default:tfckpt. step trains unchanged")
def test_of_sums_that_time_decides_nothing_is_certain():
    """Some such steps, plain, were seen to end in other last bits from one run to the next."""
    step, x = gated_step()
    checkpointed = tfckpt.checkpoint(tf.function(step), fad=False)
    checkpointed(x)
    assert checkpointed.report.applied
    found = same_arithmetic(checkpointed, x)
    assert found.same is None and "AddN" in found.reason

    exact = tfckpt.checkpoint(tf.function(gated_step()[0]), exact=True)
    exact(x)
    assert not exact.report.applied and "exact=True: not known" in exact.report.reason
