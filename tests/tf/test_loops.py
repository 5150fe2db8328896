"""The bytes that while loops keep for their gradient: iterations times the bytes of an entry."""

from __future__ import annotations

import dataclasses
import math

import keras
import pytest
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.lists import kept_lists
from tfckpt.capture.shapes import concrete_shapes
from tfckpt.capture.tfgraph import capture
from tfckpt.capture.variables import origin
from tfckpt.cost.bodies.working import working_bytes
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.kernel_copies import kernel_workspace
from tfckpt.cost.storage import roots, storage_bytes
from tfckpt.cost.time import seconds
from tfckpt.ir.graph import Graph, Op, Tensor
from tfckpt.ir.target import EIGEN, Rates, Target
from tfckpt.ops import record

ROWS, WIDTH = 8, 4
ENTRY = ROWS * WIDTH * 4
RATES = Rates(overhead_seconds=0.0)


def _graph(forward, *, batch=ROWS):
    """Return the FuncGraph of a step with a loop; its only argument has ROWS rows."""
    process.fresh()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(forward(x))
        return tape.gradient(loss, x)

    return step.get_concrete_function(tf.TensorSpec((batch, WIDTH))).graph


def _loop(x, **options):
    """Its gradient needs the result of each tanh, and nothing else of the size of x."""
    return tf.while_loop(options.pop("cond"), lambda i, t: (i + 1, tf.tanh(t)), (0, x),
                         **options)[1]


def _loops(graph):
    return [op for op in graph.get_operations() if record(op.type).is_loop]


def _kept(graph):
    """For each loop, forward before backward: bytes of its lists, and what is not known."""
    found = [kept_lists(op, lambda o: o) for op in _loops(graph)]
    return [(sum(kept.bytes.values()), kept.unknown) for kept in found]


@pytest.mark.parametrize("options, trips", [
    ({"cond": lambda i, t: i < 6}, 6),
    ({"cond": lambda i, t: i <= 6}, 7),
    ({"cond": lambda i, t: tf.constant(True), "maximum_iterations": 5}, 5),
    ({"cond": lambda i, t: i < 6, "maximum_iterations": 5}, 5),
    ({"cond": lambda i, t: tf.logical_and(i < 4, tf.reduce_sum(t) < 99.0)}, 4),
], ids=["below", "up to", "maximum", "both", "or by the data"])
def test_trips_from_bounds(options, trips):
    forward, backward = _kept(_graph(lambda x: _loop(x, **options)))
    assert forward == (trips * ENTRY, "")
    assert backward == (0, "")  # it only empties the forward's list


@pytest.mark.parametrize("numbers, trips", [((6,), 6), ((2, 12, 3), 4), ((0,), 0)])
def test_numbers_of_a_range_that_autograph_loops_over(numbers, trips):
    def forward(x):
        for _ in tf.range(*numbers):
            x = tf.tanh(x)
        return x

    convert = tf.autograph.to_graph(forward)
    forward, backward = _kept(_graph(convert))
    assert forward == (trips * ENTRY, "")
    assert backward == (0, "")


def test_a_bound_that_python_joins_to_what_the_data_say():
    """Autograph makes branches of "and": what is not looked at any more counts as false."""
    def data_first(x):
        i = 0
        while tf.reduce_max(tf.abs(x)) > 0.1 and i < 9:
            x, i = tf.tanh(x), i + 1
        return x

    def bound_first(x):
        i, most = tf.constant(0), tf.constant(9)
        while i < most and not tf.reduce_max(x) < 0.1 and tf.reduce_min(x) > -9.0:
            x, i = tf.tanh(x), i + 1
        return x

    def either(x):
        i = tf.constant(0)
        while i < 9 or tf.reduce_max(x) > 0.1:
            x, i = tf.tanh(x), i + 1
        return x

    for forward in (data_first, bound_first):
        (kept, unknown), _ = _kept(_graph(tf.autograph.to_graph(forward)))
        assert (kept, unknown) == (9 * ENTRY, "")
    (kept, unknown), _ = _kept(_graph(tf.autograph.to_graph(either)))
    assert kept == 0 and unknown == "its number of iterations is not known"


