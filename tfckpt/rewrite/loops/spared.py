"""A gradient's loop without what XLA is spared, as `tfckpt.capture.loops.compiled` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.ops import names, record
from tfckpt.rewrite.loops.bodies import (
    FunctionBody,
    name_of,
    named,
    origin,
    push_of,
    read_instead,
)


@dataclasses.dataclass(frozen=True)
class Spared:
    """A loop that is changed: its attributes, and the functions that it calls."""

    attrs: dict[str, Any]
    functions: tuple[bytes, ...]


def spared(attrs: Mapping[str, Any], cond: Any, body: Any, read_once: Collection[int],
           invariant: Mapping[int, int]) -> Spared:
    """Return a gradient's loop whose body is given less, and puts no zeros where nothing reads.

    Args:
      attrs: of the loop.
      cond: FunctionDef of the condition; changed, as is the next.
      body: that of the body.
      read_once: lists that are handed on as they are given.
      invariant: lists in whose place the entry is given, with its dtype.
    """
    for slot in read_once:
        body.ret[body.signature.output_arg[slot].name] = body.signature.input_arg[slot].name
    for slot, kind in invariant.items():
        _take_the_entry(body, slot, kind)
        cond.signature.input_arg[slot].type = kind
    for made in (cond, body):
        made.attr.pop("_input_shapes", None)
        for argument in made.arg_attr.values():  # of the lists that there were
            argument.attr.pop("_output_shapes", None)
    functions = named(cond, "cond"), named(body, "spared")
    found = {key: _copied(attr) for key, attr in attrs.items()}
    for slot, kind in invariant.items():
        found["T"].list.type[slot] = kind
        found["output_shapes"].list.shape[slot].CopyFrom(tf.TensorShape(None).as_proto())
    found["cond"].func.name, found["body"].func.name = map(name_of, functions)
    return Spared(found, functions)


def _take_the_entry(body: Any, slot: int, kind: int) -> None:
    """Have a body read an argument where it takes an entry of the list that this was."""
    argument = body.signature.input_arg[slot].name
    body.signature.input_arg[slot].type = kind
    body.signature.output_arg[slot].type = kind
    body.ret[body.signature.output_arg[slot].name] = argument
    nodes = {node.name: node for node in body.node_def}
    (pop,) = (node for node in body.node_def if record(node.op).lists.removes
              and origin(nodes, node.input[0]) == argument)
    read_instead(body, f"{pop.name}:tensor:", f"{pop.name}:output:0")
    waits = [read for read in pop.input if read.startswith("^")]
    del pop.input[:]
    pop.op = names.IDENTITY
    pop.input.extend([argument, *waits])
    pop.attr.clear()
    pop.attr["T"].type = kind


def add_invariant(body: FunctionBody, forward: Any, slot: int, given: Sequence[str]) -> str:
    """Add what the forward's body appends to a list, and return it.

    Args:
      body: takes copies of the ops that make it; what they wait for is left out, as the forward's
        body writes nothing.
      forward: FunctionDef of the forward's body.
      slot: of the list.
      given: what the forward's loop is given, in `body`.

    Raises:
      RewriteError: the forward's body does not append to the list.
    """
    nodes = {node.name: node for node in forward.node_def}
    arguments = {argument.name: given[n] for n, argument in enumerate(
        forward.signature.input_arg)}
    made: dict[str, str] = {}

    def copied(tensor: str) -> str:
        if ":" not in tensor:
            return arguments[tensor]
        name, output, number = tensor.split(":")
        if name not in made:
            source = nodes[name]
            read = [copied(read) for read in source.input if not read.startswith("^")]
            made[name] = body.copy(source, f"tfckpt_{source.op}", read).name
        return f"{made[name]}:{output}:{number}"

    return copied(push_of(forward, nodes, slot)[1])


def _copied(attr: Any) -> Any:
    made = type(attr)()
    made.CopyFrom(attr)
    return made
