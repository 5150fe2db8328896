"""A trace whose ops gave way to those that Grappler makes of them: what runs is the same."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.support.gelu_steps import gelu_step
from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import lowered_loops
from tfckpt.capture.grappler import question as grappler
from tfckpt.capture.grappler.in_place import Body, optimise_in_place
from tfckpt.capture.grappler.machine import on_one_device
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.time import flops
from tfckpt.ir.edits import PROTECTED
from tfckpt.ops import record
from tfckpt.verify import wait_for_certificates
from tfckpt.verify.arithmetic import instantiated, same

OPEN = tf.TensorSpec((None, 32), tf.float32)


def optimised(hook, body, *specs, then=lambda graph, changes: None):
    """Trace a function, and once more with Grappler's answer in its place.

    Returns:
      Both as concrete functions, and what the second was told.
    """
    plain = tf.function(body).get_concrete_function(*specs)
    found = []

    def callback(graph):
        if graph.name == "ours":
            changes = LiveChanges(graph)
            found.append(optimise_in_place(graph, changes, grappler.question(
                graph, (), tf_adapter.shown_definition(graph))))
            then(graph, changes)

    hook(callback)

    def ours(x):
        return body(x)
    return plain, tf.function(ours).get_concrete_function(*specs), found[0]


def certificate(plain, ours, *args):
    called: dict[int, str] = {}
    return same.certificate_of(*same.terms_of(
        [instantiated.computation_of(function, args, {}, called) for function in (plain, ours)]))


def weights(count=3, width=32):
    return [tf.Variable(tf.random.stateless_normal((width, width), (3, i)) * .2)
            for i in range(count)]


def training(variables, forward):
    """Return a step of gradient descent."""
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(x)))
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(.001 * g)
        return loss
    return step


def dense(ws, activation=tf.nn.relu):
    def forward(x):
        for w in ws:
            x = activation(tf.nn.bias_add(x @ w, w[0]))
        return x
    return forward


def sums(ws):
    """Sums of three and more whose terms are not in the order of their names."""
    def forward(x):
        h = x @ ws[0]
        return tf.add_n([tf.sin(h), h, tf.cos(h), tf.exp(h) * h, x]) @ ws[1] + ws[2] * ws[2]
    return forward


def normalised(ws):
    layer = keras.layers.LayerNormalization()
    layer.build((None, 32))

    def forward(x):
        for w in ws:
            x = tf.nn.gelu(layer(x @ w))
        return x * 3.0 * tf.exp(x)
    return forward


@pytest.mark.parametrize("make", [dense, sums, normalised])
@pytest.mark.parametrize("size", [64, None])
def test_what_runs_computes_the_same_in_the_same_order(hook, make, size):
    ws = weights(3) if make is not sums else [*weights(2), tf.Variable(tf.ones((size or 1, 1)))]
    step, x = training(ws, make(ws)), tf.random.stateless_normal((64, 32), (1, 2))
    plain, ours, body = optimised(hook, step, tf.TensorSpec((size, 32), tf.float32))
    assert isinstance(body, Body)
    found = certificate(plain, ours, x)
    assert found.same, found
    before = [w.numpy() for w in ws]
    losses, after = [], []
    for function in (plain, ours):
        for w, value in zip(ws, before, strict=True):
            w.assign(value)
        losses.append([function(x).numpy() for _ in range(3)])
        after.append([w.numpy() for w in ws])
    assert losses[0] == losses[1]
    assert all(map(np.array_equal, *after))


def test_every_op_is_left_alone_and_knows_its_shape(hook):
    ws = weights()
    _, ours, body = optimised(hook, training(ws, dense(ws)), tf.TensorSpec((64, 32), tf.float32))
    made = [op for op in ours.graph.get_operations() if op.name.startswith(body.scope)]
    assert {op.type for op in ours.graph.get_operations() if op not in made} == {"Placeholder"}
    assert all(op.get_attr(PROTECTED) for op in made)
    assert all(t.shape.is_fully_defined() for op in made for t in op.outputs)
    assert any(op.type == "_FusedMatMul" for op in made)
    assert {name for name in body.forward if "gradient_tape" in name} == set()
    assert body.forward and body.later


def test_it_can_be_taken_back(hook):
    def take_back(graph, changes):
        shown.append([op.name for op in graph.get_operations()])
        changes.revert(start[0])
        shown.append([op.name for op in graph.get_operations()])

    start, shown, ws = [], [], weights()
    real = LiveChanges.point

    def point(self):
        start.append(real(self))
        return start[-1]
    try:
        LiveChanges.point = point
        plain, ours, _ = optimised(hook, training(ws, dense(ws)),
                                   tf.TensorSpec((64, 32), tf.float32), then=take_back)
    finally:
        LiveChanges.point = real
    assert shown[0] != shown[1]
    assert [node.op for node in plain.function_def.node_def] == [
        node.op for node in ours.function_def.node_def]


def _loop(ws):
    return lambda x: tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.nn.gelu(h @ ws[0], True) * 3.0 * tf.exp(h)),
        (0, x))[1]


def _branch(ws):
    return lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x @ ws[0] * 3.0 * tf.exp(x),
                             lambda: x @ ws[1])


def _call(ws):
    """TensorFlow inlines it, and tfckpt by itself does not: it has a gradient of its own."""
    @tf.custom_gradient
    def pulled(h):
        return tf.exp(h) * 2.0, lambda g: g * h * 5.0

    called = tf.function(lambda h: pulled(h @ ws[0]))
    return lambda x: tf.nn.gelu(called(x) * 3.0, True) * called(tf.exp(x))


@pytest.mark.parametrize("make", [_loop, _branch, _call])
@pytest.mark.parametrize("size", [64, None])
def test_loops_and_branches_stay_and_calls_are_inlined(hook, make, size):
    ws = weights()
    step = training(ws[:1], lambda x: make(ws)(tf.nn.gelu(x @ ws[1]) * 0.1))
    plain, ours, body = optimised(hook, step, tf.TensorSpec((size, 32), tf.float32))
    assert isinstance(body, Body)
    called = any(tf_adapter.called_functions(op) for op in ours.graph.get_operations())
    assert called == (make is not _call)
    x = tf.random.stateless_normal((64, 32), (1, 2)) * 0.1
    found = certificate(plain, ours, x)
    assert found.same, found
    before, made = ws[0].numpy(), []
    for function in (plain, ours):
        ws[0].assign(before)
        made.append([function(x).numpy() for _ in range(3)] + [ws[0].numpy()])
    assert all(map(np.array_equal, *made))


def _large(ws):
    table = np.ones((1 << 20, 32), np.float32)
    return lambda x: x @ ws[0] + tf.gather(tf.constant(table), tf.cast(x[:, 0], tf.int32))


def _elsewhere(ws):
    def forward(x):
        with tf.device("GPU:0"):
            return tf.tanh(x @ ws[0])
    return forward


@pytest.mark.parametrize("make", [_large, _elsewhere])
def test_other_steps_are_left_alone(hook, make):
    ws = weights()
    _, ours, body = optimised(hook, training(ws[:1], make(ws)),
                              tf.TensorSpec((64, 32), tf.float32))
    assert body is None
    assert not any(op.name.startswith("optimized") for op in ours.graph.get_operations())


def test_what_computes_no_gradient_is_left_alone(hook):
    _, _, body = optimised(hook, tf.tanh, OPEN)
    assert body is None


@tf.custom_gradient
def _fivefold(x):
    return tf.identity(x), lambda g: 5.0 * g


def _meta_step():
    """Return a step whose results have gradients that Grappler's ops do not know of."""
    w = tf.Variable(tf.random.stateless_normal((64, 64), (1, 2)) * .1)

    def step(x):
        with tf.GradientTape() as tape:
            hidden = x
            for _ in range(5):
                hidden = _fivefold(tf.nn.relu(hidden @ w + 1.0) * tf.sigmoid(hidden)) * .2
            loss = tf.reduce_mean(tf.square(hidden))
        return loss, tape.gradient(loss, w), tf.reduce_sum(tf.stop_gradient(hidden) * x)
    return step, w, tf.random.stateless_normal((512, 64), (2, 3))


