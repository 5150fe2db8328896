"""Regions and alternatives on graphs that TensorFlow and Keras really produce.

Names of ops and numbers of tensors were counted by hand from the graphs.
"""

from __future__ import annotations

import dataclasses

import keras
import pytest
import tensorflow as tf

from tests.support.forward_ad import COMPOSED, KERAS, two_layers
from tests.support.graph_diff import graph_edits
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.storage import roots
from tfckpt.errors import CostError
from tfckpt.fad.alternatives import check_alternative, find_alternatives
from tfckpt.fad.regions import constants, find_regions
from tfckpt.fad.transform import take
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import BACKWARD, check_graph

ROWS, WIDTH = 32, 16


def captured(body, *args):
    return capture(tf.function(body, autograph=False).get_concrete_function(*args).graph)


def offers_of(body, *args):
    graph = captured(body, *args)
    return graph, find_alternatives(graph, roots(graph))


def between_dense_layers(activation):
    step, x = two_layers(activation, width=WIDTH, rows=ROWS)
    graph = captured(step, x)
    return graph, find_alternatives(graph, roots(graph), least_bytes=ROWS * WIDTH * 4)


def names(graph, ops):
    return [graph.ops[i].name for i in ops]


# Which ops belong to a region.

@pytest.mark.parametrize("activation, ops", [
    (COMPOSED["swish"], ["Sigmoid", "mul"]),
    (COMPOSED["gelu_tanh"], ["mul", "pow", "mul_1", "add", "mul_2", "Tanh", "add_1", "mul_3"]),
    (KERAS["gelu"], ["Gelu/mul", "Gelu/Neg", "Gelu/mul_1", "Gelu/Erfc", "Gelu/mul_2"]),
    # the custom gradient's own x * 1 is a function of x as well
    (KERAS["silu"], ["mul", "Sigmoid", "mul_1", "IdentityN", "mul_3"]),
    (KERAS["hard_silu"], ["add", "Relu6", "truediv", "mul"]),
    (KERAS["celu"], ["Maximum", "Minimum", "truediv", "Expm1", "mul", "add"]),
    (KERAS["soft_shrink"], ["Greater", "sub", "Less", "add", "SelectV2", "SelectV2_1"]),
])
def test_a_region_is_the_whole_activation(activation, ops):
    graph, _ = between_dense_layers(activation)
    region = find_regions(graph, constants(graph))[0]
    assert graph.ops[region.source[0]].name == "MatMul"
    assert names(graph, region.ops) == ops


def test_a_region_ends_where_a_second_tensor_comes_in():
    def body(x, w):
        a = tf.tanh(x, name="a")
        b = tf.add(a, w, name="b")  # two sources
        return tf.multiply(tf.exp(b, name="c"), b, name="d")

    graph = captured(body, tf.TensorSpec((4, 3)), tf.TensorSpec((4, 3)))
    found = {graph.ops[r.source[0]].name: names(graph, r.ops)
             for r in find_regions(graph, constants(graph))}
    assert found["x"] == ["a"]
    assert found["b"][:2] == ["c", "d"]


def test_constants_broadcast_into_a_region_but_not_beyond_it():
    def body(x):
        a = tf.multiply(x, tf.constant([1.0, 2.0, 3.0]), name="a")
        return tf.add(a, tf.constant(1.5, shape=(2, 4, 3)), name="b")

    graph = captured(body, tf.TensorSpec((4, 3)))
    region, = (r for r in find_regions(graph, constants(graph))
               if graph.ops[r.source[0]].name == "x")
    assert names(graph, region.ops) == ["a"]


def test_integers_have_no_region():
    graph = captured(lambda x: tf.cast(x * 2, tf.float32), tf.TensorSpec((4,), tf.int32))
    for region in find_regions(graph, constants(graph)):  # the cast's result may start one
        source, slot = region.source
        assert graph.ops[source].outputs[slot].dtype == "float32"
        assert graph.ops[source].type == "Cast"


def test_a_variable_scalar_and_a_vector_of_weights():
    """A scalar is a constant to the region whatever its value; a vector is a second tensor."""
    scalar, vector = tf.Variable(0.7), tf.Variable(tf.ones((WIDTH,)))
    for parameter, count in ((scalar, 3), (vector, 0)):
        graph, _ = between_dense_layers(lambda x, p=parameter: x * tf.sigmoid(p * x))
        regions = [r for r in find_regions(graph, constants(graph))
                   if graph.ops[r.source[0]].name == "MatMul"]
        assert sum(len(r.ops) for r in regions) == count


