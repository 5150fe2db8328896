"""Has what a gradient is multiplied by wait for the gradient, where Grappler would not.

Grappler makes g * (c * a) of c * (g * a), where c is a constant: it pushes constants towards what
can be folded. Where `a` is of the forward, c * a is computed there and then, and held until the
gradient comes, beside `a` where a copy reads that as well: one more tensor for each GELU, for
example, that no plan knows of. So `a` is read by a pass-through that waits for g. Grappler
multiplies in the same order as before, and nothing is delayed: the product waited for g anyway.
"""

from __future__ import annotations

import dataclasses

from tfckpt.cost.merging import only_reader
from tfckpt.edits import Create, Edits, Rewire, op_of
from tfckpt.graph import BACKWARD, FORWARD, Graph, Op
from tfckpt.ops import record
from tfckpt.rewrite.names import identity, late_name
from tfckpt.rewrite.passes.manager import Context, Pass, Property


def delay_factors(graph: Graph, edits: Edits) -> Edits:
    """Return the edits, and pass-throughs before factors of the forward."""
    rewires = {(r.op, r.index): r for r in edits.rewires}
    added: list[Create] = []
    for i, early in _early_factors(graph).items():
        op = graph.ops[i]
        read = [rewires[op.name, n].tensor if (op.name, n) in rewires else _name(graph, op, n)
                for n in range(2)]
        gradient = op_of(read[1 - early])
        guard = identity(late_name(read[early], i), read[early], (gradient,),
                         op.outputs[0].dtype, op.device)
        added.append(guard)
        rewires[op.name, early] = Rewire(op.name, early, f"{guard.name}:0")
    return dataclasses.replace(edits, added=(*edits.added, *added),
                               rewires=tuple(rewires.values())) if added else edits


def _name(graph: Graph, op: Op, index: int) -> str:
    source, slot = op.inputs[index]
    return f"{graph.ops[source].name}:{slot}"


def _early_factors(graph: Graph) -> dict[int, int]:
    """For products of a gradient and a tensor of the forward, times a constant: which it is."""
    constant, readers = _constants(graph), graph.consumers()
    found: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.region != BACKWARD or not record(op.type).multiplies or op.conditional:
            continue
        sources = [source for source, _ in op.inputs]
        regions = [graph.ops[source].region for source in sources]
        if sorted(regions) != sorted((FORWARD, BACKWARD)) or any(constant[s] for s in sources):
            continue
        reader = only_reader(graph, i, readers)
        if reader is not None and record(graph.ops[reader].type).scales and any(
                constant[source] for source, _ in graph.ops[reader].inputs):
            found[i] = regions.index(FORWARD)
    return found


def _constants(graph: Graph) -> list[bool]:
    """For each op whether it is a constant, or made of such alone: Grappler folds it."""
    found: list[bool] = []
    for op in graph.ops:
        found.append(record(op.type).is_constant or bool(op.inputs) and op.pure and all(
            found[source] for source, _ in op.inputs))
    return found


def _refusal(context: Context) -> str:
    if context.target.optimised:
        return "Grappler has run already"
    return "" if context.target.reorders_operands else "XLA waits for no control edges"


PASS = Pass("late products", lambda context, edits: delay_factors(context.graph, edits),
            requires=frozenset({Property.COPIES}), refusal=_refusal)
