"""Steps for a GPU, whose convolutions Grappler has run channels first, planned where none is.

Grappler is told of an H100, and what it makes of a step takes the place of the trace. oneDNN runs
that on a CPU. That it is what runs on a GPU was seen on one: `UNET` says what ran there.
"""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from benchmarks.measured import NETWORKS
from tests.e2e import test_branches as branches
from tests.e2e import test_sizes_of_values as by_values
from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import question as grappler
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.ir.edits import COPY
from tfckpt.request.devices import find_device
from tfckpt.request.options import make_options

H100 = tf_adapter.described_gpu("9.0", 80 << 30)
UNET = {"_FusedConv2D": 18, "Conv2D": 5, "BiasAdd": 5, "Conv2DBackpropFilter": 23,
        "Conv2DBackpropInput": 22, "MaxPool": 4, "MaxPoolGrad": 4, "Transpose": 3,
        "ReluGrad": 18, "Relu": 0, "ConcatV2": 4}
"""What ran of the U-Net of `benchmarks.measured` on an H100, by TensorFlow's profiler."""
CHOOSING = {"stochastic depth": 22.0, "kept results": 5.8, "one of many": 34.0, "nested": 25.8,
            "in a loop": 30.8}
"""MB that the plain steps of `test_branches` took on an H100, by TensorFlow's allocator."""
BY_VALUES = {"ragged": 43.8, "padded": 36.2}
"""The same of `test_sizes_of_values`."""
HALF_UNET = 537.7
"""The same of the U-Net of `benchmarks.measured`, 32 images in mixed_bfloat16."""


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(tf_adapter, "own_gpu", lambda: H100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def checkpointed(body, budget, signature=None, **options):
    return CheckpointedStep(tf.function(body, input_signature=signature), make_options(
        budget, target=find_device("H100-80GB").target(), **options))


def asked(graph, lower=False):
    return grappler.question(graph, (), tf_adapter.shown_definition(graph)).answer(lower=lower)


def kinds(definition):
    return collections.Counter(node.op for node in definition.node)


def images():
    return tf.random.stateless_normal((4, 32, 32, 3), (1, 2)), tf.constant([0, 1, 2, 3])


def small_network():
    """Convolutions, batch norm, a skip, pooling and two products."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((32, 32, 3))
    for width in (16, 16, 32):
        h = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        h = keras.layers.BatchNormalization()(h)
        x = keras.layers.Concatenate()([h, keras.layers.Conv2D(width, 1)(x)])
        x = keras.layers.MaxPooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))


def training(model, rate=.01):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        for v, g in zip(variables, tape.gradient(value, variables), strict=True):
            v.assign_sub(rate * g)
        return value
    return step


def test_grapplers_answer_is_what_ran_on_a_gpu(gpu):
    body, args = NETWORKS["unet"](batch=2)
    found = kinds(asked(tf.function(body).get_concrete_function(*args).graph))
    assert {kind: found[kind] for kind in UNET} == UNET


def test_without_a_gpu_convolutions_stay_as_they_are():
    body, args = NETWORKS["unet"](batch=2)
    answer = asked(tf.function(body).get_concrete_function(*args).graph)
    formats = {node.attr["data_format"].s for node in answer.node if "data_format" in node.attr}
    assert formats == {b"NHWC"}


@pytest.mark.parametrize("budget", ["min", 0.9])
def test_grappler_leaves_alone_what_was_planned(gpu, budget):
    model = small_network()
    step = checkpointed(training(model), budget)
    graph = step.get_concrete_function(*images()).graph
    assert step.report.applied and step.report.recomputed_ops
    shown, found = tf_adapter.shown_definition(graph), asked(graph, lower=True)
    formats = collections.Counter(
        node.attr["data_format"].s for node in found.node if "Conv2D" in node.op)
    assert formats[b"NCHW"] and not formats[b"NHWC"]
    before = {node.name: node for node in shown.node}
    for node in found.node:
        if node.op not in ("_Retval", "_Arg"):
            assert node.op == before[node.name].op
            data = [name for name in node.input if not name.startswith("^")]
            assert data == [n for n in before[node.name].input if not n.startswith("^")]
    assert {"NoOp", "Placeholder"} >= {
        node.op for node in shown.node if node.name not in {n.name for n in found.node}}


def test_recomputed_convolutions_have_no_transposes_of_their_own(gpu):
    """What is recomputed runs channels first too, and is kept in that form alone.

    A plan may make again what is transposed in the plain step.
    """
    model = small_network()
    args = images()
    plain = kinds(asked(tf.function(training(model)).get_concrete_function(*args).graph))
    step = checkpointed(training(model), "min")
    graph = step.get_concrete_function(*args).graph
    ours = kinds(asked(graph, lower=True))
    ours["Transpose"] -= sum(op.type == "Transpose" and op.get_attr(COPY)
                             for op in graph.get_operations() if COPY in op.node_def.attr)
    assert ours["_FusedConv2D"] + ours["Conv2D"] > plain["_FusedConv2D"] + plain["Conv2D"]
    assert ours["Transpose"] == plain["Transpose"]


@pytest.mark.skipif(not tf_adapter.uses_onednn(), reason="oneDNN runs what is channels first")
def test_training_is_as_it_was(gpu):
    results = []
    for wrap in (tf.function, lambda body: checkpointed(body, "min")):
        model = small_network()
        step = wrap(training(model))
        losses = [float(step(*images())) for _ in range(3)]
        results.append([np.array(losses), *(v.numpy() for v in model.weights)])
    for plain, ours in zip(*results, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


def test_the_peak_is_simulated_on_what_grappler_makes_of_the_plan(gpu):
    """Which of two ops that become ready together runs first is known from nothing else."""
    body, args = NETWORKS["unet"](batch=8)
    step = checkpointed(body, 0.7)
    step.get_concrete_function(*args)
    assert "Grappler makes of the step" in str(step.report)
    plain, ours = step.report.expected_bytes
    assert ours <= 0.7 * plain


def test_a_budget_is_met_or_refused_with_one_that_is(gpu):
    body, args = NETWORKS["unet"](batch=8)
    with pytest.raises(tfckpt.InfeasibleBudgetError) as refused:
        checkpointed(body, 0.2).get_concrete_function(*args)
    step = checkpointed(body, refused.value.smallest_bytes + step_resident(body, args))
    step.get_concrete_function(*args)
    assert step.report.applied


def step_resident(body, args):
    """Return the bytes of the device that a step holds anyway, which budgets in bytes contain."""
    step = checkpointed(body, "min")
    step.get_concrete_function(*args)
    return step.report.resident_bytes


def recurrent():
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((64, 32))
    for _ in range(2):
        x = keras.layers.LSTM(64, return_sequences=True, use_cudnn=False)(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x[:, -1]))


@pytest.mark.parametrize("where", ["on a GPU", "as traced"])
def test_a_plan_with_loops_in_segments_is_asked_about(where, gpu, monkeypatch):
    """Grappler's answer has the functions of the new loops."""
    if where == "as traced":
        monkeypatch.setattr(tf_adapter, "own_gpu", lambda: b"")
        monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")
    args = tf.random.stateless_normal((256, 64, 32), (1, 2)), tf.zeros((256,), tf.int32)
    results = []
    for wrap in (tf.function, lambda body: checkpointed(body, "min", exact=True)):
        model = recurrent()
        step = wrap(training(model))
        losses = [step(*args).numpy() for _ in range(2)]
        results.append([*losses, *(v.numpy() for v in model.weights)])
    for plain, ours in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, plain)
    report = step.report
    assert "in segments" in str(report) and "internal error" not in str(report)
    assert report.expected_bytes[1] < .7 * report.expected_bytes[0]
    assert report.identical


