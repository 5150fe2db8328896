"""An edited step with plain loops again where it has loops over segments, to be compared.

A loop over segments computes what the loop does whose place it took:
`tfckpt.verify.arithmetic.loop_bodies` says so before it is applied. What is around both is compared
as of any step, with the loop that was there in the place of the new one.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.edits import KEPT_SLOTS
from tfckpt.plan.segments import MARK


def has_segments(definition: tf.compat.v1.GraphDef) -> bool:
    """Return whether there are loops over segments.

    Args:
      definition: a GraphDef; its functions are not looked at.
    """
    return any(node.name.endswith(MARK) for node in definition.node)


def with_single_loops(definition: tf.compat.v1.GraphDef, live: tf.Graph
                      ) -> tf.compat.v1.GraphDef:
    """Return a graph in which each loop over segments is the loop that it took the place of.

    Args:
      definition: of an edited graph.
      live: the graph, edited or not, with the loops that gave way.
    """
    made = tf.compat.v1.GraphDef.FromString(definition.SerializeToString())
    kept = {node.name: list(node.attr[KEPT_SLOTS].list.i) for node in made.node
            if node.name.endswith(MARK)}
    for node in made.node:
        for i, text in enumerate(node.input):
            node.input[i] = _as_before(text, kept)
    for node in made.node:
        if node.name in kept:
            _restore(node, tf_adapter.definition_of(live, node.name.removesuffix(MARK)), kept)
    return made


def _as_before(text: str, kept: Mapping[str, list[int]]) -> str:
    """Return which result of the loop that was there something reads."""
    name, _, slot = text.partition(":")
    slots, number = kept.get(name), int(slot or 0)
    if slots is None or text.startswith("^"):
        return text
    return f"{name}:{slots[number]}" if number < len(slots) else name


def _restore(node: tf.compat.v1.NodeDef, loop: tf.compat.v1.NodeDef,
             kept: Mapping[str, list[int]]) -> None:
    """Make a loop over segments the loop that it took the place of; it keeps its name."""
    inputs = [_renamed(text, kept) for text in loop.input if not text.startswith("^")]
    for place, slot in enumerate(kept[node.name]):
        if slot >= 0:
            inputs[slot] = node.input[place]
    waits = [text for text in node.input if text.startswith("^")]
    node.op = loop.op
    del node.input[:]
    node.input.extend([*inputs, *waits])
    node.attr.clear()
    for key in loop.attr:
        node.attr[key].CopyFrom(loop.attr[key])


def _renamed(text: str, kept: Mapping[str, list[int]]) -> str:
    name, colon, slot = text.partition(":")
    return f"{name}{MARK}{colon}{slot}" if name + MARK in kept else text
