"""Edits between two graphs, found again by comparing them: an oracle for edits that were recorded.

It shares no code with `tfckpt.fad.transform`.
"""

from __future__ import annotations

from tfckpt.ir.edits import Create, Edits, Rewire
from tfckpt.ir.graph import Graph, TensorId


def graph_edits(before: Graph, after: Graph) -> Edits:
    """Return the edits between a captured graph and one that was derived from it.

    Ops are told apart by name. New ops are created in the order in which they stand; ops that
    `after` lacks are dropped.
    """
    known = {op.name: op for op in before.ops}
    added = tuple(
        Create(op.name, op.type, tuple(_name(after, t) for t in op.inputs),
               tuple(after.ops[c].name for c in op.controls),
               tuple(t.dtype for t in op.outputs), op.attrs, op.device)
        for op in after.ops if op.name not in known)
    rewires = tuple(
        Rewire(op.name, n, _name(after, tensor))
        for op in after.ops if op.name in known
        for n, tensor in enumerate(op.inputs)
        if _name(before, known[op.name].inputs[n]) != _name(after, tensor))
    left = {op.name for op in after.ops}
    return Edits(added, rewires,
                 dropped=tuple(op.name for op in before.ops if op.name not in left))


def _name(graph: Graph, tensor: TensorId) -> str:
    return f"{graph.ops[tensor[0]].name}:{tensor[1]}"
