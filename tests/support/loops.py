"""Steps with loops, to be trained; loops in segments whether that saves anything or not."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.support import process
from tfckpt.driving import decisions as driving_decisions
from tfckpt.driving import proposals
from tfckpt.driving.parts import Proposal
from tfckpt.plan.loops import choice
from tfckpt.plan.loops.segments import Cut, may_keep_last, segmentable

SEGMENT = 4
"""Iterations of a segment."""


@pytest.fixture(params=[
    pytest.param(Cut(SEGMENT), id="all"), pytest.param(Cut(SEGMENT, last=2), id="but two"),
    pytest.param(Cut(SEGMENT, last=1, within=(3,)), id="inside", marks=pytest.mark.nightly)])
def forced(monkeypatch, request):
    """All loops that can be are recomputed in segments, whether that saves anything or not."""
    def decisions(graph, cost, plans, *, target, **options):
        cuts = {op.name: request.param if may_keep_last(op) else request.param._replace(last=0)
                for op in segmentable(graph)}
        return choice._decisions(graph, cost, cuts, plans=plans, target=target)

    monkeypatch.setattr(driving_decisions, "with_loops_in_segments", decisions)
    monkeypatch.setattr(proposals.Search, "_proposal",
                        lambda self, part, decision: Proposal(part, decision))
    return decisions


def train(make, wrap, inputs, steps=3, spec=None, results=lambda loss, gradients: [loss]):
    """Return the results of some steps with the state after them, as bytes, and the step.

    Args:
      make: returns the forward as a function of the input, and the weights.
      wrap: decorates the step.
      inputs: arrays; with each the step runs as often as `steps` says.
      steps: how often.
      spec: the step's input signature.
      results: what the step returns, from the loss and the gradients.
    """
    process.fresh()
    forward, weights = make()

    @wrap
    @tf.function(input_signature=spec)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(x)))
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return results(loss, gradients)

    found = [t.numpy().tobytes() for x in map(tf.constant, inputs)
             for _ in range(steps) for t in step(x)]
    return found + [w.numpy().tobytes() for w in weights], step
