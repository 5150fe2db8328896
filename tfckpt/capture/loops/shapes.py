"""Shape inference for loops.

A loop says what shapes its results have when it is traced, so an unknown batch stays unknown
after it, even if the shapes of all its inputs are known. Here a definition is imported piece by
piece, and after each loop the shapes that its body gives are filled in: of a result, where an
iteration keeps the shape; of a stacked list, that of an entry.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.lists import entry_shape, result_shapes
from tfckpt.capture.variables import origin
from tfckpt.ir.graph import depth_first_order
from tfckpt.ops import record


def infer_loop_shapes(definition: tf.compat.v1.GraphDef, live: tf.Graph) -> None:
    """Write the shapes of loops' results, as far as they can be inferred, into a definition.

    Args:
      definition: changed in place; its nodes have the names of the ops of `live`.
      live: a graph where the loops' functions can be found.

    Raises:
      CaptureError: the definition has a cycle (a TF1 while loop).

    Complexity: one import of all nodes, in as many pieces as there are loops and stacked lists.
    """
    pieces = _pieces(definition)
    number = {node.name: f"op{i}" for i, node in enumerate(n for p in pieces for n in p)}
    scratch = tf.Graph()
    with scratch.as_default():
        for i, nodes in enumerate(pieces):
            piece = tf.compat.v1.GraphDef(versions=definition.versions)
            if not i:
                piece.library.CopyFrom(definition.library)
            for node in nodes:
                _renamed(node, piece.node.add(), number)
            tf.graph_util.import_graph_def(piece, _read_elsewhere(piece, scratch), name="")
            _tell(definition, nodes[-1], live, _Known(scratch, number))


class _Known:
    """Gives the op that stands for one of the live graph."""

    def __init__(self, scratch: tf.Graph, number: dict[str, str]) -> None:
        self.scratch, self.number = scratch, number

    def __call__(self, op: tf.Operation) -> tf.Operation:
        return self.scratch.get_operation_by_name(self.number[op.name])


def _pieces(definition: tf.compat.v1.GraphDef) -> list[list[Any]]:
    """Return the nodes in a topological order, cut after each whose shapes are to be inferred."""
    nodes = {node.name: node for node in definition.node}
    order = depth_first_order(nodes, lambda name: map(_op_of, nodes[name].input))
    pieces: list[list[Any]] = [[]]
    for node in (nodes[name] for name in order):
        pieces[-1].append(node)
        if record(node.op).is_loop or record(node.op).lists.stacks:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _op_of(name: str) -> str:
    return name.lstrip("^").partition(":")[0]


def _renamed(node: Any, into: Any, number: dict[str, str]) -> None:
    """A node under a name that is no scope of others: those would be renamed at import."""
    into.CopyFrom(node)
    into.name = number[node.name]
    into.attr.pop("_class", None)
    del into.input[:]
    into.input.extend(name.replace(_op_of(name), number[_op_of(name)], 1)
                      for name in node.input if not name.startswith("^"))


def _read_elsewhere(piece: tf.compat.v1.GraphDef, scratch: tf.Graph) -> dict[str, tf.Tensor]:
    """Return what a piece reads of those before."""
    here = {node.name for node in piece.node}
    found = {}
    for name in (name for node in piece.node for name in node.input if _op_of(name) not in here):
        op, _, slot = name.partition(":")
        found[f"{op}:{slot or 0}"] = scratch.get_operation_by_name(op).outputs[int(slot or 0)]
    return found


def _tell(definition: tf.compat.v1.GraphDef, node: Any, live: tf.Graph, known: _Known) -> None:
    """Set what is known of the shapes of a node's results, there and in the scratch graph."""
    op = live.get_operation_by_name(node.name)
    try:
        if record(node.op).is_loop:
            for slot, shape in result_shapes(op, known).items():
                known(op).outputs[slot].set_shape(shape)
                node.attr["output_shapes"].list.shape[slot].CopyFrom(shape.as_proto())
        elif record(node.op).lists.stacks:
            made = origin(op.inputs[0])
            shape = (entry_shape(made.op, made.value_index, known)
                     if record(made.op.type).is_loop else tf.TensorShape(None))
            if shape.is_fully_defined():
                known(op).outputs[0].set_shape(tf.TensorShape([None]).concatenate(shape))
                node.input[1] = tf_adapter.add_shape(
                    definition.node, f"{node.name}/element_shape_known", shape)
    except (KeyError, IndexError, ValueError, TypeError, tf.errors.OpError):
        return  # a body unlike any known: its shapes stay as they are
