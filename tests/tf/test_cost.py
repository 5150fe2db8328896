"""Prices of captured graphs against bytes worked out by hand."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from benchmarks.requests import requests_of
from tfckpt.capture.inlining.inline import Inlining
from tfckpt.capture.shapes import concrete_shapes
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.kernel_copies import kernel_workspace, rearranged_bytes
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.errors import CostError
from tfckpt.ir.costgraph import check_cost_graph
from tfckpt.ir.schedule import plain_plan
from tfckpt.ir.target import EIGEN, Rates
from tfckpt.simulate.simulate import simulate

KIB = 1024


def traced(body, *specs):
    return capture(tf.function(body).get_concrete_function(*specs).graph)


def root_of(graph, name):
    """Return the op that allocates an op's first output; None where it is resident."""
    index = next(i for i, op in enumerate(graph.ops) if op.name == name)
    found = roots(graph)[index][0]
    return None if found == RESIDENT else graph.ops[found[0]].name


@pytest.mark.parametrize("passing_on", [
    tf.identity, lambda t: tf.reshape(t, [-1, 2]), lambda t: tf.expand_dims(t, 0),
    tf.stop_gradient, lambda t: tf.squeeze(tf.expand_dims(t, 0), 0),
    lambda t: tf.ensure_shape(t, (8, 4)), lambda t: tf.bitcast(t, tf.int32),
    lambda t: tf.identity_n([t, t])[0],
])
def test_storage_is_shared(passing_on):
    def body(x):
        passed = passing_on(tf.tanh(x, name="made"))
        return tf.identity(passed, name="last")

    graph = traced(body, tf.TensorSpec((8, 4), tf.float32))
    assert root_of(graph, "last") == "made"


@pytest.mark.parametrize("allocating", [
    tf.transpose, tf.exp, lambda t: tf.concat([t, t], 0), lambda t: t + 1.0,
    lambda t: tf.cast(t, tf.float64), lambda t: t[:4],
])
def test_storage_is_not_shared(allocating):
    def body(x):
        allocated = allocating(tf.tanh(x, name="made"))
        return tf.identity(allocated, name="last")

    graph = traced(body, tf.TensorSpec((8, 4), tf.float32))
    assert root_of(graph, "last") not in ("made", None)


def test_what_is_resident():
    variable = tf.Variable(tf.ones((8, 4)))

    def body(x):
        fed = tf.identity(x, name="fed")
        read = tf.identity(variable, name="read")
        constant = tf.identity(tf.constant(np.ones((8, 4), np.float32)) * 2.0, name="folded")
        return fed, read, constant, tf.add(x, variable, name="made")

    graph = traced(body, tf.TensorSpec((8, 4), tf.float32))
    assert [root_of(graph, n) for n in ("fed", "read", "folded", "made")] == [
        None, None, None, "made"]


# A network of three layers whose peak can be told by hand: x is 512 x 64 floats (128 KiB), every
# weight 64 x 64 (16 KiB), every activation 128 KiB.

LAYERS, ACTIVATION, WEIGHT = 3, 128 * KIB, 16 * KIB


