"""Steps compiled by XLA: within rounding of the plain compiled step, and no copy is merged."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, training
from tests.support.models import MODELS

# stateful random ops draw other numbers in every compilation, so their step has no plain twin
COMPARED = ["residual", "transformer", "unet", "dense_gelu", "dense_relu", "conv_relu"]
_HEAVY = re.compile(r" (dot|convolution|custom-call)\(")


@pytest.fixture(autouse=True)
def _no_determinism():
    with process.without_determinism():
        yield


def heavy_in_hlo(step, batch) -> int:
    """Matrix products and convolutions in the optimized HLO (XLA turns one into the other)."""
    return len(_HEAVY.findall(step.experimental_get_compiler_ir(*batch)(stage="optimized_hlo")))


def build(name):
    process.fresh()
    made = MODELS[name]()
    return made, tf.function(made.step, jit_compile=True)


@pytest.mark.parametrize("name", COMPARED)
def test_within_rounding_and_not_merged(name):
    plain_trial, plain = build(name)
    wanted = training.train(plain, plain_trial)
    made, step = build(name)
    step = tfckpt.checkpoint(step)
    found = training.train(step, made)
    report = step.report
    assert report.applied and report.recomputed_ops > 0, report.reason
    assert training.relative_difference(found, wanted) <= 1e-5
    copies = training.copies_in(step.get_concrete_function(*made.batches[0]).graph)
    expected = sum(training.heavy([op.type for op in copies]).values())
    assert expected > 0
    before = heavy_in_hlo(plain, plain_trial.batches[0])
    assert heavy_in_hlo(step, made.batches[0]) - before == expected


def test_no_control_edges_only_data_guards_under_xla():
    made, step = build("dense_relu")
    step = tfckpt.checkpoint(step)
    step(*made.batches[0])
    operations = step.get_concrete_function(*made.batches[0]).graph.get_operations()
    added = [op for op in operations if "tfckpt" in op.name]
    assert not [op for op in added if op.type == "NoOp" or op.control_inputs]
    assert [op for op in added if op.type == "SelectV2"]