# What an alternative would keep: tensors of the activation's size, the next layer's input too.

KEPT = {  # plain, with the derivative
    "swish": (COMPOSED["swish"], 3, 2), "mish": (COMPOSED["mish"], 3, 2),
    "gelu_tanh": (COMPOSED["gelu_tanh"], 5, 2), "gelu_erf": (COMPOSED["gelu_erf"], 4, 2),
    "keras_mish": (KERAS["mish"], 3, 2), "keras_gelu": (KERAS["gelu"], 4, 2),
    "keras_gelu_approximate": (KERAS["gelu_approximate"], 5, 2),
    "keras_hard_silu": (KERAS["hard_silu"], 4, 2), "keras_celu": (KERAS["celu"], 3, 2),
    "keras_squareplus": (KERAS["squareplus"], 3, 2),
    "keras_hard_sigmoid": (KERAS["hard_sigmoid"], 2, 1.25),
    "keras_hard_tanh": (KERAS["hard_tanh"], 3, 1.25),
    "keras_leaky_relu": (KERAS["leaky_relu"], 2, 1.25),
    "keras_soft_shrink": (KERAS["soft_shrink"], 1.5, 1.25),
    # no gain
    "keras_silu": (KERAS["silu"], 2, 2), "keras_softplus": (KERAS["softplus"], 2, 2),
    "keras_softsign": (KERAS["softsign"], 2, 2), "keras_log_sigmoid": (KERAS["log_sigmoid"], 2, 2),
    "keras_relu": (KERAS["relu"], 1, 1.25), "keras_elu": (KERAS["elu"], 1, 2),
    "keras_selu": (KERAS["selu"], 1, 2), "keras_tanh": (KERAS["tanh"], 1, 2),
}


@pytest.mark.parametrize("name", KEPT)
def test_tensors_kept_before_and_after(name):
    activation, before, after = KEPT[name]
    _, offers = between_dense_layers(activation)
    alternative, = offers.alternatives
    unit = ROWS * WIDTH * 4
    assert alternative.bytes_before == before * unit
    assert alternative.bytes_after == after * unit
    assert alternative.saves == (before - after) * unit
    assert not offers.refusals


@pytest.mark.parametrize("name, ops", [
    ("swish", ["SigmoidGrad", "AddV2"]), ("mish", ["TanhGrad", "SoftplusGrad", "AddV2"]),
])
def test_derivatives_share_what_they_can(name, ops):
    _, offers = between_dense_layers(COMPOSED[name])
    program = offers.alternatives[0].program
    assert [n.type for n in program if n.type not in ("tensor", "number")] == ops


def test_which_backward_ops_go():
    graph, offers = between_dense_layers(COMPOSED["swish"])
    alternative, = offers.alternatives
    assert graph.ops[alternative.sink[0]].name == "AddN"
    assert names(graph, alternative.removed) == [
        "gradient_tape/mul/Mul", "gradient_tape/mul/Mul_1", "gradient_tape/Sigmoid/SigmoidGrad",
        "AddN"]
    kept, = alternative.kept
    assert names(graph, [kept.of[0]]) == ["mul"]
    assert names(graph, [g[0] for g in kept.gradients]) == ["gradient_tape/MatMul_1/MatMul"]


# Several outputs, other readers.

def loss_of(outputs, x, weights):
    with tf.GradientTape() as tape:
        made = outputs(tf.matmul(x, weights[0]))
        loss = tf.add_n([tf.reduce_sum(tf.square(tf.matmul(y, w)))
                         for y, w in zip(made, weights[1:], strict=True)])
    return tape.gradient(loss, weights)


def several(outputs, count):
    weights = [tf.Variable(tf.ones((8, WIDTH)))] + [
        tf.Variable(tf.ones((WIDTH, 4))) for _ in range(count)]
    graph = captured(lambda x: loss_of(outputs, x, weights), tf.TensorSpec((ROWS, 8)))
    return graph, find_alternatives(graph, roots(graph), least_bytes=ROWS * WIDTH * 4)


def test_two_outputs_one_of_them_inside_of_the_other():
    def outputs(x):
        s = tf.sigmoid(x, name="s")
        return s, tf.multiply(x, s, name="y")

    graph, offers = several(outputs, 2)
    alternative, = offers.alternatives
    assert sorted(graph.ops[k.of[0]].name for k in alternative.kept) == ["s", "y"]
    assert sorted(names(graph, [t[0] for t in alternative.outputs])) == ["s", "y"]
    # x, s and y before; s and y (the next layers' inputs) and two derivatives after
    unit = ROWS * WIDTH * 4
    assert (alternative.bytes_before, alternative.bytes_after) == (3 * unit, 4 * unit)


