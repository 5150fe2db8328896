"""Sums of three and more are added in the order in which the plain step adds them.

Grappler sorts what an AddN reads by name, and merges equal ops under the name of one of them: the
one that comes first when all ops are sorted by how far they are from the end of the step, fences
and copies included. So a rewritten step may keep another name, and add in another order. Where
the name of something that is summed is open in that way, Grappler is asked what it makes of the
plain step, and the sum reads its terms through pass-throughs whose names have that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from tfckpt.edits import Edits
from tfckpt.graph import Graph
from tfckpt.ops import record
from tfckpt.rewrite.names import read_through, term_name
from tfckpt.rewrite.passes.manager import Node, PlainStep

_LARGEST_COMPARED = 1 << 16
"""Bytes of a constant that is compared with others."""
_ROUNDED = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")


def add_in_plain_order(edits: Edits, graph: Graph, plain: PlainStep) -> Edits:
    """The edits, with pass-throughs before the sums whose order they might change.

    Args:
      graph: the captured step.
      plain: asked for the optimised step where a name is open.
    """
    sums = [i for i, op in enumerate(graph.ops)
            if record(op.type).adds and len(op.inputs) > 2 and op.outputs[0].dtype in _ROUNDED
            and op.name not in edits.dropped]
    if not sums:
        return edits
    classes = equal_ops(graph, plain)
    count: dict[int, int] = {}
    for c in classes:
        count[c] = count.get(c, 0) + 1
    open_sums = [i for i in sums if any(count[classes[s]] > 1 for s, _ in graph.ops[i].inputs)]
    optimised = plain.optimised() if open_sums else None
    if optimised is None:
        return edits
    number = {op.name: classes[i] for i, op in enumerate(graph.ops)}
    names: dict[str, Callable[[str], Sequence[tuple[int, str]]]] = {}
    for op in [graph.ops[i] for i in open_sums]:
        node = optimised.get(op.name)
        if node is not None and record(node.type).adds:
            order = _order([(classes[s], slot) for s, slot in op.inputs], node, number)
            if order is not None:
                names[op.name] = functools.partial(_terms, order)
    return read_through(edits, graph, names)


def _terms(order: Sequence[int], name: str) -> list[tuple[int, str]]:
    """Return the inputs of a sum or a copy of one in an order, each with its pass-through."""
    return [(i, term_name(name, place)) for place, i in enumerate(order)]


def equal_ops(graph: Graph, plain: PlainStep) -> list[int]:
    """For each op a number that it shares with the ops of which TensorFlow may keep only one."""
    known: dict[tuple, int] = {}
    found: list[int] = []
    for i, op in enumerate(graph.ops):
        key: tuple | None = None
        shape = op.outputs[0].shape if op.outputs else None
        known_op = record(op.type)
        if known_op.is_constant:
            if (op.outputs[0].bytes or 0) <= _LARGEST_COMPARED:
                key = (op.type, op.device, plain.attributes(op.name))
        elif known_op.folded_by_shape and op.inputs:
            source, slot = op.inputs[0]
            read = graph.ops[source].outputs[slot].shape
            if read is not None and None not in read:
                key = (op.type, op.device, op.outputs[0].dtype, read, shape)
        elif op.inputs and not plain.is_stateful(op.name):
            inputs = [(found[source], slot) for source, slot in op.inputs]
            key = (op.type, op.device, plain.attributes(op.name), tuple(inputs),
                   tuple(sorted(found[c] for c in op.controls)))
        found.append(i if key is None else known.setdefault(key, i))
    return found


def _order(terms: Sequence[tuple[int, int]], node: Node,
           number: Mapping[str, int]) -> list[int] | None:
    """The indices of a sum's terms in the order in which a node reads them; None where unclear.

    Args:
      terms: for each term the class of its op, and the slot.
      node: what became of the sum.
      number: class of each op by name.
    """
    left = dict(enumerate(terms))
    order: list[int | None] = []
    for text in node.inputs:
        if text.startswith("^"):
            continue
        name, _, slot = text.partition(":")
        wanted = (number.get(name, -1), int(slot or 0))
        found = next((i for i, term in left.items() if term == wanted), None)
        if found is not None:
            del left[found]
        order.append(found)
    if len(order) != len(terms) or order.count(None) > 1:
        return None
    return [next(iter(left)) if i is None else i for i in order]
