"""Updates wait for what reads the old value of their variable, so that it is changed in place."""

from __future__ import annotations

import keras
import networkx as nx
import pytest
import tensorflow as tf

import tfckpt
from benchmarks.network_steps import adam_step
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.variables import updated_late

VIEWS = ("Reshape", "Identity", "Squeeze", "ExpandDims")


def _step(layers=8, width=256):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((width,))
    for _ in range(layers):
        x = keras.layers.Dense(width, "gelu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    return adam_step(model), (tf.random.stateless_normal((2048, width), (1, 2)),
                              tf.zeros((2048,), tf.int32))


def _before_joins(tensor):
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _unawaited(graph):
    """Pairs of an update and an op of the backward that reads the old value and is not awaited.

    Found in TensorFlow's own graph, without joins of all gradients: Grappler removes these.
    """
    following = nx.DiGraph()
    for op in graph.get_operations():
        following.add_node(op.name)
        following.add_edges_from((_before_joins(t).op.name, op.name) for t in op.inputs)
        following.add_edges_from((c.name, op.name) for c in op.control_inputs)
    found, count = [], 0
    for update in graph.get_operations():
        if update.type not in ("AssignSubVariableOp", "AssignAddVariableOp"):
            continue
        before = nx.ancestors(following, update.name)
        after = nx.descendants(following, update.name)
        pending = [op for op in update.inputs[0].consumers() if op.type == "ReadVariableOp"
                   and op.outputs[0].shape.num_elements() >= 1 << 15]  # small ones do not matter
        while pending:
            for reader in pending.pop().outputs[0].consumers():
                if reader.type in VIEWS:
                    pending.append(reader)
                elif reader.name not in following:
                    continue  # hidden: no part of the function
                elif "gradient_tape" in reader.name and reader.name not in after:
                    count += 1
                    if reader.name not in before:
                        found.append((update.name, reader.name))
    return found, count


@pytest.mark.parametrize("budget", ["min", 0.6])
def test_no_update_comes_before_the_last_reader(budget):
    step, args = _step()
    plain, count = _unawaited(tf.function(step).get_concrete_function(*args).graph)
    assert plain and count
    checkpointed = tfckpt.checkpoint(tf.function(step), budget=budget)
    checkpointed(*args)
    assert checkpointed.report.applied
    missing, count = _unawaited(checkpointed.get_concrete_function(*args).graph)
    assert count and not missing


def test_the_graph_that_is_planned_says_so_and_is_in_order():
    step, args = _step(3)
    graph = capture(tf.function(step).get_concrete_function(*args).graph)
    late = updated_late(graph)
    new = [(i, c) for i, (a, b) in enumerate(zip(graph.ops, late.ops, strict=True))
           for c in b.controls if c not in a.controls]
    assert new and all(c < i for i, c in new)
    assert {late.ops[c].type for _, c in new} == {"MatMul"}
    assert updated_late(late) == late


def test_readers_and_updates_of_variables_are_numbered_alike():
    step, args = _step(2)
    cost = build_cost_graph(capture(tf.function(step).get_concrete_function(*args).graph))
    updated = {v.updates: v for v in cost.vertices if v.updates >= 0}
    weights = [n for n, size in enumerate(cost.variable_bytes) if size == 256 * 256 * 4]
    for n in weights:
        assert n in updated
    read = {n for v in cost.vertices for n in v.reads_variables if "gradient_tape" in v.name}
    assert len(read & set(weights)) == 1  # of two layers the first has no dx
