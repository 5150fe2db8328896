"""What Grappler orders by name is ordered in a rewritten step as in the plain one."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.edits import Edits
from tfckpt.graph import Graph
from tfckpt.rewrite.cubes import cubes, multiply_in_plain_order
from tfckpt.rewrite.sums import add_in_plain_order


def in_plain_order(edits: Edits, graph: Graph, live: tf.Graph) -> Edits:
    """The edits, with pass-throughs where they might change the order of a sum or a product.

    Args:
      graph: the captured step.
      live: the FuncGraph it was captured from, not edited yet. Where something is open it is
        optimised by Grappler, once.
    """
    if graph.in_xla:
        return edits
    plain = functools.cache(
        lambda: {node.name: node for node in tf_adapter.optimized(live).node})
    try:
        edits = add_in_plain_order(edits, graph, live, plain)
        return multiply_in_plain_order(edits, graph, plain()) if cubes(graph) else edits
    except (ValueError, tf.errors.OpError):  # Grappler would leave the step as it is
        return edits
