"""What Grappler knows of the shapes of a loop's results.

Of a loop that is one op it knows what the trace knew. Of the same loop lowered, as it runs, it
often knows less: the size of what a list hands out, say, is lost in the body. It then leaves sums
and products around the loop alone that it would rewrite otherwise. A loop that is asked about as
one op therefore tells no more than the lowered one does.
"""

from __future__ import annotations

import re

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ops import Calls, record

_EXIT = re.compile(r"(.+)/exit/_(\d+)$")
_SHAPES = "output_shapes"


def has_loops(definition: tf.compat.v1.GraphDef) -> bool:
    """Return whether there are loops that tell shapes of their results."""
    return any(_is_loop(node) for node in definition.node)


def forget_shapes(definition: tf.compat.v1.GraphDef, lowered: tf.compat.v1.MetaGraphDef) -> None:
    """Have loops tell the shapes that are known of their results once they are lowered.

    Args:
      definition: with loops as single ops; changed.
      lowered: the same with loops lowered.
    """
    exits: dict[str, list[tuple[int, str]]] = {}
    for node in lowered.graph_def.node:
        if found := _EXIT.match(node.name):
            exits.setdefault(found[1], []).append((int(found[2]), node.name))
    known = tf_adapter.inferred_shapes(lowered, [
        name for results in exits.values() for _, name in results])
    for node in definition.node:
        if not _is_loop(node):
            continue
        told = node.attr[_SHAPES].list.shape
        results = sorted(exits.get(node.name, ()))
        if len(results) != len(told):  # those that nothing reads are gone
            continue
        for shape, (_, name) in zip(told, results, strict=True):
            shape.CopyFrom(known[name][0].as_proto())


def _is_loop(node: tf.compat.v1.NodeDef) -> bool:
    return record(node.op).calls is Calls.LOOP and _SHAPES in node.attr
