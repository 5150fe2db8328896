"""The ops of an executed graph: what they read and wait for, across devices, and their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfckpt.ir.graph import depth_first_order
from tfckpt.ops import record
from tfckpt.verify.arithmetic.op_labels import BACK, RECEIVE, SEND, SHAPED, called

Tensor = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Node:
    """An op.

    Attributes:
      type: the same for types that compute the same.
      inputs: what it reads, each the result of an op by name.
      controls: names of the ops that it waits for besides.
    """

    name: str
    type: str
    inputs: tuple[Tensor, ...]
    controls: tuple[str, ...]


def nodes_of(definitions: Mapping[str, Any]) -> dict[str, Node]:
    """Return the ops of a graph; what one device receives reads what another sends.

    Args:
      definitions: NodeDefs by name, those of all devices.
    """
    nodes = {name: _node(definition) for name, definition in definitions.items()}
    sent = {definitions[node.name].attr["tensor_name"].s: node for node in nodes.values()
            if node.type == SEND}
    for name, node in nodes.items():
        source = sent.get(definitions[name].attr["tensor_name"].s) if (
            node.type == RECEIVE) else None
        if source is not None:
            nodes[name] = dataclasses.replace(
                node, inputs=source.inputs, controls=(*node.controls, source.name))
    return nodes


def in_order(nodes: Mapping[str, Node]) -> list[str]:
    """Return the names of ops, each after what it reads and waits for but for the ends of loops.

    Args:
      nodes: of a graph, by name.
    """
    def before(name: str) -> list[str]:
        node = nodes[name]
        needed = (*(source for source, _ in node.inputs), *node.controls)
        return [source for source in reversed(needed)
                if source in nodes and nodes[source].type not in BACK]

    return depth_first_order(nodes, before)


def passes(node: Node) -> bool:
    """Return whether an op hands on what it reads, or changes its shape alone.

    Args:
      node: the op.
    """
    return bool(node.inputs) and (
        record(node.type).passes_on or node.type in (SEND, RECEIVE) or node.type in SHAPED)


def _node(definition: Any) -> Node:
    inputs, controls = [], []
    for text in definition.input:
        if text.startswith("^"):
            controls.append(text[1:])
        else:
            name, _, slot = text.partition(":")
            inputs.append((name, int(slot or 0)))
    return Node(definition.name, called(definition.op), tuple(inputs), tuple(controls))
