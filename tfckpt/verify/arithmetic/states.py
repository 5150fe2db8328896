"""Which reads and writes of variables there are in an executed graph, and what orders them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.edits import traced
from tfckpt.ops import Access, Source, record
from tfckpt.verify.arithmetic.nodes import Node, passes
from tfckpt.verify.arithmetic.op_labels import ARGUMENT, HANDED_ON, SHAPE_OF_ALL

State = tuple[str, int, int]
"""A resource, how many writes of it come before, and how many before or after."""


def states(nodes: Mapping[str, Node], order: Sequence[str], definitions: Mapping[str, Any],
           arguments: Sequence[str], early: Collection[str]) -> dict[str, State]:
    """Return the resource that an op reads or writes, for each op that does, and its state.

    Args:
      nodes: of the graph, by name.
      order: their names, each after what the op reads and waits for.
      definitions: their NodeDefs.
      arguments: for each argument of the graph, in order, what it is.
      early: reads, by name, that run before the writes that nothing orders with them.
    """
    touched: dict[str, list[str]] = {}
    for name in order:
        handle = _handle(nodes, definitions, arguments, name)
        if handle is not None:
            touched.setdefault(handle, []).append(name)
    bits = {name: 1 << i for i, name in enumerate(
        name for names in touched.values() for name in names)}
    ancestors: dict[str, int] = {}
    for name in order:
        node = nodes[name]
        ancestors[name] = 0
        for source in (*(source for source, _ in node.inputs), *node.controls):
            ancestors[name] |= ancestors.get(source, 0) | bits.get(source, 0)
    found = {}
    for handle, names in touched.items():
        for name in names:
            writes = [other for other in names if other != name and not reads(nodes[other].type)]
            before = sum(bool(ancestors[name] & bits[w]) for w in writes)
            after = sum(bool(ancestors[w] & bits[name]) for w in writes)
            found[name] = handle, before, 0 if name in early else len(writes) - before - after
    return found


def reads(kind: str) -> bool:
    """Return whether ops of a type only read a resource.

    Args:
      kind: an op type.
    """
    return record(kind).access in (Access.VALUE, Access.READ)


def _handle(nodes: Mapping[str, Node], definitions: Mapping[str, Any], arguments: Sequence[str],
            name: str) -> str | None:
    """Return the resource that an op reads or writes; None where it does neither."""
    node = nodes[name]
    if not node.inputs or node.type in SHAPE_OF_ALL or not (
            record(node.type).access or tf_adapter.is_stateful_type(node.type)):
        return None
    source = node.inputs[0][0]
    while nodes[source].inputs and (passes(nodes[source]) or nodes[source].type in HANDED_ON):
        source = nodes[source].inputs[0][0]
    definition = definitions[source]
    if record(definition.op).source is Source.ARGUMENT or definition.op == ARGUMENT:
        return (arguments[definition.attr["index"].i]
                if definition.attr["T"].type == tf.resource.as_datatype_enum else None)
    return traced(source) if definition.op.endswith("HandleOp") else None
