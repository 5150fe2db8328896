"""What while loops keep for their gradient: iterations times the bytes of an entry."""

from __future__ import annotations

import math

import pytest
import tensorflow as tf

from tests.support import process
from tfckpt.capture.loops import kept_lists
from tfckpt.capture.tfgraph import capture
from tfckpt.graph import LOOPS

ROWS, WIDTH = 8, 4
ENTRY = ROWS * WIDTH * 4


def _graph(forward, *, batch=ROWS):
    """The FuncGraph of a step with a loop; its only argument has ROWS rows."""
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


def _kept(graph):
    """For each loop, forward before backward: bytes of its lists, and what is not known."""
    found = [kept_lists(op, lambda o: o) for op in graph.get_operations() if op.type in LOOPS]
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


def test_a_counter_that_steps_by_two_from_one():
    def forward(x):
        return tf.while_loop(lambda i, t: i < 8, lambda i, t: (i + 2, tf.tanh(t)), (1, x))[1]

    assert _kept(_graph(forward))[0] == (4 * ENTRY, "")  # 1, 3, 5, 7


def test_a_loop_that_ends_when_the_data_say_so():
    graph = _graph(lambda x: _loop(x, cond=lambda i, t: tf.reduce_sum(t) < 9.0))
    assert _kept(graph)[0] == (0, "its number of iterations is not known")
    (said, *_) = capture(graph).refused
    assert "for each iteration is not counted" in said and "while" in said


def test_an_unknown_batch_is_filled_in_from_the_arguments():
    graph = _graph(lambda x: _loop(x, cond=lambda i, t: i < 6), batch=None)
    assert "is not known" in _kept(graph)[0][1]
    known = _graph(lambda x: _loop(x, cond=lambda i, t: i < 6))
    (loop, *_) = [op for op in graph.get_operations() if op.type in LOOPS]
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
    loops = [i for i, op in enumerate(graph.ops) if op.type in LOOPS]
    lists = [(loops[0], slot) for slot, tensor in enumerate(graph.ops[loops[0]].outputs)
             if tensor.dtype == "variant" and tensor.bytes]
    assert math.fsum(graph.ops[i].outputs[slot].bytes for i, slot in lists) == 6 * ENTRY
    assert set(lists) <= set(graph.ops[loops[1]].inputs)
