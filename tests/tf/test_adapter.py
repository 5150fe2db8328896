"""Every private TensorFlow API that tfckpt uses, on this TensorFlow version."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import question as grappler


def traced(body, *specs):
    """Return the FuncGraph of a traced function."""
    return tf.function(body).get_concrete_function(*specs).graph


VECTOR = tf.TensorSpec((3,), tf.float32)


def test_hook_is_called_once_per_trace_with_the_complete_graph(hook):
    seen = []

    def callback(graph):
        seen.append((graph, [op.type for op in graph.get_operations()], len(graph.outputs)))

    hook(callback)
    hook(callback)  # idempotent
    step = tf.function(lambda x: tf.tanh(x) + 1.0)
    step(tf.zeros(3))
    step(tf.ones(3))
    step(tf.zeros(4))
    assert len(seen) == 2
    graph, types, outputs = seen[0]
    assert isinstance(graph, tf_adapter.FuncGraph)
    assert "Tanh" in types and "Placeholder" in types and outputs == 1


def test_edits_in_the_hook_reach_what_runs(hook):
    def callback(graph):
        for op in graph.get_operations():
            if op.type == "AddV2":
                tf_adapter.update_input(op, 1, op.inputs[0])

    hook(callback)
    step = tf.function(lambda x: tf.add(x, tf.constant([10.0, 20.0, 30.0])))
    np.testing.assert_array_equal(step(tf.constant([1.0, 2.0, 3.0])), [2, 4, 6])


def test_the_hook_is_relied_on_where_it_was_tested(monkeypatch):
    assert tf_adapter.hook_problem() == ""
    for version, tested in (("2.17.1", False), ("2.18.0", True), ("2.21.3", True),
                            ("2.22.0-dev20261101", False), ("3.0.0", False)):
        monkeypatch.setattr(tf, "__version__", version)
        assert (tf_adapter.hook_problem() == "") is tested
        assert tested or version in tf_adapter.hook_problem()
    monkeypatch.undo()
    monkeypatch.setattr(tf_adapter, "FUNC_GRAPH_TRANSFORMS", None)
    assert "no trace hook" in tf_adapter.hook_problem()


def test_hook_sees_the_train_step_of_keras(hook):
    names = []
    hook(lambda graph: names.append(graph.name))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert any("step" in name for name in names)


def test_is_tf_function():
    assert tf_adapter.is_tf_function(tf.function(lambda x: x))
    assert not tf_adapter.is_tf_function(lambda x: x)


def test_autograph_converts_what_a_function_calls_unless_told_not_to():
    seen = []

    def body(x):
        seen.append(tf_adapter.autograph_converts())
        return x

    for autograph in (True, False):
        tf.function(body, autograph=autograph)(tf.ones(3))
    tf.function(tf.autograph.experimental.do_not_convert(body))(tf.ones(3))
    assert seen == [True, False, False] and not tf_adapter.autograph_converts()


def test_clone_keeps_signature_compiler_and_autograph():
    signature = [tf.TensorSpec((None, 2), tf.float32)]

    def branches(x):
        if tf.reduce_sum(x) > 0:  # needs autograph
            return x
        return -x

    for jit_compile in (False, True):
        original = tf.function(lambda x: x, input_signature=signature, jit_compile=jit_compile,
                               autograph=True)
        clone = tf_adapter.clone_function(original, branches)
        assert clone.input_signature == tuple(signature)
        assert tf_adapter.compiles_with_xla(clone) is jit_compile
        np.testing.assert_array_equal(clone(tf.constant([[-1.0, -2.0]])), [[1, 2]])
        assert clone.get_concrete_function().structured_input_signature[0][0].shape.as_list() == [
            None, 2]
    plain = tf_adapter.clone_function(tf.function(lambda x: x, autograph=False), branches)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        plain(tf.ones((1, 2)))


def test_tracing_graph():
    assert tf_adapter.tracing_graph() is None
    seen = []
    graph = traced(lambda x: seen.append(tf_adapter.tracing_graph()) or x, VECTOR)
    assert seen == [graph]
    with tf.Graph().as_default():
        assert tf_adapter.tracing_graph() is None  # a v1 graph is no FuncGraph


def test_in_xla_only_while_tracing_for_xla():
    seen = []

    def body(x):
        seen.append(tf_adapter.in_xla(tf_adapter.tracing_graph()))
        return x + 1.0

    tf.function(body)(tf.ones(3))
    tf.function(body, jit_compile=True)(tf.ones(3))
    inner = tf.function(body)
    tf.function(lambda x: inner(x), jit_compile=True)(tf.ones(3))
    assert seen == [False, True, True]


def test_what_the_gradient_of_a_loop_or_branch_consists_of(hook):
    seen = []
    hook(lambda graph: seen.append((graph.name, tf_adapter.made_by_a_gradient(graph))))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, lambda y: (tf.sin(y) * y + 1.0,),
                              (x,))[0]
            y = tf.cond(tf.reduce_sum(y) > 0.0, lambda: tf.sin(y), lambda: tf.exp(y))
            y = tf.switch_case(tf.size(y), [lambda: tf.sin(y), lambda: tf.cos(y)])
        return tape.gradient(y, x)

    step.get_concrete_function(VECTOR)
    told = dict(seen)
    derived = {name for name in told if "_grad_" in name or name.endswith("_rewritten")}
    conditions = {name for name in told if name.startswith("while_cond")}
    assert len(told) == len(seen) and len(derived) >= 8
    assert {name for name, made in told.items() if made} == derived | conditions


def test_is_stateful():
    table = tf.Variable(1.0)

    def body(x):
        return tf.tanh(x) + table + tf.random.uniform((3,)) + tf.random.stateless_uniform(
            (3,), seed=[1, 2])

    found = {op.type: tf_adapter.is_stateful(op) for op in traced(body, VECTOR).get_operations()}
    assert found["RandomUniform"] and found["ReadVariableOp"]
    assert not found["Tanh"] and not found["StatelessRandomUniformV2"] and not found["AddV2"]


def test_handle_shape_of_captured_variables():
    variable = tf.Variable(tf.zeros((2, 5), tf.float16))
    graph = traced(lambda x: x * tf.cast(tf.reduce_sum(variable), tf.float32), VECTOR)
    handles = [t for t in graph.inputs if t.dtype == tf.resource]
    assert len(handles) == 1
    shape, dtype = tf_adapter.handle_shape(handles[0])
    assert shape.as_list() == [2, 5] and dtype == tf.float16


def test_inlined():
    variable = tf.Variable(tf.ones((3,)))
    inner = tf.function(lambda x: tf.tanh(x, name="inside") * variable)
    outer = tf.function(lambda x: inner(inner(x)))
    concrete = outer.get_concrete_function(VECTOR)
    definition = tf_adapter.inlined(concrete)
    types = [node.op for node in definition.node]
    assert types.count("Tanh") == 2 and not any("PartitionedCall" in t for t in types)
    assert not any("_class" in node.attr for node in definition.node)
    names = {node.name for node in definition.node}
    assert {t.op.name for t in (*concrete.inputs, *concrete.outputs)} <= names


@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_run_virtually(kind):
    """Tensors of 4 MB each, moved at 4 MB a second; what is not fetched does not run.

    x is freed only after b has been allocated.
    """
    graph = tf.Graph()
    with graph.as_default(), tf.device("/device:CPU:0"):
        x = tf.compat.v1.placeholder(tf.float32, (1000, 1000), name="x")
        tf.exp(tf.exp(x, name="a"), name="b")
        tf.exp(x, name="unwanted")
    run = tf_adapter.run_virtually(graph.as_graph_def(), ["b"], kind=kind, flops_per_second=1e15,
                                   bytes_per_second=4e6)
    assert run.peak_bytes == 12_000_000
    assert sorted(run.live) == [(name, 0, 4_000_000) for name in ("a", "b", "x")]
    assert list(run.seconds) == ["x", "a", "b"]
    assert run.seconds["a"] == pytest.approx(2.0, rel=0.01)
    slow = tf_adapter.run_virtually(graph.as_graph_def(), ["b"], kind=kind, flops_per_second=1e13,
                                    bytes_per_second=1e15)
    fast = tf_adapter.run_virtually(graph.as_graph_def(), ["b"], kind=kind, flops_per_second=1e14,
                                    bytes_per_second=1e15)
    assert slow.seconds["a"] == pytest.approx(10 * fast.seconds["a"], rel=0.2)


def test_run_virtually_on_a_device_too_small_for_the_graph():
    """Grappler has no answer for a graph that does not fit; it is told of endless memory."""
    graph = tf.Graph()
    with graph.as_default():
        tf.exp(tf.zeros((1 << 20, 1 << 16)), name="a")  # 256 GiB
    run = tf_adapter.run_virtually(graph.as_graph_def(), ["a"], kind="GPU", flops_per_second=1e12,
                                   bytes_per_second=1e12)
    assert run.peak_bytes >= 2 << 38


def test_handle_shape_of_eager_handles():
    shape, dtype = tf_adapter.handle_shape(tf.Variable(tf.zeros((2, 5))).handle)
    assert shape.as_list() == [2, 5] and dtype == tf.float32


def test_two_ops_of_one_name_are_refused_and_end_no_process():
    meta = tf.compat.v1.MetaGraphDef()
    for _ in range(2):
        meta.graph_def.node.add(name="twice", op="NoOp")
    with pytest.raises(ValueError, match="two ops are called twice"):
        tf_adapter.optimize_graph(tf_adapter.configured(), meta)


def test_grappler_may_be_told_of_a_gpu_that_is_not_here():
    assert tf_adapter.own_gpu() == b""
    device = tf_adapter.described_gpu("9.0", 80 << 30)
    graph = tf.Graph()
    with graph.as_default():
        images, kernel = (tf.raw_ops.RandomUniform(shape=shape, dtype=tf.float32, seed=1, seed2=2)
                          for shape in ((2, 8, 8, 4), (3, 3, 4, 4)))
        made = tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME"))
        gradient, = tf.gradients(made, kernel)  # steps that do not train are left alone
    meta = tf.compat.v1.MetaGraphDef(graph_def=graph.as_graph_def())
    meta.collection_def["train_op"].node_list.value.append(gradient.op.name)
    for node in meta.graph_def.node:
        node.device = tf_adapter.GPU
    first, told = ({node.attr["data_format"].s for node in tf_adapter.optimize_graph(
        tf_adapter.configured(), meta, gpu).node if "data_format" in node.attr}
        for gpu in (b"", device))
    assert first == {b"NHWC"} and b"NCHW" in told


def test_static_value():
    def step(x):
        length = tf.shape(x)[1]
        return {"known": 2 * length + 1, "open": tf.shape(x)[0], "given": x[0, 0],
                "list": tf.raw_ops.EmptyTensorList(element_shape=[2], max_num_elements=length,
                                                   element_dtype=tf.float32)}

    graph = traced(step, tf.TensorSpec((None, 7)))
    before = len(graph.get_operations())
    found = {name: tf_adapter.static_value(graph.structured_outputs[name])
             for name in ("known", "open", "given", "list")}
    assert found == {"known": 15, "open": None, "given": None, "list": None}
    assert len(graph.get_operations()) == before


def test_functions_that_a_graph_calls():
    @tf.function
    def layer(x):
        return tf.tanh(x), x

    graph = traced(lambda x: layer(x)[0], VECTOR)
    (call,) = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    name = tf_adapter.called_function(call)
    function = tf_adapter.find_function(graph, name)
    assert function.signature.name == name
    assert [node.op for node in function.node_def][0] == "Tanh"
    assert tf_adapter.find_function(graph, "no such function") is None
    flat, names = tf_adapter.flat_function(graph, function)
    assert [node.op for node in flat.node][:2] == ["Placeholder", "Tanh"]
    assert [names[function.ret[result.name]] for result in function.signature.output_arg] == [
        "Identity:0", "Identity_1:0"]


def test_functions_that_an_op_calls_and_their_graphs():
    graph = traced(lambda x: tf.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, tf.tanh(t)),
                                           (0, x))[1], tf.TensorSpec((None,), tf.float32))
    (loop,) = [op for op in graph.get_operations() if op.type == "StatelessWhile"]
    called = tf_adapter.called_functions(loop)
    assert {loop.get_attr("cond").name, loop.get_attr("body").name} == set(called)
    assert tf_adapter.called_functions(graph.inputs[0].op) == []
    body = tf_adapter.called_graph(loop, "body")
    (tanh,) = [op for op in body.get_operations() if op.type == "Tanh"]
    assert tanh.outputs[0].shape.as_list() == [None]
    assert "Less" in [op.type for op in tf_adapter.called_graph(loop, "cond").get_operations()]
    given = [tf.TensorShape((5,)) if t.dtype == tf.float32 else t.shape for t in loop.inputs]
    inferred = tf_adapter.called_graph(loop, "body", given)
    assert inferred.get_operation_by_name(tanh.name).outputs[0].shape.as_list() == [5]
    assert len(inferred.inputs) == len(body.inputs)


def test_import_nodes_reads_the_tensors_of_the_graph():
    graph = traced(lambda x: tf.identity(x), VECTOR)
    definition = tf.compat.v1.GraphDef()
    definition.node.add(name="twice", op="AddV2", input=["a", "a"]).attr["T"].type = 1
    definition.node.add(name="last", op="Neg", input=["twice", "^twice"]).attr["T"].type = 1
    for wanted in ("part/", "part_1/"):
        scope = tf_adapter.free_scope(graph, "part")
        assert scope == wanted
        inputs = {"a": graph.inputs[0], "unread": graph.inputs[0]}
        twice, last = tf_adapter.import_nodes(graph, definition, inputs, scope)
        assert twice.name == f"{scope}twice" and twice.inputs[0] is graph.inputs[0]
        assert last.inputs[0] is twice.outputs[0] and last.outputs[0].shape.as_list() == [3]
        assert tf_adapter.waiting_for(twice) == [last]


@pytest.mark.parametrize("compiled", [False, True])
def test_hidden_operations_are_no_part_of_the_function(hook, compiled):
    """Stateful ones either, and without Grappler, which would prune them."""
    count = tf.Variable(0.0)

    def callback(graph):
        if graph.name != "counting":
            return
        ops = {op.type: op for op in graph.get_operations()}
        write = ops["AssignAddVariableOp"]
        for op in graph.get_operations():
            tf_adapter.replace_control_inputs(op, [])
        graph.control_outputs = []
        first = [op.name for op in graph.get_operations()][::-1]
        tf_adapter.show_operations(graph, first, [write.name])
        names = [op.name for op in graph.get_operations()]
        assert names == [name for name in first if name != write.name]
        assert [op.name for op in tf_adapter.every_operation(graph)] == first[::-1]
        assert tf_adapter.how_shown(graph) == (tuple(first), frozenset([write.name]))
        with graph.as_default():
            tf.no_op("late")
        assert graph.get_operations()[-1].name == "late"

    hook(callback)

    def counting(x):
        count.assign_add(1.0)
        return x + 1.0

    step = tf.function(counting, jit_compile=compiled)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        np.testing.assert_array_equal(step(tf.zeros(3)), [1, 1, 1])
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    assert count.numpy() == 0.0
    types = [node.op for node in step.get_concrete_function(VECTOR).function_def.node_def]
    assert "AddV2" in types and "AssignAddVariableOp" not in types


def test_control_outputs():
    variable = tf.Variable(0.0)
    graph = traced(lambda x: variable.assign_add(tf.reduce_sum(x)), VECTOR)
    types = [op.type for op in tf_adapter.control_outputs(graph)]
    assert "AssignAddVariableOp" in types and "Sum" not in types
    assert tf_adapter.control_outputs(tf.Graph()) == []


def test_create_op():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.constant([1.0, -2.0])
    attrs = {"T": tf.compat.v1.AttrValue(type=tf.float32.as_datatype_enum),
             "_mine": tf.compat.v1.AttrValue(b=True)}
    with tf.device("/device:CPU:0"):  # must not leak in
        op = tf_adapter.create_op(graph, "Abs", [x], [tf.float32], "a/b-c_1", attrs, "")
    assert op.name == "a/b-c_1" and op.device == "" and list(op.inputs) == [x]
    assert op.node_def.attr["_mine"].b
    placed = tf_adapter.create_op(graph, "Abs", [x], [tf.float32], "d", dict(attrs),
                                  "/device:CPU:0")
    assert placed.device == "/device:CPU:0"
    with tf.compat.v1.Session(graph=graph) as session:
        np.testing.assert_array_equal(session.run(op.outputs[0]), [1, 2])


def _small_graph():
    graph = tf.Graph()
    with graph.as_default():
        a, b = tf.constant(1.0, name="a"), tf.constant(2.0, name="b")
        c = tf.add(a, b, name="c")
    return graph, a, b, c


def test_update_input_and_back():
    graph, a, b, c = _small_graph()
    for tensor, expected in ((b, 4.0), (a, 3.0)):
        tf_adapter.update_input(c.op, 0, tensor)
        assert c.op.inputs[0] is tensor
        with tf.compat.v1.Session(graph=graph) as session:
            assert session.run(c) == expected


def test_control_inputs_added_and_replaced():
    _, a, b, c = _small_graph()
    tf_adapter.add_control_input(c.op, a.op)
    tf_adapter.add_control_input(c.op, b.op)
    assert set(c.op.control_inputs) == {a.op, b.op}
    tf_adapter.replace_control_inputs(c.op, [b.op])
    assert c.op.control_inputs == [b.op]
    tf_adapter.replace_control_inputs(c.op, [])
    assert c.op.control_inputs == []


def test_record_executed_graphs_of_the_run_alone():
    @tf.function
    def large(x):
        for _ in range(20):
            x = tf.cumsum(x)
        return x

    fed = tf.ones(3)  # an argument: a constant would be folded away

    def types(function):
        fresh = tf.function(lambda: function(fed), autograph=False)
        graphs = tf_adapter.record_executed_graphs(fresh)
        return [node.op for graph in graphs for node in graph.node]

    small = tf.function(lambda x: tf.cos(x))
    assert types(small).count("Cos") == 1
    large(fed)  # runs in between, unrecorded
    assert types(small).count("Cos") == 1 and "Cumsum" not in types(small)
    assert types(large).count("Cumsum") == 20
    assert tf_adapter.record_executed_graphs(lambda: None) == []


def test_what_a_function_would_run_is_told_and_nothing_runs():
    variable = tf.Variable(2.0)

    @tf.function
    def step(x, times):
        for _ in range(times):
            x = tf.cumsum(x)
        variable.assign_add(1.0)
        return x, variable.read_value()

    fed = tf.ones(3)
    concrete = step.get_concrete_function(fed, times=4)
    for _ in range(3):  # also one that was instantiated
        graph, = tf_adapter.instantiated(concrete, (fed,), {"times": 4})
        types = [node.op for node in graph.node]
        assert types.count("Cumsum") == 4 and types.count("_Retval") == 2
        assert types.count("AssignAddVariableOp") == 1 and variable.numpy() == 2.0
    assert step(fed, times=4)[1].numpy() == 3.0


def test_which_op_types_are_stateful():
    assert tf_adapter.is_stateful_type("RandomUniform") and tf_adapter.is_stateful_type("Assert")
    assert not tf_adapter.is_stateful_type("AddV2") and not tf_adapter.is_stateful_type("_NoSuch")


@pytest.mark.parametrize("flag", ["0", "1"])
def test_whether_onednn_is_on(flag):
    code = ("from tfckpt.verify.memory import ask_for_statistics, memory_info\n"
            "from tfckpt.capture import tf_adapter\nimport os\nask_for_statistics()\n"
            "print(tf_adapter.uses_onednn(), os.environ.get('TF_CPU_ALLOCATOR_USE_BFC'),"
            " memory_info('CPU:0')['current'])")
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPU_ALLOCATOR_USE_BFC"}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300,
        env={**environment, "TF_ENABLE_ONEDNN_OPTS": flag}).stdout
    assert said.splitlines()[-1] == ("False 1 0" if flag == "0" else "True None 0")


def test_op_callbacks_run_after_the_tape_has_recorded():
    seen = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        seen.append((op_type, tf_adapter.gradient_order(outputs)))

    x = tf.constant([1.0])
    tf_adapter.add_op_callback(callback)
    try:
        with tf.GradientTape() as tape:
            tape.watch(x)
            tf.tanh(x)
        tf.tanh(x)
    finally:
        tf_adapter.remove_op_callback(callback)
    tf.exp(x)
    assert [entry for entry in seen if entry[0] == "Tanh"] == [("Tanh", 1), ("Tanh", 0)]
    assert not [entry for entry in seen if entry[0] == "Exp"]


def test_gradient_order_and_stopped_recording():
    x = tf.constant([1.0])
    assert tf_adapter.gradient_order([x]) == 0 and not tf_adapter.is_recording()
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert tf_adapter.gradient_order([x]) == 1
        assert tf_adapter.is_recording() and not tf_adapter.is_recording_stopped()
        with tf_adapter.stop_recording():
            assert tf_adapter.is_recording_stopped() and not tf_adapter.is_recording()
            assert tf_adapter.gradient_order([x]) == 0
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        assert tf_adapter.gradient_order([x]) == 2


def test_tangents_are_those_of_accumulators():
    x, other = tf.constant([1.0]), tf.constant([2.0])
    assert not tf_adapter.has_tangents([x])
    with tf.GradientTape() as tape, tf.autodiff.ForwardAccumulator(x, x):
        tape.watch(other)
        assert tf_adapter.has_tangents([other, tf.tanh(x)])
        assert not tf_adapter.has_tangents([other])


def test_a_replaced_record_frees_the_old_one():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(x)
        tf_adapter.replace_record(y, x, lambda g: [g * 10.0])
        loss = tf.reduce_sum(y)
    assert tape.gradient(loss, x).numpy().tolist() == [10.0, 10.0]


def test_a_custom_optimizer_is_configured_and_forgotten():
    from tensorflow.python.eager import context

    def configured():
        options = context.context().function_call_options
        config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
        return [(o.name, {key: value.s for key, value in o.parameter_map.items()})
                for o in config.graph_options.rewrite_options.custom_optimizers]

    assert configured() == []
    for number in "01":
        tf_adapter.set_custom_optimizer("TfckptTest", {"number": number})
        assert configured() == [("TfckptTest", {"number": number.encode()})]
    tf_adapter.set_custom_optimizer(None)
    assert configured() == []
    tf_adapter.set_custom_optimizer(None)
    given = tf.compat.v1.ConfigProto()
    found = tf_adapter.add_custom_optimizer(given, "TfckptTest", {})
    assert [o.name for o in found.graph_options.rewrite_options.custom_optimizers] == ["TfckptTest"]


def test_the_memory_optimizer_is_configured_and_forgotten_also_after_an_error():
    from tensorflow.python.eager import context

    def configured():
        options = context.context().function_call_options
        config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
        rewriting = config.graph_options.rewrite_options
        return rewriting.memory_optimization, rewriting.memory_optimizer_target_node_name_scope

    before = configured()
    with pytest.raises(ZeroDivisionError), tf_adapter.memory_optimizer("MANUAL", "scope/"):
        assert configured() == (2, "scope/")
        raise ZeroDivisionError
    assert configured() == before


def test_marked_ops():
    def body(x):
        with tf_adapter.mark_ops("_mine"):
            y = tf.tanh(x)
        return tf.sigmoid(y)

    marked = {op.type for op in traced(body, VECTOR).get_operations()
              if "_mine" in op.node_def.attr}
    assert marked == {"Tanh"}


def test_optimized_hlo():
    step = tf.function(lambda x, y: tf.tanh(x) @ y, jit_compile=True)
    hlo = tf_adapter.optimized_hlo(step, (tf.ones((64, 64)),), {"y": tf.ones((64, 64))})
    found = {i.opcode: i.metadata.op_name for part in hlo.hlo_module.computations
             for i in part.instructions}
    assert found["tanh"] == "Tanh" and "dot" in found
    assert any(b.is_entry_computation_parameter for b in hlo.buffer_assignment.buffer_allocations)
    with pytest.raises(ValueError, match="jit_compile=True"):
        tf_adapter.optimized_hlo(tf.function(tf.tanh), (tf.ones(3),), {})


def test_optimized():
    """Grappler folds, merges equal ops and drops what leads nowhere; nothing runs."""
    counter = tf.Variable(0)

    @tf.function
    def step(x):
        tf.cos(x)
        counter.assign_add(1)
        return tf.sin(x) * (tf.constant(2.0) + 1.0), tf.sin(x)

    graph = step.get_concrete_function(VECTOR).graph
    nodes = grappler.question(graph).answer().node
    assert sorted(n.op for n in nodes if not n.op.startswith("_") and n.op != "Identity") == [
        "AssignAddVariableOp", "Const", "Const", "Mul", "Sin"]
    assert sum(n.op == "_Retval" for n in nodes) == 2
    assert counter.numpy() == 0
    assert {op.type for op in graph.get_operations()} >= {"Cos", "Placeholder"}


@pytest.mark.parametrize("size", [8, None])
def test_grappler_knows_what_a_trace_knows_of_its_arguments(size):
    """A zero tensor is folded where the batch is known, and only there; `None` is not 1."""
    @tf.function
    def step(x):
        return x * tf.shape(x, out_type=tf.int32)[0], tf.shape(x)

    graph = step.get_concrete_function(tf.TensorSpec((size,), tf.int32)).graph
    nodes = grappler.question(graph).answer().node
    assert any(node.op == "Shape" for node in nodes) == (size is None)
    (argument,) = (node for node in nodes if node.op == "_Arg")
    assert tf.TensorShape(argument.attr["_output_shapes"].list.shape[0]).as_list() == [size]


def test_a_graph_as_the_body_of_a_function():
    """Also where one tensor is returned twice."""
    variable = tf.Variable(1.0)

    @tf.function
    def step(x):
        variable.assign_add(1.0)
        return tf.identity(x), x

    graph = step.get_concrete_function(VECTOR).graph
    graph.outputs = [graph.outputs[0], graph.outputs[0]]
    definition = tf_adapter.shown_definition(graph)
    running = grappler.as_body(graph, definition)
    arguments = {node.name: node.attr["index"].i for node in definition.node if node.op == "_Arg"}
    assert arguments == {t.op.name: i for i, t in enumerate(graph.inputs)}
    results = [node for node in definition.node if node.op == "_Retval"]
    assert [node.attr["index"].i for node in results] == [0, 1]
    assert len({node.name for node in results}) == 2
    assert {*running} == {op.name for op in graph.control_outputs} | {n.name for n in results}


def test_the_definition_of_what_a_graph_shows():
    graph = traced(lambda x: tf.sin(tf.cos(x)), VECTOR)
    names = [op.name for op in graph.get_operations()]
    graph.outputs = list(graph.inputs)
    tf_adapter.show_operations(graph, names[::-1], [op.name for op in graph.get_operations()
                                                    if op.type == "Identity"])
    shown = [node.name for node in tf_adapter.shown_definition(graph).node]
    assert shown == [op.name for op in graph.get_operations()] and 0 < len(shown) < len(names)


def test_what_is_called_before_gradients_of_a_function_are_made(hook):
    """Once, and only where a tape outside of it asks."""
    called = []
    hook(lambda graph: tf_adapter.before_gradients(graph, lambda: called.append(graph.name)))
    watched = tf.function(lambda x: tf.sin(x) * x)
    x = tf.constant(2.0)
    watched(x)
    assert not called
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = watched(x)
        np.testing.assert_allclose(tape.gradient(y, x), np.cos(2) * 2 + np.sin(2), rtol=1e-6)
    assert len(called) == 1 + sum("backward" in name for name in called)


class _MakesItself(tf.Module):
    """A step that makes its variable in its first trace."""

    def __init__(self):
        super().__init__()
        self.weight = None

    @tf.function
    def step(self, x):
        if self.weight is None:
            self.weight = tf.Variable(tf.fill([3], 2.0))
        return self.weight * x

    @tf.function
    def outer(self, x):
        return self.step(x)


@pytest.mark.parametrize("method", ["step", "outer"])
def test_a_trace_that_makes_variables_is_told_from_the_one_that_runs(hook, method):
    found = []
    hook(lambda graph: found.append((graph.name, tf_adapter.makes_variables(graph))))
    made = _MakesItself()
    np.testing.assert_array_equal(getattr(made, method)(tf.ones(3)), [2, 2, 2])
    inner = [makes for name, makes in found if name == "step"]
    assert inner[0] and not inner[-1]
    assert ("outer", True) not in found


def test_a_step_that_asks_whether_a_variable_has_a_value_makes_none(hook):
    found, variable = [], tf.Variable(1.0)
    hook(lambda graph: found.append(tf_adapter.makes_variables(graph)))
    assert tf.function(variable.is_initialized)().numpy() and found == [False]


def test_batch_sizes_of_datasets():
    data = tf.data.Dataset.range(10)
    assert tf_adapter.batch_size(data.batch(3).map(lambda x: x + 1).prefetch(1)) == 3
    assert tf_adapter.batch_size(data.map(lambda x: x + 1)) is None


def test_the_memory_that_a_device_may_take():
    assert tf_adapter.memory_limit("CPU:0") > 0
    with pytest.raises(ValueError, match="XPU:7"):
        tf_adapter.memory_limit("XPU:7")


def test_compiled_graph_of_one_whose_function_is_not_made_yet(hook):
    """As XLA compiles the finished function; of variables their values are not asked for."""
    weights = tf.Variable(tf.ones((64, 64)))
    scale = tf.constant([2.0])  # captured, and no variable
    found = []

    def compile_it(graph):
        if "asked_about" in graph.name:
            names = [op.name for op in graph.get_operations()]
            shapes = [tf.TensorShape((32, 64)) if t.shape.rank and t.shape[0] is None else t.shape
                      for t in graph.inputs]
            found.append(tf_adapter.compiled_graph(graph, graph.as_graph_def(), shapes, "CPU:0"))
            assert names == [op.name for op in graph.get_operations()]

    hook(compile_it)

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec((None, 64))])
    def asked_about(x):
        hidden = tf.tanh(x @ weights) * scale
        weights.assign_sub(tf.matmul(hidden, hidden, transpose_a=True))
        return hidden @ weights

    x = tf.ones((32, 64))
    asked_about(x)
    before = weights.numpy()
    wanted = tf_adapter.optimized_hlo(asked_about, (x,), {})

    def sizes(hlo):
        return sorted(b.size for b in hlo.buffer_assignment.buffer_allocations)

    assert found and sizes(found[0]) == sizes(wanted)
    assert np.array_equal(before, weights.numpy())


@pytest.mark.parametrize("rows", [None, 32])
def test_compiled_graph_of_one_that_chooses_by_number(hook, rows):
    """XLA ends the process where such a step's shapes are open: it is not asked."""
    weights, calls = tf.Variable(tf.ones((8, 8))), tf.Variable(0)
    found = []

    def compile_it(graph):
        if "asked_about" in graph.name:
            shapes = [tf.TensorShape([32, 8]), *(t.shape for t in graph.inputs[1:])]
            try:
                found.append(tf_adapter.compiled_graph(
                    graph, graph.as_graph_def(), shapes, "CPU:0"))
            except ValueError as error:
                found.append(str(error))

    hook(compile_it)

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec((rows, 8))])
    def asked_about(x):
        h = x @ weights
        return tf.switch_case(calls.assign_add(1) % 3, [
            lambda: h * 2.0, lambda: tf.tanh(h @ weights), lambda: h * 0.5])

    asked_about.get_concrete_function()
    if rows is None:
        assert "memory that it has not written" in found[0]
        return
    wanted = tf_adapter.optimized_hlo(asked_about, (tf.ones((32, 8)),), {})
    allocations = [sorted(b.size for b in hlo.buffer_assignment.buffer_allocations)
                   for hlo in (found[0], wanted)]
    assert allocations[0] == allocations[1]


