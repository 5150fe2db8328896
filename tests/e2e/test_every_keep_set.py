"""No keep set changes a bit of the results: small steps under every keep set, Grappler on.

A planner picks one keep set; here each is rewritten and run. So the tests also cover choices that
the planner does not make today but that change how TensorFlow rearranges or merges operations.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.support import process
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.build import build_cost_graph
from tfckpt.ir.costgraph import FORWARD
from tfckpt.ir.schedule import Moves, Wait
from tfckpt.plan.keep_sets import keep_schedule
from tfckpt.rewrite.appliers.graphdef import apply_to_graph_def
from tfckpt.rewrite.build import build_edits
from tfckpt.rewrite.passes.operand_order import keep_operand_order
from tfckpt.rewrite.plain_step import LiveStep
from tfckpt.simulate.check import check_plan
from tfckpt.simulate.fences import fenced
from tfckpt.simulate.order import base_order

ROWS, WIDTH = 32, 48
MOST = 48
"""Keep sets tried of one body; where there are more, evenly spread ones."""

DELAYED_DAILY = ("scaled product", "sum of sums", "silu")


def _sum(one, two, three):
    return (one + two) + three


BODIES = {
    "scaled product": lambda h, b: (h * tf.math.erfc(h)) * 1.7,
    "scaled product twice": lambda h, b: 0.3 * ((h * tf.sin(h)) * 1.7),
    "scaled sum": lambda h, b: 1.7 * (0.3 * h + tf.sin(h)),
    "sum of sums": lambda h, b: 1.3 * ((h + tf.sin(h)) + 0.1),
    "sum of products": lambda h, b: h * tf.sin(b) + tf.cos(h) * tf.sin(b),
    "constants": lambda h, b: 3.0 * (2.0 + (0.7 + h)) * 0.1,
    "quotients": lambda h, b: h / tf.sqrt(tf.square(h) + 0.3) / 1.3,
    "normalised": lambda h, b: (h - tf.reduce_mean(h, -1, keepdims=True)) * tf.math.rsqrt(
        tf.math.reduce_variance(h, -1, keepdims=True) + 1e-3) * (1.0 + b),
    "unary chain": lambda h, b: tf.exp(-tf.square(tf.tanh(h))),
    "log of one plus": lambda h, b: tf.math.log(1.0 + tf.exp(h)),
    "powers": lambda h, b: tf.pow(h, 3.0) * 0.044715 + tf.pow(h, 2.0),
    "cube between": lambda h, b: _cube(tf.sin(h, name="a/Sin")),
    "cube after": lambda h, b: _cube(tf.sin(h, name="h/Sin")),
    "roots": lambda h, b: tf.pow(tf.square(h) + 0.3, 0.5) * 1.3 + tf.pow(tf.square(h) + 0.2, -0.5),
    "quotient of a root": lambda h, b: h / tf.pow(tf.square(h) + 0.3, 0.5),
    "gelu by tanh": lambda h, b: tf.nn.gelu(h + b, approximate=True),
    "reciprocals": lambda h, b: 1.0 / (1.5 + tf.sin(h)) + tf.math.reciprocal(1.5 + tf.sin(h)) * b,
    "both roots": lambda h, b: (lambda s: tf.sqrt(s) * 0.3 + h * tf.math.rsqrt(s))(
        tf.square(h) + 0.4),
    "transposed twice": lambda h, b: tf.transpose(tf.sin(tf.transpose(h)) * 0.7) + h,
    "parts": lambda h, b: tf.concat(
        [tf.sin(h[:, :16]), tf.tanh(h[:, 16:]) * 0.3], 1) * (1.0 - h),
    "softmaxes": lambda h, b: tf.nn.softmax(h * 3.0) * tf.nn.log_softmax(h * 3.0),
    "statistics": lambda h, b: (lambda m, v: (h - m) / tf.sqrt(v + 1e-3) * b + m)(
        *tf.nn.moments(h, 0)),
    "halves": lambda h, b: tf.cast(tf.tanh(tf.cast(h, tf.float16)) * 1.3, tf.float32) * 0.7,
    "squares": lambda h, b: h * h + tf.square(h) * 0.3 - tf.pow(h, 2.0) * b,
    "one minus": lambda h, b: (1.0 - tf.sigmoid(h)) * tf.sigmoid(h) - (1.0 - h),
    "differences": lambda h, b: tf.square(tf.sin(h) - b) + tf.math.squared_difference(h, b),
    "swish": lambda h, b: h * tf.sigmoid(h),
    "swish of keras": lambda h, b: tf.math.softplus(tf.nn.silu(h)),
    "swish returned": lambda h, b: tf.nn.silu(-h),
    "product with itself": lambda h, b: h * h / 0.3 * 1.0,
    "negated": lambda h, b: 1.0 - (-((1.0 - h) * 1.0)),
    "biased gelu": lambda h, b: tf.nn.gelu(tf.nn.bias_add(h, b)),
    "biased tanh": lambda h, b: tf.tanh(tf.nn.bias_add(h, b)),
    "biased elu": lambda h, b: tf.nn.elu(tf.nn.bias_add(h, b)) * 0.7,
    "biased sigmoid": lambda h, b: tf.sigmoid(tf.nn.bias_add(h, b)),
    "sum of three": lambda h, b: tf.add_n([tf.cos(h), tf.sin(h), h]),
    "sum of three, two read late": lambda h, b: _sum(tf.tanh(h), tf.sigmoid(h * 1.3), tf.abs(h)),
    "sum of four": lambda h, b: _sum(tf.tanh(h), tf.abs(h), tf.sigmoid(h * 1.3) + tf.sin(h)),
    "silu": lambda h, b: tf.nn.silu(h),
    "biased relu": lambda h, b: tf.nn.relu(tf.nn.bias_add(h, b)) * 0.7,
    "masked": lambda h, b: tf.where(h > 0.1, (h * tf.math.erfc(h)) * 1.25, 0.0),
}

NIGHTLY = ("both roots", "differences", "halves", "one minus", "parts", "reciprocals", "softmaxes",
           "squares", "statistics", "transposed twice")
"""Bodies that were tried in search of one that fails, and never did."""


def _cube(x):
    """Grappler sorts x and x^2 by name, of which it has several for the latter."""
    return tf.pow(x, 3.0) * 0.044715 + x


def traced(body):
    """Return a step that returns its loss and gradients, as a graph that takes x, v, w and b."""
    def step(x, v, w, b):
        with tf.GradientTape() as tape:
            tape.watch([v, w, b])
            h = tf.matmul(tf.tanh(tf.matmul(body(tf.matmul(x, v), b), w)), v)
            loss = tf.reduce_mean(tf.square(body(h, b)))
        return loss, *tape.gradient(loss, [v, w, b], unconnected_gradients="zero")

    shapes = [(ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)]
    return tf.function(step, autograph=False).get_concrete_function(
        *[tf.TensorSpec(s, tf.float32, name=f"in{i}") for i, s in enumerate(shapes)]).graph


def run(definition, graph, values):
    """Import a definition into a function of its own and call it."""
    def called(*args):
        return tf.graph_util.import_graph_def(
            definition, {t.op.name: a for t, a in zip(graph.inputs, args, strict=True)},
            [t.name for t in graph.outputs], name="")

    return [r.numpy() for r in tf.function(called, autograph=False)(*values)]


def keep_sets(cost):
    """Sets of the forward's storages, evenly spread if there are too many."""
    free = [i for i, s in enumerate(cost.storages)
            if cost.vertices[s.producer].region == FORWARD
            and cost.vertices[s.producer].recomputable]
    total = 2 ** len(free)
    chosen = range(total) if total <= MOST else sorted(
        {round(i * (total - 1) / (MOST - 1)) for i in range(MOST)})
    bits = [list(itertools.compress(free, map(int, f"{n:0{len(free)}b}"))) for n in chosen]
    return [frozenset(entry) for entry in bits]


