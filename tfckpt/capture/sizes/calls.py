"""The sizes of a call that its trace leaves open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ops import Source, record

_SHOWN = 4
"""Shapes that are said at most."""


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """A call's sizes that its trace leaves open.

    Attributes:
      leaves: for each tensor, array or composite (a ragged or sparse tensor) in the order of
        `tf.nest` the shapes of its parts: one, or those of its components. An entry is None where
        it is not known.
      batch: an unknown leading dimension that the leaves do not tell.
      values: the parts of all leaves themselves, in order, while the call is made.
      numbers: of what a loop hands to its first iteration, by position, the integers that are known
        before it runs: from a counter follows how large a slice is.
    """

    leaves: tuple[tuple[tuple[int, ...] | None, ...], ...] = ()
    batch: int | None = None
    values: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)
    numbers: Mapping[int, Any] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @classmethod
    def of(cls, arguments: object, batch: int | None = None) -> CallSizes:
        """Return the sizes of what a call is made with: a nest with all its arguments.

        Args:
          arguments: what is no tensor, array or composite in it has no entry, nor has a variable.
          batch: an unknown leading dimension that the leaves do not tell; None: that of a dataset
            among the arguments, or of the dataset of an iterator.
        """
        flat = tf.nest.flatten(arguments)
        for leaf in flat if batch is None else ():
            if isinstance(leaf, tf.data.Dataset | tf.data.Iterator):
                batch = batch or tf_adapter.batch_size(leaf)
        leaves = [call_tensors(leaf) for leaf in flat]
        return cls(tuple(tuple(_size(t) for t in leaf) for leaf in leaves if leaf), batch,
                   tuple(t for leaf in leaves for t in leaf))

    def without_values(self) -> CallSizes:
        """Return the sizes alone, which may be kept."""
        return dataclasses.replace(self, values=())

    @property
    def elements(self) -> int:
        """Return how many numbers there are in all tensors of known shape."""
        shapes = [shape for leaf in self.leaves for shape in leaf if shape is not None]
        return sum(math.prod(shape) for shape in shapes)

    def inputs(self, placeholders: Sequence[tf.Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the placeholders that stand for the call's tensors, by op name.

        Args:
          placeholders: those that stand for what the call is made with, in the same order.

        Returns:
          No entry for a shape that is not known or that its placeholder cannot have, and none at
          all where there are more or fewer placeholders than tensors.
        """
        parts = [shape for leaf in self.leaves for shape in leaf]
        if len(parts) != len(placeholders):
            return {}
        return {t.op.name: shape for shape, t in zip(parts, placeholders, strict=True)
                if shape is not None and t.shape.is_compatible_with(shape)}

    def given(self, graph: tf.Graph, placeholders: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Return what a graph is given in the call, by the name of the tensor that stands for it.

        Args:
          graph: FuncGraph or imported graph.
          placeholders: those that stand for what the call is made with, in the same order.
        """
        if not self.values:
            return {}
        captures = zip(getattr(graph, "internal_captures", ()),
                       getattr(graph, "external_captures", ()), strict=True)
        found = {inside.name: outside for inside, outside in captures}
        known = self.inputs(placeholders)
        if known:
            found.update((t.name, value) for t, value in zip(
                placeholders, self.values, strict=True) if t.op.name in known)
        for op in graph.get_operations():
            if record(op.type).source is Source.ELEMENT and len(op.outputs) == len(self.values):
                found.update((t.name, value) for t, value in zip(
                    op.outputs, self.values, strict=True) if t.shape.is_compatible_with(
                        tf.TensorShape(value.shape)))
        return found

    def larger(self, placeholders: Sequence[tf.Tensor]) -> CallSizes:
        """Return the like with more of what a trace leaves open.

        Twice as much in leading dimensions, three times as much in others: so no two sizes that
        are the same here by chance are in what is returned.

        Args:
          placeholders: those that stand for what the call is made with, in the same order.
        """
        given = self.inputs(placeholders)
        larger = iter([None if t.op.name not in given else tuple(
            (3 if d else 2) * size if known is None else size
            for d, (size, known) in enumerate(zip(given[t.op.name], t.shape, strict=True)))
            for t in placeholders])
        leaves = tuple(tuple(next(larger) for _ in leaf) for leaf in self.leaves) if given else ()
        return CallSizes(leaves, self.batch and 2 * self.batch)

    def element(self, count: int) -> tuple[tuple[int, ...] | None, ...]:
        """Return the shapes of a dataset's element of so many tensors, a composite being one.

        Args:
          count: tensors of an element.

        Returns:
          None for each shape that is not known or is a composite's, and for all of them where the
          call has more or fewer leaves.
        """
        if len(self.leaves) != count:
            return (None,) * count
        return tuple(leaf[0] if len(leaf) == 1 else None for leaf in self.leaves)

    def __str__(self) -> str:
        shapes = ["x".join(map(str, shape)) or "scalar" for leaf in self.leaves for shape in leaf
                  if shape is not None]
        more = f" and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
        return ", ".join(shapes[:_SHOWN]) + more


def call_tensors(arguments: object) -> list[Any]:
    """Return the tensors and arrays in a nest of a call's arguments, and those of composites.

    Args:
      arguments: any nest; what is neither, and variables, are left out.
    """
    return [t for t in tf.nest.flatten(arguments, expand_composites=True)
            if hasattr(t, "shape") and hasattr(t, "dtype") and not isinstance(t, tf.Variable)]


def _size(tensor: Any) -> tuple[int, ...] | None:
    shape = tf.TensorShape(tensor.shape)
    return tuple(shape.as_list()) if shape.is_fully_defined() else None
