"""Which budget applies to a device; `tests/zoo/test_distribution.py` tests plans against it."""

from __future__ import annotations

import pickle

import pytest
import tensorflow as tf

import tfckpt
from tfckpt.driving.proposals import device_parts_of
from tfckpt.ir.graph import Graph
from tfckpt.ir.target import Target
from tfckpt.request.budget import Budget
from tfckpt.request.device_budgets import Budgets, parse_budgets
from tfckpt.request.options import make_options

WORKER = "/job:worker/replica:0/task:1/device:GPU:1"
HALF, MINIMUM, SIZE = Budget(fraction=0.5), Budget(), Budget(device_bytes=10**9)


@pytest.mark.parametrize(("given", "device", "wanted"), [
    ("min", "", MINIMUM), (0.5, WORKER, HALF),
    ({"CPU:0": 0.5}, "", HALF), ({"/device:CPU:0": 0.5}, "/CPU:0", HALF),
    ({"cpu": 0.5}, "/job:localhost/replica:0/task:0/device:CPU:3", HALF),
    ({"/job:localhost/replica:0/task:0/device:CPU:0": 0.5}, "", HALF),
    ({"GPU:1": 0.5, "*": "min"}, WORKER, HALF), ({"GPU:0": 0.5, "*": "1GB"}, WORKER, SIZE),
    ({"/job:worker/task:1": 0.5, "*": "min"}, WORKER, HALF),
    ({"/job:worker/task:0": 0.5, "*": "min"}, WORKER, MINIMUM),
    ({"GPU": "min", "GPU:1": 0.5, "/job:worker/task:1/GPU:1": "1GB"}, WORKER, SIZE),
    ({"/job:worker/task:1/GPU:1": "1GB", "GPU": "min", "GPU:1": 0.5}, WORKER, SIZE),
    ({"*": 0.5}, WORKER, HALF), ({"CPU": 0.5}, "/CPU", HALF),
])
def test_the_key_that_says_most_counts(given, device, wanted):
    assert parse_budgets(given).of(device) == wanted


@pytest.mark.parametrize(("given", "said"), [
    ({}, "names no device"), ({"XPU:0": 0.5}, "'XPU:0', which is no device"),
    ({"": 0.5}, "which is no device"), ({0: 0.5}, "0, which is no device"),
    ({"CPU:x": 0.5}, "'CPU:x', which is no device"),
    ({"CPU:0": 0.5, "/device:CPU:0": 0.6}, "twice, as 'CPU:0' and '/device:CPU:0'"),
    ({"CPU:0": "lots"}, "budget='lots' cannot be read"), ({"CPU:0": {}}, "is not a budget"),
])
def test_malformed_mappings(given, said):
    with pytest.raises(tfckpt.PlanError) as caught:
        tfckpt.checkpoint(tf.function(lambda: None), budget=given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_device_without_a_budget_is_named():
    with pytest.raises(tfckpt.PlanError, match=r"no entry for /job:worker/task:1/device:GPU:1,"):
        parse_budgets({"GPU:0": 0.5}).of(WORKER)
    with pytest.raises(tfckpt.PlanError, match=r"no entry for CPU:1,"):
        parse_budgets({"CPU:0": 0.5}).of("/device:CPU:1")


def test_a_device_that_is_not_there_is_named():
    there = parse_budgets({"CPU:0": "min", WORKER: 0.5})
    there.check(["", WORKER])
    with pytest.raises(tfckpt.PlanError, match=r"no such device; there are CPU:0"):
        there.check([""])
    parse_budgets(0.5).check([])


@pytest.mark.parametrize(("compiled", "device", "whole"), [
    (True, "GPU", True), (False, "GPU", False), (True, "CPU", False)])
@pytest.mark.parametrize("budget", ["device", "1GB"])
def test_xla_takes_what_is_free_on_a_gpu_in_one_piece(compiled, device, whole, budget):
    """Variables and batches lie between what is free: a step of all of it did not fit an H100."""
    graph = Graph("step", (), (), ())
    part, = device_parts_of(graph, make_options(budget), lambda name: Target(
        device=device).compiled(compiled))
    assert part.budget.in_one_piece is (whole and budget == "device")
    free = part.budget.free_bytes
    allowed = part.budget.dynamic(10**12, 0)
    assert allowed == (10**9 if budget == "1GB" else free if not whole else int(31 / 32 * free))


def test_options_are_frozen_and_pickled():
    given = {"CPU:0": "1GB", "*": 0.5}
    options = make_options(given)
    given["CPU:0"] = "2GB"
    assert options.budgets.of("CPU:0") == SIZE
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options.budgets) == hash(Budgets((("CPU:0", SIZE), ("*", HALF))))


def test_a_step_of_one_device():
    w = tf.Variable(tf.ones((64, 64)))

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for _ in range(6):
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean(h)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    x = tf.ones((512, 64))
    ours = tfckpt.checkpoint(tf.function(step), budget={"CPU:0": 0.9})
    ours.get_concrete_function(x)
    assert ours.report.applied
    assert ours.report.planned_peak_bytes <= 0.9 * ours.report.baseline_peak_bytes
    for budget, said in (({"CPU:7": 0.9}, "'CPU:7', and there is no such device"),
                         ({"CPU:0": 1}, "cannot be met; the smallest feasible one")):
        with pytest.raises(tfckpt.PlanError, match=said):
            tfckpt.checkpoint(tf.function(step), budget=budget).get_concrete_function(x)