def test_an_output_without_a_gradient_has_no_derivative():
    def outputs(x):
        s = tf.sigmoid(x, name="s")
        return tf.stop_gradient(s), tf.multiply(x, tf.tanh(tf.nn.softplus(x)), name="y")

    graph, offers = several(outputs, 2)
    alternative, = offers.alternatives
    assert [graph.ops[k.of[0]].name for k in alternative.kept] == ["y"]


def test_an_input_that_others_need_is_counted_on_both_sides():
    """x goes to a layer of its own: its gradient joins the sum, and x is kept either way."""
    graph, offers = several(lambda x: (x, x * tf.tanh(tf.nn.softplus(x))), 2)
    alternative, = offers.alternatives
    unit = ROWS * WIDTH * 4
    assert len(alternative.addends) == 1
    assert (alternative.bytes_before, alternative.bytes_after) == (3 * unit, 3 * unit)


# Refusals.

@tf.custom_gradient
def straight_through(x):
    return tf.round(x), lambda g: g * tf.cast(tf.abs(x) < 1.0, x.dtype)


@tf.custom_gradient
def clipped_gradient(x):
    return tf.tanh(x), lambda g: tf.clip_by_value(g, -0.1, 0.1) * (1 - tf.square(tf.tanh(x)))


@tf.custom_gradient
def other_gradient(x):
    return tf.tanh(x), lambda g: g * (1 - tf.abs(tf.tanh(x)))


@pytest.mark.parametrize("activation", [straight_through, other_gradient])
def test_a_custom_gradient_that_is_not_the_derivative_is_refused(activation):
    _, offers = between_dense_layers(activation)
    assert not offers.alternatives
    refusal, = offers.refusals
    assert "custom gradient" in refusal.reason


def test_a_clipped_gradient_stays_clipped():
    """The ops after the clip become the derivative; the clip itself stays where it is."""
    graph, offers = between_dense_layers(clipped_gradient)
    for alternative in offers.alternatives:
        gone = {graph.ops[i].type for i in alternative.removed}
        assert not gone & {"Minimum", "Maximum"}


# The checker and the transformed graph.

def test_taking_an_alternative_gives_a_valid_graph_without_the_old_backward():
    graph, offers = between_dense_layers(COMPOSED["gelu_tanh"])
    after, edits = take(graph, offers.alternatives)
    check_graph(after)
    assert edits == graph_edits(graph, after)
    left = {op.name for op in after.ops}
    alternative, = offers.alternatives
    assert not left & set(names(graph, alternative.removed))
    types = [op.type for op in after.ops if op.region == BACKWARD]
    assert "TanhGrad" not in types and "Pow" not in types
    assert take(graph, ())[0] is graph and take(graph, ())[1] == Edits()


def test_the_checker_refuses_nonsense():
    graph, offers = between_dense_layers(COMPOSED["swish"])
    good, = offers.alternatives
    kept = dataclasses.replace(good.kept[0], on=1.0, off=0.0)
    source = good.region.source
    for bad, said in [
        (dataclasses.replace(good, kept=(kept,)), "mask"),
        (dataclasses.replace(good, sink=source), "gradient"),
        (dataclasses.replace(good, removed=()), "replaces"),
        (dataclasses.replace(good, removed=(*good.region.ops, *good.removed)), "removes"),
        (dataclasses.replace(good, program=(dataclasses.replace(good.program[0], args=(1,)),
                                            *good.program[1:])), "later"),
    ]:
        with pytest.raises(CostError, match=said):
            check_alternative(graph, bad)


def test_a_keras_model_with_normalisation():
    """Conv + BatchNorm + mish, twice: one region for each activation."""
    layers = keras.layers
    image = keras.Input((8, 8, 3))
    h = image
    for _ in range(2):
        h = layers.Conv2D(8, 3, padding="same", use_bias=False)(h)
        h = layers.Activation("mish")(layers.BatchNormalization()(h))
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(h)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    graph, offers = offers_of(step, tf.TensorSpec((4, 8, 8, 3)))
    unit = 4 * 8 * 8 * 8 * 4
    large = [a for a in offers.alternatives
             if graph.ops[a.region.source[0]].outputs[0].bytes == unit]
    assert [(a.bytes_before, a.bytes_after) for a in large] == [
        (3 * unit, 2 * unit),  # the next convolution reads y
        (2 * unit, unit)]      # the mean does not