def _around(function, w, x):
    """Return what a tape outside of a step finds."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        loss, gradient, rest = function(x)
        penalty = tf.reduce_sum(gradient * gradient) + rest
    return [t.numpy() for t in (loss, gradient, rest, tape.gradient(loss, w),
                                tape.gradient(penalty, x), tape.gradient(rest, x))]


@pytest.mark.parametrize("called_before", [False, True])
def test_a_tape_outside_of_the_step_finds_the_gradients_of_the_trace(called_before):
    process.fresh()
    step, w, x = _meta_step()
    wanted = _around(tf.function(step), w, x)
    ours = tfckpt.checkpoint(tf.function(step), budget="min")
    if called_before:
        assert ours(x)[0].numpy() == wanted[0] and ours.report.applied
    with pytest.warns(UserWarning, match="a tape around step asks for its gradient"):
        assert all(map(np.array_equal, _around(ours, w, x), wanted))
    assert ours(x)[0].numpy() == wanted[0]


@pytest.mark.filterwarnings("ignore:tfckpt. a tape around")
@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_tape_outside_of_the_step_has_no_part_in_its_certificate(monkeypatch, setting):
    """It adds results to the step's graph before anybody asks.

    Of a step that is planned as it was traced Grappler may rearrange the plain one otherwise: then
    that is said, and the same with a tape and without.
    """
    monkeypatch.setenv("TFCKPT_CERTIFICATES", "on")
    monkeypatch.setenv("TFCKPT_OPTIMIZED", setting)
    step, w, x = _meta_step()
    alone, ours = (tfckpt.checkpoint(tf.function(step), budget="min") for _ in range(2))
    alone(x)
    _around(ours, w, x)
    assert alone.report.applied and ours.report.applied and wait_for_certificates()
    assert str(ours.report.certificate) == str(alone.report.certificate)
    assert ours.report.identical is not None
    assert ours.report.identical or setting == "off", ours.report.certificate


@pytest.mark.filterwarnings("ignore:tfckpt. a tape around step asks")
def test_a_function_around_the_step_finds_them_too():
    process.fresh()
    step, _, x = _meta_step()

    def gradient_of(inner):
        @tf.function
        def outer(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                rest = inner(x)[2]
            return tape.gradient(rest, x)
        return outer(x).numpy()

    wanted = gradient_of(tf.function(step))
    np.testing.assert_array_equal(gradient_of(tfckpt.checkpoint(tf.function(step), budget="min")),
                                  wanted)


@pytest.mark.filterwarnings("ignore:tfckpt. a tape around step asks")
def test_forward_mode_through_the_step():
    process.fresh()
    step, _, x = _meta_step()
    found = []
    for function in (tf.function(step), tfckpt.checkpoint(tf.function(step), budget="min")):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            loss = function(x)[0]
        found.append(accumulator.jvp(loss).numpy())
    assert found[0] == found[1]


def test_not_where_it_is_switched_off(monkeypatch):
    monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")
    step, x, _ = gelu_step(4, 64, 512)
    ours = tfckpt.checkpoint(tf.function(step), budget="min")
    ours(x)
    graph = ours.get_concrete_function(x).graph
    assert not any("optimized/" in op.name for op in graph.get_operations())


def test_names_in_the_report_are_those_of_the_trace():
    step, x, _ = gelu_step(4, 64, 512)
    ours = tfckpt.checkpoint(tf.function(step), budget="min")
    ours(x)
    assert ours.report.applied
    assert "optimized/" not in ours.report.explain()
    graph = ours.get_concrete_function(x).graph
    assert any("optimized/" in op.name for op in graph.get_operations())


@pytest.mark.parametrize("devices, one", [
    (["", ""], True), (["/CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"], True),
    (["/device:CPU:0", "/device:CPU:1"], False), (["", "/device:CPU:1"], False),
    (["/job:localhost/replica:0/task:0/device:CPU:0", "/device:CPU:1"], False),
    (["/job:worker/replica:0/task:0/device:CPU:0"], False), (["/GPU:0"], False)])
def test_a_step_on_another_device_is_left_as_traced(devices, one):
    """Ops lose their devices where Grappler's take their place: replicas would run on one CPU."""
    assert on_one_device(devices) == one


