"""Cubes are multiplied in the order in which the plain step multiplies them.

Grappler makes x^3 the product of x and x^2, shares x^2 with the one that the gradient holds, and
which of the two it multiplies with c in c * x^3 follows from their names. A copy's x^2 is its
own, and so is the original's where the gradient reads a copy of x: its name may sort elsewhere.
Where it does, the cube reads x through a pass-through whose name sorts as in the plain step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfckpt.edits import Clone, Create, Edits, Rewire
from tfckpt.graph import Graph, Op
from tfckpt.ops import record
from tfckpt.rewrite.names import base_name, identity
from tfckpt.rewrite.passes.manager import Node

_OWN = "ArithmeticOptimizer/"
"""What Grappler's name of a cube's own square begins with, in the scope of the cube."""


def cubes(graph: Graph) -> list[Op]:
    """The ops that Grappler makes products of x and x^2."""
    return [op for op in graph.ops
            if record(op.type).cube and graph.ops[op.inputs[1][0]].attrs.get("value") == 3.0]


def multiply_in_plain_order(edits: Edits, graph: Graph,
                            plain: Mapping[str, Node]) -> Edits:
    """The edits, with pass-throughs before the cubes whose order they might change.

    Args:
      graph: the captured step.
      plain: by name, what Grappler makes of it.
    """
    first = {}
    for op in cubes(graph):
        found = _base_comes_first(op, plain)
        if found is not None and found != (graph.ops[op.inputs[0][0]].name < _scope(op) + _OWN):
            first[op.name] = found
    ops = {op.name: op for op in graph.ops}
    added: list[Create | Clone] = []
    for new in edits.added:
        if isinstance(new, Clone) and new.source in first:
            base = _base(ops[new.source], new.name, new.inputs[0], first[new.source])
            added.append(base)
            new = dataclasses.replace(new, inputs=(f"{base.name}:0", *new.inputs[1:]))
        added.append(new)
    rewires = {(r.op, r.index): r for r in edits.rewires}
    for name in first:
        source, slot = ops[name].inputs[0]
        read = rewires.get((name, 0), Rewire(name, 0, f"{graph.ops[source].name}:{slot}")).tensor
        added.append(_base(ops[name], name, read, first[name]))
        rewires[name, 0] = Rewire(name, 0, f"{added[-1].name}:0")
    return dataclasses.replace(edits, added=tuple(added), rewires=tuple(rewires.values()))


def _scope(op: Op) -> str:
    return op.name[:op.name.rfind("/") + 1]


def _base(op: Op, name: str, read: str, first: bool) -> Create:
    return identity(base_name(name, first), read, (), op.outputs[0].dtype, op.device)


def _base_comes_first(cube: Op, plain: Mapping[str, Node]) -> bool | None:
    """Whether x has a lesser name than x^2; None where there is no product of the two.

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
