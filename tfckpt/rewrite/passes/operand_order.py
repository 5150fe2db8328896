"""The plain step's operand order, in a rewritten step, for what Grappler orders by name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from tfckpt.ir.edits import Clone, Edits, op_of
from tfckpt.ir.graph import Graph
from tfckpt.ops import record
from tfckpt.rewrite.cube_order import cubes, multiply_in_plain_order
from tfckpt.rewrite.names import read_through
from tfckpt.rewrite.passes.manager import Context, Node, Pass, PlainStep, Property
from tfckpt.rewrite.summation_order import add_in_plain_order, terms_in_order


def keep_operand_order(edits: Edits, graph: Graph, plain: PlainStep) -> Edits:
    """Return the edits, with pass-throughs where they might change the order of operands.

    Args:
      edits: what is done to the step so far.
      graph: the captured step.
      plain: asked for the optimised step only where an order is open.
    """
    edits = add_in_plain_order(edits, graph, plain)
    optimised = plain.optimised() if cubes(graph) else None
    return edits if optimised is None else multiply_in_plain_order(edits, graph, optimised)


def keep_given_order(edits: Edits, graph: Graph) -> Edits:
    """Return the edits, with pass-throughs where they would have a sum add in another order.

    Of a graph that Grappler has made, whose sums have the order that they are to have: it sorts
    what sums of three and more read by name even where it may change nothing else. What was put in
    order before (`tfckpt.capture.grappler.in_place`) is so no more where a copy, or what reads
    copies, reads by other names what pass-throughs pass on.

    Args:
      edits: what is done to the step so far.
      graph: the captured step.
    """
    sums = {op.name: op for op in graph.ops if record(op.type).adds and len(op.inputs) > 2}
    read = [(new.source, new.inputs) for new in edits.added
            if isinstance(new, Clone) and new.source in sums]
    rewired = {(r.op, r.index): r.tensor for r in edits.rewires}
    for name in dict.fromkeys(op for op, _ in rewired if op in sums):
        plain = [f"{graph.ops[source].name}:{slot}" for source, slot in sums[name].inputs]
        read.append((name, tuple(rewired.get((name, i), t) for i, t in enumerate(plain))))
    return read_through(edits, graph, {
        name: functools.partial(terms_in_order, range(len(sums[name].inputs)))
        for name, tensors in read if not _are_sorted([op_of(tensor) for tensor in tensors])})


def _are_sorted(names: Sequence[str]) -> bool:
    return all(one <= other for one, other in itertools.pairwise(names))


def read_of(graph: Graph, optimised: Mapping[str, Node]) -> Mapping[str, Node]:
    """Return what the pass reads of the optimised step: a small part where there are no cubes.

    These are sums, and products and squares with what they read.

    Args:
      graph: the captured step.
      optimised: by name, what Grappler makes of it.
    """
    pairs = [record(op.type).cube or () for op in cubes(graph)]
    kinds = frozenset(kind for pair in pairs for kind in pair)
    near = {i: None for node in optimised.values() if node.type in kinds for i in node.inputs}
    return {name: node for name, node in optimised.items()
            if record(node.type).adds or node.type in kinds or name in near}


def _run(context: Context, edits: Edits) -> Edits:
    if context.target.optimised:
        return keep_given_order(edits, context.graph)
    assert context.plain is not None  # or the pass is refused
    return keep_operand_order(edits, context.graph, context.plain)


def _refusal(context: Context) -> str:
    if context.target.optimised:
        return ""
    if not context.target.reorders_operands:
        return "XLA sorts no operands by name"
    return "" if context.plain is not None else "the plain step is not at hand"


PASS = Pass("operand order", _run, requires=frozenset({Property.COPIES}),
            ensures=frozenset({Property.OPERANDS}), refusal=_refusal)
