"""A plain GraphDef: captured, planned, rewritten in place and run in a session."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.graphdef import capture_graph_def
from tests.support.stack import shallow
from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import CaptureError
from tfckpt.ir.edits import check_edits
from tfckpt.ir.graph import BACKWARD
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.planner import plan_step
from tfckpt.rewrite.appliers.funcgraph import apply
from tfckpt.rewrite.build import build_edits


def training_graph():
    """Eight tanh layers and the gradient of their sum, as TF1 builds it."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (512, 256), name="x")
        h = x
        for layer in range(8):
            w = tf.constant(np.random.RandomState(layer).randn(256, 256).astype("f") / 16)
            h = tf.tanh(tf.matmul(h, w))
        loss = tf.reduce_sum(h * h, name="loss")
        tf.identity(tf.gradients(loss, x)[0], name="gradient")
    return graph.as_graph_def()


def run(graph, value):
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(["loss:0", "gradient:0"], {"x:0": value})


def test_a_tf1_training_graph_is_rewritten_and_computes_the_same():
    definition = training_graph()
    graph, imported = capture_graph_def(definition, ["loss:0", "gradient:0"])
    assert sum(op.region == BACKWARD for op in graph.ops) > 8
    cost = build_cost_graph(graph)
    planned = plan_step(cost)
    assert planned.peak_bytes < planned.baseline_bytes
    edits = build_edits(graph, cost, planned.plan)
    check_edits(graph, edits)
    apply(imported, edits)
    plain = tf.Graph()
    with plain.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    value = np.random.RandomState(9).randn(512, 256).astype("f")
    for found, wanted in zip(run(imported, value), run(plain, value), strict=True):
        assert np.array_equal(found, wanted)
    copies = [node for node in imported.as_graph_def().node if "_tfckpt_copy" in node.attr]
    assert len(copies) == len(edits.clones) > 0


def chain(length):
    """Tanh of tanh ... and its gradient, written node by node; fetch "gradients/g0:0"."""
    definition = tf.compat.v1.GraphDef()

    def node(name, op, *inputs):
        made = definition.node.add(name=name, op=op, input=inputs)
        made.attr["T" if inputs else "dtype"].type = tf.float32.as_datatype_enum
        return made

    node("h0", "Placeholder").attr["shape"].shape.CopyFrom(
        tf.TensorShape((64, 256)).as_proto())
    for i in range(length):
        node(f"h{i + 1}", "Tanh", f"h{i}")
    node(f"gradients/g{length}", "OnesLike", f"h{length}")
    for i in reversed(range(length)):
        node(f"gradients/g{i}", "TanhGrad", f"h{i + 1}", f"gradients/g{i + 1}")
    return definition


@pytest.mark.parametrize("length", [
    1_000, pytest.param(50_000, marks=pytest.mark.nightly)])
def test_a_long_chain_is_captured_planned_and_edited_without_recursion(length):
    definition = chain(length)
    with shallow(200):
        graph, imported = capture_graph_def(definition, ["gradients/g0:0"])
        cost = build_cost_graph(graph)
        planned = plan_step(cost, target=Target(device=GPU))
        edits = build_edits(graph, cost, planned.plan)
        check_edits(graph, edits)
        apply(imported, edits)
    assert len(graph.ops) >= 2 * length
    assert len(edits.clones) > length / 2
    assert planned.peak_bytes < planned.baseline_bytes / 5


def test_what_cannot_be_read_is_refused_by_name():
    with pytest.raises(CaptureError, match="nobody"):
        capture_graph_def(training_graph(), ["nobody:0"])
    broken = training_graph()
    broken.node[-1].op = "NoSuchOp"
    with pytest.raises(CaptureError, match="NoSuchOp"):
        capture_graph_def(broken, name="broken.pb")
