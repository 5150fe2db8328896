"""Another batch or budget of a step starts from what a search has found for it before."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support.gelu_steps import gelu_step
from tfckpt.plan import search
from tfckpt.plan.choosing import planned
from tfckpt.store import files

ROWS, WIDTH = 2048, 256


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("TFCKPT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def searches(monkeypatch):
    """The searches from now on, as sizes of their graphs."""
    found, explore = [], search.explore

    def counted(evaluator, *args):
        found.append(len(evaluator.graph.vertices))
        return explore(evaluator, *args)

    monkeypatch.setattr(search, "explore", counted)
    return found


def trained(rows=ROWS, budget=.5, layers=5):
    """Return the step's report, and its numbers after three calls."""
    step, _, variables = gelu_step(layers, WIDTH, ROWS, .06)
    x = tf.random.stateless_normal((rows, WIDTH), (2, 3))
    ours = tfckpt.checkpoint(tf.function(step), budget=budget)
    losses = [ours(x).numpy().tobytes() for _ in range(3)]
    return ours.report, losses + [v.numpy().tobytes() for v in variables]


def plain(rows=ROWS, layers=5):
    step, _, variables = gelu_step(layers, WIDTH, ROWS, .06)
    x, function = tf.random.stateless_normal((rows, WIDTH), (2, 3)), tf.function(step)
    losses = [function(x).numpy().tobytes() for _ in range(3)]
    return losses + [v.numpy().tobytes() for v in variables]


@pytest.mark.parametrize("rows", [ROWS // 2 + 100, 2 * ROWS])
def test_another_batch_is_not_searched(store, searches, rows, monkeypatch):
    """The plan is within its budget, and hardly slower than the one that a search finds."""
    first, _ = trained()
    assert first.applied and searches
    searches.clear()
    report, found = trained(rows)
    assert not searches and report.applied and not report.stored
    assert found == plain(rows)
    assert report.expected_bytes[1] <= report.allowed_bytes
    monkeypatch.setenv("TFCKPT_CACHE", "off")
    searched, _ = trained(rows)
    assert searches and report.overhead <= searched.overhead + .05


def test_another_budget_gets_the_plan_that_a_search_would_find(store, searches, monkeypatch):
    trained()
    searches.clear()
    kept, _ = trained(budget=.7)
    assert not searches
    monkeypatch.setenv("TFCKPT_CACHE", "off")
    searched, _ = trained(budget=.7)
    assert searches
    assert (kept.planned_peak_bytes, kept.overhead, kept.recomputed_ops, kept.solver) == (
        searched.planned_peak_bytes, searched.overhead, searched.recomputed_ops, searched.solver)
    assert kept.expected_bytes == searched.expected_bytes


def test_a_kept_plan_is_taken_without_simulating_the_plain_step(store, monkeypatch):
    first, _ = trained()
    monkeypatch.setattr(planned, "executed_peaks", None)
    report, found = trained()
    assert report.stored and report.applied and found == plain()
    assert (report.baseline_peak_bytes, report.planned_peak_bytes) == (
        first.baseline_peak_bytes, first.planned_peak_bytes)


def test_what_is_far_or_another_step_or_damaged_is_searched(store, searches):
    trained()
    for changed in ({"rows": 5 * ROWS}, {"layers": 4}):
        searches.clear()
        trained(**changed)
        assert searches
    searches.clear()
    for path in store.iterdir():
        head, body = path.read_bytes().split(b"\n", 1)
        if b'"search"' in head:
            key = path.stem
            files.write(store, key, {"made": "2026-01-01", "kind": "search"},
                        {"plain": 1, "candidates": [[1]]})
    report, _ = trained(budget=.6)
    assert searches and report.applied
    assert np.all([p.suffix == ".jsonl" for p in store.iterdir()])
