"""Variables by their handles: their bytes, and what still reads one when it is updated."""

from __future__ import annotations

import collections
import dataclasses

from tfckpt.cost.merging import merges_into_its_reader
from tfckpt.cost.storage import unknown_variables
from tfckpt.ir.graph import BACKWARD, UPDATE, Graph, TensorId
from tfckpt.ops import Access, record

LEAST_MOVED = 128 << 10
"""Bytes of the smallest variable whose update waits."""


def variable_bytes(graph: Graph) -> dict[TensorId, int]:
    """Return the bytes of each variable by its handle, once, however often it is used.

    First those whose values are read, then those that ops take by their handles alone: tables
    that are gathered from, what fused optimizers keep.

    Args:
      graph: joint graph.

    Returns:
      Bytes by handle; variables of unknown rank are missing.
    """
    unknown = frozenset(unknown_variables(graph))
    found = {handle_of(graph, op.inputs[0]): sum(t.bytes or 0 for t in op.outputs)
             for op in graph.ops if record(op.type).access is Access.VALUE
             and op.inputs[0][0] not in unknown}
    for op in graph.ops:
        for source, slot in op.inputs:
            size = graph.ops[source].outputs[slot].variable_bytes
            if size:
                found.setdefault(handle_of(graph, (source, slot)), size)
    return found


def handle_of(graph: Graph, tensor: TensorId) -> TensorId:
    """Return where a handle comes from, through what passes it on.

    Args:
      graph: joint graph.
      tensor: a handle: index of its op, and number of its output.

    Returns:
      The output of the op that makes the handle.
    """
    op = graph.ops[tensor[0]]
    while record(op.type).passes_on and tensor[1] < len(op.inputs):
        tensor = op.inputs[tensor[1]]
        op = graph.ops[tensor[0]]
    return tensor


def updated_late(graph: Graph) -> Graph:
    """Return the graph with updates after what of the backward reads the variables' old values.

    TensorFlow updates a variable in its own memory unless something still reads its value: then it
    makes a copy, at another address, and the old one is free when the last reader ends. That takes
    as much as the gradient does while it waits, and leaves the memory in pieces that change with
    every step. Nothing waits for what Grappler may merge into its reader or rearrange, which it
    does otherwise where another op waits, nor for what runs in one branch only. Small variables do
    not matter.

    Args:
      graph: joint graph; not changed.
    """
    readers, ops = graph.consumers(), list(graph.ops)
    last, size = _readers_of_values(graph, readers), variable_bytes(graph)
    for i, handle in _updates(graph):
        op = ops[i]
        if size.get(handle, 0) < LEAST_MOVED:
            continue
        awaited = [r for r in last.get(handle, ()) if r < i and ops[r].region == BACKWARD
                   and ops[r].device == op.device and not ops[r].conditional
                   and not record(ops[r].type).rearranged
                   and not merges_into_its_reader(graph, r, readers)]
        controls = tuple(dict.fromkeys((*op.controls, *awaited)))
        if controls != op.controls:
            ops[i] = dataclasses.replace(op, controls=controls)
    return dataclasses.replace(graph, ops=tuple(ops))


@dataclasses.dataclass(frozen=True)
class ValueUses:
    """Ops that read variables in their own memory, and ops that update them; variables by number.

    Attributes:
      reads: of an op, the variables that it reads in their own memory before they are updated.
      updates: of an op, the variable that it updates.
    """

    reads: dict[int, tuple[int, ...]]
    updates: dict[int, int]


def value_uses(graph: Graph, readers: list[list[int]]) -> ValueUses:
    """Return which ops read and which update variables, numbered as by `variable_bytes`.

    Args:
      graph: joint graph.
      readers: for each op its consumers, as `Graph.consumers` returns them.
    """
    number = {handle: n for n, handle in enumerate(variable_bytes(graph))}
    last = _readers_of_values(graph, readers)
    reads: dict[int, list[int]] = collections.defaultdict(list)
    updates = {i: number[handle] for i, handle in _updates(graph) if handle in number}
    latest = {handle: i for i, handle in _updates(graph) if i in updates}
    for handle, update in latest.items():
        for reader in last.get(handle, ()):
            if reader < update and reader not in updates:
                reads[reader].append(number[handle])
    return ValueUses({i: tuple(entry) for i, entry in reads.items()}, updates)


def _updates(graph: Graph) -> list[tuple[int, TensorId]]:
    """Return the ops that change a variable in its own memory if they can, and its handle."""
    return [(i, handle_of(graph, op.inputs[0])) for i, op in enumerate(graph.ops)
            if op.region == UPDATE and record(op.type).writes and op.inputs
            and record(op.type).access is not Access.ASSIGN and not op.conditional]


def _readers_of_values(graph: Graph, readers: list[list[int]]) -> dict[TensorId, list[int]]:
    """Return the ops that read a variable's value, or a view of it, by its handle."""
    found: dict[TensorId, list[int]] = collections.defaultdict(list)
    for i, op in enumerate(graph.ops):
        if record(op.type).access is not Access.VALUE:
            continue
        handle, pending, seen = handle_of(graph, op.inputs[0]), [i], {i}
        while pending:
            for r in readers[pending.pop()]:
                if r in seen or record(graph.ops[r].type).shape_only:
                    continue
                seen.add(r)
                (pending if record(graph.ops[r].type).aliases else found[handle]).append(r)
    return {handle: sorted(entry) for handle, entry in found.items()}
