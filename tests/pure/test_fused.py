"""Ops that XLA fuses: views of one tensor, groups of gradients, and which results stay tensors."""

from __future__ import annotations

import dataclasses

import pytest

from tfckpt.capture.purity import is_pure
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.storage import roots
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, Graph, Op, Tensor
from tfckpt.ir.target import CPU, GPU, Fusion, Rates, Target

pytestmark = pytest.mark.pure
F32, MASK, ROW = Tensor("float32", (64, 4), 1024), Tensor("bool", (64, 4), 256), Tensor(
    "float32", (1, 4), 16)
EVERY, ONCE = Fusion(repeats=True), Fusion(repeats=False)


def graph(*ops: tuple) -> Graph:
    """Return a step of (name, type, names read, region or FORWARD, result or F32); the last is
    fetched.
    """
    number = {name: i for i, (name, *_) in enumerate(ops)}
    made = []
    for name, kind, reads, *rest in ops:
        region = next((r for r in rest if isinstance(r, str)), FORWARD)
        tensor = next((r for r in rest if isinstance(r, Tensor)), F32)
        made.append(Op(name, kind, tuple((number[r], 0) for r in reads), (), (tensor,), region,
                       is_pure(kind, False, (tensor.dtype,))))
    return Graph("step", tuple(made), ((len(made) - 1, 0),), ())


def gelu(last: str = "MatMul", factor: str = "Erf") -> Graph:
    """x * erf(-x) between two products, and its gradient, which reads both factors."""
    return graph(
        ("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in")), ("minus", "Neg", ("x",)),
        ("erf", factor, ("minus",)), ("y", "Mul", ("x", "erf")), ("out", last, ("y", "y")),
        ("g", "MatMul", ("out", "out"), BACKWARD), ("g_erf", "Mul", ("g", "erf"), BACKWARD),
        ("g_x", "Mul", ("g", "x"), BACKWARD), ("gradient", "AddV2", ("g_erf", "g_x"), BACKWARD),
        ("dw", "MatMul", ("gradient", "in"), BACKWARD))


def storages(step: Graph, fusion: Fusion | None) -> list[str]:
    return [s.name.removesuffix(":0") for s in build_cost_graph(step, fusion=fusion).storages]


def test_an_executor_has_memory_for_both_factors():
    assert {"erf", "g_erf", "g_x"} < set(storages(gelu(), None))


def test_of_a_gelu_what_goes_in_and_what_comes_out_are_tensors():
    """Both factors are computed again, and the two products of the gradient within their sum."""
    step = gelu()
    assert storages(step, EVERY) == ["x", "y", "out", "g", "gradient", "dw"]
    assert [roots(step, EVERY)[i] for i in (2, 3)] == [((1, 0),)] * 2
    cost = build_cost_graph(step, fusion=EVERY)
    gradient = next(v for v in cost.vertices if v.name == "gradient")
    assert [cost.storages[s].name for s in gradient.reads] == ["x:0", "g:0"]
    assert {step.ops[i].name for i in gradient.ops} == {"gradient", "g_erf", "g_x"}
    assert gradient.workspace == 0


def test_what_takes_dozens_of_instructions_is_a_tensor():
    assert storages(gelu(factor="Erfc"), EVERY) == ["x", "erf", "y", "out", "g", "gradient", "dw"]


def test_what_xla_is_known_to_write_to_memory_is_a_tensor():
    """The factor that all fuse, the product that would be one with the sum, no part of a result."""
    known = dataclasses.replace(EVERY, in_memory={"erf": 256, "g_x": 256, "minus": 64})
    assert storages(gelu(), known) == ["x", "erf", "y", "out", "g", "g_x", "gradient", "dw"]


def test_what_is_computed_of_small_tensors_alone_is_a_view_of_the_largest():
    step = graph(("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in")),
                 ("mean", "Mean", ("x",), ROW), ("scale", "Mul", ("mean", "mean")),
                 ("y", "Mul", ("x", "scale")), ("out", "MatMul", ("y", "y")),
                 ("g", "Mul", ("out", "scale"), BACKWARD))
    assert roots(step, EVERY)[3] == ((2, 0),)
    assert storages(step, EVERY) == ["x", "y", "out", "g"]  # the mean is too small to count
    assert "scale" in storages(step, None)


def rows(reader: str = "Cast") -> Graph:
    """Return a softmax of scores that are cast and scaled, as mixed precision has it, and its
    gradient.
    """
    half = Tensor("bfloat16", (64, 4), 512)
    return graph(("in", "Placeholder", (), half, OTHER), ("x", "MatMul", ("in", "in"), half),
                 ("wide", "Cast", ("x",)), ("p", "Softmax", ("wide",)),
                 ("narrow", reader, ("p",), half), ("out", "MatMul", ("narrow", "narrow"), half),
                 ("g", "Mul", ("out", "p"), half, BACKWARD),
                 ("dx", "MatMul", ("g", "g"), half, BACKWARD))


