"""Reading graphs: regions, purity, shapes."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tfckpt.capture.devices import device_key
from tfckpt.capture.purity import is_pure
from tfckpt.capture.regions import around_gradients, regions
from tfckpt.capture.shapes import concrete_shapes, has_unknown_shapes, planned_shapes
from tfckpt.capture.tfgraph import capture
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, UPDATE, check_graph
from tfckpt.store.key import graph_digest

ROWS = tf.TensorSpec((4, 3), tf.float32)


def captured(body, *specs):
    graph = capture(tf.function(body).get_concrete_function(*(specs or (ROWS,))).graph)
    check_graph(graph)
    return graph


def region_of(graph):
    return {op.name: op.region for op in graph.ops}


def of_type(graph, op_type):
    """Regions of the ops of a type, in graph order."""
    return [op.region for op in graph.ops if op.type == op_type]


def test_what_nothing_reads_is_left_out():
    counter = tf.Variable(0)

    def body(x):
        tf.exp(tf.sin(x, name="unread"), name="last_unread")
        counter.assign_add(1)
        return tf.cos(x, name="read")

    names = [op.name for op in captured(body).ops]
    assert "read" in names and "unread" not in names and "last_unread" not in names
    assert any("AssignAdd" in name for name in names)


def test_what_shrinks_a_large_constant_is_not_repeated():
    """Each reader costs Grappler copies of the constant; what it saves here is less than that."""
    table, small = np.zeros((1 << 18, 16), np.float32), np.zeros((256, 16), np.float32)

    def body(x):
        rows = tf.range(4)
        return (tf.gather(table, rows, name="shrinks"), tf.gather(small, rows, name="small"),
                tf.add(table, x, name="keeps"), tf.reduce_sum(x * table, name="sum"))

    pure = {op.name: op.pure for op in captured(body, tf.TensorSpec((1, 16), tf.float32)).ops}
    assert not pure["shrinks"]
    assert pure["small"] and pure["keeps"] and pure["sum"]


def test_the_gradient_of_a_constant_is_left_out():
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x / tf.constant(3.0))
        return tape.gradient(loss, x)

    traced = tf.function(body).get_concrete_function(ROWS).graph
    assert sum(op.type == "Neg" for op in traced.get_operations()) == 1  # -x / 3 / 3
    assert not [op for op in captured(body).ops if op.type == "Neg"]


# Regions.


def test_gradient_tape_with_momentum():
    weight = tf.Variable(tf.ones((3, 2)))
    velocity = tf.Variable(tf.zeros((3, 2)))
    counter = tf.Variable(0, dtype=tf.int64)

    def step(x):
        counter.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weight), name="loss")
        gradient = tape.gradient(loss, weight)
        velocity.assign(tf.multiply(velocity, 0.9, name="decayed") + gradient)
        weight.assign_sub(0.1 * velocity)
        return loss

    graph = captured(step)
    regions = region_of(graph)
    assert of_type(graph, "Tanh") == [FORWARD] and of_type(graph, "TanhGrad") == [BACKWARD]
    products = [op.region for op in graph.ops if op.type == "MatMul"]
    assert products == [FORWARD, BACKWARD]
    assert regions["decayed"] == UPDATE  # needs no gradient, feeds only the update
    assert of_type(graph, "AssignVariableOp") == [UPDATE]
    assert of_type(graph, "AssignSubVariableOp") == [UPDATE]
    assert of_type(graph, "AssignAddVariableOp") == [OTHER]
    assert regions["loss"] == OTHER  # its value is returned; the gradient does not read it
    assert graph.has_gradient()


def test_a_returned_gradient_is_backward_to_its_end():
    weight = tf.Variable(tf.ones((3, 2)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weight)) + tf.reduce_sum(tf.sin(weight))
        return tf.multiply(tape.gradient(loss, weight), 0.5, name="scaled")

    graph = captured(step)
    regions = region_of(graph)
    assert regions["scaled"] == BACKWARD
    assert of_type(graph, "AddN") == [BACKWARD]  # accumulation at top level, in no scope
    assert UPDATE not in regions.values()


def test_gradients_of_a_v1_graph():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (4, 3), "x")
        weight = tf.compat.v1.get_variable("w", initializer=tf.ones((3, 2)), use_resource=True)
        loss = tf.reduce_sum(tf.tanh(x @ weight))
        gradient, = tf.gradients(loss, [weight])
        second, = tf.gradients(loss, [x])
        train = weight.assign_sub(gradient, read_value=False)
    found = capture(graph, fetches=[loss, second])
    regions = region_of(found)
    assert any(name.startswith("gradients/") for name in regions)
    assert any(name.startswith("gradients_1/") for name in regions)
    assert all(region == BACKWARD for name, region in regions.items()
               if name.startswith(("gradients/", "gradients_1/")))
    assert regions["Tanh"] == FORWARD and regions[train.name] == UPDATE


def test_ops_of_a_custom_gradient_lie_outside_any_scope():
    @tf.custom_gradient
    def clipped(x):
        def backward(upstream):
            extra = tf.ones((4, 2)) * 3.0
            return tf.clip_by_value(upstream * extra, -1.0, 1.0, name="clip")

        return tf.sinh(x), backward

    weight = tf.Variable(tf.ones((3, 2)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(clipped(x @ weight)))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    graph = captured(step)
    clip = [op for op in graph.ops if op.type in ("ClipByValue", "Minimum", "Maximum")]
    assert clip and all(op.region == BACKWARD for op in clip)
    assert of_type(graph, "Sinh") == [FORWARD] and of_type(graph, "Tanh") == [FORWARD]
    assert of_type(graph, "AssignSubVariableOp") == [UPDATE]


def test_a_constant_merged_under_a_gradients_name_leads_nowhere():
    """Grappler merges equal constants; what reads the result may still be forward."""
    names = ["x", "gradient_tape/half", "product", "gradient_tape/seed", "gradient_tape/mul"]
    found = regions(names, [[], [], [0, 1], [], [2, 3]], [[]] * 5, [False] * 5)
    assert found == [FORWARD, BACKWARD, FORWARD, BACKWARD, BACKWARD]


NAMES = ["x", "gradient_tape/square", "cube", "gradient_tape/seed", "gradient_tape/mul", "AddN"]
READ = [[], [0], [0, 1], [], [2, 3], [1, 4]]


def test_what_the_forward_reads_is_no_gradient_for_its_name():
    """The square of the forward, merged under the name of one in the derivative of the cube."""
    assert regions(NAMES, READ, [[]] * 6, [False] * 6).count(BACKWARD) == 5
    found = regions(NAMES, READ, [[]] * 6, [False] * 6, forward=[0, 2])
    assert found == [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD]


def test_what_the_forward_reads_is_forward_though_an_update_gave_it_its_name():
    """A size that the forward and the update know alike, folded to one constant."""
    names = ["x", "update/size", "filled", "gradient_tape/seed", "gradient_tape/mul", "assign"]
    read = [[], [], [0, 1], [], [2, 3], [1, 4]]
    found = regions(names, read, [[]] * 6, [False] * 5 + [True], forward=[0, 2], later=[1, 5])
    assert found == [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, UPDATE]


def test_what_followed_a_gradient_is_backward_without_its_control_edge():
    """A product of a custom gradient that Grappler has cut off from what it waited for."""
    names = ["x", "square", "slope", "gradient_tape/seed", "gradient_tape/mul"]
    read = [[], [0], [0], [], [2, 3]]
    found = regions(names, read, [[]] * 5, [False] * 5, later=[2])
    assert found == [FORWARD, OTHER, BACKWARD, BACKWARD, BACKWARD]


def test_the_tail_of_a_backward_pass_without_a_scope_is_backward_as_far_as_it_reads_activations():
    """As custom gradients with variables make it; a product with the learning rate is update."""
    names = ["x", "w", "h", "y", "gradient_tape/seed", "slope", "of_h", "of_w", "rate", "step",
             "assign"]
    read = [[], [], [0, 1], [2, 1], [], [3, 4], [5, 1], [0, 6], [], [7, 8], [9]]
    writes = [name == "assign" for name in names]
    arguments = [read, [[]] * len(names), writes]
    blind = regions(names, *arguments, later=[5])
    assert blind[5:] == [UPDATE, UPDATE, UPDATE, UPDATE, UPDATE, UPDATE]
    found = regions(names, *arguments, later=[5], fed=[0, 8], variables=[1])
    assert found[2:4] == [FORWARD, FORWARD]
    assert found[5:] == [BACKWARD, UPDATE, UPDATE, UPDATE, UPDATE, UPDATE]
    deeper = [[], [], [0, 1], [2, 1], [], [3, 4], [5, 1], [2, 6], [], [7, 8], [9]]
    found = regions(names, deeper, *arguments[1:], later=[5], fed=[0, 8], variables=[1])
    assert found[5:8] == [BACKWARD, BACKWARD, BACKWARD] and found[9] == UPDATE


def test_what_followed_no_gradient_before_ops_were_merged():
    """In any order, and with the cycle of a lowered loop."""
    names = ["AddN", "gradient_tape/mul", "merge", "next", "x", "gradient_tape/list", "awaits"]
    inputs = [[1, 5], [3, 4], [4, 3], [2], [], [], []]
    before, after = around_gradients(names, inputs, [[]] * 6 + [[1]], {5})
    assert before == {"merge", "next", "x"} and after == {"AddN", "awaits"}
    inputs[2].append(0)  # now the loop reads a gradient
    before, after = around_gradients(names, inputs, [[]] * 6 + [[1]], {5})
    assert before == {"x"} and after == {"AddN", "awaits", "merge", "next"}


def test_statistics_of_batch_normalisation_are_neither_forward_nor_update():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4),
                              keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    traced = tf.function(step).get_concrete_function(ROWS)
    graph = capture(traced.graph)
    handles = {t.name.split(":")[0]: source for source, t in
               ((h, p) for h, p in traced.graph.captures)}
    moving = {v.path: v.value.handle for v in model.non_trainable_variables}
    trained = {v.path: v.value.handle for v in model.trainable_variables}

    def writers(variables):
        names = {name for name, source in handles.items()
                 if any(source is handle for handle in variables.values())}
        return [op.region for op in graph.ops if op.type.startswith("Assign")
                and graph.ops[op.inputs[0][0]].name in names]

    assert writers(moving) == [OTHER, OTHER]
    assert writers(trained) == [UPDATE] * len(trained)
    count = collections.Counter(op.region for op in graph.ops)
    assert count[FORWARD] and count[BACKWARD]


def test_no_gradient():
    graph = captured(lambda x: tf.tanh(x))
    assert not graph.has_gradient() and set(region_of(graph).values()) == {OTHER}


def test_edges_outputs_and_sinks():
    variable = tf.Variable(1.0)

    def step(x):
        variable.assign(2.0)
        top, _ = tf.math.top_k(x, 2)
        return top, tf.identity(x)

    graph = captured(step)
    top = next(op for op in graph.ops if op.type == "TopKV2")
    assert [t.shape for t in top.outputs] == [(4, 2), (4, 2)]
    assert [t.bytes for t in top.outputs] == [4 * 2 * 4, 4 * 2 * 4]
    assert len(graph.fetches) == 2
    assert {graph.ops[i].type for i in graph.sinks} >= {"AssignVariableOp"}


# Purity.


def _purity(body):
    return {op.type: op.pure for op in captured(body).ops}


@pytest.mark.parametrize("make, op_type", [
    (lambda x: tf.random.uniform((3,)), "RandomUniform"),
    (lambda x: tf.random.normal((3,)), "RandomStandardNormal"),
    (lambda x: tf.random.shuffle(x), "RandomShuffle"),
    (lambda x: tf.py_function(lambda v: v, [x], tf.float32), "EagerPyFunc"),
    (lambda x: tf.numpy_function(lambda v: v, [x], tf.float32), "PyFunc"),
    (lambda x: tf.numpy_function(lambda v: v, [x], tf.float32, stateful=False),
     "PyFuncStateless"),
    (lambda x: tf.debugging.check_numerics(x, "bad"), "CheckNumerics"),
    (lambda x: tf.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])[0],
     "StatelessWhile"),
])
def test_never_twice(make, op_type):
    assert _purity(make)[op_type] is False


def test_never_twice_without_result():
    def step(x):
        tf.print("seen", x)
        tf.raw_ops.Assert(condition=tf.reduce_all(x < 9.0), data=[x], summarize=3)
        return x

    found = _purity(step)
    assert found["PrintV2"] is False and found["Assert"] is False


def test_variables_are_read_once_and_written_once():
    variable = tf.Variable(tf.zeros(3))

    def step(x):
        variable.assign_add(x[0])
        return variable * 2.0

    found = _purity(step)
    assert found["ReadVariableOp"] is False and found["AssignAddVariableOp"] is False
    assert found["Mul"] is True


@pytest.mark.parametrize("make, op_type", [
    (lambda x: tf.random.stateless_uniform((3,), seed=[1, 2]), "StatelessRandomUniformV2"),
    (lambda x: tf.nn.softmax(x), "Softmax"),
    (lambda x: x @ tf.transpose(x), "MatMul"),
    (lambda x: tf.nn.relu(x), "Relu"),
    (lambda x: tf.concat([x, x], 0), "ConcatV2"),
    (lambda x: tf.cast(x, tf.int32), "Cast"),
])
def test_may_run_twice(make, op_type):
    assert _purity(make)[op_type] is True


def test_resources_and_variants_are_not_copied_but_for_lists_of_rows_and_of_zeros():
    assert not is_pure("Identity", False, ("resource",))
    assert not is_pure("ZerosLike", False, ("resource",))
    for made in ("Identity", "TensorListReserve", "TensorListPushBack", "OptionalFromValue"):
        assert not is_pure(made, False, ("variant",))
    assert is_pure("ZerosLike", False, ("variant",))
    assert is_pure("TensorListFromTensor", False, ("variant",))
    assert is_pure("Identity", False, ("float32",))


# Unknown dimensions.


def _unknown():
    weight = tf.Variable(tf.ones((3, 2)))
    return tf.function(lambda x: tf.tanh(x @ weight)).get_concrete_function(
        tf.TensorSpec((None, 3), tf.float32, name="x")).graph


def test_unknown_shapes_are_seen():
    assert has_unknown_shapes(_unknown())
    known = tf.function(lambda x: x + 1.0).get_concrete_function(ROWS).graph
    assert not has_unknown_shapes(known)


@pytest.mark.parametrize("batch, inputs", [(7, {}), (None, {"x": (7, 3)}), (5, {"x": (7, 3)})])
def test_shapes_are_filled_in(batch, inputs):
    graph = _unknown()
    shapes = concrete_shapes(graph, batch, inputs)
    found = capture(graph, shapes=shapes)
    tanh = next(op for op in found.ops if op.type == "Tanh")
    assert tanh.outputs[0].shape == (7, 2) and tanh.outputs[0].bytes == 7 * 2 * 4
    assert has_unknown_shapes(graph)  # the traced graph itself is not changed


@pytest.mark.parametrize("rows", [None, 6])
def test_only_what_is_open_is_read_again(rows):
    """Sizes are computed, one of them from values; the capture is that with all shapes inferred."""
    weight = tf.Variable(tf.ones((16, 16)))

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.reshape(x @ weight, tf.concat([tf.shape(x)[:1], [4, 4]], 0))
            half = tf.cast(tf.cast(tf.shape(h)[0], tf.float32) / 2.0, tf.int32)
            h = tf.nn.gelu(h[:half]) @ tf.transpose(h[half:2 * half], (0, 2, 1))
            h = tf.nn.softmax(tf.reshape(h, (-1, 16)) @ weight)
            h = tf.boolean_mask(h, h[:, 0] > 0.0)
            loss = tf.reduce_mean(h * tf.cast(tf.range(tf.shape(h)[0]), tf.float32)[:, None])
        return loss, tape.gradient(loss, weight)

    graph = tf.function(step).get_concrete_function(tf.TensorSpec([rows, 16], name="x")).graph
    shapes, _ = planned_shapes(graph, 6, may_assume=False)
    every = concrete_shapes(graph, 6, {})
    assert graph_digest(capture(graph, shapes=shapes)) == graph_digest(capture(graph, shapes=every))
    if rows is not None:
        assert len(shapes.get_operations()) < 0.8 * len(every.get_operations())


def test_an_unknown_dimension_is_never_one():
    graph = _unknown()
    found = capture(graph, shapes=concrete_shapes(graph, None, {}))
    tanh = next(op for op in found.ops if op.type == "Tanh")
    assert tanh.outputs[0].shape == (None, 2) and tanh.outputs[0].bytes is None


def test_while_loops_of_tf1_are_refused_or_read():
    """A graph with a cycle is refused by name; the functional form is one vertex."""
    from tfckpt.errors import CaptureError
    graph = tf.Graph()
    with graph.as_default():
        tf.compat.v1.disable_control_flow_v2()
        try:
            out = tf.compat.v1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])
        finally:
            tf.compat.v1.enable_control_flow_v2()
    with pytest.raises(CaptureError, match="cycle"):
        capture(graph, fetches=[out])
    assert np.array_equal(of_type(captured(
        lambda x: tf.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])[0]),
        "StatelessWhile"), [OTHER])


@pytest.mark.parametrize("device", [
    "", "/cpu:0", "/GPU:1", "/device:GPU:1", "/device:TPU:*", "/job:localhost/device:CPU:2",
    "/job:localhost/replica:0/task:0/device:CPU:1", "/job:worker/task:3/gpu:0", "/gpu:*",
    "/job:chief/replica:0/task:0", "/job:worker/replica:0/task:1/device:CPU:0"])
def test_devices_are_read_as_tensorflow_reads_them(device):
    spec = tf.DeviceSpec.from_string(device)
    place = "" if spec.job in (None, "localhost") else f"/job:{spec.job}/task:{spec.task or 0}"
    assert device_key(device) == (
        f"{place}/device:{spec.device_type or 'CPU'}:{spec.device_index or 0}")


def _products(width, count):
    """Return weights, and a function of as many products, each with a tanh after it."""
    weights = [tf.Variable(tf.random.stateless_normal((width, width), (1, i)) * 0.1)
               for i in range(count)]

    def deep(x):
        for weight in weights:
            x = tf.tanh(x @ weight)
        return x

    return weights, deep


@pytest.mark.parametrize("batch, given", [(256, None), (None, 256)])
def test_what_branches_keep_for_their_gradients_is_counted(batch, given):
    """Of three products and three activations: what gradients read, and no result twice."""
    weights, deep = _products(128, 3)

    @tf.function
    def step(x, flag):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cond(flag, lambda: deep(x), lambda: tf.tanh(x @ weights[0])))
        return tape.gradient(loss, weights, unconnected_gradients="zero")

    specs = tf.TensorSpec((batch, 128)), tf.TensorSpec((), tf.bool)
    graph = step.get_concrete_function(*specs).graph
    shapes = None if given is None else concrete_shapes(graph, given, {})
    op = next(op for op in capture(graph, shapes=shapes).ops if op.type == "If")
    entry = 256 * 128 * 4
    assert op.outputs[0].bytes == entry
    # the inner results of tanh, and nothing of what was read of variables
    assert [t.bytes for t in op.outputs if t.dtype == "variant" and t.bytes] == [2 * entry]


def test_of_several_branches_the_one_that_keeps_most_counts():
    """One of them runs. Here each keeps other values, which have slots of their own."""
    weights, _ = _products(128, 2)

    @tf.function
    def step(x, flag):
        with tf.GradientTape() as tape:
            h = x @ weights[0]
            h = tf.cond(flag, lambda: tf.sin(tf.exp(tf.tanh(h))),
                        lambda: tf.cos(tf.sin(tf.sigmoid(tf.exp(h)))))
            loss = tf.reduce_sum(h @ weights[1])
        return tape.gradient(loss, weights)

    graph = step.get_concrete_function(tf.TensorSpec((256, 128)), tf.TensorSpec((), tf.bool)).graph
    found = capture(graph)
    op = next(op for op in found.ops if op.type.endswith("If"))
    entry = 256 * 128 * 4
    assert sum(t.bytes for t in op.outputs if t.dtype == "variant" and t.bytes) == 3 * entry
    assert op.pure and not found.refused


def test_a_step_with_branches_takes_what_is_planned():
    weights, deep = _products(256, 6)

    @tf.function
    def step(x, flag):
        with tf.GradientTape() as tape:
            y = tf.cond(flag, lambda: deep(x), lambda: tf.nn.softplus(deep(x)))
            loss = tf.reduce_mean(y * y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    batch = tf.random.stateless_normal((2048, 256), (1, 9)), tf.constant(False)
    measured = tfckpt.verify.measure_peak(step, *batch, repeats=3)
    marked = tfckpt.checkpoint(step, solver="store_all", free_moves=False)
    marked(*batch)
    assert 0.8 * measured <= marked.report.baseline_peak_bytes <= 1.3 * measured
