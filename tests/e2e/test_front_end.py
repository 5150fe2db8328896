"""The decorator: every way to write it, what it reports, and what it leaves alone."""

from __future__ import annotations

import importlib.util
import logging
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, training
from tests.support.models import dense_relu

WIDTH, DEPTH, BATCH = 64, 6, 2048


class Net:
    """A stack of tanh layers whose steps are written by hand."""

    def __init__(self):
        made = np.random.default_rng(4)
        self.weights = [tf.Variable(made.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.2)
                        for _ in range(DEPTH)]

    def learn(self, x, rate=0.1):
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(tf.square(h - 0.25))
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(rate * gradient)
        return loss


def batch(count=BATCH):
    return tf.constant(np.random.default_rng(8).standard_normal((count, WIDTH)), tf.float32)


def run(step, net, steps=2) -> list[bytes]:
    losses = [step(batch()).numpy().tobytes() for _ in range(steps)]
    return losses + [weight.numpy().tobytes() for weight in net.weights]


@pytest.fixture(scope="module")
def wanted():
    net = Net()
    return run(tf.function(net.learn), net)


def _bare(net):
    @tfckpt.checkpoint
    @tf.function
    def step(x):
        return net.learn(x)

    return step


def _options(net):
    @tfckpt.checkpoint(budget=0.75, solver="auto", objective="time")
    @tf.function
    def step(x):
        """Return what it says."""
        return net.learn(x)

    assert step.__name__ == "step" and step.__doc__ == "Return what it says."
    return step


def _call(net):
    return tfckpt.checkpoint(tf.function(net.learn), budget="min")


def _under(net):
    @tf.function
    @tfckpt.checkpoint(batch_size=BATCH)
    def step(x):
        return net.learn(x)

    return step


@pytest.mark.parametrize("write", [_bare, _options, _call, _under])
def test_ways_to_write_it(write, wanted):
    net = Net()
    step = write(net)
    assert run(step, net) == wanted
    copies = training.copies_in(step.get_concrete_function(batch()).graph)
    assert copies
    if write is not _under:  # there TensorFlow's own object is outermost
        assert step.report.applied and step.report.recomputed_ops > 0


def test_report_before_and_after_the_first_trace():
    net = Net()
    step = tfckpt.checkpoint(tf.function(net.learn))
    assert step.report is None and step.reports == {}
    step(batch())
    first = step.report
    assert list(step.reports.values()) == [first]
    step(batch())
    assert step.report is first  # not traced again


def test_a_new_shape_is_planned_again():
    net = Net()
    step = tfckpt.checkpoint(tf.function(net.learn))
    step(batch())
    small = step.report
    step(batch(2 * BATCH))
    large = step.report
    assert len(step.reports) == 2 and set(map(id, step.reports.values())) == {id(small), id(large)}
    assert large.baseline_peak_bytes > 1.5 * small.baseline_peak_bytes
    assert [f"[{BATCH}, {WIDTH}]" in name for name in step.reports] == [True, False]
    assert [f"[{2 * BATCH}, {WIDTH}]" in name for name in step.reports] == [False, True]


def test_an_argument_in_python_is_a_trace_of_its_own():
    net = Net()
    step = tfckpt.checkpoint(tf.function(net.learn))
    step(batch(), 0.1)
    first = step.report
    step(batch(), 0.2)
    second = step.report
    assert first.applied and second.applied and second is not first
    assert list(step.reports.values()) == [first, second]
    assert [name.endswith(f", {rate})") for name, rate in zip(step.reports, (0.1, 0.2), strict=True)
            ] == [True, True]


def test_a_lambda_with_a_branch_on_a_tensor():
    """AutoGraph looks for the source of what is called a lambda where the wrapper stands."""
    def rate(x):
        return 0.1 if tf.reduce_sum(x) > 1e9 else 0.2

    net, plain = Net(), Net()
    step = tfckpt.checkpoint(tf.function(lambda x: net.learn(x, rate(x) if x[0, 0] < 9 else 0.3)))
    found = run(step, net)
    assert step.report.applied
    assert found == run(tf.function(lambda x: plain.learn(
        x, rate(x) if x[0, 0] < 9 else 0.3)), plain)


