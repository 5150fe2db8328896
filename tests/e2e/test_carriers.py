"""Every carrier gets every stage of the driver, or says why not."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib

import pytest
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import process
from tfckpt import driver
from tfckpt.capture.files import read_path
from tfckpt.capture.steps import training_steps
from tfckpt.carriers import traced
from tfckpt.carriers.files import plan_file_step, rewrite
from tfckpt.driving import decisions, judges
from tfckpt.request.options import make_options
from tfckpt.rewrite.realise import PASSES

DOCS = pathlib.Path(__file__).parents[2] / "docs"
ROWS, WIDTH, LAYERS = 1024, 32, 6


def carrier_table():
    """Return the script that writes the table."""
    spec = importlib.util.spec_from_file_location("carrier_table", DOCS / "carrier_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model(tf.Module):
    """Layers with an activation that forward AD can take, on one device or two."""

    def __init__(self, devices=("",)):
        super().__init__()
        process.seed()
        self.devices = devices
        self.weights = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (1, i)) * 0.3)
                        for i in range(LAYERS * len(devices))]

    def train(self, x):
        """One step on each device, each with weights of its own."""
        results = []
        for n, device in enumerate(self.devices):
            weights = self.weights[n * LAYERS:(n + 1) * LAYERS]
            with tf.device(device), tf.GradientTape() as tape:
                h = x
                for w in weights:
                    h = tf.nn.softplus(tf.sin(h @ w)) * h
                loss = tf.reduce_mean(h * h)
            with tf.device(device):
                results += [loss, *tape.gradient(loss, weights)]
        return results


@pytest.fixture
def outcomes(monkeypatch):
    """Return the list of (kind, result) to which each run of the driver adds."""
    seen, run = [], driver.run

    def watched(*arguments, **options):
        seen.append((arguments[0].kind, run(*arguments, **options)))
        return seen[-1][1]

    for module in ("tfckpt.driver", "tfckpt.carriers.traced", "tfckpt.carriers.files",
                   "grappler_ext.bridge"):
        monkeypatch.setattr(f"{module}.run", watched)
    return seen


def carried(kind: str, folder: pathlib.Path, devices=("",), **options):
    """Return the results of a step that came in one way."""
    model, x = Model(devices), tf.random.stateless_normal((ROWS, WIDTH), (2, 3))
    step = tf.function(model.train, input_signature=[tf.TensorSpec((ROWS, WIDTH))])
    if kind == "plain":
        return step(x)
    if kind == "trace hook":
        return tfckpt.checkpoint(step, **options)(x)
    if kind == "native pass":
        try:
            with grappler_ext.enabled(strict=True, **options):
                return tf.function(model.train)(x)
        finally:
            process.without_pass()
    model.step = step
    tf.saved_model.save(model, str(folder / "plain"))
    document = read_path(str(folder / "plain"))
    results = [plan_file_step(s, make_options(**options)) for s in training_steps(document)]
    smaller = rewrite(document, results)
    (folder / "plain" / "saved_model.pb").write_bytes(smaller.serialized())
    loaded = tf.saved_model.load(str(folder / "plain"))  # owns the variables
    return loaded.step(x)


KINDS = ("trace hook", "files", "native pass")


def same(found, wanted) -> bool:
    return [t.numpy().tobytes() for t in found] == [t.numpy().tobytes() for t in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_passes_run_as_the_table_says(kind, tmp_path, outcomes):
    wanted = carried("plain", tmp_path)
    assert same(carried(kind, tmp_path), wanted)
    (seen, outcome), = [entry for entry in outcomes if entry[1].report is not None]
    assert seen == kind and outcome.report.applied and outcome.report.recomputed_ops
    table = carrier_table()
    said = next(table.reasons(c, table.ways(c)[-1]) for c in table.CARRIERS if c.kind == kind)
    assert [p.name for p in outcome.passes] == [each.name for each in PASSES]
    assert {p.name: p.refusal for p in outcome.passes} == {
        each.name: said[each.name] for each in PASSES}


@pytest.mark.parametrize("kind", KINDS)
def test_every_carrier_keeps_derivatives(kind, tmp_path, outcomes):
    wanted = carried("plain", tmp_path)
    found = carried(kind, tmp_path, fad=True)
    (_, outcome), = [entry for entry in outcomes if entry[1].report is not None]
    assert outcome.report.applied
    assert any(region.taken for region in outcome.report.forward_ad_regions)
    for a, b in zip(found, wanted, strict=True):
        assert abs(a - b).numpy().max() <= 1e-5 * max(1e-3, abs(b).numpy().max())


@pytest.mark.parametrize("kind", ("trace hook", "files"))
def test_every_carrier_plans_each_device_by_itself(kind, tmp_path, outcomes):
    """Where there is no second device its name is enough: nothing runs."""
    devices = ("/device:CPU:0", "/device:GPU:0")
    model = Model(devices)
    step = tf.function(model.train, input_signature=[tf.TensorSpec((ROWS, WIDTH))])
    if kind == "files":
        model.step = step
        tf.saved_model.save(model, str(tmp_path / "two"))
        for read in training_steps(read_path(str(tmp_path / "two"))):
            plan_file_step(read, make_options({"CPU:0": "min", "*": 1.0}))
    else:
        tfckpt.checkpoint(step, budget={"CPU:0": "min", "*": 1.0}).get_concrete_function(
            tf.TensorSpec((ROWS, WIDTH)))
    (_, outcome), = [entry for entry in outcomes if entry[1].report is not None]
    assert len(outcome.report.devices) == 2
    assert {d.budget for d in outcome.report.devices} == {"min", "1 of plain"}


def test_a_plan_that_cannot_be_realised_costs_that_plan_only(monkeypatch, tmp_path, outcomes):
    """Also where the reason is a fault of ours; the report says what was given up."""
    refused = []

    def refuse_two(candidate):
        if len(refused) < 2:
            refused.append(candidate)
            if len(refused) == 2:
                raise judges.Rejected("for this test")
            raise judges.Rejected("internal error: KeyError: 'for this test'")

    monkeypatch.setattr(judges, "JUDGES", (refuse_two, *judges.JUDGES))
    monkeypatch.setattr(driver, "JUDGES", judges.JUDGES)
    wanted = carried("plain", tmp_path)
    assert same(carried("trace hook", tmp_path), wanted)
    (_, outcome), = outcomes
    assert outcome.report.applied and len(outcome.report.rejected) == 2
    assert outcome.report.rejected[1].endswith("for this test")
    assert "given up" in str(outcome.report)
    plans = [c.proposals[0].decision.planned.plan for c in refused]
    assert plans[0] != outcome.proposals[0].decision.planned.plan


def test_a_fault_of_ours_costs_plans_and_never_the_step(monkeypatch, tmp_path, outcomes):
    def fail(*_):
        raise KeyError("for this test")

    monkeypatch.setattr(judges, "realise", fail)
    wanted = carried("plain", tmp_path)
    with pytest.warns(UserWarning, match="trains unchanged: internal error: KeyError"):
        assert same(carried("trace hook", tmp_path), wanted)
    (_, outcome), = outcomes
    assert not outcome.report.applied and 1 < len(outcome.report.rejected) <= 8


def test_plans_that_ask_for_less_follow_the_best_of_each_source(monkeypatch, tmp_path, outcomes):
    asked, real = [], decisions.plans_of

    def plans(*arguments, **options):
        asked.append((options["await_updates"], options["free_moves"]))
        return real(*arguments, **options)

    def refuse(candidate):
        if candidate.edits is not None:
            raise judges.Rejected(f"after {len(asked)}")

    monkeypatch.setattr(decisions, "plans_of", plans)
    monkeypatch.setattr(driver, "JUDGES", (*judges.JUDGES, refuse))
    with pytest.warns(UserWarning, match="trains unchanged: after 3"):
        carried("trace hook", tmp_path)
    assert asked == [(True, True), (False, True), (False, False)]
    (_, outcome), = outcomes
    assert not outcome.report.applied
    after = [line.rpartition("after ")[2] for line in outcome.report.rejected]
    assert after[:3] == ["1", "2", "3"] and set(after[3:]) == {"3"}
    asked.clear()
    with pytest.warns(UserWarning, match="trains unchanged: after 2"):
        carried("trace hook", tmp_path, free_moves=False)
    assert asked == [(True, False), (False, False)]


def test_where_a_plan_was_given_up_one_that_gains_nothing_is_passed_over(
        monkeypatch, tmp_path, outcomes):
    real, made = decisions.plans_of, []

    def plans(*arguments, **options):
        for planned in real(*arguments, **options):
            made.append(planned)
            yield planned if len(made) == 1 or not options["free_moves"] else dataclasses.replace(
                planned, peak_bytes=planned.baseline_bytes)

    def refuse_first(candidate):
        if len(made) == 1:
            raise judges.Rejected("for this test")

    monkeypatch.setattr(decisions, "plans_of", plans)
    monkeypatch.setattr(driver, "JUDGES", (refuse_first, *judges.JUDGES))
    assert same(carried("trace hook", tmp_path), carried("plain", tmp_path))
    (_, outcome), = outcomes
    assert outcome.report.applied and not outcome.plans[0][1].moves.deferred
    assert len(outcome.report.rejected) == 1


def test_the_table_in_the_docs_is_that_of_the_code():
    table = carrier_table()
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.written(text) == text, "run python docs/carrier_table.py"
    assert traced.Traced in table.CARRIERS
