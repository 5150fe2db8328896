"""Element-wise regions of the forward pass: everything that depends on one tensor alone.

A region is a maximal connected set of fad primitives (ops with tangent rules) with one
non-constant input x. Every tensor in it has x's shape, so that each element is a function of one
element of x. Constants may broadcast into that shape, never beyond it. Since nothing in a region
reads anything else, no path leaves it and comes back.

Source: Guo et al., section III-A (`fad` and `nfad` operations) and III-B.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tfckpt.fad.evaluate import can_evaluate, evaluate
from tfckpt.ir.graph import BACKWARD, UPDATE, Graph, Op, TensorId
from tfckpt.ops import Access, Source, record

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclasses.dataclass(frozen=True)
class Region:
    """One element-wise region.

    Attributes:
      source: x, the only tensor that its ops read besides constants and each other.
      ops: indices in `Graph.ops`, ascending.
    """

    source: TensorId
    ops: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Constants:
    """Ops that give constants, with their value where all elements are equal and it is known.

    A scalar that the step is fed or reads from a variable counts as a constant of unknown value:
    how it moves the result is the business of ops outside of the region.
    """

    values: dict[int, float | None]

    def __contains__(self, op: int) -> bool:
        return op in self.values

    def get(self, op: int) -> float | None:
        """Return the common value of all elements, or None where unknown.

        Args:
          op: index in `Graph.ops`.
        """
        return self.values.get(op)


def constants(graph: Graph) -> Constants:
    """Find constants and fold those whose value is known. O(ops).

    Args:
      graph: the captured step.
    """
    values: dict[int, float | None] = {}
    for i, op in enumerate(graph.ops):
        made = record(op.type)
        if made.is_constant:
            value = op.attrs.get("value")
            values[i] = float(value) if isinstance(value, int | float) else None
        elif made.source is Source.ARGUMENT or made.access is Access.VALUE:
            if op.outputs[0].shape == () and op.outputs[0].dtype in FLOATS:
                values[i] = None
        elif op.pure and op.inputs and len(op.outputs) == 1 and all(
                source in values for source, _ in op.inputs):
            values[i] = _fold(op, [values[source] for source, _ in op.inputs])
    return Constants(values)



def _fold(op: Op, inputs: list[float | None]) -> float | None:
    source = record(op.type).elements_of
    if source is not None:
        return inputs[source]
    known = [x for x in inputs if x is not None]
    if len(known) != len(inputs) or not can_evaluate(op.type):
        return None
    if op.outputs[0].dtype not in FLOATS and op.outputs[0].dtype != "bool":
        return None
    with np.errstate(all="ignore"):
        value = float(evaluate(op.type, [np.asarray(x) for x in known], op.attrs))
    return value if np.isfinite(value) else None


def find_regions(graph: Graph, known: Constants) -> tuple[Region, ...]:
    """Return all regions, by the position of their source. O(edges).

    Args:
      graph: a captured step whose shapes are known.
      known: what `constants` found.
    """
    source: dict[TensorId, TensorId] = {}
    members: dict[TensorId, list[int]] = {}
    for i, op in enumerate(graph.ops):
        x = _source(graph, i, op, source, known)
        if x is not None:
            members.setdefault(x, []).append(i)
            source.update({(i, slot): x for slot in range(len(op.outputs))})
    return tuple(Region(x, tuple(ops)) for x, ops in sorted(members.items()))


def _source(graph: Graph, i: int, op: Op, source: dict[TensorId, TensorId],
            known: Constants) -> TensorId | None:
    """Return the x of the region that an op belongs to, or None."""
    if op.region in (BACKWARD, UPDATE) or not op.pure or i in known or (
            not record(op.type).tangents):
        return None
    found = {source.get(t, t) for t in op.inputs if t[0] not in known}
    if len(found) != 1:
        return None
    x = found.pop()
    tensor = graph.ops[x[0]].outputs[x[1]]
    if tensor.dtype not in FLOATS or tensor.bytes is None:
        return None
    for slot, output in enumerate(op.outputs):
        constant_slot = record(op.type).joins and op.inputs[slot][0] in known
        if output.shape != tensor.shape and not constant_slot:
            return None
        if output.dtype not in FLOATS and output.dtype != "bool":
            return None
    return x
