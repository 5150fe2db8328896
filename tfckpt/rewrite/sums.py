"""Sums of three and more are added in the order in which the plain step adds them.

Grappler sorts what an AddN reads by name, and merges equal ops under the name of one of them: the
one that comes first when all ops are sorted by how far they are from the end of the step, fences
and copies included. So a rewritten step may keep another name, and add in another order. Where
the name of something that is summed is open in that way, Grappler is asked what it makes of the
plain step, and the sum reads its terms through pass-throughs whose names have that order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from tfckpt.edits import Clone, Create, Edits, Rewire
from tfckpt.graph import Graph
from tfckpt.ops import record
from tfckpt.rewrite.names import identity, term_name
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
    orders = {}
    for op in [graph.ops[i] for i in open_sums]:
        node = optimised.get(op.name)
        if node is not None and record(node.type).adds:
            order = _order([(classes[s], slot) for s, slot in op.inputs], node, number)
            if order is not None:
                orders[op.name] = order
    return _through_terms(edits, graph, orders)


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


def _through_terms(edits: Edits, graph: Graph, orders: Mapping[str, Sequence[int]]) -> Edits:
    """Has the sums in `orders`, and copies of them, read pass-throughs in these orders."""
    ops = {op.name: op for op in graph.ops}
    added: list[Create | Clone] = []
    for new in edits.added:
        if isinstance(new, Clone) and new.source in orders:
            terms = list(_terms(new.name, new.inputs, orders[new.source], ops[new.source].device,
                                ops[new.source].outputs[0].dtype))
            added += [term for _, term in terms]
            inputs = list(new.inputs)
            for i, term in terms:
                inputs[i] = f"{term.name}:0"
            new = dataclasses.replace(new, inputs=tuple(inputs))
        added.append(new)
    rewires = {(r.op, r.index): r for r in edits.rewires}
    for name, order in orders.items():
        op = ops[name]
        read = [f"{graph.ops[source].name}:{slot}" for source, slot in op.inputs]
        read = [rewires[name, i].tensor if (name, i) in rewires else tensor
                for i, tensor in enumerate(read)]
        for i, term in _terms(name, read, order, op.device, op.outputs[0].dtype):
            added.append(term)
            rewires[name, i] = Rewire(name, i, f"{term.name}:0")
    return dataclasses.replace(edits, added=tuple(added), rewires=tuple(rewires.values()))


def _terms(name: str, read: Sequence[str], order: Sequence[int], device: str, dtype: str
           ) -> Iterator[tuple[int, Create]]:
    for place, i in enumerate(order):
        yield i, identity(term_name(name, place), read[i], (), dtype, device)