def filters(*shapes):
    return [tf.Variable(.2 * tf.random.stateless_normal(shape, (i, len(shape))))
            for i, shape in enumerate(shapes)]


BRANCHES = {
    "a convolution": lambda h, k: tf.nn.relu(tf.nn.conv2d(h, k, 1, "SAME")),
    "the last axis": lambda h, k: h + tf.range(16.),
    "a transpose": lambda h, k: tf.transpose(h, [0, 2, 1, 3]),
    "an axis": lambda h, k: h + tf.reduce_mean(h, [3], keepdims=True)}


@pytest.mark.skipif(not tf_adapter.uses_onednn(), reason="oneDNN runs what is channels first")
@pytest.mark.parametrize("loop", [False, True], ids=["cond", "while_loop"])
@pytest.mark.parametrize("inside", BRANCHES)
@pytest.mark.parametrize("spec", [(8, 16, 16, 3), pytest.param(
    (None, 16, 16, 3), marks=pytest.mark.nightly)], ids=["static", "open"])
def test_bodies_of_branches_and_loops_read_what_they_were_traced_for(gpu, inside, loop, spec):
    """Grappler hands images on through them channels first, and changes their bodies with that."""
    variables = filters((3, 3, 3, 16), (3, 3, 16, 16), (16, 4))
    first, again, last = variables

    def body(h):
        made = BRANCHES[inside](h, again)
        return (made * .1,)

    def forward(x):
        h = tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME"))
        if loop:
            h, = tf.while_loop(lambda h: tf.constant(True), body, (h,), maximum_iterations=3)
        else:
            h += tf.cond(tf.reduce_sum(h) > 0, lambda: body(h)[0], lambda: tf.zeros_like(h))
        for _ in range(2):
            h = tf.nn.relu(tf.nn.conv2d(h, again, 1, "SAME"))
        return tf.reduce_mean((tf.reduce_mean(h, [1, 2]) @ last) ** 2)

    def step(x):
        with tf.GradientTape() as tape:
            value = forward(x)
        return value, tape.gradient(value, variables)

    x = tf.random.stateless_normal((8, 16, 16, 3), (1, 2))
    signature = [tf.TensorSpec(spec)]
    plain, plain_gradients = tf.function(step, input_signature=signature)(x)
    ours = checkpointed(step, "min", signature)
    found, gradients = ours(x)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    for one, other in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * np.abs(other).max())
    assert "internal error" not in str(ours.report)


