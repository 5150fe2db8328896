"""Steps with lowered loops and branches as Grappler optimises them, with these as ops again."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.support.executed_ops import counted
from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import lowered_loops
from tfckpt.capture.grappler import question as grappler
from tfckpt.capture.grappler.in_place import optimise_in_place
from tfckpt.capture.grappler.lowered_loops import NotRaised, has_loops
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.capture.nodes import functions_of
from tfckpt.verify.arithmetic import instantiated

ROWS, WIDTH = 64, 16


def _weights(count=2):
    return [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (3, i)) * .2)
            for i in range(count)]


def _while(x, ws):
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ ws[0])), (0, x))[1]


def _until(x, ws):
    return tf.while_loop(lambda h, n: tf.reduce_sum(h) > n, lambda h, n: (tf.tanh(h @ ws[0]), n),
                         (x, 1e3))[0] * tf.exp(x)


def _cond(x, ws):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x @ ws[0] * 3.0 * tf.exp(x), lambda: x @ ws[1])


def _case(x, ws):
    return tf.switch_case(tf.cast(tf.reduce_sum(x) * 0.0, tf.int32) + 1, [
        lambda: x @ ws[0], lambda: tf.sin(x @ ws[1]) * x, lambda: x])


def _nested(x, ws):
    def body(i, h):
        return i + 1, tf.cond(i % 2 > 0, lambda: tf.tanh(h @ ws[0]), lambda: _while(h, ws))
    return tf.while_loop(lambda i, h: i < 3, body, (0, x))[1]


def _called_twice(x, ws):
    called = tf.function(lambda h: _while(h, ws) * _cond(h, ws))
    return called(tf.sin(x)) + called(x)


def _scan(x, ws):
    return tf.scan(lambda h, row: tf.tanh(h + tf.reduce_sum(row) * tf.linalg.diag_part(ws[0])), x,
                   initializer=tf.zeros(WIDTH))


def _same_choice(x, ws):
    """Two branches that one choice decides, and a sum that Grappler writes anew."""
    positive, total = tf.reduce_sum(x) > 0, x + x + tf.sin(x)
    return tf.cond(positive, lambda: total, lambda: total @ ws[0]) * tf.cond(
        positive, lambda: tf.sin(total), lambda: total)


BODIES = [_same_choice, _while, _until, _cond, _case, _nested, _called_twice, _scan]


def _step(body, ws):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(body(tf.nn.gelu(x @ ws[0]) * 0.5, ws)))
        for w, gradient in zip(ws, tape.gradient(loss, ws), strict=True):
            if gradient is not None:
                w.assign_sub(gradient * 0.1)
        return loss
    return tf.function(step, autograph=False)


def _batch():
    return tf.random.stateless_normal((ROWS, WIDTH), (1, 2))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("rows", [ROWS, None])
def test_around_loops_stands_what_grappler_makes_where_they_are_lowered(body, rows):
    graph = _step(body, _weights()).get_concrete_function(tf.TensorSpec((rows, WIDTH))).graph
    asked = grappler.question(graph)
    lowered, raised = asked.answer(lower=True), asked.answer()
    assert has_loops(raised) and not has_loops(lowered)
    loops = [node.name for node in raised.node if functions_of(node)]
    made = {node.name: node for node in lowered.node}
    outside = [node for node in raised.node if node.name in made and node.name not in loops]
    assert len(outside) > len(raised.node) / 2
    read = {name.lstrip("^").partition(":")[0] for node in raised.node for name in node.input}
    assert read <= {node.name for node in raised.node} and set(loops) <= read
    assert not any(node.op in ("Enter", "Exit", "Merge", "Switch") for node in raised.node)
    for node in outside:
        before = [name for name in made[node.name].input if name[:1] != "^"]
        now = [name for name in node.input if name[:1] != "^"]
        assert made[node.name].op == node.op and len(before) == len(now)
        assert all(a == b or b.partition(":")[0] in loops for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize("body", BODIES)
def test_steps_with_loops_are_certified(body):
    ours = tfckpt.checkpoint(_step(body, _weights()), budget="min")
    ours(_batch())
    assert instantiated.same_arithmetic(ours, _batch()).same


@pytest.mark.parametrize("condition", [lambda i, *_: i < 3,
                                       lambda i, h, _: tf.logical_and(i < 3, h[0, 0] < 9)])
def test_of_a_loop_that_is_left_which_the_executor_runs(condition):
    """Grappler prunes what a loop makes and nothing reads, unless its condition waits for it."""
    w = _weights()[0]

    def step(x):
        return tf.while_loop(condition, lambda i, h, e: (i + 1, tf.tanh(h @ w), e + tf.sin(h)),
                             (0, x, x))[1]

    # nothing waits for the loop, though it reads a variable; so it is with one that is recomputed
    function = tf.compat.v1.wrap_function(step, [tf.TensorSpec((ROWS, WIDTH))])
    runs, = tf_adapter.instantiated(function, (_batch(),), {})
    asked = grappler.question(function.graph).answer(lower=True)
    kinds, ran = (sorted(kind for kind, _ in counted([graph]).elements())
                  for graph in (asked, runs))
    assert kinds == ran  # names have another scope there


def test_where_it_is_not_understood_what_is_around_loops_is_optimised_by_itself(monkeypatch):
    def refuse(*_):
        raise NotRaised("it is not understood")

    monkeypatch.setattr(grappler, "with_loops", refuse)
    graph = _step(_while, _weights()).get_concrete_function(tf.TensorSpec((ROWS, WIDTH))).graph
    assert has_loops(grappler.question(graph).answer())


@pytest.mark.parametrize("body", [_same_choice, _while, lambda x, ws: x @ ws[0] + x + tf.sin(x)])
def test_what_nothing_needs_is_left_out(body):
    """Of a sum that it writes anew Grappler leaves the terms' sums of two in the graph."""
    graph = _step(body, _weights()).get_concrete_function(tf.TensorSpec((ROWS, WIDTH))).graph
    for lower in (False, True):
        made = grappler.question(graph).answer(lower=lower)
        read = {name.lstrip("^").partition(":")[0] for node in made.node for name in node.input}
        ends = {op.name for op in graph.control_outputs}
        assert all(node.name in read | ends or node.op in ("_Retval", "_Arg")
                   for node in made.node)


