"""A fault of ours, wherever it happens, costs a plan: the step trains as plain, in every bit."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import shutil
import warnings

import numpy as np
import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import process, training
from tests.support.faults import Faults, MadeUpError
from tests.support.models import Trial, numbers
from tfckpt import driver
from tfckpt.capture import tf_adapter
from tfckpt.capture.files import read_path
from tfckpt.capture.steps import training_steps
from tfckpt.carriers import traced
from tfckpt.carriers.files import plan_file_step, rewrite
from tfckpt.driving import decisions, judges, proposals
from tfckpt.errors import CaptureError
from tfckpt.plan import forward_ad
from tfckpt.request.options import make_options
from tfckpt.rewrite.appliers import graphdef as apply_graphdef

WIDTH, ROWS = 16, 64
LIVE = [(tf_adapter, name) for name in (
    "create_op", "import_nodes", "update_input", "add_control_input", "replace_control_inputs",
    "show_operations")]  # the last when all is inlined, and when traced ops are hidden
"""All that edits a live graph."""
DEFINITION = [(apply_graphdef._Nodes, name) for name in ("_add", "_wait", "tensor")]
"""All that edits a definition."""
compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                              reason="no C++ compiler")


def trial(nested: bool, depth: int) -> Trial:
    """Layers, each of them in a function of its own if nested, and their updates."""
    made = np.random.default_rng(2)
    ws = [tf.Variable(made.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.3)
          for _ in range(depth)]

    def layer(h, w):
        return tf.nn.softplus(tf.tanh(h @ w))

    called = tf.function(layer) if nested else layer

    def step(x, y):
        with tf.GradientTape() as tape:
            for w in ws:
                x = called(x, w)
            loss = tf.reduce_mean(x * x)
        gradients = tape.gradient(loss, ws)
        for w, g in zip(ws, gradients, strict=True):
            w.assign_sub(0.1 * g)
        return loss, gradients

    return Trial(step, numbers((ROWS, WIDTH), 5, steps=2), lambda: ws)


@functools.cache
def plain(nested: bool, depth: int) -> training.History:
    """Return what the step computes without us."""
    made = trial(nested, depth)
    return training.train(tf.function(made.step), made)


def rewritten(nested: bool = False, depth: int = 2, **options):
    """Train a decorated step, which must train as plain; return its report and what was warned."""
    wanted = plain(nested, depth)
    made = trial(nested, depth)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tfckpt: no hook in this test")
        step = tfckpt.checkpoint(tf.function(made.step), **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = training.train(step, made)
    training.assert_same_bits(found, wanted)
    return step.report, [str(w.message) for w in said if "tfckpt" in str(w.message)]


def counted(monkeypatch, functions, train) -> list[str]:
    """Return the calls of what edits while a step is rewritten without a fault."""
    with monkeypatch.context() as patch:
        faults = Faults()
        faults.inject(patch, functions)
        assert train().applied
    return faults.calls


# A fault at every edit.


@pytest.mark.parametrize("nested, late, depth", [
    (True, False, 2), (False, True, 2),
    *(pytest.param(*case, marks=pytest.mark.nightly)
      for case in ((True, True, 2), (False, False, 2), (True, False, 3), (False, True, 3)))])
def test_at_every_edit_of_a_traced_graph(monkeypatch, nested, late, depth):
    """The next plan is used; of a nested function that is not inlined the call stays, and where
    Grappler's answer cannot be put in the place of the trace the plan is one of the trace."""
    calls = counted(monkeypatch, LIVE, lambda: rewritten(nested, depth)[0])
    assert len(calls) > 20
    taken = max(i for i, pair in enumerate(zip(calls, calls[1:], strict=False), 1)
                if pair == ("import_nodes", "show_operations"))  # Grappler's answer
    plans = 0
    for number in range(1, len(calls) + 1):
        with monkeypatch.context() as patch:
            Faults({number}, late).inject(patch, LIVE)
            report, said = rewritten(nested, depth)
        if number in (taken, taken + 1):
            assert not said and report.applied and not report.rejected and not report.refused
            continue
        if calls[number - 1] == "show_operations" and number < taken:  # the step cannot be read
            assert report is None and any("internal error" in text for text in said)
            continue
        assert not said and (report.applied if report.rejected else report.refused), number
        plans += len(report.rejected)
    assert plans > len(calls) / 3


@pytest.mark.parametrize("nested, every", [
    (False, 6), (True, 9), *(pytest.param(n, 1, marks=pytest.mark.nightly) for n in (0, 1))])
