"""The names of Keras' layers in place of the scopes that TensorFlow has numbered for them.

A Keras layer opens a scope of its name twice in each call, and its ops are in the second.
TensorFlow numbers a scope that is opened again, so that the ops of a layer `conv2d` are in
`conv2d_1`, and those of a layer `conv2d_1` in `conv2d_1_2`. People know their layers: what they
read, and what they write in `keep=` and `recompute=`, has the layers' names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from tfckpt.ir.edits import traced

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
    """

    layers: frozenset[str] = frozenset()
    unnumbered: frozenset[str] = frozenset()

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
        return self.path(self.shown(op))

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