@pytest.mark.parametrize("start, holds, step", [
    (1, lambda i: i < 8, lambda i: i + 2),
    (9, lambda i: i >= 0, lambda i: i - 1),
    (9, lambda i: i > 0, lambda i: i - 2),
    (10, lambda i: i > 0, lambda i: -2 + i),
    (9, lambda i: tf.constant(0) <= i, lambda i: i - 3),
    (0, lambda i: tf.constant(8) > i, lambda i: 3 + i),
    (3, lambda i: i > 5, lambda i: i - 1),
    (9, tf.function(lambda i: i >= 2), tf.function(lambda i: i - 1)),
    (0, tf.function(lambda i: i < 7), tf.function(lambda i: i + 1)),
], ids=["by two", "down", "down by two", "adding", "turned round", "above", "not once",
        "called down", "called"])
def test_counters(start, holds, step):
    trips, i = 0, tf.constant(start)
    while holds(i):
        i, trips = step(i), trips + 1

    def forward(x):
        return tf.while_loop(lambda i, t: holds(i), lambda i, t: (step(i), tf.tanh(t)),
                             (start, x))[1]

    assert _kept(_graph(forward))[0] == (trips * ENTRY, "")


def test_a_counter_that_no_limit_ends():
    """It falls and the condition asks for less, or the other way round: until it overflows."""
    for holds, step in ((lambda i: i < 8, -1), (lambda i: i > -8, 1)):
        graph = _graph(lambda x, holds=holds, step=step: tf.while_loop(
            lambda i, t: tf.logical_and(holds(i), tf.reduce_sum(t) > 0.1),
            lambda i, t: (i + step, tf.tanh(t)), (0, x))[1])
        assert _kept(graph)[0] == (0, "its number of iterations is not known")


def test_a_loop_that_ends_when_the_data_say_so():
    graph = _graph(lambda x: _loop(x, cond=lambda i, t: tf.reduce_sum(t) < 9.0))
    assert _kept(graph)[0] == (0, "its number of iterations is not known")
    (said, *_) = capture(graph).refused
    assert "for each iteration is not counted" in said and "while" in said


def test_an_unknown_batch_is_filled_in_from_the_arguments():
    graph = _graph(lambda x: _loop(x, cond=lambda i, t: i < 6), batch=None)
    assert "is not known" in _kept(graph)[0][1]
    known = _graph(lambda x: _loop(x, cond=lambda i, t: i < 6))
    (loop, *_) = _loops(graph)
    kept = kept_lists(loop, lambda op: known.get_operation_by_name(op.name))
    assert sum(kept.bytes.values()) == 6 * ENTRY and not kept.unknown


def test_a_loop_in_a_loop_keeps_lists_of_lists():
    def forward(x):
        return tf.while_loop(
            lambda i, t: i < 3,
            lambda i, t: (i + 1, _loop(t, cond=lambda j, u: j < 5)), (0, x))[1]

    kept, unknown = _kept(_graph(forward))[0]
    assert kept - 3 * 5 * ENTRY == 3 * 4 and not unknown  # and how often the inner loop ran


def test_lists_are_outputs_with_bytes_and_the_backward_reads_them():
    graph = capture(_graph(lambda x: _loop(x, cond=lambda i, t: i < 6)))
    loops = [i for i, op in enumerate(graph.ops) if record(op.type).is_loop]
    lists = [(loops[0], slot) for slot, tensor in enumerate(graph.ops[loops[0]].outputs)
             if tensor.dtype == "variant" and tensor.bytes]
    assert math.fsum(graph.ops[i].outputs[slot].bytes for i, slot in lists) == 6 * ENTRY
    assert set(lists) <= set(graph.ops[loops[1]].inputs)


def _sizes(graph):
    """Of the forward's loop: what was found out about its lists."""
    return kept_lists(_loops(graph)[0], lambda o: o)