def test_at_an_edit_of_every_plan(monkeypatch, nested, every):
    """The step is as it was traced, and the report lists what was given up."""
    apply, most = traced.apply, len(counted(monkeypatch, LIVE, lambda: rewritten(nested)[0]))

    for number in range(1, most, every):
        attempts = []

        def failing(graph, edits, changes, number=number, attempts=attempts, **options):
            with monkeypatch.context() as patch:
                attempts.append(Faults({min(number, len(edits.added) + len(edits.rewires))}))
                attempts[-1].inject(patch, LIVE)
                apply(graph, edits, changes, **options)

        with monkeypatch.context() as patch:
            patch.setattr(traced, "apply", failing)
            report, said = rewritten(nested)
        # plans of one solver and peak have one line
        assert not report.applied and 1 < len(report.rejected) <= len(attempts)
        assert "before " in report.reason and "given up" in str(report)
        assert any("trains unchanged: rewrite: MadeUpError" in text for text in said)


@pytest.mark.parametrize("nested", [False, True])
def test_at_every_edit_that_takes_back_another(monkeypatch, nested):
    calls = counted(monkeypatch, LIVE, lambda: rewritten(nested)[0])
    last = len(calls)
    with monkeypatch.context() as patch:
        faults = Faults({last})
        faults.inject(patch, LIVE)
        rewritten(nested)
    assert len(faults.calls) > last + 12  # these are taken back, and others applied
    for late, number in itertools.product((False, True), (1, 2, 3, 5, 8, 12)):
        with monkeypatch.context() as patch:
            Faults({last, last + number}, late).inject(patch, LIVE)
            report, _ = rewritten(nested)
        assert report.applied and report.rejected or len(report.rejected) == 2  # there are no more


def test_at_every_edit_that_takes_inlining_back(monkeypatch):
    """No plan is made, and the calls are put back."""
    monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")  # otherwise Grappler inlines them
    Faults(range(1, 1000)).inject(monkeypatch, [(driver, "searches")])
    with monkeypatch.context() as patch:
        faults = Faults()
        faults.inject(patch, LIVE)
        rewritten(True)
    first = faults.calls.index("show_operations") + 2  # the one after it takes back
    assert len(faults.calls) - first > 12
    for late, number in itertools.product((False, True), range(first, len(faults.calls) + 1)):
        with monkeypatch.context() as patch:
            Faults({number}, late).inject(patch, LIVE)
            report, said = rewritten(True)
        assert report is None and any("before searches" in text for text in said)


def test_what_cannot_be_taken_back_is_raised(monkeypatch):
    """Nothing trains on a graph that is half edited."""
    last = len(counted(monkeypatch, LIVE, lambda: rewritten()[0]))
    with monkeypatch.context() as patch:
        Faults(range(last, 10_000)).inject(patch, LIVE)
        with pytest.raises(tfckpt.RewriteError, match="cannot be taken back"):
            rewritten()


def test_an_interrupted_trace_leaves_a_step_that_can_be_traced_again(monkeypatch):
    made = trial(True, 2)
    step = tfckpt.checkpoint(tf.function(made.step))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tf_adapter, "add_control_input", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(*made.batches[0])
    training.assert_same_bits(training.train(step, made), plain(True, 2))
    assert step.report.applied


# In other carriers.


@pytest.fixture
def without_hook(monkeypatch):
    """A TensorFlow whose trace hook is not to be relied on."""
    monkeypatch.setattr(tf_adapter, "hook_problem", lambda: "no hook in this test")


@pytest.mark.parametrize("late, every", [
    (False, 3), (True, 3), *(pytest.param(late, 1, marks=pytest.mark.nightly) for late in (0, 1))])
def test_at_every_edit_of_an_imported_step(monkeypatch, without_hook, late, every):
    edits = [*DEFINITION, (tf.graph_util, "import_graph_def")]
    calls = counted(monkeypatch, edits, lambda: rewritten()[0])
    assert calls[-1:] == ["import_graph_def"] and calls.count("import_graph_def") == 1
    for number in [*range(1, len(calls), every), len(calls)]:
        with monkeypatch.context() as patch:
            Faults({number}, late).inject(patch, edits)
            report, _ = rewritten()
        assert report.applied and report.rejected, (number, calls[number - 1])


def test_a_step_that_cannot_be_imported_is_called(monkeypatch, without_hook):
    with monkeypatch.context() as patch:
        Faults(range(1, 1000), late=True).inject(patch, [(tf.graph_util, "import_graph_def")])
        report, said = rewritten()
    assert not report.applied and any("trains unchanged" in text for text in said)


def passed(nested: bool = False):
    """Train a step with the native pass; return its report."""
    wanted, made = plain(nested, 2), trial(nested, 2)
    try:
        with grappler_ext.enabled():
            found = training.train(tf.function(made.step), made)
            report = grappler_ext.reports()["step"]
    finally:
        process.without_pass()
    training.assert_same_bits(found, wanted)
    return report


@compiler
@pytest.mark.parametrize("nested, every", [
    (False, 3), *(pytest.param(nested, 1, marks=pytest.mark.nightly) for nested in (0, 1))])
