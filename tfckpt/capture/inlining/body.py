"""The body of a function as nodes that can be put in the place of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.errors import CaptureError
from tfckpt.ops import record
from tfckpt.ops.names import IDENTITY


@dataclasses.dataclass(frozen=True)
class Body:
    """The body that a call stands for.

    Attributes:
      definition: the nodes, in the order of the function, without its arguments.
      arguments: names by which nodes read the arguments.
      results: the tensors that the function returns, as `op:slot`; an argument is an op here.
      control_outputs: the nodes that must have run when it returns.
    """

    definition: tf.compat.v1.GraphDef
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    control_outputs: tuple[str, ...]


def read_body(graph: tf.Graph, function: Any) -> Body:
    """Return the body of a FunctionDef that is called in `graph`.

    Args:
      graph: the caller's, which knows the functions that the body calls.
      function: the FunctionDef; not changed.

    Raises:
      CaptureError: a node waits for an argument, which has no node of its own in a caller.
      ValueError: an op type is unknown, or the definition is malformed.
    """
    flat, names = tf_adapter.flat_function(graph, function)
    count = len(function.signature.input_arg)
    arguments = tuple(node.name for node in flat.node[:count])
    del flat.node[:count]
    given = frozenset(arguments)
    for node in flat.node:
        if any(name.startswith("^") and name[1:] in given for name in node.input):
            raise CaptureError(f"capture: {node.name!r} waits for an argument of the function")
        node.attr.pop("_class", None)  # names an op by what it is called in the function
    return Body(flat, arguments,
                tuple(names[function.ret[result.name]] for result in function.signature.output_arg),
                tuple(function.control_ret[name] for name in function.signature.control_output))


class Placed:
    """A body in a caller's graph.

    Attributes:
      ops: its ops, and before them what some of its arguments pass through.
    """

    def __init__(self, graph: tf.Graph, body: Body, inputs: Sequence[tf.Tensor],
                 waits: Sequence[tf.Operation], scope: str, device: str) -> None:
        """Add the ops to `graph`; nothing reads or awaits them yet.

        Args:
          graph: the caller's.
          body: of the function that is called.
          inputs: what the arguments stand for.
          waits: what the call waits for (rule 2 of `tfckpt.capture.inlining.inline`).
          scope: name scope to begin with.
          device: of the call; what a node says of its device goes before it.
        """
        scope = tf_adapter.free_scope(graph, scope)
        passes = [tf_adapter.create_op(graph, IDENTITY, [tensor], [tensor.dtype],
                                       f"{scope}{name}", {}, device).outputs[0]
                  if waits and tensor.dtype != tf.resource else tensor
                  for name, tensor in zip(body.arguments, inputs, strict=True)]
        self._given: Mapping[str, tf.Tensor] = dict(zip(body.arguments, passes, strict=True))
        definition = _on_device(body.definition, device)
        ops = tf_adapter.import_nodes(graph, definition, self._given, scope)
        self._made = {node.name: op for node, op in zip(definition.node, ops, strict=True)}
        first = [t.op for t, given in zip(passes, inputs, strict=True) if t is not given]
        self.ops = first + ops
        own = frozenset(op.name for op in self.ops)
        for op in [*first, *(op for op in ops if _starts(op, own))] if waits else ():
            for wait in waits:
                tf_adapter.add_control_input(op, wait)

    def op(self, name: str) -> tf.Operation:
        """Return the op that a node of the body has become.

        Args:
          name: of a node in `Body.definition`.
        """
        return self._made[name]

    def tensor(self, name: str) -> tf.Tensor:
        """Return what a tensor of the body, named `op:slot`, has become.

        Args:
          name: as in `Body.results`; an argument is an op here, with what the call gave for it.
        """
        op, _, slot = name.rpartition(":")
        return self._given[op] if op in self._given else self._made[op].outputs[int(slot)]


def _starts(op: tf.Operation, own: frozenset[str]) -> bool:
    """Return whether nothing of the body but constants must run before an op of it."""
    before = [*(t.op for t in op.inputs), *op.control_inputs]
    return not record(op.type).is_constant and all(
        record(b.type).is_constant or b.name not in own for b in before)


def _on_device(definition: tf.compat.v1.GraphDef, device: str) -> tf.compat.v1.GraphDef:
    if not device:
        return definition
    placed = tf.compat.v1.GraphDef()
    placed.CopyFrom(definition)
    around = tf.DeviceSpec.from_string(device)
    for node in placed.node:
        node.device = around.make_merged_spec(tf.DeviceSpec.from_string(node.device)).to_string()
    return placed