def test_what_a_branch_reads_is_there_where_grappler_joins_it_with_an_equal_op():
    """Two ops that are one for Grappler, and both given to a branch that reads both."""
    def body(x, ws):
        ones, again = tf.exp(x), tf.exp(tf.identity(x) * 1.0)
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: tf.sin(ones) * ws[0][0] + tf.cos(again),
                       lambda: ones - again)

    step, x = _step(body, _weights()), _batch()
    wanted = step(x).numpy()
    ours = tfckpt.checkpoint(_step(body, _weights()), budget="min")
    assert ours(x).numpy() == wanted
    made = grappler.question(step.get_concrete_function(x).graph).answer()
    assert not any("unused" in node.name for node in made.node)


def _equal_inputs(x, ws):
    """Two branches that are given what two equal ops make."""
    one, two, positive = tf.exp(x), tf.exp(x), tf.reduce_sum(x) > 0
    return tf.cond(positive, lambda: tf.sin(one) * ws[0][0] + one, lambda: x) + tf.cond(
        positive, lambda: tf.cos(two) * ws[1][0] + two, lambda: x)


@pytest.mark.parametrize("body", [_equal_inputs, _same_choice, _called_twice])
def test_what_branches_are_given_is_joined_as_the_executor_joins_it(body):
    """The runtime places what hands an input on with what makes it, and joins no two of these."""
    function = _step(body, _weights()).get_concrete_function(_batch())
    runs, = tf_adapter.instantiated(function, (_batch(),), {})
    asked = grappler.question(function.graph).answer(lower=True)
    ran = counted([runs])
    assert ran["Switch", ""] and counted([asked]) == ran
    ours = tfckpt.checkpoint(_step(body, _weights()), budget="min")
    ours(_batch())
    assert instantiated.same_arithmetic(ours, _batch()).same