@pytest.mark.parametrize("name", CHOOSING)
def test_what_branches_keep_is_counted_in_grapplers_answer(name, gpu):
    """Functions in it were not traced: what variables they read is known from who calls them."""
    body, _ = branches.STEPS[name][0]()
    step = checkpointed(body, "min")
    step.get_concrete_function(tf.TensorSpec((branches.BATCH, branches.WIDTH)),
                               tf.TensorSpec((), tf.int32))
    plain, ours = step.report.expected_bytes
    assert plain == pytest.approx(CHOOSING[name] * 1e6, rel=0.05)
    assert ours < branches.STEPS[name][1] * plain, str(step.report)


@pytest.mark.parametrize("name", BY_VALUES)
def test_sizes_that_values_decide_are_counted_in_grapplers_answer(name, gpu):
    """They follow from no shapes in it: it has the ops of the step, by their names."""
    rows, arguments = by_values.CASES[name]
    _, step = by_values.trained(rows, lambda made: checkpointed(made.python_function, 0.5),
                                arguments())
    plain, ours = step.report.expected_bytes
    assert "Grappler makes of the step" in str(step.report)
    assert plain == pytest.approx(BY_VALUES[name] * 1e6, rel=0.06)
    assert ours <= 0.5 * plain, str(step.report)


def test_gradients_of_convolutions_copy_images_in_half_precision(gpu):
    """Grappler leaves channels last, and the kernels of gradients want them first."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        body, args = NETWORKS["unet"](batch=32)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    step = checkpointed(body, "min")
    step.get_concrete_function(*args)
    assert step.report.expected_bytes[0] == pytest.approx(HALF_UNET * 1e6, rel=0.05)


@pytest.mark.skipif(not tf_adapter.uses_onednn(), reason="oneDNN runs what is channels first")
def test_open_sizes_are_no_reason_to_mix_layouts_up(gpu):
    """[?, ?, ?, 16] and [?, 16, ?, ?] do not contradict each other."""
    first, again, last = variables = filters((3, 3, 3, 16), (3, 3, 16, 16), (16, 4))

    signature = [tf.TensorSpec((None, None, None, 3))]

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME"))
            h = tf.pad(h, [[0, 0], [1, 1], [1, 1], [0, 0]])
            for _ in range(3):
                h = tf.nn.relu(tf.nn.conv2d(h, again, 1, "SAME"))
            value = tf.reduce_mean((tf.reduce_mean(h, [1, 2]) @ last) ** 2)
        return value, tape.gradient(value, variables)

    ours = checkpointed(step, "min", signature)
    x = tf.random.stateless_normal((8, 24, 20, 3), (1, 2))
    plain, _ = tf.function(step, input_signature=signature)(x)
    found, _ = ours(x)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert ours.report.applied, ours.report.reason
    graph = ours.get_concrete_function(x).graph
    formats = {op.get_attr("data_format") for op in graph.get_operations()
               if op.type == "Conv2D" and op.name.startswith("optimized")}
    assert formats == {b"NCHW"}
    for op in graph.get_operations():
        if op.type == "Relu" and op.name.startswith("optimized"):
            assert op.outputs[0].shape.as_list() == [None, 16, None, None]


def test_which_ops_have_kernels_for_gpus():
    def node(kind, **types):
        made = tf.compat.v1.NodeDef(op=kind)
        for name, dtype in types.items():
            made.attr[name].type = dtype.as_datatype_enum
        return made

    assert tf_adapter.has_gpu_kernel(node("Conv2D", T=tf.float32))
    assert tf_adapter.has_gpu_kernel(node("Identity", T=tf.float32))
    assert not tf_adapter.has_gpu_kernel(node("Conv2D", T=tf.string))
    assert not tf_adapter.has_gpu_kernel(node("StringJoin"))
    assert not tf_adapter.has_gpu_kernel(node("NoSuchOp"))


def test_a_step_that_returns_nothing_is_laid_out_alike(gpu):
    model, (x, y) = small_network(), images()

    def formats(returns):
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True))
            for w, g in zip(model.trainable_weights,
                            tape.gradient(loss, model.trainable_weights), strict=True):
                w.value.assign_sub(0.1 * g)
            if returns:
                return loss

        found = asked(step.get_concrete_function(x, y).graph)
        return collections.Counter((node.op, node.attr["data_format"].s) for node in found.node
                                   if "data_format" in node.attr)

    assert formats(False) == formats(True)
    assert formats(False)["Conv2DBackpropFilter", b"NCHW"] == 6