def test_lists_of_the_same_tensors_share_their_memory():
    """The product needs the sine of each iteration, the sine what the one before returned."""
    def forward(x):
        return tf.while_loop(lambda i, t: i < 6,
                             lambda i, t: (i + 1, tf.tanh(tf.sin(t))), (0, x))[1]

    kept = _sizes(_graph(forward))
    lists = {slot: size for slot, size in kept.bytes.items() if size >= ENTRY}
    assert len(lists) == 2 and not kept.unknown  # tanh's result is the next iteration's argument
    assert len(set(lists) - set(kept.loop.shares)) == 1 and set(kept.loop.shares) < set(lists)
    in_xla = kept_lists(_loops(_graph(forward))[0], lambda o: o, Target().compiled())
    assert not in_xla.loop.shares


def test_a_list_of_a_variables_value_takes_nothing():
    variable = tf.Variable(tf.ones((WIDTH, WIDTH)))
    kept = _sizes(_graph(lambda x: tf.while_loop(
        lambda i, t: i < 6, lambda i, t: (i + 1, t @ variable), (0, x))[1]))
    assert sorted(kept.bytes.values()) == [0, 6 * ENTRY] and not kept.unknown


def _of_rows(x):
    """Return what a loop makes that reads a row in each iteration."""
    rows = tf.TensorArray(tf.float32, 6, element_shape=(ROWS, WIDTH)).unstack(
        tf.reshape(tf.repeat(x[None], 6, 0), (6, ROWS, WIDTH)))
    return tf.while_loop(lambda i, t: i < 6, lambda i, t: (i + 1, tf.tanh(t + rows.read(i))),
                         (0, x))[1]


def test_a_list_to_which_gradients_are_added_counts_an_entry_for_each_iteration():
    """What was read from rows gets its gradient row by row, in a list that begins with zeros."""
    graph = _graph(_of_rows)
    gradient = _loops(graph)[1]
    kept = kept_lists(gradient, lambda o: o)
    summed = [slot for slot, t in enumerate(tf_adapter.called_graph(gradient, "body").outputs)
              if t.dtype == tf.variant and origin(t).op.type == "AddN"]
    assert not kept.unknown and [kept.bytes[slot] for slot in summed] == [6 * ENTRY]


def test_an_entry_that_is_written_over_counts_once():
    def forward(x):
        store = tf.TensorArray(tf.float32, 1, element_shape=(ROWS, WIDTH))
        return tf.while_loop(lambda i, t: i < 6, lambda i, t: (i + 1, t.write(0, x * 2.0)),
                             (0, store))[1].read(0)

    graph = _graph(lambda x: tf.stop_gradient(forward(x)) * x)
    assert sum(_sizes(graph).bytes.values()) == ENTRY


def test_a_loop_takes_as_long_as_its_iterations():
    def seconds_of(trips):
        graph = capture(_graph(lambda x: _loop(x, cond=lambda i, t: i < trips)))
        return [seconds(graph, op, RATES) for op in graph.ops if record(op.type).is_loop]

    for once, often in zip(seconds_of(1), seconds_of(5), strict=True):
        assert once > 0 and often == pytest.approx(5 * once)


def test_what_a_body_calls_counts_as_if_it_stood_there():
    """Time and the bytes that an iteration holds, forward and backward, calls in calls too."""
    def inner(t):
        return tf.nn.softplus(tf.tanh(t) @ tf.eye(WIDTH)) * t

    def outer(t, call):
        return tf.sin(call(t)) + tf.exp(t)

    def priced(wrap):
        graph = capture(_graph(lambda x: tf.while_loop(
            lambda i, t: i < 6, lambda i, t: (i + 1, wrap(lambda u: outer(u, wrap(inner)))(t)),
            (0, x), parallel_iterations=1)[1]))
        return [(seconds(graph, op, RATES), working_bytes(graph, op)) for op in graph.ops
                if record(op.type).is_loop]

    plain, called = priced(lambda f: f), priced(tf.function)
    for (time, held), (time_called, held_called) in zip(plain, called, strict=True):
        assert time_called == pytest.approx(time, rel=0.2)
        assert 0.5 * held <= held_called <= held + 8 * ENTRY and held_called


