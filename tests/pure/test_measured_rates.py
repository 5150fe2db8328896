"""Rates told by a profile: fused kernels, ops that Grappler made, and ops that it does not name."""

from __future__ import annotations

import math

import pytest

from tfckpt.cost.measured import measured_rates
from tfckpt.cost.time import seconds
from tfckpt.ir.graph import FORWARD, Graph, Op, Tensor
from tfckpt.ir.target import SMALL_CPU

pytestmark = pytest.mark.pure
SIDE = 1024


def op(kind, name, *inputs):
    shape = (SIDE, SIDE)
    return Op(name, kind, tuple((i, 0) for i in inputs), (), (
        Tensor("float32", shape, 4 * math.prod(shape)),), FORWARD, True)


GRAPH = Graph("step", (
    op("Placeholder", "x"), op("MatMul", "dense/MatMul", 0, 0), op("AddV2", "dense/add", 1, 0),
    op("Relu", "dense/Relu", 2), op("Tanh", "tanh", 3), op("Exp", "exp", 4),
    op("MatMul", "last", 5, 5)), ((6, 0),), ())


def known(profile):
    return measured_rates(GRAPH, profile, SMALL_CPU)


def test_the_time_of_a_fused_kernel_is_given_to_the_op_that_computes():
    rates = known({"dense/Relu": .5})
    relu = seconds(GRAPH, GRAPH.ops[3], SMALL_CPU)
    assert rates.known == {"dense/MatMul": pytest.approx(.5 - relu), "dense/Relu": relu}


def test_an_op_that_ran_by_itself_keeps_its_time():
    rates = known({"dense/MatMul": .25, "dense/Relu": .5})
    assert rates.known == {"dense/MatMul": .25, "dense/Relu": .5}


def test_what_stands_for_an_op_counts_as_the_op():
    rates = known({"tanh/unary_ops_composition": .125, "tanh/body/_3/mul": .125, "other/op": 9.,
                   "dense/MatMul": .5})
    assert rates.known["tanh"] == .25 and "other/op" not in rates.known


def test_a_time_that_is_too_short_for_a_fused_kernel_is_none():
    assert known({"dense/Relu": 1e-6}).known == {"dense/Relu": 1e-6}
    assert known({"exp": .5}).known == {"exp": .5}  # too far from the product


def test_ops_without_a_time_are_priced_by_what_others_of_their_kind_took():
    described = {op.name: seconds(GRAPH, op, SMALL_CPU) for op in GRAPH.ops}
    rates = known({"last": 4 * described["last"], "exp": described["exp"] / 2})
    assert rates.flops_per_second == pytest.approx(SMALL_CPU.flops_per_second / 4)
    assert rates.bytes_per_second == pytest.approx(SMALL_CPU.bytes_per_second * 2)
    rates = known({"exp": 1e-12})  # no machine is as quick as that
    assert rates.bytes_per_second == pytest.approx(SMALL_CPU.bytes_per_second * 30)
    assert known({}) == SMALL_CPU