def test_compiled_graph_of_what_is_not_known(hook):
    said = []

    def compile_it(graph):
        if "asked_about" in graph.name:
            with pytest.raises(ValueError) as error:
                tf_adapter.compiled_graph(graph, graph.as_graph_def(),
                                          [t.shape for t in graph.inputs], "CPU:0")
            said.append(str(error.value))

    hook(compile_it)
    weights = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def asked_about(variable):
        return variable.assign_add(1.0)

    asked_about.get_concrete_function(weights)
    assert said and "is not known outside of the graph" in said[0]


def test_a_clone_that_xla_compiles():
    @tf.function
    def double(x):
        return 2 * x

    compiled = tf_adapter.clone_function(double, double.python_function, True)
    assert tf_adapter.compiles_with_xla(compiled) and not tf_adapter.compiles_with_xla(double)
    assert "HloModule" in compiled.experimental_get_compiler_ir(tf.ones(3))(stage="hlo")
    back = tf_adapter.clone_function(compiled, double.python_function, False)
    assert not tf_adapter.compiles_with_xla(back) and back(tf.ones(3)).numpy().tolist() == [2, 2, 2]


def test_calls_are_watched_until_that_ends():
    seen = []
    double = tf.function(lambda x: 2 * x)

    def watch(function, run):
        seen.append(function)
        return run()

    tf_adapter.watch_calls(watch)
    try:
        assert double(tf.constant(3)).numpy() == 6 and double(x=tf.constant(4)).numpy() == 8
    finally:
        tf_adapter.watch_calls(None)
    double(tf.constant(5))
    assert seen == [double, double]


