"""The names of Keras' layers in place of the scopes that TensorFlow has numbered for them.

A Keras layer opens a scope of its name twice in each call, and its ops are in the second.
TensorFlow numbers a scope that is opened again, so that the ops of a layer `conv2d` are in
`conv2d_1`, and those of a layer `conv2d_1` in `conv2d_1_2`. People know their layers: what they
read, and what they write in `keep=` and `recompute=`, has the layers' names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from tfckpt.ir.edits import traced
from tfckpt.ir.graph import BACKWARD, Graph

_NUMBER = re.compile(r"_[0-9]+$")
_AROUND = re.compile(r"(?:^|(?<=/))(?:gradient_tape|gradients(?:_\d+)?|StatefulPartitionedCall"
                     r"|ArithmeticOptimizer|ConstantFolding)/")
"""Scopes that no person opened."""


@dataclasses.dataclass(frozen=True)
class LayerNames:
    """The layers of a step, as far as they are known.

    Attributes:
      layers: names of the layers.
      unnumbered: those in whose scope of the very name there are ops, as in Keras 2, where a
        layer opens its scope once.
      beside: for gradients that stand outside of all layers, as the sums of several do: an op in
        the layer that they belong to, by the gradient's name.
    """

    layers: frozenset[str] = frozenset()
    unnumbered: frozenset[str] = frozenset()
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, layers: Iterable[str], ops: Iterable[str]) -> LayerNames:
        """Return the layers of a step.

        Args:
          layers: their names; none where they are not known.
          ops: names of the step's ops.
        """
        known = frozenset(layers)
        scopes = {part for name in ops for part in name.split("/")[:-1]} if known else set()
        return cls(known, known & scopes)

    def with_gradients(self, graph: Graph) -> LayerNames:
        """Return the same, with the layers of gradients that stand outside of all layers.

        Such a gradient belongs to the layer that reads it first: it is that of the layer's result.
        Where none does, to a layer that it is made of.

        Args:
          graph: the step.
        """
        if not self.layers:
            return self
        inside = {i: op.name for i, op in enumerate(graph.ops)
                  if op.region == BACKWARD and self.knows(op.name)}
        outside = [i for i, op in enumerate(graph.ops)
                   if op.region == BACKWARD and i not in inside]
        readers = graph.consumers()
        for i in reversed(outside):
            self._stand_beside(i, readers[i], inside)
        for i in outside:
            self._stand_beside(i, [source for source, _ in graph.ops[i].inputs], inside)
        return dataclasses.replace(self, beside={
            traced(graph.ops[i].name): inside[i] for i in outside if i in inside})

    @staticmethod
    def _stand_beside(op: int, others: Sequence[int], inside: dict[int, str]) -> None:
        """Note by which of others a gradient is known, unless it is; `inside` is changed."""
        found = next((inside[other] for other in others if other in inside), None)
        if found is not None:
            inside.setdefault(op, found)

    def shown(self, op: str) -> str:
        """Return an op's name as people know it: `net/conv2d/Relu` for `net_1/conv2d_1/Relu`.

        Args:
          op: name of an op of the graph that is planned.
        """
        *scopes, own = traced(op).split("/")
        return "/".join([*map(self._layer_of, scopes), own])

    def layer(self, op: str) -> str:
        """Return the layer that an op belongs to, with the layers around it.

        Where no scope is a known layer's: its first two scopes, without those of gradients. Of a
        loop's gradient, whose name has the layers twice: once.

        Args:
          op: name of an op of the graph that is planned.
        """
        op = traced(op)
        return self.path(self.shown(self.beside.get(op, op)))

    def knows(self, op: str) -> bool:
        """Return whether an op is in a layer that is known.

        Args:
          op: name of an op of the graph that is planned.
        """
        return any(part in self.layers for part in self.shown(op).split("/")[:-1])

    def path(self, shown: str) -> str:
        """Return the layer that an op belongs to; as `layer`.

        Args:
          shown: what the op is called.
        """
        parts = _AROUND.sub("", shown).split("/")
        known = [n for n, part in enumerate(parts[:-1], 1)
                 if part in self.layers and part not in parts[:n - 1]]
        if known:
            return "/".join(parts[:known[-1]])
        return "/".join(parts[:2]) if len(parts) > 2 else parts[0]

    def _layer_of(self, scope: str) -> str:
        """Return the name of the layer that opened a scope; the scope where none is known to."""
        layer = _NUMBER.sub("", scope)
        if layer == scope or layer not in self.layers:
            return scope
        # a layer's own name may end in a number as well
        return scope if scope in self.layers and layer in self.unnumbered else layer


UNKNOWN = LayerNames()
"""No layer is known: names are TensorFlow's."""
