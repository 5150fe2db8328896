"""Full-size steps: traced, planned and rewritten, not run."""

from __future__ import annotations

import warnings

import pytest
import tensorflow as tf

import tfckpt
from benchmarks import jobs
from tests.support import training

pytestmark = pytest.mark.nightly


def test_resnet152_is_rewritten():
    """Its first layer's update is too small to be a vertex; see `tests/tf/test_rewrite.py`."""
    job = jobs.resnet152(batch=16, size=128)
    step = tfckpt.checkpoint(tf.function(job.train_step))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as that it trains unchanged
        graph = step.get_concrete_function(job.x, job.y).graph
    report = step.report
    assert report.applied and not report.reason
    assert report.recomputed_ops > 100
    assert len(training.copies_in(graph)) >= report.recomputed_ops
    assert report.planned_peak_bytes < report.baseline_peak_bytes / 2
