"""Sums of gradients in the order of the plain step, whichever equal op Grappler keeps."""

import shutil

import pytest
import tensorflow as tf

import tfckpt
from tfckpt.capture.files import read_path
from tfckpt.capture.grappler import question as grappler
from tfckpt.capture.steps import training_steps
from tfckpt.capture.tfgraph import capture
from tfckpt.carriers.files import plan_file_step, rewrite
from tfckpt.ir.edits import AddControl, Edits
from tfckpt.request.options import make_options
from tfckpt.rewrite.passes.operand_order import keep_operand_order
from tfckpt.rewrite.plain_step import LiveStep
from tfckpt.rewrite.summation_order import equal_ops

VECTOR = tf.TensorSpec((8,), tf.float32, name="x")


def traced(body):
    return tf.function(body, autograph=False).get_concrete_function(VECTOR).graph


def two_equal_terms(x):
    """One sum reads b/Sin, which Grappler keeps as a/Sin or as b/Sin."""
    early = tf.sin(x, name="z/Sin")
    twin = tf.sin(x, name="a/Sin")
    total = tf.add_n([tf.cos(x, name="m/Cos"), early, tf.exp(x, name="q/Exp")], name="total")
    return total, twin


def test_equal_ops():
    graph = traced(lambda x: (tf.sin(x) + 1.0, tf.sin(x) + 1.0, tf.cos(x) + 2.0))
    found = capture(graph)
    classes = equal_ops(found, LiveStep(graph))
    named = {op.name: classes[i] for i, op in enumerate(found.ops)}
    assert named["Sin"] == named["Sin_1"] and named["add"] == named["add_1"]
    assert len({named["Sin"], named["Cos"], named["add"], named["add_2"]}) == 4


def test_random_ops_have_no_equal():
    graph = traced(lambda x: tf.random.uniform((8,), seed=1) + tf.random.uniform((8,), seed=1) + x)
    found = capture(graph)
    random = [i for i, op in enumerate(found.ops) if op.type == "RandomUniform"]
    classes = equal_ops(found, LiveStep(graph))
    assert len(random) == 2 and classes[random[0]] != classes[random[1]]


def test_terms_have_the_order_that_grappler_gives_them():
    live = traced(two_equal_terms)
    (node,) = [n for n in grappler.question(live).answer().node if n.name == "total"]
    edits = keep_operand_order(Edits(), capture(live), LiveStep(live))
    reads = {op.name: op.inputs[0].removesuffix(":0") for op in edits.added}
    order = sorted(edits.rewires, key=lambda r: r.tensor)
    terms = [reads[r.tensor.removesuffix(":0")] for r in order]
    equal = {"a/Sin": "z/Sin"}  # the sum reads the one, whichever of the two is kept
    assert terms == [equal.get(name, name) for name in node.input]
    assert {r.op for r in edits.rewires} == {"total"} and len(edits.rewires) == 3


@pytest.mark.parametrize("body", [
    lambda x: tf.add_n([tf.sin(x), tf.cos(x), tf.exp(x)]),  # no term has an equal
    lambda x: (tf.sin(x) + tf.cos(x), tf.sin(x)),  # a sum of two is the same in both orders
    lambda x: tf.add_n([tf.cast(tf.sin(x), tf.int32)] * 2 + [tf.cast(x, tf.int32)]),
], ids=["no equal", "two terms", "integers"])
def test_other_sums_are_left_alone(body):
    live = traced(body)
    edits = Edits(controls=(AddControl("a", "b"),))
    assert keep_operand_order(edits, capture(live), LiveStep(live)) is edits


class TwoLosses(tf.Module):
    """Four gradients of one output, three of which have an equal in another loss."""

    def __init__(self):
        super().__init__()
        self.weights = [tf.Variable(tf.random.stateless_normal((16, 16), (1, i)) * 0.3)
                        for i in range(6)]

    @tf.function(input_signature=[tf.TensorSpec((256, 16))])
    def step(self, x):
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            h = x
            for w in self.weights:
                h = tf.tanh(h @ w)
            one = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.ones_like(h), h))
            two = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.zeros_like(h), h))
        return tape.gradient(one, self.weights), other.gradient(two, self.weights)


def bits(gradients):
    return [t.numpy().tobytes() for t in tf.nest.flatten(gradients)]


X = tf.random.stateless_normal((256, 16), (2, 2))


def test_a_rewritten_step_adds_as_the_plain_one():
    plain = TwoLosses()
    rewritten = tfckpt.checkpoint(plain.step, budget="min")
    assert bits(rewritten(X)) == bits(plain.step(X)) and rewritten.report.recomputed_ops


def test_a_step_in_a_file_does_so_too(tmp_path):
    plain = TwoLosses()
    tf.saved_model.save(plain, str(tmp_path / "plain"))
    document = read_path(str(tmp_path / "plain"))
    (result,) = [plan_file_step(step, make_options()) for step in training_steps(document)]
    assert result.edits.clones and any("_term" in op.name for op in result.edits.added)
    shutil.copytree(tmp_path / "plain", tmp_path / "new")
    (tmp_path / "new" / "saved_model.pb").write_bytes(rewrite(document, [result]).serialized())
    new = tf.saved_model.load(str(tmp_path / "new"))
    assert bits(new.step(X)) == bits(tf.saved_model.load(str(tmp_path / "plain")).step(X))