def test_so_is_one_that_is_called_on_another_device():
    assert on_one_device(["", ""])
    with tf.device("/CPU:0"):
        assert on_one_device(["", "/CPU:0"]) and tf_adapter.device_of_calls() == "CPU:0"
    with tf.device("/GPU:1"):
        assert not on_one_device([""]) and tf_adapter.device_of_calls() == "GPU:1"


def test_a_step_that_is_called_on_the_cpu_beside_a_gpu_is_asked_about_as_on_a_cpu(monkeypatch):
    monkeypatch.setattr(tf_adapter, "default_device", lambda: "GPU:0")
    monkeypatch.setattr(tf_adapter, "_own_gpu", lambda: b"a GPU")
    assert tf_adapter.own_gpu() == b"a GPU" and on_one_device(["", "/GPU:0"])
    assert not on_one_device(["/CPU:0"])
    with tf.device("/CPU:0"):
        assert tf_adapter.own_gpu() == b"" and on_one_device(["", "/CPU:0"])
    with tf.device("/GPU:1"):
        assert tf_adapter.own_gpu() == b"" and not on_one_device([""])


def _two_updates():
    """Loops that read a variable in their bodies, before and after it is updated."""
    (w,) = weights(1)

    def loop(h):
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, h))[1]

    def step(x):
        losses = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                h = loop(tf.sin(loop(x)))
                losses.append(tf.reduce_mean(tf.square(tf.tanh(tf.tanh(h) @ w))))
            w.assign_sub(5.0 * tape.gradient(losses[-1], w))
        return losses
    return step, tf.random.stateless_normal((4096, 32), (1, 2))


