"""What is live at the peak of a step that XLA compiles is named by the step's operations."""

from __future__ import annotations

import tensorflow as tf

import tfckpt
from tests.support import models, process

ARGUMENT = "variables and inputs"


def test_every_large_buffer_is_of_a_layer():
    """XLA names neither copies to other layouts nor what it fuses them to."""
    process.fresh()
    made = models.residual()
    function = tf.function(made.step, jit_compile=True)
    step = tfckpt.checkpoint(function, budget=1.0)
    step.get_concrete_function(*made.batches[0])
    graph = function.get_concrete_function(*made.batches[0]).graph
    shown = {step.report.names.shown(op.name) for op in graph.get_operations()}
    for curve in step.report.curves:
        assert curve.by_xla
        large = [held for held in curve.at_peak if 100 * held.bytes > curve.peak_bytes]
        assert any(held.layer != ARGUMENT for held in large)
        for held in large:
            assert held.layer == ARGUMENT or held.op.partition("-tfckpt")[0] in shown, held
