"""Keeps copies right in graphs with TF1 reference variables, which change in place.

A read of a resource variable is a value. A read of a reference variable is its buffer, and an
optimizer writes into that. TF1 lets the gradients of an op wait for each other before the update
of its weight, so the plain step reads no weight too late. A new op has no such wait: every write
of a variable must await the copies (and derivatives) that read it.

Fences of such a step must not await updates (`await_updates=False`): an update that awaits a copy
after a fence that awaits the update would be a cycle.
"""

from __future__ import annotations

import dataclasses

from tfckpt.ir.edits import AddControl, Clone, Edits, op_of
from tfckpt.ir.graph import Graph
from tfckpt.ops import Source, record
from tfckpt.rewrite.passes.manager import Pass, Property


def has_references(graph: Graph) -> bool:
    """Return whether the graph has reference variables.

    Args:
      graph: the captured step.
    """
    return any(record(op.type).source is Source.REFERENCE for op in graph.ops)


def await_readers(graph: Graph, edits: Edits) -> Edits:
    """Return the edits, with every write of a reference variable awaiting its new readers.

    Complexity: linear in ops, edits and edges that are added.

    Args:
      graph: the captured step.
      edits: what is done to the step so far.
    """
    passed: dict[str, frozenset[str]] = {}  # op -> reference variables whose buffer it passes on
    nothing: frozenset[str] = frozenset()
    for op in graph.ops:
        known = record(op.type)
        if known.source is Source.REFERENCE:
            passed[op.name] = frozenset((op.name,))
        elif known.aliases:
            passed[op.name] = nothing.union(*(passed.get(graph.ops[s].name, nothing)
                                              for s, _ in op.inputs))
    types = {op.name: op.type for op in graph.ops}
    readers: dict[str, list[str]] = {}
    for new in edits.added:
        read = nothing.union(*(passed.get(op_of(t), nothing) for t in new.inputs))
        kind = types.get(new.source, "") if isinstance(new, Clone) else new.type
        if record(kind).aliases:
            passed[new.name] = read
        else:
            for variable in sorted(read):
                readers.setdefault(variable, []).append(new.name)
    sinks = frozenset(graph.sinks)
    added = [AddControl(op.name, copy) for i, op in enumerate(graph.ops) if i in sinks
             for source, _ in op.inputs[:1]
             for copy in readers.get(graph.ops[source].name, ())]
    return dataclasses.replace(edits, controls=(*edits.controls, *added))


PASS = Pass("reference variables", lambda context, edits: await_readers(context.graph, edits),
            requires=frozenset({Property.COPIES, Property.OPERANDS}),  # they add what reads
            ensures=frozenset({Property.REFERENCES}))
