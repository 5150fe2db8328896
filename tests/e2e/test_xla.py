"""Steps compiled by XLA: within rounding of the plain compiled step, and no copy is merged."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from benchmarks import network_steps, networks
from tests.support import process, training
from tests.support.models import MODELS
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.errors import VerificationError
from tfckpt.ir.target import Target
from tfckpt.request.options import make_options
from tfckpt.verify import compiled

# stateful random ops draw other numbers in every compilation, so their step has no plain twin
COMPARED = ["transformer", "dense_gelu", "dense_relu", "conv_relu",
            *(pytest.param(name, marks=pytest.mark.nightly) for name in ("residual", "unet"))]


@pytest.fixture(autouse=True)
def _no_determinism():
    with process.without_determinism():
        yield


def build(name):
    process.fresh()
    made = MODELS[name]()
    return made, tf.function(made.step, jit_compile=True)


def tolerance(name, wanted):
    """1e-5, or far below what XLA itself changes: some networks amplify rounding in three steps."""
    process.fresh()
    made = MODELS[name]()
    by_executor = training.train(tf.function(made.step), made)
    return max(1e-5, 0.02 * training.relative_difference(by_executor, wanted))


@pytest.mark.parametrize("name", COMPARED)
def test_within_rounding_and_not_merged(name):
    plain_trial, plain = build(name)
    wanted = training.train(plain, plain_trial)
    made, step = build(name)
    step = tfckpt.checkpoint(step, xla_trials=0)  # rewritten also where that does not pay
    found = training.train(step, made)
    report = step.report
    assert report.applied and report.recomputed_ops > 0, report.reason
    assert np.allclose(found.losses, wanted.losses, rtol=1e-5, atol=0)
    assert training.relative_difference(found, wanted) <= tolerance(name, wanted)
    copies = training.copies_in(step.get_concrete_function(*made.batches[0]).graph)
    expected = sum(training.heavy([op.type for op in copies]).values())
    assert expected > 0
    before = compiled(plain, *plain_trial.batches[0])
    after = compiled(step, *made.batches[0])
    assert after.heavy_count - before.heavy_count == expected
    assert not before.planned and after.copies
    assert set(after.merged) <= {"Cast"}  # of the labels, as many numbers as there are examples
    assert after.copy_count + after.folded_count + after.merged_count == after.planned_count
    if not (name == "conv_relu" and tf.__version__.startswith("2.18.")):  # layouts of its own
        assert after.temp_bytes < before.temp_bytes


def test_no_control_edges_only_data_guards_under_xla():
    made, step = build("dense_relu")
    step = tfckpt.checkpoint(step)
    step(*made.batches[0])
    operations = step.get_concrete_function(*made.batches[0]).graph.get_operations()
    added = [op for op in operations if "tfckpt" in op.name]
    assert not [op for op in added if op.type == "NoOp" or op.control_inputs]
    assert [op for op in added if op.type == "SelectV2"]
    assert step.report.deferred_ops == step.report.pins == 0


def test_regions_wait_for_what_the_backward_goes_on_from():
    """They do not wait for gradients of weights, which stay in memory until the updates."""
    made, step = build("dense_relu")
    graph = tfckpt.checkpoint(step).get_concrete_function(*made.batches[0]).graph
    guards = [op for op in graph.get_operations()
              if re.fullmatch(r"tfckpt/guard_\d+/reshape", op.name)]
    assert guards
    for op in guards:
        assert [r for r in op.inputs[0].consumers() if "gradient_tape" in r.name], op.inputs[0].name


def test_element_wise_gradients_see_the_forward_through_a_guard():
    """Else XLA recomputes kept tensors from those not kept, which then stay in memory.

    What the last layer made is read first, when no gradient is in memory that could open one.
    """
    made, step = build("conv_relu")
    graph = tfckpt.checkpoint(step, xla_trials=0).get_concrete_function(*made.batches[0]).graph
    relus = [op for op in graph.get_operations() if op.type == "ReluGrad"]
    read = [op.inputs[1].op for op in relus]
    assert relus
    assert all(op.type == "SelectV2" or "tfckpt" in op.name for op in read[1:]), read
    assert any(op.type == "SelectV2" for op in read)


def test_no_guard_stands_before_what_xla_must_know_when_it_compiles():
    """Masks of a size that is read off a shape: TensorFlow refuses a step that hides the size."""
    process.fresh()
    network = networks.decoder(batch=4, length=512, width=64, depth=4, vocabulary=64)
    batch = network_steps.batch_of(network)
    ours = tfckpt.checkpoint(network_steps.step_of(network), xla_trials=0)
    ours(*batch)
    assert ours.report.applied
    made = ours.get_concrete_function(*batch).graph.get_operations()
    assert [op for op in made if op.type == "Fill" and "-tfckpt" in op.name]


@pytest.mark.nightly
def test_a_plan_pays_where_xla_schedules_for_memory():
    """As on GPUs: there a plain step needs far less than by default on a CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.xla_guards", "--jobs=resnet50",
         "--flag_sets=memory scheduler"], capture_output=True, text=True, timeout=1800)
    assert not done.returncode, done.stderr[-2000:]
    ratio = {cells[3].strip(): float(cells[5]) for cells in
             (line.split("|") for line in done.stdout.splitlines()[2:])}
    assert ratio["data"] < 0.8 * ratio["plain"]


@pytest.mark.parametrize("guard, kept", [("control", 0), ("barrier", 6)])
def test_what_xla_merges_is_counted_as_merged(guard, kept):
    """Control edges mean nothing to XLA; it takes a barrier out before it merges the products."""
    plain_trial, plain = build("dense_relu")
    made, step = build("dense_relu")
    step = CheckpointedStep(step, make_options(target=Target(guard=guard)))
    found = compiled(step, *made.batches[0])
    assert (found.planned_count, found.copy_count, found.merged_count) == (9, kept, 9 - kept)
    assert found.merged["MatMul"] == found.planned["MatMul"] == 3
    before = compiled(plain, *plain_trial.batches[0])
    assert found.heavy_count == before.heavy_count
    assert found.temp_bytes == pytest.approx(before.temp_bytes, rel=0.01)


def test_bytes_of_buffers_that_can_be_counted_by_hand():
    """Product and tanh are both needed by the last product, whose result is no temporary."""
    side = 512

    @tf.function(jit_compile=True)
    def chain(x):
        product = x @ x
        return tf.tanh(product) @ product

    found = compiled(chain, tf.ones((side, side)))
    assert found.instructions["dot"] == found.heavy_count == 2
    assert 2 * side * side * 4 <= found.temp_bytes < 2.1 * side * side * 4


def test_a_step_for_the_executor_was_not_compiled():
    with pytest.raises(VerificationError, match="jit_compile=True"):
        compiled(tf.function(tf.tanh), tf.ones(3))