def test_times_of_ops_in_a_profile(tmp_path):
    @tf.function
    def step(x):
        return tf.tanh(tf.matmul(x, x, name="product"), name="activation")

    x = tf.ones((256, 256))
    step(x)
    tf.profiler.experimental.start(str(tmp_path), options=tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=3))
    for _ in range(4):
        step(x).numpy()
    tf.profiler.experimental.stop()
    (path,) = tmp_path.rglob("*.xplane.pb")
    times = tf_adapter.op_times(path.read_bytes())
    assert len(times["activation"]) == 4 and all(0 < s < 10 for s in times["activation"])
    assert not any("EagerLocalExecute" in name for name in times)


def test_a_scalar_may_say_the_shape_of_a_lists_entries():
    graph = tf.Graph()
    with graph.as_default():
        entries = tf.compat.v1.placeholder(tf.variant, ())
        shape = tf.raw_ops.TensorListElementShape(input_handle=entries, shape_type=tf.int32)
        rows = tf.compat.v1.placeholder(tf.float32, (None, 3))
        tf.raw_ops.TensorListReserve(element_shape=shape, num_elements=3, element_dtype=tf.float32)
        tf.identity(rows, name="read")
    definition = graph.as_graph_def()
    tf_adapter.say_shapes(definition.node, {
        shape.name: tf.TensorSpec((), tf.int32), rows.name: tf.TensorSpec((5, 3), tf.float32)})
    made = tf.Graph()
    with made.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    assert made.get_tensor_by_name("read:0").shape == (5, 3)


