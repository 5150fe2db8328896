"""Slices of rows: views where TensorFlow's kernels make no copy, memory of their own elsewhere."""

from __future__ import annotations

import pytest

from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.row_slices import takes_rows
from tfckpt.cost.storage import roots
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, Graph, Op, Tensor
from tfckpt.ir.target import Fusion

WHOLE = {"shrink_axis_mask": 0, "new_axis_mask": 0}
ONE = {"shrink_axis_mask": 1, "new_axis_mask": 0}


def f32(*shape: int) -> Tensor:
    size = 4
    for d in shape:
        size *= d
    return Tensor("float32", shape, size)


def step(kind: str, attrs: dict, given: Tensor, made: list[Tensor], constants: dict[int, int]
         ) -> Graph:
    """Return a step in which an op takes slices of a product; `constants` are its other inputs."""
    last = max(constants, default=-1)
    inputs = [(1, 0) if n not in constants else (2, 0)
              for n in range(max(last, 0 if 0 not in constants else 1) + 1)]
    integer = next(iter(constants.values()), 0)
    ops = (Op("in", "Placeholder", (), (), (given,), OTHER, False),
           Op("x", "MatMul", ((0, 0), (0, 0)), (), (given,), FORWARD, True),
           Op("n", "Const", (), (), (Tensor("int32", (1,), 4),), OTHER, True,
              attrs={"integer": integer}),
           Op("y", kind, tuple(inputs), (), tuple(made), FORWARD, True, attrs=attrs),
           Op("z", "MatMul", ((3, 0), (3, len(made) - 1)), (), (made[0],), FORWARD, True),
           Op("g", "MatMul", ((4, 0), (3, 0)), (), (made[0],), BACKWARD, True))
    return Graph("step", ops, ((5, 0),), ())


X = f32(8, 32, 16)


@pytest.mark.parametrize("kind, attrs, made, constants, is_view", [
    ("StridedSlice", ONE, [f32(32, 16)], {1: 3, 2: 3, 3: 1}, True),  # x[i]
    ("StridedSlice", WHOLE, [f32(2, 32, 16)], {1: 1, 2: 1, 3: 1}, True),  # x[a:b]
    ("StridedSlice", WHOLE, [f32(4, 32, 16)], {1: 2, 2: 2, 3: 2}, False),  # x[::2]
    ("StridedSlice", WHOLE, [f32(8, 32, 4)], {1: 1, 2: 1, 3: 1}, False),  # x[..., a:b]
    ("StridedSlice", {"shrink_axis_mask": 2, "new_axis_mask": 0}, [f32(8, 16)],
     {1: 1, 2: 1, 3: 1}, False),  # x[:, i]
    ("Slice", {}, [f32(3, 32, 16)], {1: 1, 2: 3}, True),
    ("Slice", {}, [f32(8, 32, 1)], {1: 1, 2: 1}, False),
    ("Unpack", {"axis": 0}, [f32(32, 16)] * 8, {}, True),
    ("Unpack", {"axis": 2}, [f32(8, 32)] * 16, {}, False),
    ("Split", {}, [f32(4, 32, 16)] * 2, {0: 0}, True),
    ("Split", {}, [f32(8, 16, 16)] * 2, {0: 1}, False)])
def test_which_slices_are_views(kind, attrs, made, constants, is_view):
    graph = step(kind, attrs, X, made, constants)
    assert takes_rows(graph, 3) == is_view
    assert set(roots(graph)[3]) == ({(1, 0)} if is_view else {(3, n) for n in range(len(made))})
    names = [v.name for v in build_cost_graph(graph).vertices]
    assert ("y" in names) != is_view


def test_what_is_not_aligned_is_copied():
    graph = step("StridedSlice", ONE, f32(8, 33), [f32(33)], {1: 3, 2: 3, 3: 1})
    assert not takes_rows(graph, 3)


def test_a_square_tensor_is_told_from_its_transpose():
    graph = step("Unpack", {"axis": 1}, f32(16, 16, 16), [f32(16, 16)] * 16, {})
    assert not takes_rows(graph, 3)


def test_xla_copies_or_fuses_them():
    graph = step("StridedSlice", ONE, X, [f32(32, 16)], {1: 3, 2: 3, 3: 1})
    assert roots(graph, Fusion(True, 0))[3] == ((3, 0),)
