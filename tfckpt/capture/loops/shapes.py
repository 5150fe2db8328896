"""Shape inference for loops and branches.

A loop says what shapes its results have when it is traced, and so do branches, so an unknown batch
stays unknown after them, even if the shapes of all inputs are known. Here a definition is imported
piece by piece, and after each loop or branches the shapes that their bodies give are filled in: of
a loop's result, where an iteration keeps the shape; of what is made of a list, its length and the
shape of its entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.loops.branch_values import branch_shapes
from tfckpt.capture.loops.lists import entries_shape, list_length, result_shapes
from tfckpt.ir.graph import depth_first_order
from tfckpt.ops import record


def infer_shapes_of_bodies(definition: tf.compat.v1.GraphDef, live: tf.Graph
                           ) -> Callable[[tf.Operation], tf.Operation]:
    """Write the shapes of results of loops and branches into a definition, as far as is known.

    Args:
      definition: changed in place; its nodes have the names of the ops of `live`.
      live: a graph where the functions can be found.

    Returns:
      What gives for an op of `live` one with the shapes that were inferred.

    Raises:
      CaptureError: the definition has a cycle (a TF1 while loop).

    Complexity: one import of all nodes, in as many pieces as there are loops, branches and
    stacked lists.
    """
    pieces = _pieces(definition)
    number = {node.name: f"op{i}" for i, node in enumerate(n for p in pieces for n in p)}
    scratch = tf.Graph()
    known = _Known(scratch, number)
    with scratch.as_default():
        for i, nodes in enumerate(pieces):
            piece = tf.compat.v1.GraphDef(versions=definition.versions)
            if not i:
                piece.library.CopyFrom(definition.library)
            for node in nodes:
                _renamed(node, piece.node.add(), number)
            tf.graph_util.import_graph_def(piece, _read_elsewhere(piece, scratch), name="")
            _tell(definition, nodes[-1], live, known)
    return known


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
        if record(node.op).has_bodies or _takes_entries(node.op):
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
    has_bodies = record(node.op).has_bodies
    if not has_bodies and not _takes_entries(node.op):  # the last piece ends with any op
        return
    op = live.get_operation_by_name(node.name)
    try:
        if has_bodies:
            told = result_shapes if record(node.op).is_loop else branch_shapes
            for slot, shape in told(op, known).items():
                known(op).outputs[slot].set_shape(shape)
                node.attr["output_shapes"].list.shape[slot].CopyFrom(shape.as_proto())
        else:
            _tell_entries(definition, node, op, known)
    except (KeyError, IndexError, ValueError, TypeError, tf.errors.OpError):
        return  # a body unlike any known: its shapes stay as they are


def _takes_entries(op_type: str) -> bool:
    """Return whether an op makes a tensor of an entry of a list, or of all of them."""
    use = record(op_type).lists
    return use.stacks or use.shape is not None and not use.removes


def _tell_entries(definition: tf.compat.v1.GraphDef, node: Any, op: tf.Operation, known: _Known
                  ) -> None:
    """As `_tell`, of what is made of a list's entries."""
    use = record(node.op).lists
    shape = entries_shape(op.inputs[0], known)
    if not shape.is_fully_defined():
        return
    place = 1 if use.shape is None else use.shape
    node.input[place] = tf_adapter.add_shape(
        definition.node, f"{node.name}/element_shape_known", shape)
    if use.stacks:
        length = list_length(op.inputs[0], known)
        if length is not None:
            node.attr["num_elements"].i = length
        shape = tf.TensorShape([length]).concatenate(shape)
    known(op).outputs[0].set_shape(shape)
