"""Recursive checkpoints in TensorFlow: tensors are made three and four times, no bit changes."""

from __future__ import annotations

import collections
import re

import keras
import pytest
import tensorflow as tf

import tfckpt
from benchmarks.paper_tables.joint_graphs import with_backward
from tests.support import models, process, training
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.plan.candidates import recursive
from tfckpt.plan.evaluate import Candidate, Evaluator, proposed
from tfckpt.store.pools import Pools

LAYERS, BUDGET = 40, 0.16
"""The plain step keeps 40 equal outputs. With each made again once at most, about 2 sqrt(40) of
them are needed at a time; four runs of each need seven or eight."""


def chain() -> models.Trial:
    """40 layers of one shape; each output takes 512 KiB, each kernel 16 KiB."""
    process.fresh()
    inputs = h = keras.Input((64,))
    for _ in range(LAYERS):
        h = keras.layers.Dense(64, "tanh")(h)
    model = keras.Model(inputs, keras.layers.Dense(4)(h))
    return models.trial(model, keras.optimizers.SGD(0.01),
                        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                        models.numbers((2048, 64), 4, steps=3), gradients=False)


def products(ops: dict[str, int]) -> int:
    return training.heavy(collections.Counter(ops).elements())["MatMul"]


def test_a_budget_that_only_recursion_meets_changes_no_bit():
    made = chain()
    step = tf.function(made.step)
    wanted = training.train(step, made)
    plain = tfckpt.verify.executed(step, *made.batches[0])

    made = chain()
    step = tfckpt.checkpoint(tf.function(made.step), budget=BUDGET, solver="recursive")
    found = training.train(step, made)
    report = step.report
    assert report.applied and report.solver == "recursive", report.reason
    assert report.planned_peak_bytes <= BUDGET * report.baseline_peak_bytes
    training.assert_same_bits(found, wanted)

    ran = tfckpt.verify.executed(step, *made.batches[0])
    again = collections.Counter(match[1] for node in ran.nodes if (
        match := re.search(r"-tfckpt(\d)$", node.name)) and training.heavy([node.op]))
    assert sorted(again) == ["1", "2", "3"]
    assert again["1"] >= again["2"] >= again["3"] > 0
    assert len({node.name for node in ran.nodes}) == len(ran.nodes)
    assert products(ran.ops) - products(plain.ops) == again.total() == report.recomputed_ops
    measured = tfckpt.verify.measure_peak(step, *made.batches[0])
    assert measured <= 1.05 * BUDGET * report.baseline_peak_bytes


@pytest.mark.parametrize("solver", ["chen", "acg", "approx_dp"])
def test_no_keep_set_meets_it(solver):
    made = chain()
    step = tfckpt.checkpoint(tf.function(made.step), budget=BUDGET, solver=solver)
    with pytest.raises(InfeasibleBudgetError, match="budget=0.16 of the plain peak"):
        step(*made.batches[0])


def test_what_later_runs_keep_is_kept_with_a_search(tmp_path):
    graph = with_backward((None, [1] * 30, [1] * 30, [(v, v + 1) for v in range(29)]))
    evaluator = Evaluator(graph)
    found = [proposed(Candidate(frozenset()), proposal, "recursive")
             for proposal in recursive(evaluator, "time")]
    pools = Pools(tmp_path, "a step")
    pools.write(graph, "searched", 31, found)
    read = pools.read(graph, "searched", 31)
    assert [evaluator.price(c).schedule for c in read] == [
        evaluator.price(c).schedule for c in found]
    assert max(copy for c in read for _, copy in evaluator.price(c).schedule) == 3
