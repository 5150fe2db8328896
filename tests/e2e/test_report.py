"""Reports of a real step: the fate of each tensor, in words and on the page."""

from __future__ import annotations

import tensorflow as tf

import tfckpt
from tests.support.forward_ad import COMPOSED, two_layers
from tests.support.gelu_steps import gelu_step

ROWS, WIDTH = 4096, 64


def test_kept_recomputed_and_derivative_tensors_are_told_apart(tmp_path):
    """Plain: the backward reads x of mish, its softplus and tanh. Of these a derivative stays."""
    body, x = two_layers(COMPOSED["mish"], width=WIDTH, rows=ROWS)
    fates = {}
    for fad in (False, True):
        step = tfckpt.checkpoint(tf.function(body, autograph=False), fad=fad, solver="store_all")
        step(x)
        assert step.report.applied
        fates[fad] = [f for f in step.report.fates if f.bytes == ROWS * WIDTH * 4]
    assert {f.fate for f in fates[False]} == {"kept"} and len(fates[False]) >= 3
    derivative, = [f for f in fates[True] if f.fate == "derivative"]
    assert len(fates[True]) < len(fates[False])
    path = tmp_path / "report.html"
    step.report.html(str(path))
    assert path.read_text().count("<td>derivative</td>") == 1
    assert f"<td>{derivative.layer}</td><td>derivative</td>" in path.read_text()


def test_the_minimum_does_not_take_any_time_for_a_little_memory():
    reports = []
    for objective in ("time", "memory"):
        step, x, _ = gelu_step(8, 64, 1024)
        function = tfckpt.checkpoint(tf.function(step), objective=objective)
        function.get_concrete_function(x)
        reports.append(function.report)
    fast, small = reports
    assert small.planned_peak_bytes < fast.planned_peak_bytes < .4 * fast.baseline_peak_bytes
    assert fast.overhead < .7 and small.overhead > 2 * fast.overhead
