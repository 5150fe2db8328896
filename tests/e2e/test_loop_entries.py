"""Loops whose gradients compute entries again train as plain ones, in every bit, in less memory."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import loops
from tfckpt.driving import decisions as driving_decisions
from tfckpt.driving import proposals
from tfckpt.driving.parts import Proposal
from tfckpt.plan.loops import choice
from tfckpt.plan.loops.entries import choices_of_entries
from tfckpt.plan.loops.segments import PREFIX, Cut
from tfckpt.verify.arithmetic import loop_entries

LAYERS, BATCH, LENGTH, WIDTH = 6, 4, 32, 32


def _random(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype("f")


def _variable(*shape, seed=1):
    return tf.Variable(0.1 * _random(*shape, seed=seed))


def layers():
    """Transformer blocks in a loop, which takes each one's weights from those of all."""
    weights = [_variable(LAYERS, WIDTH, 3 * WIDTH), _variable(LAYERS, WIDTH, WIDTH, seed=2),
               _variable(LAYERS, WIDTH, 4 * WIDTH, seed=3),
               _variable(LAYERS, 4 * WIDTH, WIDTH, seed=4)]

    def block(i, h):
        q, k, v = tf.split(h @ weights[0][i], 3, -1)
        h = h + tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.1) @ v @ weights[1][i]
        return i + 1, h + tf.nn.gelu(h @ weights[2][i]) @ weights[3][i]

    return lambda x: tf.while_loop(lambda i, h: i < LAYERS, block, (0, x),
                                   maximum_iterations=LAYERS)[1], weights


def runge_kutta():
    """A neural differential equation, by the classical method."""
    weight, bias = _variable(WIDTH, WIDTH), _variable(WIDTH, seed=2)

    def slope(h):
        return tf.tanh(h @ weight + bias)

    def iteration(i, h):
        first = slope(h)
        second = slope(h + 0.05 * first)
        third = slope(h + 0.05 * second)
        return i + 1, h + (first + 2 * second + 2 * third + slope(h + 0.1 * third)) / 60

    return lambda x: tf.while_loop(lambda i, h: i < 20, iteration, (0, x),
                                   maximum_iterations=20)[1], [weight, bias]


def convolutions():
    """Normalised convolutions in a loop."""
    weights = [_variable(LAYERS, 3, 3, 4, 4), _variable(LAYERS, 4, seed=2)]

    def layer(i, h):
        made = tf.nn.conv2d(h, weights[0][i], 1, "SAME")
        mean, variance = tf.nn.moments(made, [0, 1, 2])
        return i + 1, h + tf.nn.silu((made - mean) * tf.math.rsqrt(variance + 0.1) + weights[1][i])

    def forward(x):
        image = tf.reshape(x, (BATCH, LENGTH // 2, WIDTH // 2, 4))
        return tf.while_loop(lambda i, h: i < LAYERS, layer, (0, image),
                             maximum_iterations=LAYERS)[1]
    return forward, weights


def _recurrent(layer):
    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((LENGTH, WIDTH)), layer])
        return (lambda x: model(x, training=True)), [v.value for v in model.trainable_variables]
    return make


MADE = {"layers": layers, "runge_kutta": runge_kutta, "convolutions": convolutions,
        "gru": lambda: _recurrent(keras.layers.GRU(WIDTH, use_cudnn=False))(),
        "lstm": lambda: _recurrent(keras.layers.LSTM(WIDTH, use_cudnn=False, dropout=0.3))()}


@pytest.fixture
def forced(monkeypatch):
    """Loops compute all entries again that they can, whether that is best or not."""
    def decisions(graph, cost, plans, *, target, allowed, **options):
        chosen = choices_of_entries(graph, target.rates)
        cuts = {name: Cut(0, entries=slots) for name, slots in chosen[-1].items()} if chosen else {}
        if cuts and allowed(cuts.values()):
            yield from choice._decisions(graph, cost, cuts, plans=plans, target=target)

    monkeypatch.setattr(driving_decisions, "with_loops_in_segments", decisions)
    monkeypatch.setattr(proposals.Search, "_proposal",
                        lambda self, part, decision: Proposal(part, decision))