def _network(rows=512):
    made = np.random.default_rng(0)
    weights = [tf.Variable(made.standard_normal((64, 64)).astype(np.float32) * 0.1)
               for _ in range(LAYERS)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.exp(h @ weight)
            loss = tf.reduce_sum(h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    return step, tf.TensorSpec((rows, 64), tf.float32)


def test_resident_bytes_of_the_network():
    step, spec = _network()
    cost = build_cost_graph(traced(step, spec))
    check_cost_graph(cost)
    assert cost.variable_bytes == (WEIGHT,) * LAYERS
    # x and the variables; scalar constants and shapes take some bytes more
    assert 0 <= cost.resident_bytes - (ACTIVATION + LAYERS * WEIGHT) < 256


def test_storages_of_the_network():
    step, spec = _network()
    cost = build_cost_graph(traced(step, spec))
    forward = [s.bytes for s in cost.storages if cost.vertices[s.producer].region == "forward"]
    # a product and its exponential for each layer; the gradient of exp reads exp's result
    assert sorted(forward) == [ACTIVATION] * (2 * LAYERS)
    kept = [cost.storages[s] for s in cost.residuals]
    assert [s.bytes for s in kept] == [ACTIVATION] * LAYERS
    assert {cost.vertices[s.producer].recomputable for s in kept} == {True}


def test_peak_of_the_network():
    """Planned order, by hand.

    exp writes into its product's buffer, so after the forward three activations are live:
    e1, e2, e3 (3 A). The gradient of the sum is broadcast: g3 (4 A). g3 * e3 overwrites g3; e3
    is free (3 A: e1, e2, g3). Layer 3: its weight gradient (W), then the gradient of e2 next to
    e1, e2, g3 (4 A + W at most; the weight gradient may be consumed before). So the peak is 4 A
    and at most the weight gradients on top.
    """
    step, spec = _network()
    cost = build_cost_graph(traced(step, spec))
    timeline = simulate(cost, plain_plan(cost).schedule)
    assert 4 * ACTIVATION <= timeline.peak_bytes <= 4 * ACTIVATION + LAYERS * WEIGHT


# Ops that Grappler rearranges with their readers.


def vertices_of(body):
    """Return names of the forward's vertices, in order, with what each writes."""
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(body(x)))
        return tape.gradient(loss, x)

    cost = build_cost_graph(traced(step, tf.TensorSpec((64, 64), tf.float32)))
    return {v.name: [cost.storages[s].name for s in v.writes]
            for v in cost.vertices if v.region == "forward"}


def test_a_product_that_only_a_product_reads_is_part_of_it():
    found = vertices_of(lambda x: tf.multiply(
        tf.multiply(x, tf.stop_gradient(x), name="inner"), 1.7, name="outer"))
    assert found == {"outer": ["outer:0"]}


def test_a_product_that_others_read_stands_alone():
    def body(x):
        inner = tf.multiply(x, x, name="inner")
        return tf.multiply(inner, 1.7, name="outer") * tf.sin(inner, name="sine")

    found = vertices_of(body)
    assert found["inner"] == ["inner:0"] and found["outer"] == ["outer:0"]


def test_what_becomes_log1p_is_one_vertex_that_writes_both():
    found = vertices_of(lambda x: tf.math.log(tf.add(1.0, tf.exp(x), name="plus"), name="log"))
    assert sorted(found["log"]) == ["log:0", "plus:0"] and "plus" not in found


def test_a_sum_is_part_of_a_later_sum_after_other_work():
    def body(x):
        early = tf.add(x, 0.5, name="early")
        return tf.add(early, tf.matmul(x, x, name="product"), name="late")

    assert vertices_of(body) == {"product": ["product:0"], "late": ["late:0"]}


def test_time_of_a_product_counts_its_multiplications():
    step, spec = _network()
    cost = build_cost_graph(traced(step, spec))
    wide = build_cost_graph(traced(*_network(rows=512 * 16)))

    def products(graph):
        return [v.time for v in graph.vertices if v.name.endswith("matmul")]

    (narrow,), (sixteenfold,) = products(cost), products(wide)
    assert 12 * narrow < sixteenfold <= 16 * narrow  # a call has some fixed cost


# Unknown dimensions.


def test_times_on_another_device():
    """A product of 512 x 64 by 64 x 32, then what somebody else has priced."""
    def body(x, w):
        return tf.tanh(tf.matmul(x, w, name="product"), name="bent")

    graph = traced(body, tf.TensorSpec((512, 64)), tf.TensorSpec((64, 32)))
    rates = Rates(flops_per_second=1e6, bytes_per_second=1e9, overhead_seconds=0.25,
                  known={"bent": 7.0})
    cost = build_cost_graph(graph, rates)
    times = {v.name: v.time for v in cost.vertices}
    assert times == pytest.approx({"product": 0.25 + 2 * 512 * 64 * 32 / 1e6, "bent": 7.0})
    slow = build_cost_graph(graph, Rates(flops_per_second=1e12, bytes_per_second=1e3))
    moved = 4 * (512 * 64 + 64 * 32 + 512 * 32)
    assert slow.vertices[0].time == pytest.approx(moved / 1e3, abs=1e-5)


def _unknown():
    weight = tf.Variable(tf.ones((64, 64)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.exp(tf.matmul(x, weight, name="product")))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    return tf.function(step).get_concrete_function(
        tf.TensorSpec((None, 64), tf.float32, name="features")).graph


def test_unknown_dimensions_are_refused_by_name():
    with pytest.raises(CostError) as caught:
        build_cost_graph(capture(_unknown()))
    message = str(caught.value)
    assert message.startswith(("cost: tensor product:0", "cost: tensor features:0"))
    assert "[None, 64]" in message and "batch_size" in message


@pytest.mark.parametrize("batch, inputs", [(512, {}), (None, {"features": (512, 64)})])
def test_a_batch_size_or_real_arguments_resolve_them(batch, inputs):
    graph = _unknown()
    cost = build_cost_graph(capture(graph, shapes=concrete_shapes(graph, batch, inputs)))
    forward = [s.bytes for s in cost.storages if cost.vertices[s.producer].region == "forward"]
    assert sorted(forward) == [ACTIVATION, ACTIVATION]


def test_sizes_that_depend_on_data_do_not_grow_with_depth():
    """Residual layers over some of the rows: no tensor is larger than over all of them."""
    weight = tf.Variable(tf.ones((64, 64)))

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.boolean_mask(x, x[:, 0] > 0.0)
            for _ in range(12):
                h += tf.tanh(h @ weight) * h
            loss = tf.reduce_sum(h)
        return tape.gradient(loss, weight)

    cost = build_cost_graph(traced(step, tf.TensorSpec((512, 64), tf.float32)))
    assert ACTIVATION == 512 * 64 * 4
    assert max(s.bytes for s in cost.storages) <= 1.1 * ACTIVATION


def test_a_broadcast_that_did_not_happen_takes_no_memory():
    """With an open batch TensorFlow sums gradients over axes found at run time: none here."""
    def body(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            loss = tf.reduce_sum(tf.tanh(x) * y / (tf.exp(y) + 2.0) - x * x * y)
        return tape.gradient(loss, [x, y])

    def sizes(batch):
        graph = tf.function(body).get_concrete_function(
            *[tf.TensorSpec((batch, 64), tf.float32)] * 2).graph
        cost = build_cost_graph(capture(graph, shapes=concrete_shapes(graph, 512, {})))
        return sorted(s.bytes for s in cost.storages
                      if cost.vertices[s.producer].region == "backward" and s.bytes > 8 * KIB)

    assert sizes(None) == sizes(512)
    assert len(sizes(512)) > 6


def test_a_broadcast_that_happened_does():
    def body(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            loss = tf.reduce_sum(tf.tanh(x) * y)
        return tape.gradient(loss, y)

    graph = tf.function(body).get_concrete_function(
        tf.TensorSpec((None, 64), tf.float32), tf.TensorSpec((None, 1), tf.float32)).graph
    cost = build_cost_graph(capture(graph, shapes=concrete_shapes(graph, 512, {})))
    assert [v.name for v in cost.vertices if v.name.endswith("Sum_1")]


def test_unknown_rank_is_refused_too():
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.exp(x))
        return tape.gradient(loss, x)

    graph = tf.function(step).get_concrete_function(tf.TensorSpec(None, tf.float32)).graph
    with pytest.raises(CostError, match="unknown rank"):
        build_cost_graph(capture(graph, shapes=concrete_shapes(graph, 8, {})))


def test_sums_of_gradients_are_no_biases():
    """Weight gradients of a layer used twice are added: they can be waited for as they are."""
    w = tf.Variable(tf.ones((64, 64)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ w) @ w))
        return tape.gradient(loss, w)

    cost = build_cost_graph(traced(step, tf.TensorSpec((64, 64), tf.float32)))
    found = {v.name: v.fusible for v in cost.vertices}
    assert not found["gradient_tape/matmul/MatMul"]
    assert not found["gradient_tape/matmul_1/MatMul_1"]


@pytest.mark.parametrize("added, merged", [((64,), True), ((1, 64), True), ((64, 64), False)])
def test_a_product_merges_with_a_bias_alone(added, merged):
    w = tf.Variable(tf.ones((64, 64)))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.matmul(x, w, name="product") + y))
        return tape.gradient(loss, w)

    cost = build_cost_graph(traced(step, tf.TensorSpec((64, 64), tf.float32),
                                   tf.TensorSpec(added, tf.float32)))
    assert {v.name: v.fusible for v in cost.vertices}["product"] == merged


