"""Passes of the rewriter in tests: what one changes is asserted as a whole.

Graphs are evaluated with numpy, so that no TensorFlow is needed to see that numbers stay.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Mapping

import numpy as np

from tfckpt.ir.edits import Clone, Edits, check_edits, edited
from tfckpt.ir.graph import BACKWARD, FORWARD, UPDATE, Graph, Op, Tensor, check_graph
from tfckpt.rewrite import realise

NOTHING = Edits()
MATRIX = Tensor("float32", (8, 8), 256)
_KERNELS = {
    "Tanh": np.tanh, "Exp": np.exp, "Neg": np.negative, "Sin": np.sin, "Square": np.square,
    "Mul": np.multiply, "AddV2": np.add, "MatMul": np.matmul, "Pow": np.power,
    "Identity": lambda x: x, "TanhGrad": lambda y, g: g * (1 - y * y),
    "AddN": lambda *terms: functools.reduce(operator.add, terms),
    "AssignVariableOp": lambda _, value: value, "While": lambda x: np.cos(x),
    "IdentityN": lambda *values: np.stack(values),
    "XlaOptimizationBarrier": lambda *values: list(values),
    # what guards are made of
    "Reshape": lambda x, _: x, "StridedSlice": lambda x, *_: x, "Bitcast": lambda x: x,
    "Equal": lambda *_: False, "Any": lambda *_: False, "SelectV2": lambda armed, zero, x: x,
}
_SOURCES = ("Placeholder", "VariableV2", "VarHandleOp", "Const")


def graph_of(rows, fetches=(), sinks=(), **fields) -> Graph:
    """Return a graph of rows (name, type, inputs as names, region, further fields of an op).

    An input "name:2" is the third result of an op.
    """
    index: dict[str, int] = {}

    def tensor(text: str) -> tuple[int, int]:
        name, _, slot = text.partition(":")
        return index[name], int(slot or 0)

    ops = []
    for name, kind, inputs, region, *more in rows:
        given: dict = {"outputs": (MATRIX,), "pure": region == FORWARD, "controls": ()}
        given.update(*more)
        given["controls"] = tuple(index[c] for c in given["controls"])
        index[name] = len(ops)
        ops.append(Op(name, kind, tuple(map(tensor, inputs)), region=region, **given))
    graph = Graph("hand", tuple(ops), tuple((index[f], 0) for f in fetches),
                  tuple(index[s] for s in sinks), **fields)
    check_graph(graph)
    return graph


def assert_edits(graph: Graph, edits: Edits, before: Edits = NOTHING, *,
                 delta: Mapping[str, int], modified: set[str]) -> None:
    """Assert what a pass has added by type, which ops it has changed, and that numbers stay.

    Args:
      graph: as captured.
      edits: what the pass returned.
      before: what it was given.
      delta: new ops by type.
      modified: the ops, of the graph or made by earlier passes, that read or await anything else.
    """
    check_edits(graph, edits)
    old_reads, old_waits, _ = edited(graph, before)
    reads, waits, kinds = edited(graph, edits)
    new = [name for name in reads if name not in old_reads]
    assert collections.Counter(kinds[name] for name in new) == collections.Counter(delta)
    assert {name for name in old_reads if (old_reads[name], sorted(old_waits[name]))
            != (reads[name], sorted(waits[name]))} == modified
    assert_same_numbers(graph, edits)


def assert_same_numbers(graph: Graph, edits: Edits, tolerance: float = 0.0) -> None:
    """Assert that what is fetched and written is what the graph computes without the edits."""
    wanted, found = numbers(graph, NOTHING), numbers(graph, edits)
    for index in [*(i for i, _ in graph.fetches), *graph.sinks]:
        name = graph.ops[index].name
        if tolerance:
            np.testing.assert_allclose(found[name], wanted[name], tolerance, tolerance, name)
        else:
            assert wanted[name].tobytes() == found[name].tobytes(), name


def numbers(graph: Graph, edits: Edits) -> dict[str, np.ndarray]:
    """Return what every op of the edited graph computes, copies of constants included."""
    reads, _, kinds = edited(graph, edits)
    sources = {op.name: op.source for op in edits.added if isinstance(op, Clone)}
    found: dict[str, np.ndarray] = {}

    def value(name: str) -> np.ndarray:
        if name not in found:
            if kinds[name] in _SOURCES:
                seed = sum(map(ord, sources.get(name, name)))
                found[name] = np.random.default_rng(seed).random((8, 8), np.float32)
            else:
                found[name] = _KERNELS[kinds[name]](*map(read, reads[name]))
        return found[name]

    def read(tensor: str) -> np.ndarray:
        name, _, slot = tensor.rpartition(":")
        made = value(name)
        several = kinds[name] in ("IdentityN", "XlaOptimizationBarrier")
        return made[int(slot)] if several else made

    for name, kind in kinds.items():
        if kind != "NoOp":
            value(name)
    return found


def chain_of_layers(count: int, prefix: str = "", device: str = "") -> list[tuple]:
    """Return rows of products and activations, their gradients, and writes of the weights."""
    def at(name):
        return f"{prefix}{name}"

    more = {"device": device}
    rows = [(at("x"), "Placeholder", (), FORWARD, {**more, "pure": False})]
    rows += [(at(f"w{n}"), "Placeholder", (), FORWARD, {**more, "pure": False})
             for n in range(count)]
    last = at("x")
    for n in range(count):
        rows += [(at(f"h{n}"), "MatMul", (last, at(f"w{n}")), FORWARD, more),
                 (at(f"t{n}"), "Tanh", (at(f"h{n}"),), FORWARD, more),
                 (at(f"y{n}"), "Mul", (at(f"h{n}"), at(f"t{n}")), FORWARD, more)]
        last = at(f"y{n}")
    rows.append((at("g"), "MatMul", (last, last), BACKWARD, more))
    above = at("g")
    for n in reversed(range(count)):
        below = at(f"y{n - 1}") if n else at("x")
        rows += [(at(f"gt{n}"), "Mul", (above, at(f"t{n}")), BACKWARD, more),
                 (at(f"gh{n}"), "Mul", (above, at(f"h{n}")), BACKWARD, more),
                 (at(f"th{n}"), "TanhGrad", (at(f"t{n}"), at(f"gh{n}")), BACKWARD, more),
                 (at(f"d{n}"), "AddN", (at(f"gt{n}"), at(f"th{n}")), BACKWARD, more),
                 (at(f"dw{n}"), "MatMul", (below, at(f"d{n}")), BACKWARD, more),
                 (at(f"write{n}"), "AssignVariableOp", (at(f"w{n}"), at(f"dw{n}")), UPDATE,
                  {**more, "outputs": ()})]
        if n:
            rows.append((at(f"g{n}"), "MatMul", (at(f"d{n}"), at(f"w{n}")), BACKWARD, more))
            above = at(f"g{n}")
    return rows


def replace_pass(monkeypatch, name: str, run) -> None:
    """Have a pass run something else: `run` takes context and edits."""
    passes = {each.name: each for each in realise.PASSES}
    passes[name] = dataclasses.replace(passes[name], run=run)
    monkeypatch.setattr(realise, "PASSES", tuple(passes.values()))
