"""Branches that hand out what the gradient of another branch reads in their place.

The optionals that branches hand their gradients are shared by number: the first of each branch has
one slot, and so on. What a branch puts into a slot, but its own gradient does not need, is read
there by the gradients of other branches alone, which do not run. TensorFlow drops it when the
`Switch` of that reader has run, which the executor comes to late, now and then when the step ends.
Here such a branch hands out nothing in that slot, and its gradient does not take it.

The constants of a branch are those of its gradient in the plain step, where one op decides for
both; a copy of the branch has its own. Grappler makes x^3 a product, which waits for the exponent
as long as anything reads that, as the gradient does, and which it leaves as it is, even in a longer
product, while it waits. So the exponent gets a reader in the branch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.capture.loops.branch_values import needed_arguments, needed_inputs
from tfckpt.capture.nodes import is_lowered
from tfckpt.capture.variables import origin
from tfckpt.ir.edits import PROTECTED
from tfckpt.ops import record
from tfckpt.ops.names import IDENTITY, NO_VALUE
from tfckpt.rewrite.loops.bodies import FunctionBody, function_of, name_of, named

Reader = tuple[tf.Operation, int]
"""Branches of a gradient, and which of their inputs."""


def hand_out_what_is_read(graph: Any, changes: LiveChanges) -> None:
    """Have branches of a graph hand out only what their own gradients need.

    Args:
      graph: a FuncGraph whose trace is complete.
      changes: of the graph.
    """
    lowered = [op for op in graph.get_operations() if record(op.type).chooses and is_lowered(op)]
    if not lowered:
        return
    before, returned = changes.point(), {tensor.ref() for tensor in graph.outputs}
    try:
        for op in lowered:
            _Branches(op, returned).change(changes)
    except Exception as error:  # whatever branches TensorFlow makes: they may hand out more
        logging.info("tfckpt: the branches of %s stay as they are: %s", graph.name, error)
        changes.revert(before)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A result of branches that only gradients of them read, and what reads it."""

    number: int
    readers: tuple[Reader, ...]

    def is_needed(self, branch: int) -> bool:
        """Return whether the gradient of a branch needs it."""
        return any(place - record(reader.type).first_argument in needed_arguments(
            reader, tf_adapter.called_functions(reader)[branch], whole=True)
            for reader, place in self.readers)


class _Branches:
    """An op that chooses between branches.

    Args:
      returned: references to what the graph returns.
    """

    def __init__(self, op: tf.Operation, returned: Collection[Any]) -> None:
        self.op, self.names = op, tf_adapter.called_functions(op)
        slots = [_Slot(number, readers) for number, tensor in enumerate(op.outputs)
                 if tensor.dtype == tf.variant and (readers := self._readers(tensor, returned))]
        needed = {slot: [slot.is_needed(n) for n in range(len(self.names))] for slot in slots}
        self.unread = {n: [slot for slot, used in needed.items() if any(used) and not used[n] and (
            self._hands_out(n, slot.number))] for n in range(len(self.names))}
        self.gradients = {reader.name: reader for slot in slots for reader, _ in slot.readers}
        self.cubes = {n: self._cubes_of_gradients(n) for n in range(len(self.names))}

    def _readers(self, tensor: tf.Tensor, returned: Collection[Any]) -> tuple[Reader, ...]:
        """Return the branches that read a result; none where anything else does."""
        if tensor.ref() in returned:
            return ()
        found: list[Reader] = []
        for reader in dict.fromkeys(tensor.consumers()):
            places = [n for n, read in enumerate(reader.inputs) if read is tensor]
            further: Iterable[Sequence[Reader]] = ([(reader, n)] for n in places)
            if record(reader.type).passes_on:
                further = [self._readers(reader.outputs[n], returned) for n in places]
            elif not self._decides_alike(reader):
                return ()
            for each in further:
                if not each:
                    return ()
                found += each
        return tuple(found)

    def _decides_alike(self, reader: tf.Operation) -> bool:
        """Return whether an op takes the branch of the same number as this one."""
        return bool(record(reader.type).chooses and is_lowered(reader)
                    and len(tf_adapter.called_functions(reader)) == len(self.names)
                    and origin(reader.inputs[0]) is origin(self.op.inputs[0]))

    def _hands_out(self, branch: int, slot: int) -> bool:
        """Return whether there is something in what a branch hands out."""
        graph = tf_adapter.graph_called(self.op, self.names[branch])
        return record(origin(graph.outputs[slot]).op.type).wraps

    def _cubes_of_gradients(self, branch: int) -> list[str]:
        """Return the cubes of a branch whose exponent its gradient has as well, by name."""
        graph = tf_adapter.graph_called(self.op, self.names[branch])
        cubes = [op for op in graph.get_operations() if _is_cube(op)]
        known = {op.outputs[0].dtype for reader in self.gradients.values() if cubes
                 for op in tf_adapter.graph_called(
                     reader, tf_adapter.called_functions(reader)[branch]).get_operations()
                 if record(op.type).is_constant and _is_three(op.outputs[0])}
        return [op.name for op in cubes if op.inputs[1].dtype in known]

    def change(self, changes: LiveChanges) -> None:
        """Have the branches, and those of the gradient, call functions without what is unread."""
        for n, slots in self.unread.items():
            if slots or self.cubes[n]:
                _call(self.op, n, _handing_out_less(
                    self.op, self.names[n], [slot.number for slot in slots], self.cubes[n]),
                    changes)
        for reader in self.gradients.values():
            for n, slots in self.unread.items():
                if any(reader is each for slot in slots for each, _ in slot.readers):
                    _call(reader, n, _needing_less(
                        reader, tf_adapter.called_functions(reader)[n]), changes)


