"""An edited step with plain loops again where it has loops over segments, to be compared.

A loop over segments computes what the loop does whose place it took:
`tfckpt.verify.arithmetic.loop_bodies` says so before it is applied. What is around both is compared
as of any step, with the loop that was there in the place of the new one. Where the last iterations
have a loop of their own, this and the loop over segments are one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.nodes import op_of
from tfckpt.ir.edits import KEPT_SLOTS
from tfckpt.ops import record
from tfckpt.ops.names import IDENTITY
from tfckpt.plan.loops.segments import AGAIN, LAST, MARK


def has_segments(definition: Any) -> bool:
    """Return whether there are loops over segments.

    Args:
      definition: a GraphDef, whose functions are not looked at, or a FunctionDef.
    """
    nodes = definition.node if hasattr(definition, "node") else definition.node_def
    return any(KEPT_SLOTS in node.attr for node in nodes)


def with_single_loops(definition: tf.compat.v1.GraphDef, live: tf.Graph
                      ) -> tf.compat.v1.GraphDef:
    """Return a graph in which each loop over segments is the loop that it took the place of.

    So is each copy of one.

    Args:
      definition: of an edited graph.
      live: the graph, edited or not, with the loops that gave way.
    """
    made = tf.compat.v1.GraphDef.FromString(definition.SerializeToString())
    joined = _join(made)
    kept = {node.name: list(node.attr[KEPT_SLOTS].list.i) for node in made.node
            if KEPT_SLOTS in node.attr}
    # where the states come from that a gradient's loop begins its segments with
    begun = {node.name: op_of(node.input[len(kept[node.name])]) for node in made.node
             if node.name in kept and len(node.input) > len(kept[node.name])}
    for node in made.node:
        if node.op == IDENTITY and _is_new(node.input[0], kept):  # it reads a counter instead
            node.attr["T"].type = tf.int32.as_datatype_enum
        for i, text in enumerate(node.input):
            node.input[i] = _as_before(text, kept)
    for node in made.node:
        if node.name in kept:
            forward = before if (before := begun.get(node.name, "")) in kept else ""
            _restore(node, tf_adapter.definition_of(live, _before(node.name)), kept[node.name],
                     joined.get(forward, forward))
    _leave_out(made, joined)
    return made


def _join(definition: tf.compat.v1.GraphDef) -> dict[str, str]:
    """Have loops over the last iterations, or over segments, read what the loop that was there did.

    Of the forward the first is that loop then, of the gradient the second, once it is restored.

    Returns:
      For each loop that is not needed any more, the one that is there in its place.
    """
    nodes = {node.name: node for node in definition.node}
    joined: dict[str, str] = {}
    for last in [name for name in nodes if name.endswith(LAST)]:
        over = last.removesuffix(LAST) + MARK
        left, gone = (last, over) if nodes[over].attr[KEPT_SLOTS].list.i[0] == 0 else (over, last)
        for i, text in enumerate(nodes[left].input):
            name, _, slot = text.partition(":")
            while name in nodes and nodes[name].op == IDENTITY and LAST in name:
                name, _, slot = nodes[name].input[0].partition(":")
            if name == gone:
                nodes[left].input[i] = nodes[gone].input[int(slot or 0)]
        joined[gone] = left
    return joined


def _leave_out(definition: tf.compat.v1.GraphDef, joined: Mapping[str, str]) -> None:
    """Leave loops out that others have the place of, and what reads them.

    What waits for any of this waits for something that such a loop reads: it may come before the
    other loop.
    """
    nodes = {node.name: node for node in definition.node}
    gone = {name: name for name in joined}
    readers: dict[str, list[str]] = {}
    for node in definition.node:
        for text in node.input:
            if text[:1] != "^" and node.name not in joined.values():
                readers.setdefault(op_of(text), []).append(node.name)
    left_out = list(joined)
    for name in left_out:  # what reads a loop goes with it, and what reads that
        for reader in readers.get(name, ()):
            if reader not in gone:
                gone[reader] = gone[name]
                left_out.append(reader)
    before = {loop: [name for text in nodes[loop].input if (name := op_of(text)) in nodes
                     and name not in gone and not record(nodes[name].op).is_constant]
              for loop in joined}

    def instead(text: str) -> str:
        """Return what something reads, or waits for, now; "" where it is left out."""
        if text[:1] != "^" or text[1:] not in gone:
            return text
        return next((f"^{name}" for name in before[gone[text[1:]]]), "")

    left = [node for node in definition.node if node.name not in gone]
    for node in left if joined else ():
        read = [text for text in node.input if text[:1] != "^"]
        waits = dict.fromkeys(map(instead, node.input[len(read):]))
        del node.input[:]
        node.input.extend([*read, *filter(None, waits)])
    if joined:
        kept = tf.compat.v1.GraphDef(node=left)
        del definition.node[:]
        definition.node.extend(kept.node)


def _before(name: str) -> str:
    """Return the name of the loop whose place a loop over segments took, or a copy of that."""
    return name.rpartition(AGAIN if AGAIN in name else MARK)[0]


def _is_new(text: str, kept: Mapping[str, list[int]]) -> bool:
    """Return whether a result of a loop over segments is none of the loop that was there."""
    name, _, slot = text.partition(":")
    return name in kept and int(slot or 0) >= len(kept[name])


def _as_before(text: str, kept: Mapping[str, list[int]]) -> str:
    """Return which result of the loop that was there something reads."""
    name, _, slot = text.partition(":")
    if name not in kept:
        return text
    return name if _is_new(text, kept) else f"{name}:{kept[name][int(slot or 0)]}"


def _restore(node: tf.compat.v1.NodeDef, loop: tf.compat.v1.NodeDef, kept: Sequence[int],
             forward: str) -> None:
    """Make a loop over segments the loop that it took the place of; it keeps its name.

    Args:
      node: is changed.
      loop: that it took the place of.
      kept: of each of its first slots, which one that was of `loop`.
      forward: the loop whose segments it runs again, of a gradient's; "" of a forward's.
    """
    before = _before(forward) or forward.removesuffix(LAST)
    inputs = [f"{forward}{text[len(before):]}" if forward and op_of(text) == before else text
              for text in loop.input if not text.startswith("^")]
    for place, slot in enumerate(kept):
        if slot >= 0:
            inputs[slot] = node.input[place]
    waits = [text for text in node.input if text.startswith("^")]
    node.op = loop.op
    del node.input[:]
    node.input.extend([*inputs, *waits])
    node.attr.clear()
    for key in loop.attr:
        node.attr[key].CopyFrom(loop.attr[key])