def test_loops_read_variables_after_the_writes_that_they_followed(monkeypatch):
    """Grappler drops a control edge where data comes from an op that follows the same write."""
    step, x = _two_updates()
    ours = tfckpt.checkpoint(tf.function(step), budget="min")
    ours(x)
    assert ours.report.applied and instantiated.same_arithmetic(ours, x).same
    monkeypatch.setattr(lowered_loops, "wait_as_asked", lambda asked, found: None)
    step, x = _two_updates()
    ours = tfckpt.checkpoint(tf.function(step), budget="min")
    ours(x)
    assert not instantiated.same_arithmetic(ours, x).same


def test_of_a_loop_grappler_knows_what_it_knows_once_that_is_lowered(monkeypatch):
    """Not the shape of a gradient that comes from a list: sums of it are left alone."""
    def as_ops(*_):
        raise lowered_loops.NotRaised("they are optimised as ops")

    def certificate():
        (w,) = weights(1)

        def loop(h):
            return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)),
                                 (0, h))[1]

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = (tf.reduce_mean(tf.tanh(tf.sin(loop(x))))
                        + tf.reduce_mean(tf.sin(tf.tanh(loop(x)))))
            gradient, of_w = tape.gradient(loss, (x, w))
            w.assign_sub(of_w)
            return tf.reduce_sum(tf.square(gradient + tf.sin(x) + tf.cos(x)))

        x = tf.random.stateless_normal((4096, 32), (1, 2))
        ours = tfckpt.checkpoint(tf.function(step, autograph=False), budget="min")
        ours(x)
        assert ours.report.applied
        return instantiated.same_arithmetic(ours, x).same

    assert certificate()
    monkeypatch.setattr(grappler, "with_loops", as_ops)
    assert not certificate()


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_writes_come_after_the_reads_that_they_followed(monkeypatch):
    """Grappler drops an edge where data leads from the read to the write, and then that data."""
    from tests.support.random_steps.assembly import build, draw_spec
    from tfckpt.capture.grappler import in_place as optimised_body
    from tfckpt.verify.arithmetic.terms import terms_of

    def open_reads():
        process.fresh()
        made = build(draw_spec(3328))
        step = tfckpt.checkpoint(tf.function(made.function), budget="min")
        step(*made.batches[0])
        assert step.report.applied
        function = step.get_concrete_function(*made.batches[0])
        (found,) = terms_of([instantiated.computation_of(function, made.batches[0], {}, {})])
        return found.open

    assert not open_reads()
    monkeypatch.setattr(optimised_body, "write_after_reads", lambda asked, found: None)
    assert open_reads()


def test_a_lowered_loop_waits_for_no_more_than_the_runtime_has_it_wait():
    """Grappler has a loop that reads a variable wait for all that it is given."""
    step, x = _two_updates()
    plain = tf.function(step).get_concrete_function(x)
    asked = grappler.question(
        plain.graph, (), tf_adapter.shown_definition(plain.graph)).answer(lower=True)
    ran = [node for graph in tf_adapter.instantiated(plain, (x,), {}) for node in graph.node]
    for nodes in (asked.node, ran):
        first = [node for node in nodes if node.op == "Enter" and node.name.startswith("while/")]
        assert first and not any(name.startswith("^") for node in first for name in node.input)


def test_a_branch_that_is_known_to_be_taken(hook):
    """Its condition gives way to a constant of the lowered branch, and lowering makes that anew."""
    v = tf.Variable(2.0)

    def step(x):
        with tf.GradientTape() as tape:
            value = tf.cond(tf.constant(True), lambda: tf.pow(v, 3.0), lambda: v * 1.0)
        return x * tape.gradient(value, v)

    plain, ours, told = optimised(hook, step, tf.TensorSpec((4,)))
    x = tf.constant([1.0, 2.0, 3.0, 4.0])
    assert told is not None and ours(x).numpy().tolist() == plain(x).numpy().tolist()
    assert ours(x).numpy().tolist() == [12.0, 24.0, 36.0, 48.0]
    assert certificate(plain, ours, x).same