def test_as_a_method_of_any_class():
    class Trainer(Net):
        step = tfckpt.checkpoint(tf.function(Net.learn))

    one, other = Trainer(), Trainer()
    plain = Net()
    wanted = run(tf.function(plain.learn), plain)
    assert run(one.step, one) == wanted
    assert run(other.step, other) == wanted  # each instance trains its own weights
    assert one.step.report.applied and other.step.report.applied
    assert one.step.report is not other.step.report is Trainer.step.report  # the latest of all
    assert Trainer().step.report is None and Trainer().step.reports == {}


def test_called_inside_another_function(wanted):
    net = Net()
    inner = tfckpt.checkpoint(tf.function(net.learn))

    @tf.function
    def outer(x):
        return inner(x)

    assert run(outer, net) == wanted
    assert inner.report.applied and inner.report.recomputed_ops > 0
    nodes = tfckpt.verify.executed(outer, batch())
    assert nodes.copy_count > 0


def test_inside_a_loop_of_another_function():
    net, plain = Net(), Net()
    inner = tfckpt.checkpoint(tf.function(net.learn))

    def loop(step):
        @tf.function
        def outer(x):
            loss = 0.0
            for _ in tf.range(3):
                loss = step(x)
            return loss
        return outer

    def outcome(step, owner):
        return [step(batch()).numpy().tobytes()] + [w.numpy().tobytes() for w in owner.weights]

    assert outcome(loop(inner), net) == outcome(loop(tf.function(plain.learn)), plain)
    assert inner.report.applied


def test_eager_execution_says_so():
    net = Net()
    step = tfckpt.checkpoint(net.learn)
    with pytest.warns(UserWarning, match="learn runs eagerly.*tf.function"):
        loss = step(batch())
    assert np.isfinite(loss.numpy()) and step.report is None


def test_functions_run_eagerly_say_so():
    net = Net()
    step = tfckpt.checkpoint(tf.function(net.learn))
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.warns(UserWarning, match="runs eagerly"):
            step(batch())
    finally:
        tf.config.run_functions_eagerly(False)
    assert step.report is None
    step(batch())
    assert step.report.applied


def test_a_function_without_gradient_is_returned_unchanged_and_logged_once(caplog):
    @tfckpt.checkpoint
    @tf.function
    def forward(x):
        return tf.reduce_sum(tf.tanh(x) @ tf.ones((WIDTH, WIDTH)))

    with caplog.at_level(logging.WARNING, logger="absl"):
        for count in (8, 16):  # two traces
            assert np.isfinite(forward(batch(count)).numpy())
    said = [r for r in caplog.records if "forward computes no gradient" in r.getMessage()]
    assert len(said) == 1
    assert forward.report is None and forward.reports == {}
    operations = forward.get_concrete_function(batch(8)).graph.get_operations()
    assert not [op for op in operations if "tfckpt" in op.name]


