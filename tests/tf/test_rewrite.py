"""Edits are checked before they are applied, and applied as a whole or not at all."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process, training
from tests.support.faults import Faults
from tests.support.models import MODELS
from tfckpt.capture import tf_adapter
from tfckpt.capture.tfgraph import capture
from tfckpt.carriers import traced
from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import Clone, Edits, Rewire, check_edits
from tfckpt.ir.schedule import Moves, plain_plan
from tfckpt.plan.keep_sets import keep_schedule
from tfckpt.rewrite.appliers.funcgraph import apply
from tfckpt.rewrite.build import build_edits
from tfckpt.rewrite.edit_builder import EditBuilder
from tfckpt.rewrite.xla.guards import XLA_GUARDS, DataGuard
from tfckpt.simulate.fences import fenced
from tfckpt.simulate.order import base_order

# What a guard can pass on.


def test_references_are_never_guarded():
    """A guard would turn a reference into a value, and TensorFlow would refuse the graph."""
    live = tf.Graph()
    with live.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (1 << 10,), "x")
        made = tf.raw_ops.TemporaryVariable(shape=x.shape, dtype=x.dtype, var_name="v", name="v")
        assigned = tf.raw_ops.Assign(ref=made, value=tf.exp(x), name="first")
        added = tf.raw_ops.AssignAdd(ref=assigned, value=tf.tanh(x), name="second")
        with tf.control_dependencies([added]):
            total = tf.raw_ops.DestroyTemporaryVariable(ref=assigned, var_name="v", name="sum")
    graph = capture(live, fetches=[total])
    cost = build_cost_graph(graph)
    builder = EditBuilder(graph, cost, plain_plan(cost))
    usable = {op.name: builder.guardable(op, range(len(op.inputs))) for op in graph.ops}
    assert usable["first"] == usable["second"] == [1] and usable["sum"] == []


# What an applier does with it.


def chain():
    """x -> a = tanh(x) -> b = exp(a) -> c = b * a."""
    def body(x):
        a = tf.tanh(x, name="a")
        return tf.multiply(tf.exp(a, name="b"), a, name="c")

    return tf.function(body).get_concrete_function(tf.TensorSpec((4,), tf.float32, "x")).graph


def test_a_clone_computes_what_its_source_does():
    graph = chain()
    apply(graph, Edits(added=(Clone("again", "a", ("x:0",)),),
                       rewires=(Rewire("c", 1, "again:0"),)))
    again = graph.get_operation_by_name("again")
    source = graph.get_operation_by_name("a")
    assert again.type == source.type and again.get_attr("T") == source.get_attr("T")
    assert again.outputs[0].shape == source.outputs[0].shape
    assert graph.get_operation_by_name("c").inputs[1] is again.outputs[0]


# All or nothing.


def snapshot(graph):
    """Return all that could be changed in the ops of a graph, by name."""
    return {op.name: ([t.name for t in op.inputs], sorted(c.name for c in op.control_inputs),
                      {key: value.SerializeToString(deterministic=True)
                       for key, value in op.node_def.attr.items()})
            for op in graph.get_operations()}


def _plain_history(name):
    process.fresh()
    made = MODELS[name]()
    return training.train(tf.function(made.step), made)


@pytest.fixture(scope="module")
def wanted():
    return _plain_history("dense_relu")


@pytest.mark.parametrize("function, nth", [
    ("create_op", 1), ("create_op", 9), ("update_input", 1), ("update_input", 2),
    ("update_input", 5), ("add_control_input", 1), ("add_control_input", 12),
])
def test_a_failure_midway_leaves_the_graph_as_it_was(monkeypatch, wanted, function, nth):
    """Ops that were added are not part of it, and the next plan is used."""
    faults, seen = Faults({nth}), []

    def applied(graph, edits, changes, **options):
        before = snapshot(graph)
        with monkeypatch.context() as patch:
            faults.inject(patch, () if seen else [(tf_adapter, function)])
            try:
                apply(graph, edits, changes, **options)
            except RewriteError as error:
                seen.append(str(error))
                assert snapshot(graph) == before
                raise

    monkeypatch.setattr(traced, "apply", applied)
    process.fresh()
    made = MODELS["dense_relu"]()
    step = tfckpt.checkpoint(tf.function(made.step))
    training.assert_same_bits(training.train(step, made), wanted)
    said, = seen
    assert f"MadeUpError: before {function}" in said
    assert step.report.applied and said in step.report.rejected[0]


# Plans that no small model leads to.


def last_write_before_last_copies():
    """Graph, cost graph and plan whose last write comes before the last recomputation.

    The scale is so small that its update is no vertex of its own. `Pad` is read in the forward
    and in the backward, its copy in the backward alone.
    """
    made = np.random.default_rng(0)
    scale = tf.Variable(made.standard_normal((16,), dtype=np.float32))
    weight = tf.Variable(made.standard_normal((16, 512), dtype=np.float32))

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.tanh(x * scale)
            h = tf.multiply(tf.pad(h, [[0, 0], [0, 0]]), h, name="kept")
            loss = tf.reduce_sum(tf.tanh(h @ weight, name="kept_too"))
        variables = [scale, weight]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    traced = tf.function(step).get_concrete_function(tf.TensorSpec((1024, 16), tf.float32)).graph
    graph = capture(traced)
    cost = build_cost_graph(graph)
    keep = frozenset(i for i, s in enumerate(cost.storages) if s.name.startswith("kept"))
    return graph, cost, fenced(cost, keep_schedule(cost, keep, base_order(cost, Moves())))


def test_nothing_waits_for_a_copy_that_waits_for_it():
    """The last fence awaits the last write, so that write must not await what follows the fence."""
    graph, cost, plan = last_write_before_last_copies()
    types = [graph.ops[cost.vertices[v].ops[0]].type for v, _ in plan.schedule]
    write, = (i for i, kind in enumerate(types) if kind == "AssignSubVariableOp")
    assert max(i for i, (_, copy) in enumerate(plan.schedule) if copy) > write
    edits = build_edits(graph, cost, plan)
    fence, = (op for op in edits.added if op.name == "tfckpt/fence_1")
    written = graph.ops[cost.vertices[plan.schedule[write][0]].ops[0]].name
    assert written in fence.controls
    assert any(op.name.endswith("_tap") for op in edits.added)
    check_edits(graph, edits)


# The data guard: it must change no value.

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
          "float64": np.float64, "int32": np.int32, "uint8": np.uint8, "bool": np.bool_}
PAYLOADS = {"float32": np.uint32(0x7FADBEEF), "float64": np.uint64(0x7FF4DEADBEEF0BAD),
            "float16": np.uint16(0x7D5B), "bfloat16": np.uint16(0x7FAB)}


def guarded(trigger: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the value that a guard on this trigger passes on, by the edits and their applier."""
    graph = tf.Graph()
    with graph.as_default():
        fed = tf.compat.v1.placeholder(trigger.dtype, trigger.shape, "trigger")
        passed = tf.compat.v1.placeholder(value.dtype, value.shape, "value")
    guard = DataGuard("g", fed.name, fed.dtype.name)
    apply(graph, Edits(added=(*guard.trigger_ops(),
                              *guard.pass_through("out", "value:0", passed.dtype.name))))
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run("out:0", {fed: trigger, passed: value})


