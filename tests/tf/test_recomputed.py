"""Fates of recomputed ops under XLA, read from modules that are written by hand."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from tfckpt.verify.recomputed import COMPUTED, FOLDED, MERGED, fates


def traced(*lines):
    """Return a graph of ops as `name reads...`, x among them; what ends in `out` is returned."""
    graph = tf.__internal__.FuncGraph("step")
    with graph.as_default():
        made = {"x": tf.compat.v1.placeholder(tf.float32, (4,), "x")}
        for line in lines:
            name, *reads = line.split()
            made[name] = tf.raw_ops.Tanh(x=made[reads[0]], name=name) if len(reads) == 1 else (
                tf.raw_ops.Mul(x=made[reads[0]], y=made[reads[1]], name=name))
        graph.outputs = [made[name] for name in made if name.endswith("out")]
    return graph


def module(*lines, inside=()):
    """Return a module of instructions as `name opcode reads...`, which come from the op of their
    name.

    What is after a colon in a name is no part of it: `a:2` comes from `a`, too, `:p` from none.
    `inside` is the computation that the instruction `fusion` calls.
    """
    found = hlo_pb2.HloModuleProto()
    number = {}
    for part, texts in enumerate(filter(None, (lines, inside)), start=1):
        computation = found.computations.add(id=part)
        for text in texts:
            name, opcode, *reads = text.split()
            number[name] = 100 * part + len(computation.instructions)
            made = computation.instructions.add(id=number[name], name=name, opcode=opcode)
            made.metadata.op_name = name.split(":")[0]
            if opcode == "get-tuple-element":
                made.tuple_index = int(reads.pop())
            elif opcode == "parameter":
                made.parameter_number = int(reads.pop())
            made.operand_ids.extend(number[read] for read in reads)
            made.called_computation_ids.extend([2] if opcode == "fusion" else [])
        computation.root_id = number[name]
    return found


ONE = ("a x", "a-tfckpt1 x", "out a", "late_out a-tfckpt1 out")
X = ":x parameter 0"


@pytest.mark.parametrize("wanted, instructions", [
    (COMPUTED, ["a tanh :x", "a-tfckpt1 tanh :x", "out tanh a", "late_out multiply a-tfckpt1 out"]),
    (MERGED, ["a tanh :x", "out tanh a", "late_out multiply a out"]),
    (MERGED, ["a tanh :x", ":b bitcast a", "out tanh a", "late_out multiply :b out"]),
    (FOLDED, ["a tanh :x", "out tanh a", "late_out custom-call :x out"]),
    (FOLDED, ["out custom-call :x", "late_out custom-call :x out"]),
    (FOLDED, ["a tanh :x", "out tanh a", "a-tfckpt1 bitcast :x",
              "late_out custom-call a-tfckpt1 out"]),
    (FOLDED, [":c constant", "a broadcast :c", "out tanh a", "late_out multiply a out"]),
    (COMPUTED, ["a-tfckpt1 tanh :x", "out custom-call :x", "late_out multiply a-tfckpt1 out"]),
    (MERGED, ["a-tfckpt1 tanh :x", "out tanh a-tfckpt1", "late_out multiply a-tfckpt1 out"]),
    (COMPUTED, ["a tanh :x", "a-tfckpt1;b tanh :x", "out tanh a",
                "late_out multiply a-tfckpt1;b out"]),
], ids=str)
def test_one_copy(wanted, instructions):
    assert fates(traced(*ONE), module(X, *instructions)) == {"a-tfckpt1": wanted}


@pytest.mark.parametrize("left", [[], ["b tanh a"]], ids=["in both", "in one"])
@pytest.mark.parametrize("read, wanted", [("a", MERGED), ("a-tfckpt1", FOLDED)])
def test_of_what_is_lost_it_matters_what_is_read_instead(left, read, wanted):
    """The sum of a product and a bias, say, which became part of what reads it."""
    graph = traced("a x", "b a", "a-tfckpt1 x", "b-tfckpt1 a-tfckpt1", "out b",
                   "late_out b-tfckpt1 out")
    found = fates(graph, module(X, "a tanh :x", "a-tfckpt1 tanh :x", *left,
                                f"out custom-call {'b' if left else 'a'}",
                                f"late_out custom-call {read} out"))
    assert found["b-tfckpt1"] == wanted


def test_what_only_merged_ones_read_is_merged():
    """The next op that is left reads the last of them alone."""
    graph = traced("a x", "b a", "a-tfckpt1 x", "b-tfckpt1 a-tfckpt1", "out b",
                   "late_out b-tfckpt1 out")
    found = fates(graph, module(X, "a tanh :x", "b tanh a", "out tanh b",
                                "late_out multiply b out"))
    assert found == {"a-tfckpt1": MERGED, "b-tfckpt1": MERGED}


def test_what_a_reader_reads_in_the_step_as_well_is_no_sign_of_a_merge():
    graph = traced("a x", "b a", "a-tfckpt1 x", "b-tfckpt1 a-tfckpt1", "out b",
                   "late_out b-tfckpt1 a")
    found = fates(graph, module(X, "a tanh :x", "a-tfckpt1 tanh :x", "out custom-call a",
                                "late_out custom-call a-tfckpt1 a"))
    assert found["b-tfckpt1"] == FOLDED


def test_a_copy_that_replaces_its_original_has_nothing_to_be_merged_with():
    """Nothing that the step returns needs the original."""
    graph = traced("a x", "a-tfckpt1 x", "out a-tfckpt1")
    assert fates(graph, module(X, "a-tfckpt1 tanh :x", "out tanh a-tfckpt1")) == {
        "a-tfckpt1": COMPUTED}


@pytest.mark.parametrize("element, wanted", [(0, MERGED), (1, COMPUTED)])
def test_results_of_fusions_are_what_they_compute(element, wanted):
    """Of a fusion with two results the one that is read tells."""
    inside = ["a:p parameter 0", "a-tfckpt1:2 tanh a:p", "other tanh a:p",
              ":t tuple a-tfckpt1:2 other"]
    found = fates(traced(*ONE), module(
        X, "fusion fusion :x", f":g get-tuple-element fusion {element}", "out tanh :g",
        "late_out multiply fusion out", inside=inside))
    assert found == {"a-tfckpt1": wanted}


def test_inside_of_a_fusion_its_arguments_are_read():
    inside = [":q parameter 0", ":r parameter 1", "late_out multiply :q :r"]
    found = fates(traced(*ONE), module(X, "a tanh :x", "out tanh a", "fusion fusion a out",
                                       inside=inside))
    assert found == {"a-tfckpt1": MERGED}
