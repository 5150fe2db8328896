"""dv/dx for tensors v of a region: as a program to be emitted, and as numbers on samples.

The program accumulates from v back to x with a cotangent of one, by the same diagonal rules that
carry tangents forward. For element-wise functions both orders give the same products; this one
multiplies in the order in which TensorFlow's own backward does, so that the result is TensorFlow's
gradient for an incoming gradient of one, and finite wherever that is (the derivative of
`1e-5 * x**3` at x = 150 overflows in float16 when accumulated forward, and does not backward).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfckpt.fad.evaluate import evaluate, run
from tfckpt.fad.regions import FLOATS, Constants, Region
from tfckpt.ir.graph import Graph, TensorId
from tfckpt.ops import Array, record
from tfckpt.ops.tangents import At
from tfckpt.ops.terms import TENSOR, Builder, Term, cast

LARGEST = 1.0e6
_GRID = 8.0


class Derivatives:
    """Derivatives of one region, sharing one program."""

    def __init__(self, graph: Graph, region: Region, known: Constants) -> None:
        self.graph, self.region, self.known = graph, region, known
        self.builder = Builder()
        self._done: dict[TensorId, Term | None] = {}

    def term(self, tensor: TensorId) -> Term:
        """Return a tensor that the region may read; a constant of known value is a number.

        Args:
          tensor: index of its op, and number of its output.
        """
        op, slot = tensor
        dtype = self.graph.ops[op].outputs[slot].dtype
        value = self.known.get(op)
        if value is not None and dtype in FLOATS:
            return self.builder.number(value, dtype)
        return self.builder.tensor(tensor, dtype)

    def of(self, v: TensorId) -> Term | None:
        """Return dv/dx as a term of the shared program; None where v does not move with x.

        Args:
          v: a tensor of the region: index of its op, and number of its output.
        """
        if v not in self._done:
            self._done[v] = self._accumulate(v)
        return self._done[v]

    def _accumulate(self, v: TensorId) -> Term | None:
        graph, x = self.graph, self.region.source
        dtype = graph.ops[v[0]].outputs[v[1]].dtype
        cotangent: dict[TensorId, Term] = {v: self.builder.number(1.0, dtype)}
        for i in reversed(self.region.ops):
            if i > v[0]:
                continue
            for slot in range(len(graph.ops[i].outputs)):
                t = cotangent.pop((i, slot), None)
                if t is not None:
                    self._propagate(i, slot, t, cotangent)
        result = cotangent.get(x)
        return None if result is None else cast(result, graph.ops[x[0]].outputs[x[1]].dtype)

    def _propagate(self, i: int, slot: int, t: Term, cotangent: dict[TensorId, Term]) -> None:
        op = self.graph.ops[i]
        at = At([self.term(s) for s in op.inputs], self.term((i, slot)), t, op.attrs)
        known = record(op.type)
        positions = [slot] if known.passes_on else range(len(op.inputs))
        for position in positions:
            tensor = op.inputs[position]
            dtype = self.graph.ops[tensor[0]].outputs[tensor[1]].dtype
            if tensor[0] in self.known or dtype not in FLOATS:
                continue
            part = known.tangent(position)(at)
            if part.number == 0.0:
                continue
            cotangent[tensor] = cotangent[tensor] + part if tensor in cotangent else part


class Samples:
    """Sample points of x, and every tensor of a region and its derivative on them.

    The points include the kinks that piecewise functions usually have (multiples of 1/4, and every
    known constant of the region with either sign), random ones, and magnitudes up to 1e6. A
    constant whose elements differ or are unknown is a different random number at each point.
    """

    def __init__(self, graph: Graph, region: Region, known: Constants) -> None:
        self.graph, self.region, self.known = graph, region, known
        read = sorted({s for i in region.ops for s, _ in graph.ops[i].inputs if s in known})
        values = [known.get(s) for s in read]
        kinks = sorted({sign * c for c in values if c is not None for sign in (1.0, -1.0)})
        random = np.random.default_rng(20)
        self.x = np.concatenate([
            np.arange(-_GRID, _GRID + 0.25, 0.25), kinks, random.normal(0, 2, 96),
            np.geomspace(1e-6, LARGEST, 24), -np.geomspace(1e-6, LARGEST, 24)])
        self.values: dict[TensorId, Array] = {region.source: self.x}
        self.slopes: dict[TensorId, Array] = {region.source: np.ones_like(self.x)}
        with np.errstate(all="ignore"):
            for i in region.ops:
                self._forward(i)

    def value(self, tensor: TensorId) -> Array | None:
        """Return a tensor of the region or a constant; None for any other.

        Args:
          tensor: index of its op, and number of its output.

        Returns:
          A float64 array with one entry for each sample point.
        """
        if tensor in self.values:
            return self.values[tensor]
        if tensor[0] not in self.known:
            return None
        value = self.known.get(tensor[0])
        if value is None:
            self.values[tensor] = np.random.default_rng(tensor[0]).normal(0.5, 1.0, len(self.x))
        else:
            self.values[tensor] = np.full(len(self.x), value)
        return self.values[tensor]

    def _forward(self, i: int) -> None:
        op = self.graph.ops[i]
        found = [self.value(t) for t in op.inputs]
        inputs = [a for a in found if a is not None]
        for slot in range(len(op.outputs)):
            if record(op.type).joins:
                self.values[(i, slot)] = inputs[slot]
            else:
                self.values[(i, slot)] = evaluate(op.type, inputs, op.attrs)
            if op.outputs[slot].dtype in FLOATS:
                self.slopes[(i, slot)] = self._slope(i, slot)

    def _slope(self, i: int, slot: int) -> Array:
        """Tangent of one output, forward, by the rules themselves on numbers."""
        op = self.graph.ops[i]
        known = record(op.type)
        total = np.zeros_like(self.x)
        for position, tensor in enumerate(op.inputs):
            slope = self.slopes.get(tensor)
            if slope is None or (known.passes_on and position != slot):
                continue
            builder = Builder()
            terms = [builder.tensor((0, n), "float64") for n in range(len(op.inputs))]
            at = At(terms, builder.tensor((1, 0), "float64"),
                    builder.tensor((2, 0), "float64"), op.attrs)
            part = known.tangent(position)(at)
            values = [self.value(t) for t in op.inputs]
            tensors: dict[object, Array] = {
                (0, n): v for n, v in enumerate(values) if v is not None}
            tensors |= {(1, 0): self.values[(i, slot)], (2, 0): slope}
            total = total + run(builder.program(), tensors)[part.index]
        return total


def on_samples(samples: Samples, builder: Builder) -> list[Array]:
    """Return every node of a program on the samples.

    Args:
      samples: the sample points of the program's region.
      builder: of the program.

    Returns:
      One array of samples, or a scalar, for each node, in the order of the program.
    """
    nodes = builder.program()
    wanted: Mapping[object, Any] = {node.attr("tensor"): samples.value(node.attr("tensor"))
                                    for node in nodes if node.type == TENSOR}
    with np.errstate(all="ignore"):
        return run(nodes, wanted)