def values(dtype) -> list[np.ndarray]:
    """Ordinary and extraordinary values of a dtype."""
    if dtype == "bool":
        return [np.array([True, False, True]), np.zeros((0, 2), np.bool_), np.array(True)]
    made = DTYPES[dtype]
    if dtype in ("int32", "uint8"):
        return [np.array([[0, 1, np.iinfo(made).max, np.iinfo(made).min]], made),
                np.zeros((3, 0), made), np.array(7, made)]
    special = np.array([0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan]).astype(made)
    return [special, np.zeros((0,), made), np.array(-0.0).astype(made), special.reshape(1, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trigger_dtype", PAYLOADS)
def test_the_guard_passes_every_value_unchanged(trigger_dtype, dtype):
    made = DTYPES[trigger_dtype]
    triggers = [np.array([x, 1.0]).astype(made) for x in (0.0, -np.inf, np.inf, np.nan, 3.0)]
    triggers += [np.zeros((0, 3), made), np.array(np.inf).astype(made)]
    for value in values(dtype):
        for trigger in triggers:
            found = guarded(trigger, value)
            assert found.dtype == value.dtype and found.shape == value.shape
            assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize("trigger_dtype", PAYLOADS)
def test_the_guard_does_depend_on_its_trigger(trigger_dtype):
    """Only the payload itself arms the guard: so no compiler may drop the dependence."""
    payload = PAYLOADS[trigger_dtype]
    armed = np.array([payload, 0], payload.dtype).view(DTYPES[trigger_dtype])
    value = np.array([1.0, np.nan, -3.0], np.float32)
    assert guarded(armed, value).tobytes() == np.zeros(3, np.float32).tobytes()
    # an ordinary NaN does not arm it
    ordinary = np.array([np.nan, 0.0]).astype(DTYPES[trigger_dtype])
    assert guarded(ordinary, value).tobytes() == value.tobytes()


@pytest.mark.parametrize("kind", XLA_GUARDS.values())
def test_the_guard_under_xla_changes_nothing_either(kind):
    def body(trigger, value):
        graph = tf_adapter.tracing_graph()
        guard = kind("g", trigger.name, "float32")
        apply(graph, Edits(added=(*guard.trigger_ops(),
                                  *guard.pass_through("out", value.name, "float32"))))
        return graph.get_tensor_by_name("out:0")

    step = tf.function(body, jit_compile=True, autograph=False)
    value = tf.constant([1.0, -0.0, np.inf, -3.0])
    for trigger in (0.0, np.inf, np.nan, -np.inf):
        found = step(tf.constant([trigger, 1.0]), value).numpy()
        assert found.tobytes() == value.numpy().tobytes()
