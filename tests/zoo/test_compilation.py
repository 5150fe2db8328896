"""However a step is compiled, what the plan recomputes is really computed again.

Products are counted in what ran: in TensorFlow's partition graphs, or in the optimized HLO.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, training
from tests.support.training import heavy
from tests.zoo import alone, architectures
from tests.zoo.compilation import grappler_options
from tests.zoo.steps import batches, by_hand, chain, fit, mean_square, stack, weights
from tests.zoo.test_distribution import Kept
from tfckpt.capture import tf_adapter

OFF = [(), ("disable_meta_optimizer",), ("remapping",), ("arithmetic_optimization",),
       ("constant_folding",), ("dependency_optimization",), ("function_optimization",),
       ("layout_optimizer", "shape_optimization", "loop_optimization")]
EVERY_DAY = OFF[:2]


def _step(**function):
    """Return the plain and the rewritten step, and a batch."""
    made = []
    for wrap in (Kept(False), Kept(True)):
        ws = weights()
        made.append(by_hand(wrap, lambda x, ws=ws: mean_square(chain(x, ws)), ws, **function))
    return made[0].step, made[1].step, made[0].batches[0]


def _planned(step, batch) -> int:
    """Products that the plan computes a second time, in the trace."""
    graph = step.get_concrete_function(*batch).graph
    assert step.report.applied and step.report.recomputed_ops > 0
    return sum(heavy(op.type for op in training.copies_in(graph)).values())


def _ran(step, batch) -> int:
    return sum(heavy(node.op for node in tfckpt.verify.executed(step, *batch).nodes).values())


def _in_hlo(function, batch) -> int:
    text = function.experimental_get_compiler_ir(*batch)(stage="optimized_hlo")
    return sum(f" {op}(" in line for line in text.splitlines() for op in ("dot", "custom-call"))


@pytest.mark.parametrize("off", [pytest.param(
    names, id="+".join(names) or "none", marks=() if names in EVERY_DAY else pytest.mark.nightly)
    for names in OFF])
def test_with_parts_of_grappler_off(off):
    with grappler_options({name: name == "disable_meta_optimizer" for name in off}):
        plain, ours, batch = _step()
        planned = _planned(ours, batch)
        assert planned > 0 and _ran(ours, batch) - _ran(plain, batch) == planned


@pytest.mark.nightly
def test_autoclustering():
    """Copies stay outside of XLA's clusters, which would merge them with their originals."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.zoo.autoclustered"], capture_output=True, text=True,
        timeout=400, check=False, env={**os.environ, **alone.ENVIRONMENT})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["clusters"] > 0, "nothing was clustered"
    assert found["ran"] == found["planned"] > 0


def test_compiled():
    with process.without_determinism():
        plain, ours, batch = _step(jit_compile=True)
        planned = _planned(ours, batch)
        assert _in_hlo(ours, batch) - _in_hlo(plain, batch) == planned > 0


class Compiled(Kept):
    """Has XLA compile the step."""

    def function(self, fn, **options):
        return super().function(fn, jit_compile=True, **options)


def _compiled(build):
    with process.without_determinism():
        process.fresh()
        wrap = Compiled(True, xla_trials=0)
        training = build(wrap)
        return tfckpt.verify.compiled(wrap.wrapped, *training.batches[0])


@pytest.mark.parametrize("build", [architectures.causal_language_model,
                                   architectures.graph_convolution])
def test_what_is_looked_up_is_not_merged(build):
    """Small integers pass no guard, since XLA may know them, nor do copies of them: tables do."""
    found = _compiled(build)
    assert found.planned["GatherV2"] == found.copies["GatherV2"] > 0
    assert set(found.merged) <= {"StridedSlice"}  # of the small integers


def test_a_gradient_that_begins_with_padding_opens_no_guard():
    """XLA would know that the first element is zero, and that the guard does not hold."""
    found = _compiled(architectures.gated_mixture_of_experts)
    assert found.copies and not found.merged


def _called_compiled(step):
    return tf.function(lambda x, y: step(x, y), jit_compile=True)


@pytest.mark.parametrize("compiled_first", [
    False, pytest.param(True, marks=pytest.mark.nightly)])
def test_traced_for_one_and_then_called_by_the_other(compiled_first):
    with process.without_determinism():
        plain, ours, batch = _step()
        outer, plain_outer = _called_compiled(ours), _called_compiled(plain)
        for step in (outer, ours) if compiled_first else (ours, outer):
            step(*batch)
        assert len(ours.reports) == 2 and all(r.applied for r in ours.reports.values())
        assert _ran(ours, batch) - _ran(plain, batch) == _planned(ours, batch) > 0
        assert _in_hlo(outer, batch) > _in_hlo(plain_outer, batch)


@pytest.mark.nightly
@pytest.mark.parametrize("choice", [False, "auto"])
def test_keras_without_and_with_its_own_choice(choice):
    """On the CPU "auto" compiles nothing."""
    counts = []
    for rewrite in (False, True):
        process.fresh()
        made = fit(Kept(rewrite), stack(), batches(), jit_compile=choice)
        graphs = tf_adapter.record_executed_graphs(made.step)
        counts.append(sum(heavy(node.op for g in graphs for node in g.node).values()))
    assert counts[1] > counts[0] > 0


def test_eager_runs_are_left_alone():
    process.fresh()
    model = tfckpt.keras.checkpoint(stack())
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="runs eagerly"):
        model.fit(np.ones((8, 16), np.float32), np.ones((8, 5), np.float32), verbose=0)
    assert tfckpt.keras.report(model) is None