def test_what_is_left_of_a_lowered_branch_has_a_name_of_its_own(hook):
    """TensorFlow numbers anew what it lowers when the step runs, and refuses equal names."""
    weight = tf.Variable(2.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            chosen = tf.cond(tf.constant(True), lambda: tf.pow(weight, 3),
                             lambda: weight.read_value())
        return tape.gradient(chosen, weight)

    wanted = step().numpy()
    asked = grappler.question(step.get_concrete_function().graph)
    lowered = {node.name for node in asked.answer(lower=True).node}
    raised = asked.answer()
    assert has_loops(raised)
    assert not {node.name for node in raised.node if "/_" in node.name} & lowered
    hook(lambda graph: optimise_in_place(graph, LiveChanges(graph), grappler.question(
        graph, (), tf_adapter.shown_definition(graph))) if graph.name == "step" else None)
    again = tf_adapter.clone_function(step, step.python_function)
    assert again().numpy() == wanted
    assert any(op.name.startswith("optimized/") for op in
               again.get_concrete_function().graph.get_operations())


def test_grappler_is_asked_once_about_lowered_loops(monkeypatch):
    """It takes most of the time: what is around loops comes of the same answer as their bodies."""
    graph = _step(_while, _weights()).get_concrete_function(tf.TensorSpec((ROWS, WIDTH))).graph
    calls, optimized = [], grappler.optimized
    monkeypatch.setattr(grappler, "optimized", lambda *given: calls.append(1) or optimized(*given))
    question = grappler.question(graph)
    alone = grappler.question(graph).answer(lower=True)
    assert question.answer().node and len(calls) == 2
    asked = tf.compat.v1.GraphDef()
    lowered = question.answer(asked.CopyFrom, lower=True)
    assert lowered == alone and len(calls) == 2 and not has_loops(asked)
    assert lowered is not question.answer(lower=True) == lowered  # callers change what they get


def test_what_is_in_a_loop_does_not_stand_for_what_is_around_it():
    graph = _step(_while, _weights()).get_concrete_function(tf.TensorSpec((ROWS, WIDTH))).graph
    asked = tf.compat.v1.GraphDef()
    question = grappler.question(graph)
    question.answer(asked.CopyFrom)
    lowered = tf.compat.v1.GraphDef()
    made = question.answer(lowered.CopyFrom, lower=True)
    inside = next(node.name for node in made.node if node.op == "Tanh" and "/body/" in node.name)
    with pytest.raises(NotRaised, match="lowered loop or branch"):
        lowered_loops.with_loops(made, asked, lowered, [inside])
    asked.node[[node.name for node in asked.node].index(next(
        node.name for node in asked.node if functions_of(node)))].input.append("x")
    with pytest.raises(NotRaised, match="inputs"):
        lowered_loops.with_loops(made, asked, lowered, question.running)


def test_a_loop_whose_value_nobody_needs_runs_on_what_it_was_given(hook):
    """The gradient of a product needs its factor alone; Grappler leaves the value out."""
    factor = tf.random.stateless_normal((WIDTH, WIDTH), (1, 2)) * 0.1

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.while_loop(lambda i, _: i < 4, lambda i, v: (i + 1, v @ factor), (0, x))[1]
        return tape.jacobian(value, x)

    batch = tf.random.stateless_normal((1, WIDTH), (3, 4))
    wanted = step(batch).numpy()
    found = []
    hook(lambda graph: found.append(optimise_in_place(graph, LiveChanges(graph), grappler.question(
        graph, (), tf_adapter.shown_definition(graph)))) if graph.name == "step" else None)
    ours = tf_adapter.clone_function(step, step.python_function)(batch).numpy()
    assert ours.tobytes() == wanted.tobytes()
    assert found[0] is not None