def test_a_softmax_is_computed_again_of_its_scores_where_all_that_read_it_are_fused():
    assert storages(rows(), EVERY) == ["x", "narrow", "out", "g", "dx"]
    assert {"wide", "p"} < set(storages(rows(), None))
    assert "p" in storages(rows("MatMul"), EVERY)


def test_after_a_softmax_nothing_is_written_in_the_place_of_its_scores():
    """All of a row is read before any of it may be overwritten."""
    step = graph(("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in")),
                 ("p", "Softmax", ("x",)), ("y", "Neg", ("p",)), ("out", "MatMul", ("y", "y")))
    made = {v.name: v for v in build_cost_graph(step, fusion=EVERY).vertices}
    assert made["y"].reads and not made["y"].reuses
    other = dataclasses.replace(step, ops=tuple(
        dataclasses.replace(op, type="Tanh") if op.name == "p" else op for op in step.ops))
    assert {v.name: v for v in build_cost_graph(other, fusion=EVERY).vertices}["y"].reuses


def test_a_loss_of_logits_makes_their_gradient_where_it_is_read():
    op = graph(("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in")),
               ("loss", "SparseSoftmaxCrossEntropyWithLogits", ("x", "in"),
                Tensor("float32", (64,), 256)), ("mean", "Mean", ("loss",), ROW),
               ("g", "Neg", ("x",), BACKWARD), ("dw", "MatMul", ("g", "in"), BACKWARD))
    loss = dataclasses.replace(op.ops[2], outputs=(*op.ops[2].outputs, F32))
    reads = dataclasses.replace(op.ops[4], inputs=((2, 1),))
    step = dataclasses.replace(op, ops=(*op.ops[:2], loss, op.ops[3], reads, *op.ops[5:]))
    assert roots(step, EVERY)[2] == ((2, 0), (1, 0))
    assert storages(step, EVERY) == ["x", "loss", "g", "dw"]


def test_on_a_cpu_what_has_one_reader_is_fused():
    """And minus, which the erfc alone reads."""
    assert storages(gelu(), ONCE) == ["x", "erf", "y", "out", "g", "gradient", "dw"]
    assert Target(device=CPU).compiled().fusion == ONCE
    assert Target(device=GPU).compiled().fusion.repeats
    assert Target(device=GPU).fusion is None


def test_what_a_product_reads_is_a_tensor():
    """Not what a reduction reads; nor what the step hands out."""
    def step(reader: str) -> Graph:
        return graph(("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in")),
                     ("y", "Tanh", ("x",)), ("z", reader, ("y", "y")[:1 + (reader == "MatMul")]),
                     ("w", "MatMul", ("z", "z")))

    assert "y" in storages(step("MatMul"), EVERY) and "y" not in storages(step("Sum"), EVERY)
    handed_out = step("Sum")
    assert "y" in storages(dataclasses.replace(handed_out, fetches=((2, 0), (4, 0))), EVERY)


def test_a_mask_is_no_view_of_what_is_larger():
    step = graph(("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in")),
                 ("mask", "Greater", ("x", "in"), MASK), ("y", "SelectV2", ("mask", "x", "x")),
                 ("out", "MatMul", ("y", "y")),
                 ("g", "SelectV2", ("mask", "out", "out"), BACKWARD))
    assert "mask" in storages(step, EVERY)


def test_a_bias_is_a_view_of_what_it_is_added_to_and_a_residual_is_none():
    def step(other: tuple) -> Graph:
        return graph(("in", "Placeholder", (), OTHER), ("x", "MatMul", ("in", "in")), other,
                     ("y", "AddV2", ("x", "other")), ("z", "Tanh", ("y",)),
                     ("out", "MatMul", ("z", "z")), ("g", "TanhGrad", ("y", "out"), BACKWARD))

    assert "y" not in storages(step(("other", "Sum", ("in",), ROW)), EVERY)
    assert "y" in storages(step(("other", "MatMul", ("in", "in"))), EVERY)


def test_a_loop_on_a_gpu_takes_the_time_to_move_what_goes_in_and_comes_out():
    """The ops in between do not matter, as memory limits it; a library's ops have their own time.
    """
    rates = Rates(flops_per_second=1e12, bytes_per_second=1e9, overhead_seconds=1e-6)
    times = {v.name: v.time for v in build_cost_graph(gelu(factor="Erfc"), rates, EVERY).vertices}
    assert times["y"] == pytest.approx(1e-6 + 3 * 1024 / 1e9)  # x and the factor to y
    assert times["gradient"] == pytest.approx(1e-6 + 4 * 1024 / 1e9)  # with g
    single = build_cost_graph(gelu(factor="Erfc"), rates).vertices
    assert times["dw"] == next(v.time for v in single if v.name == "dw")
    assert sum(v.time for v in single if v.name in ("gradient", "g_erf", "g_x")) > (
        2 * times["gradient"])


def test_a_library_takes_its_workspace_for_products_alone():
    cost = build_cost_graph(gelu(), fusion=Fusion(True, 4096))
    assert {v.name: v.workspace for v in cost.vertices if v.workspace} == dict.fromkeys(
        ("x", "out", "g", "dw"), 4096)
