"""XLA asked what it would make of a step that is being traced, as it is or with edits."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph
from tfckpt.ir.hlo import XlaMemory, memory_of
from tfckpt.rewrite.appliers.graphdef import apply_to_graph_def
from tfckpt.verify.memory import default_device

_HERE = "/job:localhost/replica:0/task:0/device:{}"


class NotAsked(Exception):
    """XLA does not tell; the text says why."""


class Asked:
    """A step that XLA can be asked about; nothing of it runs.

    Args:
      live: the step's graph, complete and not edited.
      graph: the same as captured, for the shapes that the trace leaves open.
    """

    def __init__(self, live: tf.Graph, graph: Graph) -> None:
        self.live, self.graph = live, graph

    def memory(self, edits: Edits | None = None) -> XlaMemory:
        """Return what the step takes, compiled for the device that steps without one run on.

        Args:
          edits: what is changed of the step first.

        Raises:
          NotAsked: it cannot be compiled by itself.
        """
        if not hasattr(self.live, "captures"):
            raise NotAsked("the step is read from a file")
        definition = self.definition
        if edits is not None:
            definition = apply_to_graph_def(definition, edits)
        try:
            return memory_of(self._compiled(definition))
        except (ValueError, TypeError, RuntimeError, tf.errors.OpError) as error:
            raise NotAsked(str(error).strip().splitlines()[0]) from error

    def _compiled(self, definition: tf.compat.v1.GraphDef) -> Any:
        """Return the HloProto of a graph, with its buffer assignment."""
        return tf_adapter.compiled_graph(self.live, definition, self._shapes(),
                                         _HERE.format(default_device()))

    def _shapes(self) -> list[tf.TensorShape]:
        return [self._shape(t) for t in self.live.inputs]

    @functools.cached_property
    def definition(self) -> tf.compat.v1.GraphDef:
        """Return the step as it is when it is first asked about, written once for all questions."""
        return self.live.as_graph_def()

    def _shape(self, tensor: tf.Tensor) -> tf.TensorShape:
        """Return the shape that an input has when it is compiled.

        Raises:
          NotAsked: it is not known.
        """
        if tensor.dtype == tf.resource or tensor.shape.is_fully_defined():
            return tensor.shape
        shape = tf.TensorShape(next(op.outputs[0].shape for op in self.graph.ops
                                    if op.name == tensor.op.name))
        if not shape.is_fully_defined():
            raise NotAsked(f"the size of {tensor.name} is not known")
        return shape
