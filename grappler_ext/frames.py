"""Loops of an item, which TensorFlow has lowered: each is replaced by one op that stands for it.

A lowered loop is a cycle of Enter, Merge, Switch, NextIteration and Exit around its body, all of
which belong to a frame: no edge may lead in but to an Enter, or out but from an Exit. No schedule
can say more of it than when it runs. So a step is planned with an op in place of each frame; it
never runs twice. Edits name it by its first Exit, and are then made to the real ops:

  1. a result of the loop is that of one of its Exits;
  2. an input of the loop is that of one of its Enters;
  3. what waits for the loop waits for its first Exit, since all come at its end;
  4. if the loop waits, all of its Enters do: with some of its variables it would start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture.regions import is_gradient_scope
from tfckpt.ir.edits import AddControl, Clone, Create, Edits, Rewire
from tfckpt.ops import FramePart, record
from tfckpt.ops.names import LOOP, WRITING_LOOP


@dataclasses.dataclass(frozen=True)
class Frame:
    """A loop that is part of no other.

    Attributes:
      enters, exits: names of the ops at its border; its first exit's is the loop's.
      inside: names of all its ops.
    """

    enters: tuple[str, ...]
    exits: tuple[str, ...]
    inside: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return what the loop is called."""
        return self.exits[0]


def collapse(definition: tf.compat.v1.GraphDef
             ) -> tuple[tf.compat.v1.GraphDef, tuple[Frame, ...]]:
    """Return a copy of a graph with one op in place of each loop, and the loops.

    Loops without results stay as they are.

    Args:
      definition: graph of an item; not changed.
    """
    inside = _frames(definition)
    members: dict[str, list[Any]] = {}
    for node in definition.node:
        if node.name in inside:
            members.setdefault(inside[node.name][0], []).append(node)
    found = {name: frame for name, nodes in members.items() if (frame := _border(nodes, inside))}
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(definition)
    kept = [node for node in definition.node
            if node.name not in inside or inside[node.name][0] not in found]
    del result.node[:]
    result.node.extend(kept)
    for name, frame in found.items():
        _stand_in(result.node.add(), frame, {node.name: node for node in members[name]})
    made = {exit_op: (frame.name, slot) for frame in found.values()
            for slot, exit_op in enumerate(frame.exits)}
    for node in result.node:
        for i, read in enumerate(node.input):
            node.input[i] = _moved(read, made)
    return result, tuple(found.values())


def expand(edits: Edits, frames: Sequence[Frame]) -> Edits:
    """Return edits of a graph with loops collapsed as edits of the graph itself.

    Args:
      edits: ops and tensors are named as in the graph that `collapse` returned.
      frames: the loops that `collapse` returned.
    """
    loops = {frame.name: frame for frame in frames}
    if not loops:
        return edits

    def tensor(name: str) -> str:
        op, _, slot = name.rpartition(":")
        return f"{loops[op].exits[int(slot)]}:0" if op in loops else name  # rule 1

    added: list[Create | Clone] = [
        dataclasses.replace(new, inputs=tuple(map(tensor, new.inputs))) for new in edits.added]
    rewires = [Rewire(loops[r.op].enters[r.index], 0, tensor(r.tensor)) if r.op in loops  # rule 2
               else dataclasses.replace(r, tensor=tensor(r.tensor)) for r in edits.rewires]
    controls = [AddControl(op, c.control) for c in edits.controls
                for op in (loops[c.op].enters if c.op in loops else (c.op,))]  # rule 4
    return dataclasses.replace(edits, added=tuple(added), rewires=tuple(rewires),
                               controls=tuple(controls))


def _frames(definition: tf.compat.v1.GraphDef) -> dict[str, tuple[str, ...]]:
    """Return the frames that each op is in, outermost first; ops in none are missing.

    An Enter and an Exit count as inside.
    """
    readers: dict[str, list[Any]] = {}
    for node in definition.node:
        for read in node.input:
            readers.setdefault(_op_of(read), []).append(node)
    known: dict[str, tuple[str, ...]] = {
        node.name: () for node in definition.node if not node.input}
    types = {node.name: record(node.op).frame for node in definition.node}
    pending = list(known)
    while pending:
        name = pending.pop()
        within = known[name][:-1] if types[name] is FramePart.EXIT else known[name]
        for node in readers.get(name, ()):
            if node.name not in known:
                known[node.name] = within if types[node.name] is not FramePart.ENTER else (
                    *within, node.attr["frame_name"].s.decode())
                pending.append(node.name)
    return {name: frames for name, frames in known.items() if frames}


def _border(nodes: Sequence[Any], inside: Mapping[str, tuple[str, ...]]) -> Frame | None:
    """Return the loop of some nodes; None where it has no result."""
    outer = [node for node in nodes if len(inside[node.name]) == 1]
    parts = {part: tuple(node.name for node in outer if record(node.op).frame is part)
             for part in FramePart}
    return Frame(parts[FramePart.ENTER], parts[FramePart.EXIT],
                 tuple(node.name for node in nodes)) if parts[FramePart.EXIT] else None


def _stand_in(into: Any, frame: Frame, members: Mapping[str, Any]) -> None:
    """Fill in the op that stands for a loop."""
    enters, exits = ([members[name] for name in names] for names in (frame.enters, frame.exits))
    into.name, into.device = frame.name, exits[0].device
    into.op = WRITING_LOOP if any(record(node.op).writes for node in members.values()) else LOOP
    into.input.extend(node.input[0] for node in enters)
    into.input.extend(dict.fromkeys(c for node in enters for c in node.input[1:]))
    into.attr["Tin"].list.type.extend(node.attr["T"].type for node in enters)
    into.attr["Tout"].list.type.extend(node.attr["T"].type for node in exits)
    shapes = into.attr["_output_shapes"].list.shape
    for node in exits:
        shape = _shape(node)
        if not shape.is_fully_defined() and is_gradient_scope(frame.name):
            shape = _shape(_initial(node, members))  # that of what the gradient is of
        shapes.add().CopyFrom(shape.as_proto())


def _shape(node: Any) -> tf.TensorShape:
    """Return what Grappler found out of the shape of a node's first result."""
    known = node.attr["_output_shapes"].list.shape
    return tf.TensorShape(known[0] if known else None)


def _initial(node: Any, members: Mapping[str, Any]) -> Any:
    """Return the Enter of the loop variable that an Exit hands out, through Switch and Merge."""
    while record(node.op).frame is not FramePart.ENTER:
        node = members[_op_of(node.input[0])]
    return node


def _op_of(read: str) -> str:
    return read.lstrip("^").partition(":")[0]


def _moved(read: str, made: Mapping[str, tuple[str, int]]) -> str:
    """Return what an input is called once its Exit is a result of a loop."""
    if _op_of(read) not in made:
        return read
    name, slot = made[_op_of(read)]
    return f"^{name}" if read.startswith("^") else f"{name}:{slot}"