def test_what_gradients_are_added_up_in_is_one_buffer():
    """Grappler turns a sum of gradients at the peak into additions to a temporary variable."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (8, 4), "x")
        made = tf.raw_ops.TemporaryVariable(shape=(8, 4), dtype=tf.float32, var_name="v", name="v")
        assigned = tf.raw_ops.Assign(ref=made, value=tf.zeros((8, 4)))
        with tf.control_dependencies([tf.raw_ops.AssignAdd(ref=assigned, value=tf.tanh(x))]):
            total = tf.raw_ops.DestroyTemporaryVariable(ref=assigned, var_name="v")
        last = tf.identity(total, "last")
    captured = capture(graph, fetches=[last])
    assert root_of(captured, "last") == "v"
    assert not next(op for op in captured.ops if op.type == "DestroyTemporaryVariable").pure


def test_variables_are_counted_however_they_are_used():
    """Read, gathered from, written by a fused optimizer, inside of a nested function or not."""
    weight, slot, table = (tf.Variable(tf.zeros(shape)) for shape in ((8, 4), (8, 4), (100, 8)))

    def body(x):
        with tf.GradientTape() as tape:
            rows = tf.raw_ops.ResourceGather(resource=table.handle, indices=tf.range(16),
                                             dtype=tf.float32)
            loss = tf.reduce_sum(tf.tanh(x + rows @ weight) @ tf.transpose(weight))
        gradient = tape.gradient(loss, weight)
        tf.raw_ops.ResourceApplyMomentum(var=weight.handle, accum=slot.handle, lr=0.1,
                                         grad=gradient, momentum=0.9)
        return loss

    spec = tf.TensorSpec((16, 4), tf.float32)
    for step in (body, lambda x: tf.function(body)(x) + tf.reduce_sum(weight)):
        live = tf.function(step).get_concrete_function(spec).graph
        inlining = Inlining(live, live.as_graph_def().library.function)
        cost = build_cost_graph(capture(live, inlining=inlining))
        assert sorted(cost.variable_bytes) == [4 * 8 * 4, 4 * 8 * 4, 4 * 100 * 8]
        # the argument, and constants: numbers and the rows that are gathered
        assert 0 <= cost.resident_bytes - sum(cost.variable_bytes) - 4 * 16 * 4 <= 256


@pytest.mark.parametrize("equation, left, right", [
    ("btd,de->bte", (64, 64, 64), (64, 64)), ("bdn,de->ben", (64, 64, 64), (64, 64)),
    ("bdn,de->bne", (64, 64, 64), (64, 64)), ("ben,de->bdn", (64, 64, 64), (64, 64)),
    ("bid,ide->bie", (256, 16, 64), (16, 64, 64)), ("bhtd,hde->bhte", (16, 8, 32, 64), (8, 64, 64)),
    ("bhqd,bhkd->bhqk", (4, 4, 64, 64), (4, 4, 64, 64)), ("ab,cb->ca", (512, 256), (512, 256)),
    ("bqhd,bkhd->bhqk", (4, 64, 4, 64), (4, 64, 4, 64)),
    ("bhqk,bkhd->bqhd", (4, 4, 64, 64), (4, 64, 4, 64)), ("ab,b->ba", (1024, 256), (256,)),
    ("abc->cab", (64, 64, 64), None), ("...y,...x->xy...", (8, 16, 128), (8, 16, 64)),
    ("...y,xy...->...x", (64, 64, 128), (64, 128)), ("...x,xy->y...", (64, 64, 64), (64, 64)),
    ("b...,bc->c...", (64, 64, 64), (64, 64))])
def test_what_einsum_copies_is_counted(equation, left, right):
    """As its kernel was measured to allocate beside the result, but for blocks of products."""
    given = [tf.random.stateless_normal(shape, (1, 2)) for shape in (left, right) if shape]

    @tf.function
    def product(*operands):
        return tf.einsum(equation, *operands, optimize="greedy")

    graph = capture(product.get_concrete_function(*given).graph)
    counted = sum(rearranged_bytes(graph, op) for op in graph.ops)
    measured = tfckpt.verify.measure_peak(product, *given, repeats=3)
    result = sum(t.bytes for op in graph.ops for t in op.outputs if op.type == "Einsum")
    assert measured == pytest.approx(result + counted, abs=300_000)


@pytest.mark.parametrize("batch, pixels, inner, outer, window, stride", [
    (8, 56, 64, 64, 3, 1), (8, 56, 128, 64, 1, 2), (2, 14, 256, 256, 3, 1), (4, 16, 64, 136, 3, 1),
    (4, 16, 64, 144, 3, 1), (1, 32, 16, 16, 3, 1)])
@pytest.mark.parametrize("dtype", ["float16", "float64", "float32"])
def test_what_gradients_of_convolutions_lay_out_is_counted(
        dtype, batch, pixels, inner, outer, window, stride):
    """Of what oneDNN does not compute, to the byte."""
    made = -(-pixels // stride)
    x, y = (tf.zeros((batch, side, side, channels), dtype)
            for side, channels in ((pixels, inner), (made, outer)))
    kernel = tf.zeros((window, window, inner, outer), dtype)
    steps = {"strides": [1, stride, stride, 1], "padding": "SAME"}
    gradients = (
        (lambda k, y: tf.raw_ops.Conv2DBackpropInput(
            input_sizes=x.shape, filter=k, out_backprop=y, **steps), (kernel, y), x),
        (lambda x, y: tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=kernel.shape, out_backprop=y, **steps), (x, y), kernel))
    for gradient, given, like in gradients:
        function = tf.function(gradient)
        graph = capture(function.get_concrete_function(*given).graph)
        counted = [n for op in graph.ops if (n := kernel_workspace(graph, op, EIGEN))]
        function(*given)
        asked = [r.bytes for r in requests_of(function, given)[0] if r.bytes >= 1 << 18]
        result = like.shape.num_elements() * like.dtype.size
        if result in asked:
            asked.remove(result)
        if dtype == "float32":
            assert not counted
        else:
            assert asked == [n for n in counted if n >= 1 << 18]


def test_where_onednn_is_off_the_windows_of_all_gradients_are_counted():
    """A U-Net's plain step by what is planned, in a process of its own."""
    code = """
import numpy as np, tensorflow as tf, tfckpt
from benchmarks.measured import NETWORKS
body, args = NETWORKS["unet"](batch=2)
plain, ours = tf.function(body), tfckpt.checkpoint(tf.function(body))
for step in plain, ours:
    measured = [tfckpt.verify.measure_peak(step, *args, repeats=1) for _ in range(11)]
    print(min(measured), np.median(measured), max(measured))
print(*ours.report.simulated_bytes, ours.report.most_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"})
    assert done.returncode == 0, done.stderr
    _, plain, _, least, _, most, simulated_plain, simulated, at_most = map(
        float, done.stdout.split()[-9:])
    assert 0.85 * plain < simulated_plain < 1.25 * plain
    # two gradients of filters, each with a workspace of a third of the peak, run at the same time
    # in some calls, and in others not
    assert 0.85 * simulated < least and most < at_most < 1.6 * simulated


def test_where_onednn_is_off_products_in_bfloat16_are_converted_too():
    """To the byte, in a process of its own."""
    code = """
