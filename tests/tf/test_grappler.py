"""The graph that Grappler is given before a step runs is the one that it gets when the step runs.

The oracle is the function that TensorFlow instantiates for a call: both are compared term by term.
"""

from __future__ import annotations

import functools

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfckpt
from tests.support.gelu_steps import gelu_step
from tests.tf.test_optimised_body import _branch, _call, _loop, normalised, sums, training, weights
from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import question as grappler
from tfckpt.verify import same_arithmetic
from tfckpt.verify.arithmetic.same import certificate_of
from tfckpt.verify.arithmetic.terms import Computation, terms_of

X = tf.random.stateless_normal((64, 32), (1, 2)) * 0.1


def nested(ws):
    """Functions in functions, with state, that wait for each other."""
    calls = tf.Variable(0.0)

    @tf.function
    def inner(h, w):
        calls.assign_add(1.0)
        return tf.nn.gelu(h @ w) * 3.0 + calls

    outer = tf.function(lambda h: inner(tf.exp(h), ws[0]) + h + inner(h, ws[1]))
    return lambda x: outer(outer(x) * 2.0)


def loop_in_a_function(ws):
    made = tf.function(_loop(ws))
    return lambda x: made(x) + x + made(tf.sin(x))


def same_kernels(node):
    """oneDNN's kernels are chosen after Grappler, by what a machine has."""
    for prefix, kind in (("_MklNative", ""), ("_MklFused", "_Fused"), ("_Mkl", "")):
        if node.op.startswith(prefix):
            node.op = kind + node.op.removeprefix(prefix)
    if node.op.startswith("Fused") and "fused_ops" in node.attr:
        node.op = f"_{node.op}"
    return node


def spelled_otherwise(ws):
    """Terms of one sum on one device that is written in two ways: the runtime makes one of both."""
    def added(x):
        made = tf.sin(x) + x @ ws[0]
        with tf.device("/device:CPU:0"):
            return made + tf.exp(x)
    return added


def loop_in_branches_of_a_function(ws):
    """Nothing in the function of the gradient waits for its branches, which read a variable."""
    @tf.function
    def block(h):
        return tf.switch_case(tf.cast(tf.reduce_sum(h) > 0, tf.int32), [lambda: tf.cond(
            tf.reduce_mean(h) < 9.0, lambda: _loop(ws)(h), lambda: 3.0 * h), lambda: 2.0 * h])

    def made(x):
        with tf.GradientTape(persistent=True) as tape:
            y = block(x)
            z = tf.sin(y)
        return tape.gradient(y, ws[0]) @ tape.gradient(z, ws[0]) + tf.reduce_sum(z)
    return made


@pytest.mark.parametrize("make", [_loop, _branch, _call, nested, loop_in_a_function, normalised,
                                  sums, spelled_otherwise, loop_in_branches_of_a_function])
@pytest.mark.parametrize("size", [64, None])
def test_it_is_asked_about_what_will_run(make, size):
    ws = weights(3) if make is not sums else [*weights(2), tf.Variable(tf.ones((size or 1, 1)))]
    step = tf.function(training(ws[:1], make(ws))).get_concrete_function(
        tf.TensorSpec((size, 32), tf.float32))
    asked = grappler.question(
        step.graph, (), tf_adapter.shown_definition(step.graph)).answer(lower=True)
    ran = [node for graph in tf_adapter.instantiated(step, (X,), {}) for node in graph.node]
    function = functools.partial(tf_adapter.find_function, step.graph)
    names = [f"argument {i}" for i in range(len(step.graph.inputs))]
    found = certificate_of(*terms_of([
        Computation(list(map(same_kernels, nodes)), names, function)
        for nodes in (list(asked.node), ran)]))
    assert found.same, found


def test_it_is_asked_with_the_options_that_the_thread_has():
    """Not with those of the context, which a thread may call functions without."""
    step = tf.function(lambda x: tf.sin(x) + tf.cos(x) + tf.exp(x)).get_concrete_function(
        tf.TensorSpec((64, 32), tf.float32))

    def sums():
        return sum(node.op == "AddN" for node in grappler.question(step.graph).answer().node)

    ctx = context.context()
    before = ctx.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.arithmetic_optimization = rewriting.OFF
    assert sums() == 1
    ctx.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        assert sums() == 0
        asked = grappler.question(step.graph)
    finally:
        ctx.function_call_options = before
    assert sums() == 1 and not any(node.op == "AddN" for node in asked.answer().node)


def test_an_optimizer_that_rearranges_otherwise_is_noticed():
    """As another version of TensorFlow may: the plain step changes, and ours stays as it was."""
    step, x, _ = gelu_step(4, 64, 512)
    ours = tfckpt.checkpoint(tf.function(step))
    ours(x)
    assert ours.report.applied and same_arithmetic(ours, x).same
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        found = same_arithmetic(ours, x)
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True, **before})
    assert found.same is False and found.differences
    assert ours.report.identical is False
