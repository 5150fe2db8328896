"""Has what of the forward goes into gradients wait for them, where Grappler would not.

Grappler makes g * (c * a) of c * (g * a), where c is a constant: it pushes constants towards what
can be folded. Where `a` is of the forward, c * a is computed there and then, and kept until the
gradient comes, beside `a` where a copy reads that as well: one more tensor for each GELU, for
example, that no plan knows of. What a gradient needs of the forward alone, such as exp(-x * x) for
that of erfc, waits for a gradient by a control edge, which is lost where Grappler moves or folds
the op at its other end. So such ops read the forward through a pass-through that waits for a
gradient which Grappler leaves alone. It computes the same as before, and nothing is delayed.
"""

from __future__ import annotations

import dataclasses

from tfckpt.cost.merging import only_reader
from tfckpt.ir.edits import Create, Edits, Rewire
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Op
from tfckpt.ops import record
from tfckpt.rewrite.edit_builder import FLOATS
from tfckpt.rewrite.names import identity, late_name
from tfckpt.rewrite.passes.manager import Context, Pass, Property


def delay_factors(graph: Graph, edits: Edits) -> Edits:
    """Return the edits, and pass-throughs before what gradients need of the forward.

    Args:
      graph: the captured step.
      edits: what is done to the step so far.
    """
    rewires = {(r.op, r.index): r for r in edits.rewires}
    added: list[Create] = []
    for i, (inputs, awaited) in _early(graph).items():
        op, gradient = graph.ops[i], graph.ops[_lasting(graph, awaited)]
        for n in inputs:
            read = rewires[op.name, n].tensor if (op.name, n) in rewires else _name(graph, op, n)
            source, slot = op.inputs[n]
            guard = identity(late_name(read, i), read, (gradient.name,),
                             graph.ops[source].outputs[slot].dtype, op.device)
            added.append(guard)
            rewires[op.name, n] = Rewire(op.name, n, f"{guard.name}:0")
    return dataclasses.replace(edits, added=(*edits.added, *added),
                               rewires=tuple(rewires.values())) if added else edits


def _name(graph: Graph, op: Op, index: int) -> str:
    source, slot = op.inputs[index]
    return f"{graph.ops[source].name}:{slot}"


def _early(graph: Graph) -> dict[int, tuple[list[int], int]]:
    """Return which inputs of gradients' ops are to wait, and for which op."""
    constant, readers = _constants(graph), graph.consumers()
    found: dict[int, tuple[list[int], int]] = {}
    for i, op in enumerate(graph.ops):
        if op.region != BACKWARD or op.conditional:
            continue
        forward = [n for n, (s, slot) in enumerate(op.inputs)
                   if graph.ops[s].region == FORWARD and not constant[s]
                   and graph.ops[s].outputs[slot].dtype in FLOATS]
        gradients = [s for s, _ in op.inputs if graph.ops[s].region == BACKWARD]
        if record(op.type).multiplies and len(forward) == len(gradients) == 1:
            if _is_scaled(graph, i, readers, constant):
                found[i] = forward, gradients[0]
        elif forward and not gradients:
            awaited = [c for c in op.controls if graph.ops[c].region == BACKWARD]
            if awaited and record(op.type).rearranged:
                found[i] = forward, awaited[0]
    return found


def _is_scaled(graph: Graph, i: int, readers: list[list[int]], constant: list[bool]) -> bool:
    """Return whether a product's only reader multiplies it by a constant."""
    reader = only_reader(graph, i, readers)
    return reader is not None and record(graph.ops[reader].type).scales and any(
        constant[source] for source, _ in graph.ops[reader].inputs)


def _constants(graph: Graph) -> list[bool]:
    """Return for each op whether it is a constant, or made of such alone: Grappler folds it."""
    found: list[bool] = []
    for op in graph.ops:
        found.append(record(op.type).is_constant or bool(op.inputs) and op.pure and all(
            found[source] for source, _ in op.inputs))
    return found


def _lasting(graph: Graph, i: int) -> int:
    """Return what an op of the backward is computed from and Grappler does not rearrange."""
    while record(graph.ops[i].type).rearranged or record(graph.ops[i].type).aliases:
        before = next((s for s, _ in graph.ops[i].inputs if graph.ops[s].region == BACKWARD), None)
        if before is None:
            return i
        i = before
    return i


def _refusal(context: Context) -> str:
    if context.target.optimised:
        return "Grappler has run already"
    return "" if context.target.reorders_operands else "XLA waits for no control edges"


PASS = Pass("late products", lambda context, edits: delay_factors(context.graph, edits),
            requires=frozenset({Property.COPIES}), refusal=_refusal)
