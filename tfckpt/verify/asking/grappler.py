"""Grappler asked what it would make of a step that is being traced, as it is or with edits.

What it makes is what the executor runs: products with constants are moved, equal ops merged, others
fused, so that other tensors are kept than the traced graph says. It is read as a step is and
simulated. Nothing runs.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import question as grappler
from tfckpt.capture.grappler.items import importable
from tfckpt.capture.grappler.machine import is_relaid, says_more
from tfckpt.capture.grappler.terms import Terms
from tfckpt.capture.shapes import planned_shapes
from tfckpt.capture.steps import imported
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.build import cost_of
from tfckpt.errors import TfckptError
from tfckpt.ir.edits import Edits, traced
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.hlo import XlaMemory
from tfckpt.ir.target import Target
from tfckpt.ops.names import ARG, RETVAL
from tfckpt.plan.choosing.planned import executed_peaks
from tfckpt.rewrite.appliers.graphdef import apply_to_graph_def, protected
from tfckpt.verify.asking.xla import NotAsked


class Optimised:
    """A step that Grappler can be asked about.

    Args:
      live: the step's graph, complete and not edited.
      graph: the same as captured, for the shapes that the trace leaves open.
      target: what runs it.
      plain: what the step was, where its ops are Grappler's already, marked so that Grappler leaves
        them alone: in which order those run that become ready together it says anew.
      terms: in which Grappler is asked; None: as calls have it asked.
    """

    def __init__(self, live: tf.Graph, graph: Graph, target: Target,
                 plain: grappler.Question | None = None,
                 terms: Terms | None = None) -> None:
        self.live, self.graph, self.target, self._plain = live, graph, target, plain
        self._terms = terms

    def memory(self, edits: Edits | None = None) -> XlaMemory:
        """Return the peak of the step as it would run, simulated; of the plain step in the middle.

        Args:
          edits: what is changed of the step first.

        Raises:
          NotAsked: Grappler does not accept the step, or leaves sizes of it open.
        """
        try:
            cost = cost_of(self.optimised(edits), self.target)
        except (ValueError, TypeError, KeyError, TfckptError, tf.errors.OpError) as error:
            raise NotAsked((str(error).strip() or type(error).__name__).splitlines()[0]) from error
        middle, most = executed_peaks(cost, self.target)
        return XlaMemory(middle, most_bytes=0 if edits is None else most)

    def optimised(self, edits: Edits | None = None) -> Graph:
        """Return the step as it would run.

        Args:
          edits: what is done to the step; not applied to its graph. None for the step as it is.

        Raises:
          ValueError, tf.errors.OpError, TfckptError: there is none.
        """
        if edits is None and self._plain is not None:
            found = self._plain.answer()
        else:
            found = grappler.question(
                self.live, (), self._edited(edits), {} if edits is None else edits.renamed,
                self._terms).answer()
        self._tell_arguments(found)
        graph = imported(importable(found))
        fetches = [graph.get_operation_by_name(node.name).inputs[0]
                   for node in found.node if node.op == RETVAL]
        relaid = self._plain is None and is_relaid(found)
        told = self._told(graph, edits, relaid)
        shapes, _ = planned_shapes(graph, None, may_assume=False, library=found.library, told=told)
        return capture(graph, fetches=fetches, name=self.graph.name, shapes=shapes)

    def _edited(self, edits: Edits | None) -> tf.compat.v1.GraphDef:
        """Return a definition of the step, to be changed."""
        if edits is None:
            return tf.compat.v1.GraphDef.FromString(self._definition.SerializeToString())
        edited = apply_to_graph_def(self._definition, edits)
        return edited if self._plain is None else protected(edited)

    @functools.cached_property
    def _definition(self) -> tf.compat.v1.GraphDef:
        """Return the step as it is, written once for all questions."""
        return tf_adapter.shown_definition(self.live)

    def _told(self, graph: tf.Graph, edits: Edits | None, relaid: bool
              ) -> dict[str, tf.TensorSpec]:
        """Return what is known of open shapes: those of the same ops when the step was captured.

        Sizes that values decide follow from no shapes: the first call's values told them.

        Args:
          graph: what Grappler made of the step.
          edits: what was done to the step before.
          relaid: whether images lie in memory in another way than in the step.
        """
        copies = {} if edits is None else {copy.name: copy.source for copy in edits.clones}
        found = {}
        for op in graph.get_operations():
            if all(tensor.shape.is_fully_defined() for tensor in op.outputs):
                continue
            known = self._captured.get(copies.get(op.name, op.name))
            if known is None or known.type != op.type or len(known.outputs) != len(op.outputs):
                continue
            for tensor, before in zip(op.outputs, known.outputs, strict=True):
                shape = tf.TensorShape(before.shape)
                if shape.is_fully_defined() and says_more(shape, tensor.shape, relaid):
                    found[tensor.name] = tf.TensorSpec(shape, tensor.dtype)
        return found

    @functools.cached_property
    def _captured(self) -> dict[str, Op]:
        """Return the captured ops by name, and by what they are called in the trace."""
        found = {op.name: op for op in self.graph.ops}
        return {traced(name): op for name, op in found.items()} | found

    def _tell_arguments(self, definition: tf.compat.v1.GraphDef) -> None:
        """Write into a graph what is known of its arguments, which Grappler leaves out."""
        inputs = {tensor.op.name: tensor for tensor in self.live.inputs}
        for node in definition.node:
            if node.op != ARG:
                continue
            tensor = inputs[node.name]
            grappler.tell_argument(node, tensor)
            known = self._captured.get(node.name)
            shape = known.outputs[0].shape if known is not None and known.outputs else None
            if shape is not None and not tensor.shape.is_fully_defined() and (
                    tensor.dtype != tf.resource):
                del node.attr["_output_shapes"].list.shape[:]
                node.attr["_output_shapes"].list.shape.append(tf.TensorShape(shape).as_proto())