def test_a_loop_that_only_writes_variables_is_counted():
    """One iteration: the next reads what it has written. Nothing that it returns takes memory."""
    process.fresh()
    weight = tf.Variable(tf.eye(WIDTH))

    @tf.function
    def step(x):
        for _ in tf.range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(tf.sin(x @ weight)))
            weight.assign_sub(tape.gradient(loss, weight))
        return tf.reduce_sum(weight)

    graph = capture(step.get_concrete_function(tf.TensorSpec((512, WIDTH))).graph)
    (loop,) = [op for op in graph.ops if record(op.type).is_loop]
    assert loop.loop.at_once == 1
    (vertex,) = [v for v in build_cost_graph(graph).vertices if v.name == loop.name]
    tensor = 512 * WIDTH * 4
    assert 2 * tensor <= vertex.workspace <= 5 * tensor


def test_iterations_hold_no_more_together_than_each_by_itself():
    def body(i, x, total):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.tanh(tf.sin(tf.exp(x))))
        return i + 1, x, total + tape.gradient(loss, x)

    process.fresh()
    graph = capture(tf.function(lambda x: tf.while_loop(
        lambda i, x, total: i < 3, body, (0, x, tf.zeros_like(x)))[2]).get_concrete_function(
            tf.TensorSpec((512, WIDTH))).graph)
    (loop,) = [op for op in graph.ops if record(op.type).is_loop]
    alone = dataclasses.replace(loop, loop=dataclasses.replace(loop.loop, at_once=1))
    assert loop.loop.at_once == 3
    assert working_bytes(graph, alone) <= working_bytes(graph, loop) <= 3 * working_bytes(
        graph, alone)


def test_what_kernels_take_in_a_body_is_counted():
    """Eigen's windows for a gradient of a convolution: 30 MiB and more in float64."""
    kernel = tf.ones((3, 3, 8, 8), tf.float64)

    def forward(x):
        images = tf.cast(tf.reshape(x, (1, ROWS, WIDTH, 1)) * tf.ones((8,)), tf.float64)
        return tf.while_loop(lambda i, t: i < 3, lambda i, t: (
            i + 1, tf.nn.conv2d(tf.tanh(t), kernel, 1, "SAME")), (0, images))[1]

    graph = capture(_graph(lambda x: tf.cast(forward(x), tf.float32)))
    gradient = [op for op in graph.ops if record(op.type).is_loop][-1]
    product = next(op for op in gradient.loop.body.ops if op.type == "Conv2DBackpropInput")
    taken = kernel_workspace(gradient.loop.body, product, EIGEN)
    assert taken > 0
    assert working_bytes(graph, gradient, EIGEN) >= taken + working_bytes(graph, gradient) // 2


def test_the_steps_of_a_ctc_loss_are_counted():
    """Its loops call what TensorFlow made by `Defun`, one of them counting down."""
    @tf.function
    def loss(labels, logits):
        return tf.nn.ctc_loss(labels, logits, tf.fill([ROWS], 3), tf.fill([ROWS], 20),
                              logits_time_major=False, blank_index=0)

    graph = capture(loss.get_concrete_function(
        tf.TensorSpec((ROWS, 3), tf.int32), tf.TensorSpec((ROWS, 20, 5))).graph)
    found = [op for op in graph.ops if record(op.type).is_loop]
    assert [op.loop.trips for op in found] == [20, 20]
    assert all(seconds(graph, op, RATES) > 0 for op in found)


@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_an_unknown_batch_is_known_after_recurrent_layers_too(layer):
    """Each layer is given the stacked lists of the one before; bodies read variables and lists."""
    process.fresh()
    model = keras.Sequential([keras.Input((6, WIDTH)),
                              *(layer(WIDTH, return_sequences=True) for _ in range(2))])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    graph = step.get_concrete_function(tf.TensorSpec((None, 6, WIDTH), name="x")).graph
    assert all("is not known" in kept_lists(op, lambda o: o).unknown
               for op in graph.get_operations() if op.type == "While")
    captured = capture(graph, shapes=concrete_shapes(graph, None, {"x": (ROWS, 6, WIDTH)}))
    loops = [op for op in captured.ops if op.type == "While"]
    assert len(loops) == 2 and all(op.pure for op in loops) and not captured.refused
    for op in loops:
        lists = [t.bytes for slot, t in enumerate(op.outputs)
                 if t.dtype == "variant" and slot not in op.loop.shares]
        assert max(lists) == 6 * ENTRY and sum(lists) >= 6 * 6 * ENTRY
    stacked = [op.outputs[0] for op in captured.ops if op.type == "TensorListStack"]
    assert stacked and all(t.shape == (6, ROWS, WIDTH) for t in stacked)


