"""Sizes that values decide, such as that of `tf.range(n)`: the ops themselves are asked.

Shape inference knows what follows from shapes. What else there is the first call's arguments
decide: the longest row of a ragged tensor, a number of repeats, the words of a text. So the ops
whose results have a size that does not follow from the shapes of what they read are run by
themselves, on what the call is made with, and their results' shapes are taken. Run is what only
reads, multiplies no matrices, and calls no functions; nothing that it draws, reads or looks up is
another in the step for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfckpt.capture.loops.purity import is_pure_op
from tfckpt.capture.variables import only_reads
from tfckpt.ops import record

MOST_OPS = 5_000
"""Ops that are run at most for the size of one tensor."""
MOST_BYTES = 1 << 28
"""Bytes of a known size that a result may have of which others are made."""
_NO_SIZE = frozenset((tf.resource, tf.variant))
"""Types of tensors whose shape says nothing of their size."""


class ValueSizes:
    """Answers which shapes tensors of a graph have in a call.

    Args:
      graph: FuncGraph or imported graph.
      given: what the call is made with, and what the graph captures, by the name of the tensor
        that stands for it; nothing is run that needs others.
    """

    def __init__(self, graph: tf.Graph, given: Mapping[str, Any]) -> None:
        self._graph = graph
        self._given = {name: value for name, value in given.items()
                       if not (tf.is_tensor(value) and hasattr(value, "graph"))}  # is in no graph

    def shapes(self, known: tf.Graph) -> dict[str, tf.TensorSpec]:
        """Return the shapes of tensors that follow from no shapes, and their dtypes, by name.

        Args:
          known: a graph with the ops of `graph`, some left out, and as many shapes as are known.
        """
        names = list(self._asked(known))
        if not names:
            return {}
        try:
            found = self._run(names)
        except Exception as error:  # whatever ops make of values: their sizes stay unknown
            logging.debug("tfckpt: sizes that values decide are not known: %s", error)
            return {}
        return {name: tf.TensorSpec(shape.numpy(), self._graph.get_tensor_by_name(name).dtype)
                for name, shape in zip(names, found, strict=True)}

    def read_values(self, names: Iterable[str]) -> bool:
        """Return whether values decide the size of a tensor, and not shapes alone.

        Shape inference does not know what a gradient sums over: that follows from shapes.

        Args:
          names: of tensors that `shapes` told.
        """
        made = self._made_of((self._graph.get_tensor_by_name(name).op for name in names),
                             lambda tensor: not record(tensor.op.type).folded_by_shape)
        return any(tensor.name in self._given for op in made for tensor in op.inputs)

    def _asked(self, known: tf.Graph) -> Iterator[str]:
        """Yield the tensors of unknown shape that are made of none, and can be run."""
        for op in self._graph.get_operations():
            try:
                same = known.get_operation_by_name(op.name)
            except KeyError:
                continue
            open_here = not all(map(_is_known, same.outputs))
            if open_here and all(map(_is_known, same.inputs)) and self._may_run(op):
                yield from (mine.name for mine, here in zip(op.outputs, same.outputs, strict=True)
                            if not _is_known(here))

    def _may_run(self, op: tf.Operation) -> bool:
        """Return whether an op and all that it is made of may be run."""
        return all(_is_harmless(this) and count < MOST_OPS
                   for count, this in enumerate(self._made_of([op])))

    def _made_of(self, ops: Iterable[tf.Operation],
                 follows: Callable[[tf.Tensor], bool] = lambda tensor: True
                 ) -> Iterator[tf.Operation]:
        """Yield ops and what they are made of, each once, back to what is given.

        Args:
          ops: where to begin.
          follows: whether a tensor is looked behind.
        """
        left = list(dict.fromkeys(ops))
        seen = set(left)
        while left:
            this = left.pop()
            yield this
            for tensor in this.inputs:
                if tensor.name not in self._given and follows(tensor) and tensor.op not in seen:
                    seen.add(tensor.op)
                    left.append(tensor.op)

    def _run(self, names: Sequence[str]) -> list[tf.Tensor]:
        definition, read = self._part(names)

        def run(*values: tf.Tensor) -> list[tf.Tensor]:
            made = tf.graph_util.import_graph_def(
                definition, input_map=dict(zip(read, values, strict=True)),
                return_elements=list(names), name="")
            return [tf.shape(tensor) for tensor in made]

        with tf.init_scope():
            values = [tf.convert_to_tensor(self._given[name]) for name in read]
            traced = tf.function(run, autograph=False).get_concrete_function(*values)
            return list(traced(*values))  # called by itself it would warn of being traced anew

    def _part(self, names: Sequence[str]) -> tuple[tf.compat.v1.GraphDef, list[str]]:
        """Return the nodes that make some tensors, and what they read of what is given."""
        definition = tf.compat.v1.GraphDef(versions=self._graph.graph_def_versions)
        wanted = dict.fromkeys(self._made_of(
            self._graph.get_tensor_by_name(name).op for name in names))
        read = dict.fromkeys(tensor.name for op in wanted for tensor in op.inputs
                             if tensor.name in self._given)
        for op in self._graph.get_operations():
            if op in wanted:
                node = definition.node.add()
                node.CopyFrom(op.node_def)
                node.attr.pop("_class", None)
                node.device = ""
                del node.input[:]
                node.input.extend(t.name for t in op.inputs)  # waits for nothing
        return definition, list(read)


def _is_known(tensor: tf.Tensor) -> bool:
    return tensor.dtype in _NO_SIZE or tensor.shape.is_fully_defined()


def _is_harmless(op: tf.Operation) -> bool:
    known = record(op.type)
    if known.is_constant:
        return True
    large = any(t.shape.is_fully_defined() and (t.shape.num_elements() or 0) * t.dtype.size
                > MOST_BYTES for t in op.outputs if t.dtype not in _NO_SIZE)
    looks_up = known.no_variables and not known.writes and not any(
        t.dtype in _NO_SIZE for t in op.outputs)
    return (known.source is None and known.flops is None and known.calls is None and not large
            and not known.collective and not known.runs_python
            and (is_pure_op(op) or only_reads(op) or known.draws or looks_up))
