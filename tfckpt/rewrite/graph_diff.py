"""Edits that turn one graph into another that was derived from it, and edits made on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfckpt.graph import Graph, TensorId
from tfckpt.rewrite.edits import Clone, Create, Edits, Rewire, op_of


def graph_edits(before: Graph, after: Graph) -> Edits:
    """The edits between a captured graph and what `tfckpt.fad.transform.take` made of it.

    Ops are told apart by name. New ops are created in the order in which they stand; ops that
    `after` lacks are dropped: nothing that runs reads them any more.
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
    dropped = tuple(op.name for op in before.ops if op.name not in left)
    return Edits(added, rewires, (), before.in_xla, dropped)


def join_edits(first: Edits, second: Edits) -> Edits:
    """Edits of a graph, and edits made for the graph that they give, as one value.

    What the second rewires among the ops that the first creates is written into their creation.
    """
    created = {op.name: n for n, op in enumerate(first.added)}
    added: list[Create | Clone] = list(first.added)
    rewires: dict[tuple[str, int], Rewire] = {(r.op, r.index): r for r in first.rewires}
    for rewire in second.rewires:
        if rewire.op not in created:
            rewires[(rewire.op, rewire.index)] = rewire
            continue
        op = added[created[rewire.op]]
        inputs = list(op.inputs)
        inputs[rewire.index] = rewire.tensor
        added[created[rewire.op]] = dataclasses.replace(op, inputs=tuple(inputs))
    return Edits(_in_order([*added, *second.added]), tuple(rewires.values()),
                 (*first.controls, *second.controls), second.in_xla,
                 (*first.dropped, *second.dropped))


def _in_order(ops: Sequence[Create | Clone]) -> tuple[Create | Clone, ...]:
    """New ops, each behind the new ops that it reads or waits for."""
    known = {op.name: op for op in ops}
    done: dict[str, Create | Clone] = {}
    stack = [op.name for op in reversed(ops)]
    while stack:
        op = known[stack[-1]]
        needs = [n for n in [*map(op_of, op.inputs), *op.controls]
                 if n in known and n not in done]
        if op.name not in done and needs:
            stack.extend(reversed(needs))
            continue
        done.setdefault(stack.pop(), op)
    return tuple(done.values())


def _name(graph: Graph, tensor: TensorId) -> str:
    return f"{graph.ops[tensor[0]].name}:{tensor[1]}"