def test_a_list_of_zeros_takes_what_the_list_does_that_it_is_made_like():
    """The gradient's loop adds to it entry by entry, in the memory that it has."""
    graph = capture(_graph(_of_rows))
    zeros = [i for i, op in enumerate(graph.ops)
             if op.type == "ZerosLike" and op.outputs[0].dtype == "variant"]
    assert [graph.ops[i].outputs[0].bytes for i in zeros] == [6 * ENTRY]
    (gradient,) = [op for op in graph.ops if (zeros[0], 0) in op.inputs]
    slot = gradient.inputs.index((zeros[0], 0))
    assert gradient.loop.takes[slot][0] == slot


def test_a_list_of_zeros_is_planned_and_measured_alike():
    """It is made as soon as its list is: before the gradient's loop, whatever comes in between.

    Measured are 92 to 134 MB, by threads and by the chunks that are free; without it 67 are
    planned.
    """
    process.fresh()
    given = tf.Variable(tf.random.stateless_normal((24, 256, 1024), (1, 2)))  # 1 MiB an entry

    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.TensorArray(tf.float32, 24, element_shape=(256, 1024)).unstack(given * 2.0)
            end = tf.while_loop(lambda i, t: i < 24, lambda i, t: (i + 1, t + rows.read(i)),
                                (0, x))[1]
            wide = tf.tanh(tf.tile(end, (16, 1)))
            loss = tf.reduce_sum(tf.tanh(wide) * wide)
        return tape.gradient(loss, given)

    x = tf.ones((256, 1024))
    measured = tfckpt.verify.measure_peak(tf.function(step), x, repeats=3)
    marked = tfckpt.checkpoint(tf.function(step), solver="store_all")
    marked.get_concrete_function(x)
    assert 0.75 <= marked.report.baseline_peak_bytes / measured <= 1.2


def test_rows_in_a_list_are_copies():
    """On the executor, as the allocator says: XLA makes none."""
    rows = 8
    x = tf.ones((rows, 256, 1024))  # 1 MiB a row

    @tf.function
    def listed(x):
        wide = 2.0 * x
        made = tf.TensorArray(tf.float32, rows, element_shape=(256, 1024)).unstack(wide)
        with tf.control_dependencies([made.flow]):
            return tf.reduce_sum(wide) + tf.reduce_sum(made.read(0))

    measured = tfckpt.verify.measure_peak(listed, x, repeats=3)
    assert 2 * rows <= measured / 2**20 < 2 * rows + 2
    graph = listed.get_concrete_function(x).graph
    for compiled, own in ((False, rows << 20), (True, 0)):
        captured = capture(graph, compiled=compiled)
        (made,) = [i for i, op in enumerate(captured.ops) if op.type == "TensorListFromTensor"]
        assert storage_bytes(captured, roots(captured)).get((made, 0), 0) == own


def test_a_stack_of_a_list_takes_what_its_entries_take():
    """Its size is not known where lengths are open; what says how entries look adds nothing."""
    size = 3 * 512
    graph = Graph("step", (
        Op("list", "TensorListReserve", (), (), (Tensor("variant", (), size),), "forward", True),
        Op("shape", "Const", (), (), (Tensor("int32", (2,), 8),), "forward", True),
        Op("stack", "TensorListStack", ((0, 0), (1, 0)), (), (
            Tensor("float32", (None, 128), None),), "forward", True)), ((2, 0),), ())
    assert storage_bytes(graph, roots(graph))[2, 0] == size
