"""Cubes are multiplied in the order in which the plain step multiplies them.

Grappler makes x^3 the product of x and x^2, shares x^2 with the one in the gradient, and
which of the two it multiplies with c in c * x^3 follows from their names. A copy's x^2 is its
own, and so is the original's where the gradient reads a copy of x: its name may sort elsewhere.
Where it does, the cube reads x through a pass-through whose name sorts as in the plain step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph, Op
from tfckpt.ops import record
from tfckpt.rewrite.names import base_name, read_through
from tfckpt.rewrite.passes.manager import Node

_OWN = "ArithmeticOptimizer/"
"""Prefix of Grappler's name of a cube's own square, in the scope of the cube."""


def cubes(graph: Graph) -> list[Op]:
    """Return the ops that Grappler makes products of x and x^2.

    Args:
      graph: the captured step.
    """
    return [op for op in graph.ops
            if record(op.type).cube and graph.ops[op.inputs[1][0]].attrs.get("value") == 3.0]


def multiply_in_plain_order(edits: Edits, graph: Graph,
                            plain: Mapping[str, Node]) -> Edits:
    """Return the edits, with pass-throughs before the cubes whose order they might change.

    Args:
      edits: what is done to the step so far.
      graph: the captured step.
      plain: by name, what Grappler makes of it.
    """
    names: dict[str, Callable[[str], Sequence[tuple[int, str]]]] = {}
    for op in cubes(graph):
        found = _base_comes_first(op, plain)
        if found is not None and found != (graph.ops[op.inputs[0][0]].name < _scope(op) + _OWN):
            names[op.name] = functools.partial(_base, found)
    return read_through(edits, graph, names)


def _scope(op: Op) -> str:
    return op.name[:op.name.rfind("/") + 1]


def _base(first: bool, name: str) -> list[tuple[int, str]]:
    """Return the first input of a cube or a copy of one, with its pass-through."""
    return [(0, base_name(name, first))]


def _base_comes_first(cube: Op, plain: Mapping[str, Node]) -> bool | None:
    """Return whether x has a lesser name than x^2; None where there is no product of the two.

    Constants are multiplied in between: x^2 or x may be read by what reads the cube.
    """
    times, squared = record(cube.type).cube or ("", "")
    product = plain.get(cube.name)
    if product is None or product.type != times:
        return None
    readers = [node for node in plain.values() if node.type == times and cube.name in node.inputs]
    read = {i: plain[i] for node in (product, *readers) for i in node.inputs if i in plain}
    for square in read.values():
        if square.type == squared and square.inputs[0] in read:
            return square.inputs[0] < square.name
    return None
