"""Sums of three and more are added in the order in which the plain step adds them.

Grappler sorts what an AddN reads by name, and merges equal ops under the name of one of them: the
one that comes first when all ops are sorted by how far they are from the end of the step, fences
and copies included. So a rewritten step may keep another name, and add in another order. Where
the name of something that is summed is open in that way, Grappler is asked what it makes of the
plain step, and the sum reads its terms through pass-throughs whose names have that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence

from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph
from tfckpt.ops import record
from tfckpt.rewrite.names import read_through, term_name
from tfckpt.rewrite.passes.manager import Node, PlainStep

_LARGEST_COMPARED = 1 << 16
"""Bytes of a constant that is compared with others."""
_ROUNDED = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")


def add_in_plain_order(edits: Edits, graph: Graph, plain: PlainStep) -> Edits:
    """Return the edits, with pass-throughs before the sums whose order they might change.

    Args:
      edits: what is done to the step so far.
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
                names[op.name] = functools.partial(terms_in_order, order)
    return read_through(edits, graph, names)


def terms_in_order(order: Sequence[int], name: str) -> list[tuple[int, str]]:
    """Return the inputs of a sum or a copy of one in an order, each with its pass-through.

    Args:
      order: indices of the sum's inputs, as they are to be added.
      name: of the sum, or of a copy of it.

    Returns:
      (index of an input, name of its pass-through) in that order.
    """
    return [(i, term_name(name, place)) for place, i in enumerate(order)]


def equal_ops(graph: Graph, plain: PlainStep) -> list[int]:
    """Return for each op a number that it shares with those of which TensorFlow may keep only one.

    Attributes are asked for only of ops that have all else in common with another: few.

    Args:
      graph: the captured step.
      plain: asked for attributes, and for whether ops are stateful.

    Returns:
      For each op, in the order of the graph, the index of the first of those that it may be merged
      with, or its own.
    """
    first: dict[tuple, int] = {}
    known: dict[tuple, dict[Hashable, int]] = {}
    found: list[int] = []

    def number(i: int, key: tuple) -> int:
        """Return the first op with the key, and the attributes, of an op."""
        other = first.setdefault(key, i)
        if other == i:
            return i
        alike = known.setdefault(key, {plain.attributes(graph.ops[other].name): other})
        return alike.setdefault(plain.attributes(graph.ops[i].name), i)

    for i, op in enumerate(graph.ops):
        made = op.outputs[0] if op.outputs else None
        result = (made.dtype, made.shape) if made is not None else ()
        kind = op.type, op.device
        known_op = record(op.type)
        if known_op.is_constant:
            small = made is not None and (made.bytes or 0) <= _LARGEST_COMPARED
            found.append(number(i, (*kind, *result)) if small else i)
        elif known_op.folded_by_shape and op.inputs:
            source, slot = op.inputs[0]
            read = graph.ops[source].outputs[slot].shape
            open_ = read is None or None in read
            found.append(i if open_ else first.setdefault((*kind, *result, read), i))
        elif op.inputs and not plain.is_stateful(op.name):
            inputs = tuple((found[source], slot) for source, slot in op.inputs)
            controls = tuple(sorted(found[c] for c in op.controls))
            found.append(number(i, (*kind, inputs, controls)))
        else:
            found.append(i)
    return found


def _order(terms: Sequence[tuple[int, int]], node: Node,
           number: Mapping[str, int]) -> list[int] | None:
    """Return the indices of a sum's terms in the order in which a node reads them.

    None where that is unclear.

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