@pytest.mark.parametrize("dtype, changed", [(tf.bfloat16, True), (tf.float32, False)])
def test_what_grappler_fuses_in_bfloat16_can_be_imported(dtype, changed):
    graph = tf.Graph()
    with graph.as_default():
        for name, shape in (("x", (1, 8, 8, 3)), ("w", (3, 3, 3, 4)), ("b", (4,))):
            tf.compat.v1.placeholder(dtype, shape, name=name)
    definition = graph.as_graph_def()
    node = definition.node.add(name="fused", op="_FusedConv2D", input=["x", "w", "b"])
    node.attr["T"].type = dtype.as_datatype_enum
    node.attr["TArgs"].list.type.append(dtype.as_datatype_enum)
    node.attr["num_args"].i = 1
    node.attr["strides"].list.i.extend([1, 1, 1, 1])
    node.attr["padding"].s = b"SAME"
    node.attr["fused_ops"].list.s.append(b"BiasAdd")
    if changed:
        with tf.Graph().as_default(), pytest.raises(ValueError, match="bfloat16"):
            tf.graph_util.import_graph_def(definition)
    tf_adapter.make_importable(node)
    assert (node.op != "_FusedConv2D") == changed
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(definition, name="")
    assert imported.get_operation_by_name("fused").outputs[0].shape == (1, 8, 8, 4)