LAYERS = {
    "dense": lambda: [keras.layers.Dense(24, activation=name)
                      for name in ("relu", "gelu", "tanh", "elu", "sigmoid", None)],
    "convolution": lambda: [keras.layers.Conv2D(6, 3, activation="relu"),
                            keras.layers.DepthwiseConv2D(3, activation="relu"),
                            keras.layers.Conv2D(4, 1), keras.layers.Flatten()],
    "volume": lambda: [keras.layers.Reshape((8, 8, 8, 1)),
                       keras.layers.Conv3D(3, 3, activation="relu"), keras.layers.Flatten()],
}


@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_fused_is_priced_as_what_it_was_fused_of(hook, kind):
    """Products count alike: Grappler leaves none out here, and makes none."""
    shape = {"dense": (32, 16), "convolution": (4, 12, 12, 8), "volume": (4, 512)}[kind]
    model = keras.Sequential([keras.layers.Input(shape[1:]), *LAYERS[kind]()])
    variables = [v.value for v in model.trainable_variables]
    plain, ours, _ = optimised(hook, training(variables, model), tf.TensorSpec(shape))
    counted = [sum(flops(graph, op) for op in graph.ops)
               for graph in (capture(plain.graph), capture(ours.graph))]
    assert counted[0] == counted[1] > 0
    fused = {op.type for op in ours.graph.get_operations() if op.type.startswith("_Fused")}
    assert fused


@pytest.mark.parametrize("function, op_type", [
    (tf.exp, "Exp"), (lambda y: tf.sqrt(tf.exp(tf.square(y))), "_UnaryOpsComposition"),
    (lambda y: y * tf.sigmoid(y), "_MklSwish"), (tf.cumsum, "Cumsum")])
def test_which_kernels_write_over_what_they_read(function, op_type):
    """As TensorFlow's allocator counts it: one buffer or two, and some of that for its chunks."""
    halves = [tf.random.stateless_normal((512, 512), (1, i)) * 0.1 for i in range(2)]
    called = tf.function(lambda: tf.reduce_sum(function(tf.concat(halves, 0))))
    called()
    buffers = tfckpt.verify.measure_peak(called, repeats=3) / (4 * 1024 * 512)
    assert (buffers < 1.9) == record(op_type).reuses_input
    assert op_type in tfckpt.verify.executed(called).ops


@pytest.mark.parametrize("read_again", [False, True])
@pytest.mark.parametrize("loss, labels", [
    ("SparseSoftmaxCrossEntropyWithLogits", lambda: tf.zeros((1024,), tf.int32)),
    ("SoftmaxCrossEntropyWithLogits", lambda: tf.fill((1, 512), 1 / 512))])
def test_losses_write_gradients_over_logits_that_nothing_reads_again(loss, labels, read_again):
    halves = [tf.random.stateless_normal((512, 512), (1, i)) for i in range(2)]

    @tf.function
    def called():
        logits = tf.concat(halves, 0)
        _, gradient = getattr(tf.raw_ops, loss)(features=logits, labels=labels())
        found = tf.reduce_sum(gradient)
        with tf.control_dependencies([found]):
            return found + (tf.reduce_sum(tf.identity(logits)) if read_again else 0.0)

    called()
    buffers = tfckpt.verify.measure_peak(called, repeats=3) / (4 * 1024 * 512)
    assert record(loss).writes_over == (1, 0) and (buffers < 1.9) != read_again
    assert loss in tfckpt.verify.executed(called).ops


@pytest.mark.parametrize("gate", [tf.nn.silu, lambda x: x * tf.tanh(tf.nn.softplus(x))],
                         ids=["silu", "mish"])
def test_a_product_that_grappler_left_as_it_is_stays_so(gate):
    """Marked or not, Grappler merges x * sigmoid(x), which it did not while x had other readers."""
    rows = tf.range(512) % 8

    def trained(wrap):
        process.fresh()
        some = weights(5)

        def step(x):
            with tf.GradientTape() as tape:
                for weight in some:
                    h = x @ weight
                    x = gate(tf.gather(tf.math.unsorted_segment_mean(h, rows, 8), rows) + h)
                loss = tf.reduce_mean(x * x)
            for weight, gradient in zip(some, tape.gradient(loss, some), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        function, x = wrap(tf.function(step)), tf.random.stateless_normal((512, 32), (1, 2))
        found = [function(x).numpy().tobytes() for _ in range(2)]
        return found + [weight.numpy().tobytes() for weight in some], function, x

    wanted, _, _ = trained(lambda step: step)
    found, step, x = trained(tfckpt.checkpoint)
    assert step.report.applied and step.report.recomputed_ops
    assert found == wanted
    assert tfckpt.verify.same_arithmetic(step, x).same
