"""Has loops in the backward wait for the gradients that they are handed.

TensorFlow starts a loop as soon as one of the things that it is handed is there. Where what is
computed of the others does not depend on a gradient, as the states that an adjoint method computes
backwards, it runs ahead through the iterations that may run at once, of all such loops of a step,
while the forward still runs; what the gradients need of it then stays live. A plan has a loop begin
when all that it reads is there.
"""

from __future__ import annotations

from tfckpt.ir.edits import AddControl, Create, Edits, edited
from tfckpt.ir.graph import BACKWARD, Graph, Loop, Op
from tfckpt.rewrite.names import given_name, identity
from tfckpt.rewrite.passes.manager import Context, Pass

SMALL = 1 << 16
"""Bytes of an iteration up to which it may run ahead."""


def hold_loops(context: Context, edits: Edits) -> Edits:
    """Return the edits, and control edges from gradients to loops that would run ahead of them.

    Args:
      context: the step; of its target whether control edges order anything.
      edits: what is done to the step so far; where nothing is, it stays as it is.
    """
    if not edits.added or not context.target.delays_by_control:
        return edits
    graph = context.graph
    loops = {op.name: slots for op in graph.ops if op.loop is not None
             if op.region == BACKWARD and (slots := _gradients(graph, op))
             and _runs_ahead(op.loop, slots) > SMALL}
    if not loops:
        return edits
    tensors, _, _ = edited(graph, edits)
    ops = {op.name: op for op in graph.ops}
    added: list[Create] = []
    controls: list[AddControl] = []
    for name, slots in loops.items():
        for slot in slots if name in tensors else ():
            source, output = ops[name].inputs[slot]
            added.append(identity(given_name(name, slot), tensors[name][slot], (),
                                  graph.ops[source].outputs[output].dtype, ops[name].device))
            controls.append(AddControl(name, added[-1].name))
    return edits.then(Edits(tuple(added), controls=tuple(controls)))


def _gradients(graph: Graph, loop: Op) -> list[int]:
    """Return which inputs of a loop follow from the backward."""
    return [slot for slot, (source, _) in enumerate(loop.inputs)
            if graph.ops[source].region == BACKWARD and graph.ops[source].inputs]


def _runs_ahead(loop: Loop, given: list[int]) -> int:
    """Return the bytes that an iteration makes whatever some of its arguments are."""
    waiting = {loop.arguments[slot] for slot in given if slot < len(loop.arguments)}
    slot_of = {op: slot for slot, op in enumerate(loop.arguments)}
    while True:
        before = len(waiting)
        for i, op in enumerate(loop.body.ops):
            if any(source in waiting for source, _ in op.inputs):
                waiting.add(i)
        waiting.update(op for op, slot in slot_of.items()
                       if loop.body.fetches[slot][0] in waiting)
        if len(waiting) == before:
            break
    return sum(t.bytes or 0 for i, op in enumerate(loop.body.ops)
               if i not in waiting and op.inputs for t in op.outputs)


PASS = Pass("loop starts", hold_loops)