def test_at_every_edit_of_the_native_pass(monkeypatch, nested, every):
    calls = counted(monkeypatch, DEFINITION, lambda: passed(nested))
    for number in range(1, len(calls) + 1, every):
        with monkeypatch.context() as patch:
            Faults({number}).inject(patch, DEFINITION)
            report = passed(nested)
        assert report.applied and report.rejected


@pytest.mark.parametrize("nested", [False, True])
def test_at_every_edit_of_a_file(monkeypatch, tmp_path, nested):
    """It is refused as a whole, and what was read is as it was."""
    model = tf.Module()
    made = trial(nested, 2)
    model.variables_ = made.variables()
    model.step = tf.function(made.step, input_signature=[
        tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((ROWS,), tf.int32)])
    tf.saved_model.save(model, str(tmp_path / "model"))
    document = read_path(str(tmp_path / "model"))
    results = [plan_file_step(s, make_options()) for s in training_steps(document)]
    before, calls = document.serialized(), Faults()
    with monkeypatch.context() as patch:
        calls.inject(patch, DEFINITION)
        assert rewrite(document, results).serialized() != before
    for late, number in itertools.product((False, True), range(1, len(calls.calls) + 1)):
        with monkeypatch.context() as patch:
            Faults({number}, late).inject(patch, DEFINITION)
            with pytest.raises(MadeUpError):
                rewrite(document, results)
        assert document.serialized() == before


# In a stage.


@pytest.mark.parametrize("holder, name", [
    (decisions, "plans_of"), (decisions, "decisions_of"), (judges, "realise"),
    (driver, "report_of"), (traced, "apply")],
    ids=lambda value: value if isinstance(value, str) else "")
def test_in_a_stage_it_costs_a_plan_or_a_source(monkeypatch, holder, name):
    with monkeypatch.context() as patch:
        Faults({1}).inject(patch, [(holder, name)])
        report, said = rewritten()
    assert report.applied and not said
    line, = report.rejected
    assert "internal error: MadeUpError: before" in line
    with monkeypatch.context() as patch:
        Faults(range(1, 100)).inject(patch, [(holder, name)])
        report, said = rewritten()
    assert any("trains unchanged: internal error: MadeUpError" in text
               and "set TFCKPT_DUMP" in text for text in said)
    assert report is None if name == "report_of" else not report.applied


@pytest.mark.parametrize("holder, name", [
    (traced, "capture"), (traced, "Inlining"), (driver, "searches"), (driver, "place"),
    (proposals, "priced"), (proposals, "device_parts")],
    ids=lambda value: value if isinstance(value, str) else "")
def test_where_a_step_is_read_or_priced_it_costs_the_plans(monkeypatch, tmp_path, holder, name):
    monkeypatch.setenv("TFCKPT_DUMP", str(tmp_path))
    with monkeypatch.context() as patch:
        Faults({1}, late=name == "Inlining").inject(patch, [(holder, name)])
        report, said = rewritten(nested=True)
    assert report is None
    line, = said
    assert "trains unchanged: internal error: MadeUpError: " in line and name in line
    folder, = pathlib.Path(tmp_path).iterdir()
    assert name in (folder / "fault.txt").read_text()
    assert tf.compat.v1.GraphDef.FromString((folder / "graph.pb").read_bytes()).node


def test_what_cannot_be_read_trains_as_it_is(monkeypatch):
    def refuse(*_, **__):
        raise CaptureError("capture: for this test")

    monkeypatch.setattr(traced, "capture", refuse)
    report, (line,) = rewritten(nested=True)
    assert report is None and line.endswith("trains unchanged: capture: for this test")


def test_a_fault_of_forward_ad_costs_the_derivatives(monkeypatch):
    for fail in ({1}, range(1, 100)):
        with monkeypatch.context() as patch:
            Faults(fail).inject(patch, [(forward_ad, "find_alternatives")])
            report, said = rewritten(fad=True)
        assert report.applied and report.recomputed_ops
        assert any("no derivatives are kept: internal error" in text for text in said)


def test_a_dump_that_fails_costs_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TFCKPT_DUMP", str(tmp_path))
    Faults(range(1, 100)).inject(monkeypatch, [(driver.dump, "to_json")])
    report, _ = rewritten()
    assert report.applied and not [*tmp_path.iterdir()]


def test_a_plan_that_is_refused_when_it_was_accepted_is_not_taken_for_the_best(monkeypatch):
    refused = []

    def refuse_first(step, edits):
        if edits is not None and edits in (refused or [edits]):
            refused.append(edits)
            raise judges.Rejected("not this one")

    monkeypatch.setattr(driver, "ASKED_FROM", 0)
    monkeypatch.setattr(driver, "_check_loops", refuse_first)
    report, said = rewritten(depth=6)
    assert refused and report.applied and not said
    assert [text for text in report.rejected if "not this one" in text]