def test_two_functions_without_gradient_are_both_named(caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        for name in ("first_of_two", "second_of_two"):
            def body(x):
                return tf.tanh(x)

            body.__name__ = name
            tfckpt.checkpoint(tf.function(body))(batch(4))
    text = " ".join(r.getMessage() for r in caplog.records)
    assert "first_of_two" in text and "second_of_two" in text


def test_an_undecorated_function_is_not_touched():
    net, other = Net(), Net()
    step = tfckpt.checkpoint(tf.function(net.learn))
    step(batch())
    plain = tf.function(other.learn)
    operations = plain.get_concrete_function(batch()).graph.get_operations()
    assert not [op for op in operations if "tfckpt" in op.name]


def test_fields_of_the_report():
    process.fresh()
    trial = dense_relu(gradients=False)
    step = tfckpt.checkpoint(tf.function(trial.step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*trial.batches[0])
    report = step.report
    kept_plain = 6 * 2048 * 48 * 4  # each ReLU's result, at least, is read by the backward
    assert report.baseline_peak_bytes >= kept_plain
    assert 0 < report.planned_peak_bytes < report.baseline_peak_bytes
    assert 0 < report.kept_bytes < kept_plain
    variables = sum(v.numpy().nbytes for v in trial.variables())
    fed = sum(t.numpy().nbytes for t in trial.batches[0])
    # the rest are constants that Grappler makes of others, here zeros and their like
    assert variables <= report.resident_bytes <= 1.15 * (variables + fed)
    assert 0 < report.overhead < 1
    assert report.measured_peak_bytes is None and report.measured_baseline_bytes is None
    assert 0 < report.op_count < len(running_operations(trial))  # Grappler makes fewer
    assert report.plan_seconds > 0 and report.reason == ""
    text = str(report)
    for word in ("plain peak", "planned peak", "overhead", "recomputed", "applied", "yes"):
        assert word in text
    assert len(text.splitlines()) < 20
    peaks = [peak for peak, _ in report.front]
    overheads = [overhead for _, overhead in report.front]
    assert peaks == sorted(peaks, reverse=True) and overheads == sorted(overheads)


def running_operations(trial):
    """Return the plain step's arguments and ops that its results and effects need, traced anew."""
    graph = tf.function(trial.step).get_concrete_function(*trial.batches[0]).graph
    found = {op for op in graph.get_operations() if op.type == "Placeholder"}
    pending = [t.op for t in graph.outputs] + list(graph.control_outputs)
    while pending:
        op = pending.pop()
        if op not in found or op.type == "Placeholder":
            found.add(op)
            pending += [*(t.op for t in op.inputs if t.op not in found), *op.control_inputs]
    return found


def test_explain_says_what_is_live_and_why():
    process.fresh()
    trial = dense_relu()
    step = tfckpt.checkpoint(tf.function(trial.step))
    step(*trial.batches[0])
    report = step.report
    text = report.explain()
    before, after = text.split("live at the planned peak")
    assert "live at the plain peak" in before
    assert "Relu" in before and "gradient" in before and "dense" in before
    assert "393.2 kB" in before  # 2,048 x 48 floats
    assert len(report.at_peak_after) < len(report.at_peak_before)
    for live in (report.at_peak_before, report.at_peak_after):
        assert all(t.bytes > 0 and t.op and t.layer and t.why for t in live)
        assert [t.bytes for t in live] == sorted((t.bytes for t in live), reverse=True)


def test_measured_peak_lands_in_the_report():
    process.fresh()
    trial = dense_relu()
    step = tfckpt.checkpoint(tf.function(trial.step))
    peak = tfckpt.verify.measure_peak(step, *trial.batches[0])
    assert step.report.measured_peak_bytes == peak > 0
    assert "not measured" not in str(step.report)


needs_or_tools = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None,  # importing it here would crash
    reason="OR-tools is not installed: make test-matrix leaves the extra `exact` out, since "
           "OR-tools and TensorFlow up to 2.19 want different versions of protobuf")


@needs_or_tools
def test_the_proven_optimum_is_planned_outside_this_process(wanted):
    """OR-tools would crash here: it runs in a process that has not loaded TensorFlow."""
    net = Net()
    step = tfckpt.checkpoint(tf.function(net.learn), solver="optimal", budget=0.7)
    assert run(step, net) == wanted
    assert step.report.applied and step.report.solver == "optimal"
    assert step.report.planned_peak_bytes <= 0.7 * step.report.baseline_peak_bytes
    assert step.report.recomputed_ops


@needs_or_tools
def test_the_proven_optimum_refuses_a_budget_that_nothing_fits():
    net = Net()
    step = tfckpt.checkpoint(tf.function(net.learn), solver="optimal", budget=0.01)
    with pytest.raises(tfckpt.InfeasibleBudgetError) as caught:
        step(batch())
    assert 0 < caught.value.smallest_bytes
