"""Branches hand out what their own gradients read, and nothing else that takes memory."""

from __future__ import annotations

import sys

import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.capture import tf_adapter
from tfckpt.capture.loops import branch_values

WIDTH, BATCH, BLOCKS = 64, 256, 4


def _step(branch):
    weights = [tf.Variable(0.1 * tf.random.stateless_normal((WIDTH, WIDTH), (n, 9)))
               for n in range(2 * BLOCKS)]

    def step(x, which):
        with tf.GradientTape() as tape:
            h = x
            for n in range(BLOCKS):
                h = h + branch(h, which, *weights[2 * n:2 * n + 2])
            loss = tf.reduce_mean(tf.square(h))
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step, weights


def cases(h, which, a, b):
    return tf.switch_case(which, [lambda: tf.nn.gelu(h @ a) @ b,
                                  lambda: tf.nn.softplus(tf.sin(h @ b)) @ a,
                                  lambda: tf.tanh(tf.exp(-tf.abs(h @ b))) * tf.cos(h @ a)])


def conditions(h, which, a, b):
    return tf.cond(which > 0, lambda: tf.nn.gelu(h @ a) @ b,
                   lambda: tf.nn.softplus(tf.sin(h @ b)) @ a)


def within(h, which, a, b):
    return tf.cond(which > 0, lambda: cases(h, which, a, b), lambda: tf.nn.gelu(h @ b) @ a)


def scaled(h, which, a, b):
    """What is scaled has another reader in what it is handed out through alone."""
    return tf.switch_case(which, [lambda: tf.nn.gelu(h @ a) @ b,
                                  lambda: 0.3 * tf.nn.softplus(h @ b),
                                  lambda: 0.3 * (tf.cos(h @ a) * tf.sin(h))])


def _handed_out(function):
    """Return the bytes in each result of a branch, by its number, where it is handed out.

    Where a variable was read or a number made it does not count, and a branch within hands out
    what is counted there.
    """
    nodes = {node.name: node for node in function.node_def}
    found = set()
    for n, output in enumerate(function.signature.output_arg):
        node = nodes.get(function.ret[output.name].partition(":")[0])
        if node is not None and node.op == "OptionalFromValue":
            of = nodes.get(node.input[0].partition(":")[0])
            if of is not None and of.op not in ("ReadVariableOp", "Const", "If", "Case"):
                found.add(n)
    return found


def _read(function):
    """Return which arguments of a branch of a gradient it opens and uses, by number."""
    nodes = {node.name: node for node in function.node_def}
    needed, pending = set(), [text.partition(":")[0] for text in function.ret.values()]
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending += [text.lstrip("^").partition(":")[0]
                        for text in (nodes[name].input if name in nodes else ())]
    return {n for n, argument in enumerate(function.signature.input_arg)
            if argument.name in needed}


def _readers(tensor):
    """Return the branches that read a tensor, and which of their arguments it is."""
    found = []
    for reader in tensor.consumers():
        for n, read in enumerate(reader.inputs):
            if read is tensor:
                found += (_readers(reader.outputs[n]) if reader.type.startswith("Identity")
                          else [(reader, n - 1)])
    return found


def _shared(graph):
    """Return (branches, number, slot) for what a branch hands out to gradients of others alone."""
    found = []
    for op in graph.get_operations():
        if op.type not in ("If", "Case"):
            continue
        called = [tf_adapter.find_function(graph, name) for name in tf_adapter.called_functions(op)]
        for slot, tensor in enumerate(op.outputs):
            readers = _readers(tensor) if tensor.dtype == tf.variant else []
            used = [any(place in _read(tf_adapter.find_function(
                graph, tf_adapter.called_functions(reader)[n])) for reader, place in readers)
                for n in range(len(called))]
            found += [(op.name, n, slot) for n, function in enumerate(called)
                      if any(used) and not used[n] and slot in _handed_out(function)]
    return found


def _trained(branch, wrap):
    process.fresh()
    body, weights = _step(branch)
    step = wrap(tf.function(body))
    x = tf.random.stateless_normal((BATCH, WIDTH), (7, 7))
    found = [step(x, tf.constant(which)).numpy().tobytes() for which in (0, 1, 2, 1)]
    spec = (tf.TensorSpec(x.shape), tf.TensorSpec((), tf.int32))
    return [*found, *(weight.numpy().tobytes() for weight in weights)], (
        step.get_concrete_function(*spec).graph), step


def _is_handed_out(branch):
    wanted, plain, _ = _trained(branch, lambda step: step)
    found, graph, step = _trained(branch, tfckpt.checkpoint)
    assert found == wanted and step.report.applied, str(step.report)
    assert _shared(plain)
    assert not _shared(graph)
    assert tfckpt.verify.same_arithmetic(step, tf.zeros((BATCH, WIDTH)), tf.constant(0)).same


def test_cases():
    _is_handed_out(cases)


def test_conditions():
    _is_handed_out(conditions)


def test_branches_within_branches():
    _is_handed_out(within)


def test_results_that_grappler_would_merge_with_their_readers():
    _is_handed_out(scaled)


def _exits(h, weights, k):
    """Return layers behind each of which a network may stop, as branches within branches."""
    h = h + tf.tanh(h @ weights[0])
    if len(weights) == 1:
        return h
    return tf.cond(k < 0, lambda: h, lambda: _exits(h, weights[1:], k - 1))


def _looks_at(depth):
    """Return how often a step of branches within branches has what a branch needs looked for."""
    process.fresh()
    weights = [tf.Variable(0.1 * tf.random.stateless_normal((WIDTH, WIDTH), (n, 9)))
               for n in range(depth)]

    def step(x, k):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(_exits(x, weights, k)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    found, before = 0, sys.getprofile()

    def counted(frame, event, _):
        nonlocal found
        found += event == "call" and frame.f_code is branch_values.needed_inputs.__code__

    sys.setprofile(counted)
    try:
        tfckpt.checkpoint(tf.function(step))(tf.ones((BATCH, WIDTH)), tf.constant(1))
    finally:
        sys.setprofile(before)
    return found


def test_what_branches_within_branches_need_is_found_once():
    few, more = _looks_at(3), _looks_at(5)
    print(f"looked at {few} and {more} ops")
    assert 0 < few and more < 6 * few  # the ops of all branches: they grow with the square
