"""Derivatives kept and tensors recomputed in one step: the planner on a graph with alternatives."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.support.forward_ad import COMPOSED, tower, worst
from tfckpt.capture import tf_adapter
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.storage import roots
from tfckpt.fad.alternatives import find_alternatives
from tfckpt.fad.transform import take
from tfckpt.ir.edits import check_edits
from tfckpt.plan.planner import plan_step
from tfckpt.rewrite.appliers.funcgraph import apply
from tfckpt.rewrite.build import build_edits
from tfckpt.verify.memory import measure_peak

ROWS, WIDTH, LAYERS = 2048, 256, 8
UNIT = ROWS * WIDTH * 4
_MARK = "_planned_test_mark"


def rewritten(body, fad: bool, recompute: bool):
    found: dict = {}

    def hook(func_graph):
        if getattr(func_graph, _MARK, None) is not found:
            return
        delattr(func_graph, _MARK)
        graph = capture(func_graph)
        offers = find_alternatives(graph, roots(graph)).alternatives if fad else ()
        after, edits = take(graph, [a for a in offers if a.saves > 0])
        if recompute:
            cost = build_cost_graph(after)
            found["planned"] = plan_step(cost)
            more = build_edits(after, cost, found["planned"].plan)
            check_edits(after, more)
            edits = edits.then(more)
        check_edits(graph, edits)
        apply(func_graph, edits)

    def marked(x):
        setattr(tf_adapter.tracing_graph(), _MARK, found)
        return body(x)

    tf_adapter.install_trace_hook(hook)
    return tf.function(marked, autograph=False), found


@pytest.mark.parametrize("name, factor", [("mish", 1.35), ("gelu_tanh", 1.35)])
def test_both_together(name, factor):
    """Hardly more than either alone: a planner has to weigh them (`tests/pure`), here all regions
    are taken. Measured peaks scatter by a tensor or two of ten."""
    step, x = tower(COMPOSED[name], LAYERS, rows=ROWS, width=WIDTH)
    wanted = tf.function(step, autograph=False)(x)
    peaks = {}
    for fad, recompute in ((False, False), (True, False), (False, True), (True, True)):
        function, found = rewritten(step, fad, recompute)
        assert worst(function(x), wanted) <= 1e-6
        peaks[fad, recompute] = measure_peak(function, x, repeats=3) / UNIT
        planned = found.get("planned")
        print(name, fad, recompute, f"{peaks[fad, recompute]:.2f}",
              planned and f"{planned.peak_bytes / UNIT:.2f} time {planned.time:.5f} "
                          f"of {planned.baseline.time:.5f}")
    assert peaks[True, False] < peaks[False, False]
    assert peaks[True, True] <= factor * min(peaks[True, False], peaks[False, True])