import tensorflow as tf
from tests.tf.test_cost import requests_of
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.kernel_copies import kernel_workspace
from tfckpt.ir.target import EIGEN_ALONE
for left, right in ((1024, 512), (512, 512)), ((8, 4, 128, 64), (8, 4, 64, 128)):
    given = tf.zeros(left, tf.bfloat16), tf.zeros(right, tf.bfloat16)
    product = tf.function(lambda a, b: tf.matmul(a, b))
    graph = capture(product.get_concrete_function(*given).graph)
    result = product(*given)
    print("asked", sum(r.bytes for r in requests_of(product, given)[0] if r.bytes >= 1 << 18),
          sum(kernel_workspace(graph, op, EIGEN_ALONE) for op in graph.ops)
          + 2 * result.shape.num_elements())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"})
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("asked")]
    assert len(said) == 2 and all(asked == counted for asked, counted in said), (
        said, done.stderr[-2000:])


@pytest.mark.parametrize("left, right, transpose", [
    ((1024, 512), (512, 512), False), ((256, 1024), (768, 1024), True),
    ((8, 4, 128, 64), (8, 4, 128, 64), True)])
@pytest.mark.parametrize("dtype, times", [("float16", 2), ("float32", 0), ("float64", 0)])
def test_what_products_convert_is_counted(dtype, times, left, right, transpose):
    """In half precision they are computed in float32, of copies."""
    given = tf.zeros(left, dtype), tf.zeros(right, dtype)
    product = tf.function(lambda a, b: tf.matmul(a, b, transpose_b=transpose))
    graph = capture(product.get_concrete_function(*given).graph)
    counted = sum(kernel_workspace(graph, op, EIGEN) for op in graph.ops)
    result = product(*given)
    made = result.shape.num_elements() * result.dtype.size
    copies = [times * t.shape.num_elements() * t.dtype.size for t in (*given, result) if times]
    assert counted == sum(copies)
    asked = sorted(r.bytes for r in requests_of(product, given)[0] if r.bytes >= 1 << 18)
    assert asked == sorted([made, *copies])