def _train(make, wrap, spec=None, inputs=None):
    """Return the results of some steps with the state after them, and the step."""
    given = [_random(BATCH, LENGTH, WIDTH, seed=9)] if inputs is None else inputs
    return loops.train(make, wrap, given, spec=spec)


@pytest.mark.parametrize("name", MADE)
def test_in_every_bit(name, forced):
    wanted, _ = _train(MADE[name], lambda f: f)
    found, step = _train(MADE[name], tfckpt.checkpoint(exact=True))
    assert step.report.applied and step.report.again, str(step.report)
    assert found == wanted
    assert step.report.identical, step.report.certificate
    assert "again in loops" in str(step.report)
    certificate = tfckpt.verify.same_arithmetic(
        step, tf.constant(_random(BATCH, LENGTH, WIDTH, seed=9)))
    assert certificate.same, certificate
    assert any(PREFIX in node.name for node in tfckpt.verify.executed(
        step, tf.constant(_random(BATCH, LENGTH, WIDTH, seed=9))).nodes)


def test_a_batch_that_the_trace_leaves_open(forced):
    spec = [tf.TensorSpec((None, LENGTH, WIDTH))]
    inputs = [_random(BATCH, LENGTH, WIDTH), _random(3, LENGTH, WIDTH)]
    wanted, _ = _train(layers, lambda f: f, spec, inputs)
    found, step = _train(layers, tfckpt.checkpoint(batch_size=BATCH), spec, inputs)
    assert step.report.applied and step.report.again, str(step.report)
    assert found == wanted


def _measured(make, budget):
    x = tf.constant(_random(64, LENGTH, WIDTH, seed=9))
    peaks, bits = [], []
    for wrap in (lambda f: f, tfckpt.checkpoint(budget=budget)):
        found, step = _train(make, wrap, inputs=[x.numpy()])
        peaks.append(tfckpt.verify.measure_peak(step, x, repeats=3))
        bits.append(found)
    assert bits[0] == bits[1]
    return step.report, *peaks


def test_layers_in_a_loop_take_a_third():
    """Without an iteration of the forward that runs twice."""
    report, plain, ours = _measured(layers, "min")
    assert report.again, str(report)
    assert ours < 0.4 * plain and report.overhead < 0.2, (ours / plain, report.overhead)


def test_a_budget_is_met_by_entries_that_cost_little():
    report, plain, ours = _measured(runge_kutta, 0.3)
    assert report.again and not report.segments, str(report)
    assert ours < 0.3 * plain * 1.05


def test_where_that_is_not_the_same_loops_are_cut_into_segments(monkeypatch):
    compared = loop_entries._copied_otherwise
    monkeypatch.setattr(loop_entries, "_copied_otherwise",
                        lambda *given: ["gradient", *compared(*given)])
    report, plain, ours = _measured(layers, "min")
    assert report.applied and report.segments and not report.again, str(report)
    assert ours < 0.5 * plain


def test_an_op_that_is_computed_otherwise_is_found(monkeypatch, forced):
    """A copy of another op in the place of one: the certificate names it."""
    from tfckpt.rewrite.loops import entries

    copied = entries._Copies._copy

    def other(self, source):
        copied(self, source)
        if source.op == "Tanh":
            node = next(n for n in self.body.node_def if n.name == self.made[source.name])
            node.op = "Sigmoid"
            self.made[source.name] = node.name

    monkeypatch.setattr(entries._Copies, "_copy", other)
    with pytest.warns(UserWarning, match="not known to compute in the same arithmetic: tfckpt_ag"):
        _, step = _train(runge_kutta, tfckpt.checkpoint)
    assert not step.report.applied