def _call(op: tf.Operation, branch: int, text: bytes, changes: LiveChanges) -> None:
    """Have an op call a function in one of its branches."""
    tf_adapter.add_functions(op.graph, [text])
    number = 0
    for attr, names in tf_adapter.functions_of(op).items():
        if number <= branch < number + len(names):
            changes.call(op, attr, [name_of(text) if number + n == branch else name
                                    for n, name in enumerate(names)])
        number += len(names)


def _is_cube(op: tf.Operation) -> bool:
    return record(op.type).cube is not None and record(
        op.inputs[1].op.type).is_constant and _is_three(op.inputs[1])


def _is_three(tensor: tf.Tensor) -> bool:
    """Return whether a constant is the exponent of a cube."""
    return tensor.shape.rank == 0 and tensor.dtype.is_floating and bool(
        tf.get_static_value(tensor) == 3.0)


def _handing_out_less(op: tf.Operation, name: str, slots: Sequence[int], cubes: Collection[str]
                      ) -> bytes:
    """Return a branch that hands out nothing in some slots, and reads the exponents of cubes.

    What it handed out there keeps a reader in the place of the optional: Grappler merges what has
    one reader with that, or multiplies its constant with that of the reader.
    """
    made, inside = function_of(op.graph, name), tf_adapter.graph_called(op, name)
    nodes = {node.name: node for node in made.node_def}
    adding = FunctionBody(made)
    readers = [_reader(adding, tensor, text) for slot in slots
               for optional in (origin(inside.outputs[slot]).op,)
               for tensor, text in zip(optional.inputs, nodes[optional.name].input, strict=False)]
    if slots:
        nothing = _nothing(made, *readers)
        for slot in slots:
            made.ret[made.signature.output_arg[slot].name] = nothing
    optionals = [nodes[name] for text in made.ret.values()
                 if (name := text.partition(":")[0]) in nodes and record(nodes[name].op).wraps]
    for cube in cubes if optionals else ():
        optionals[0].input.append(_reader(
            adding, inside.get_operation_by_name(cube).inputs[1], nodes[cube].input[1]))
    _remove_unread(made)
    return named(made, "branch")


def _reader(adding: FunctionBody, tensor: tf.Tensor, text: str) -> str:
    """Add a reader of a tensor that Grappler leaves there, and return what waits for it."""
    node = adding.new(f"tfckpt_{IDENTITY}")
    node.op = IDENTITY
    node.input.append(text)
    node.attr["T"].type = tensor.dtype.as_datatype_enum
    node.attr[PROTECTED].b = True
    return f"^{node.name}"


def _needing_less(op: tf.Operation, name: str) -> bytes:
    """Return a branch without what it computes for nothing."""
    made, nothing = function_of(op.graph, name), ""
    inside = tf_adapter.graph_called(op, name)
    nodes = {node.name: node for node in made.node_def}
    for inner in inside.get_operations():
        needed = needed_inputs(inner, whole=True)
        for n, tensor in enumerate(inner.inputs):
            if n not in needed and tensor.dtype == tf.variant and inner.name in nodes:
                nothing = nothing or _nothing(made)
                nodes[inner.name].input[n] = nothing
    _remove_unread(made)
    return named(made, "branch")


def _nothing(function: Any, *awaited: str) -> str:
    """Add an op that hands out nothing, once others have run, and return its result."""
    return FunctionBody(function).node(NO_VALUE, awaited, "optional")


def _remove_unread(function: Any) -> None:
    """Remove the ops that nothing reads or awaits, and that have no effect."""
    nodes = {node.name: node for node in function.node_def}
    pending = [*(text.partition(":")[0] for text in function.ret.values()),
               *function.control_ret.values(),
               *(node.name for node in nodes.values() if tf_adapter.is_stateful_type(node.op))]
    needed: set[str] = set()
    while pending:
        name = pending.pop()
        if name in nodes and name not in needed:
            needed.add(name)
            pending += (text.removeprefix("^").partition(":")[0] for text in nodes[name].input)
    kept = [node for node in function.node_def if node.name in needed]
    del function.node_def[:]
    function.node_def.extend(kept)