def waits_of_copies(cost, schedule):
    """Return for each copy a wait for the last step before it that is no part of a later kernel."""
    waits, before = [], None
    for step in schedule:
        if step[1]:
            waits.append(Wait(step, before))
        if not cost.vertices[step[0]].fusible:
            before = step
    return tuple(waits)


def _cases():
    for name in BODIES:
        marks = (pytest.mark.nightly,) if name in NIGHTLY else ()
        yield pytest.param(name, False, id=name, marks=marks)
        if name not in DELAYED_DAILY:
            marks = (*marks, pytest.mark.nightly)
        yield pytest.param(name, True, id=f"{name}, delayed", marks=marks)


@pytest.mark.parametrize(("name", "wait"), list(_cases()))
def test_no_keep_set_changes_a_bit(name, wait):
    process.fresh()
    live = traced(BODIES[name])
    graph = capture(live)
    cost = build_cost_graph(graph)
    made = np.random.default_rng(7)
    values = [tf.constant(made.standard_normal(t.shape).astype(np.float32) * 0.3)
              for t in live.inputs]
    definition = live.as_graph_def()
    wanted = run(definition, live, values)
    assert all(np.isfinite(w).all() for w in wanted)
    tried = 0
    for keep in keep_sets(cost):
        schedule = keep_schedule(cost, keep, base_order(cost, Moves()))
        plan = fenced(cost, schedule)
        if wait:
            plan = dataclasses.replace(plan, waits=waits_of_copies(cost, schedule))
        check_plan(cost, plan)
        edits = keep_operand_order(build_edits(graph, cost, plan), graph, LiveStep(live))
        tried += bool(edits.added)
        found = run(apply_to_graph_def(definition, edits), live, values)
        names = sorted(cost.storages[i].name for i in keep)
        for which, (f, w) in enumerate(zip(found, wanted, strict=True)):
            assert f.tobytes() == w.tobytes(), f"result {which} differs, kept: {names}"
    assert tried > 2
