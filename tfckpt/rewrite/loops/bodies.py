"""Functions in the making, as definitions: nodes are added, results set, a name given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import TRIPS
from tfckpt.ops import names, record

INT, VARIANT = tf.int32.as_datatype_enum, tf.variant.as_datatype_enum
BY_PLACE = ("_num_original_outputs", "_read_only_resource_inputs", "_output_shapes", "_class")
"""Attributes of a loop that count its inputs or outputs, or that tie it to others."""


def function_of(live: tf.Graph, name: str) -> Any:
    """Return a copy of a function of a graph, as a FunctionDef.

    Args:
      live: the graph.
      name: of the function.

    Raises:
      RewriteError: it is not known.
    """
    found = tf_adapter.find_function(live, name)
    if found is None:
        raise RewriteError(f"rewrite: {name!r}, which a loop calls, is not known")
    made = type(found)()
    made.CopyFrom(found)
    return made


def origin(nodes: Mapping[str, Any], tensor: str) -> str:
    """Return what comes before nodes that only pass a tensor on.

    Args:
      nodes: of a function, by name.
      tensor: as it is named there.
    """
    while (node := nodes.get(tensor.partition(":")[0])) is not None and (
            record(node.op).passes_on and len(node.input)):
        tensor = node.input[int(tensor.rpartition(":")[2]) if ":" in tensor else 0]
    return tensor


def push_of(function: Any, nodes: Mapping[str, Any], slot: int) -> tuple[Any, str]:
    """Return the node with which a loop's body appends to a list, and what it appends.

    Args:
      function: FunctionDef of the body.
      nodes: its nodes, by name.
      slot: of the list.

    Raises:
      RewriteError: the body does not append to the list.
    """
    result = function.ret[function.signature.output_arg[slot].name]
    push = nodes.get(origin(nodes, result).partition(":")[0])
    entry = None if push is None else record(push.op).lists.entry
    if push is None or entry is None:
        raise RewriteError("rewrite: a loop's body does not append to a list that it did append to")
    return push, push.input[entry]


def read_instead(function: Any, result: str, tensor: str) -> None:
    """Have what reads a result of an op in a function, or returns it, take another tensor.

    Args:
      function: FunctionDef; changed.
      result: `op:result:`.
      tensor: the other.
    """
    for node in function.node_def:
        for n, text in enumerate(node.input):
            if text.startswith(result):
                node.input[n] = tensor
    for name in function.ret:
        if function.ret[name].startswith(result):
            function.ret[name] = tensor


def named(function: Any, what: str) -> bytes:
    """Return a FunctionDef, serialised, under a name that says what is in it.

    Args:
      function: the definition; its name is replaced.
      what: part of the name, for people.
    """
    function.signature.name = ""
    text = function.SerializeToString(deterministic=True)
    function.signature.name = f"{tf_adapter.ADDED}{what}_{hashlib.sha256(text).hexdigest()[:16]}"
    return bytes(function.SerializeToString(deterministic=True))


def name_of(text: bytes) -> str:
    """Return the name of a serialised function.

    Args:
      text: what `named` returned.
    """
    return str(tf_adapter.FunctionDef.FromString(text).signature.name)


def with_own_calls(function: Any, find: Callable[[str], Any], what: str) -> list[bytes]:
    """Have a function call copies of what it calls, and return these, callees first.

    Args:
      function: the definition; changed.
      find: returns a copy of a definition by its name.
      what: part of the names of the copies, for people, and so that others get other copies.

    Raises:
      RewriteError: a function is not known.
    """
    copies: dict[str, bytes] = {}
    for node in function.node_def:
        for key in sorted(node.attr):
            attr = node.attr[key]
            for called in ([attr.func] if attr.HasField("func") else attr.list.func):
                if called.name not in copies:
                    copy = find(called.name)
                    copies.update((name_of(text), text) for text in with_own_calls(
                        copy, find, what))
                    text = named(copy, what)
                    copies[called.name] = text
                called.name = name_of(copies[called.name])
    return list(dict.fromkeys(copies.values()))


class FunctionBody:
    """Adds ops to a FunctionDef.

    Tensors are named as there: an argument by its name, others by op, result and number.

    Args:
      function: the definition; changed.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._taken = {node.name for node in function.node_def} | {
            argument.name for argument in function.signature.input_arg}

    def new(self, name: str) -> Any:
        """Add a node of a name like this, which is not taken yet, and return it.

        Args:
          name: of the node; a number is appended where it is taken.
        """
        number = 0
        while (found := f"{name}_{number}" if number else name) in self._taken:
            number += 1
        self._taken.add(found)
        return self.function.node_def.add(name=found)

    def node(self, kind: str, inputs: Sequence[str], output: str,
             numbers: Mapping[str, int] = MappingProxyType({}), **dtypes: int) -> str:
        """Add an op, its attributes numbers and dtypes, and return its first result.

        Args:
          kind: op type.
          inputs: tensors that it reads.
          output: name of the result of which the first tensor is returned.
          numbers: attributes that are numbers.
          **dtypes: attributes that are dtypes, as enumerated.
        """
        node = self.new(f"tfckpt_{kind}")
        node.op = kind
        node.input.extend(inputs)
        for key, dtype in dtypes.items():
            node.attr[key].type = dtype
        for key, number in numbers.items():
            node.attr[key].i = number
        return f"{node.name}:{output}:0"

    def copy(self, source: Any, name: str, read: Sequence[str]) -> Any:
        """Add a copy of a node, without what ties it to others, and return it.

        Args:
          source: the node, of any function.
          name: of the copy; a number is appended where it is taken.
          read: tensors that the copy reads.
        """
        node = self.new(name)
        node.op = source.op
        node.input.extend(read)
        for key, attr in source.attr.items():
            if key not in ("_class", "_output_shapes"):
                node.attr[key].CopyFrom(attr)
        return node

    def constant(self, value: int | list[int], dtype: int = INT) -> str:
        """Add a constant, and return its result.

        Args:
          value: a number, or a list of them.
          dtype: of integers, as enumerated.
        """
        node = self.new("tfckpt_const")
        node.op = names.CONST
        made = tf.make_tensor_proto(value, tf.dtypes.as_dtype(dtype))
        node.attr["dtype"].type = made.dtype
        node.attr["value"].tensor.CopyFrom(made)
        return f"{node.name}:output:0"

    def shaped(self, tensor: str, shape: Any, dtype: int) -> str:
        """Return a tensor of which TensorFlow knows the shape: it fuses ops only where it does.

        Args:
          tensor: any.
          shape: TensorShapeProto; where the rank is not known, the tensor is returned as it is.
          dtype: of the tensor, as enumerated.
        """
        if shape.unknown_rank:
            return tensor
        node = self.new("tfckpt_shaped")
        node.op = names.ENSURE_SHAPE
        node.input.append(tensor)
        node.attr["T"].type = dtype
        node.attr["shape"].shape.CopyFrom(shape)
        return f"{node.name}:output:0"

    def _read(self, tensor: str) -> str:
        """Return an argument as an op of the function hands it on.

        What a loop is handed is named by what it reads, and sums add in the order of names: that of
        an argument begins with "Func", and stands before what the body computes.
        """
        if ":" in tensor:
            return tensor
        kind = next(a.type for a in self.function.signature.input_arg if a.name == tensor)
        return self.node(names.IDENTITY, (tensor,), "output", T=kind)

    def loop(self, like: tf.Operation, attrs: dict, inputs: Sequence[str], cond: str, body: str,
             trips: int, first: Collection[int] = ()) -> list[str]:
        """Add a loop with the attributes of another, and return its results.

        Args:
          like: op whose type the loop has.
          attrs: attributes, of which those are left out that tie it to others.
          inputs: what it is given.
          cond: name of the condition.
          body: name of the body.
          trips: how often it runs at most.
          first: which of the inputs, all arguments of the function, stand before what the body
            computes, by name: sums add in the order of names.
        """
        read = [tensor if n in first else self._read(tensor) for n, tensor in enumerate(inputs)]
        node = self.new("tfckpt_loop")
        node.op = like.type
        node.input.extend(read)
        for key in sorted(attrs):
            if key not in ("_class", "_output_shapes"):
                node.attr[key].CopyFrom(attrs[key])
        node.attr["cond"].func.name, node.attr["body"].func.name = cond, body
        node.attr[TRIPS].i = trips
        return [f"{node.name}:output:{n}" for n in range(len(inputs))]

    def returns(self, results: Sequence[str]) -> None:
        """Set the function's results.

        Args:
          results: tensors, one for each that the signature has.
        """
        for output, result in zip(self.function.signature.output_arg, results, strict=True):
            self.function.ret[output.name] = result


def is_left(kinds: Sequence[int]) -> bytes:
    """Return the condition that the first of some arguments is above 0.

    Args:
      kinds: dtypes of the arguments, as enumerated.
    """
    made = tf_adapter.FunctionDef()
    for n, kind in enumerate(kinds):
        made.signature.input_arg.add(name=f"arg{n}", type=kind)
    made.signature.output_arg.add(name="result0", type=tf.bool.as_datatype_enum)
    body = FunctionBody(made)
    made.ret["result0"] = body.node("Greater", ("arg0", body.constant(0)), "z", T=INT)
    return named(made, "cond")


def empty_function(like: tf.Operation, kinds: Sequence[int]) -> tuple[Any, list[str]]:
    """Return a FunctionDef without ops, results as its arguments, and the arguments' names.

    Args:
      like: op that calls it; it is stateful where that is.
      kinds: dtypes of the arguments, as enumerated.
    """
    made = tf_adapter.FunctionDef()
    made.signature.is_stateful = tf_adapter.is_stateful(like)
    found = [f"arg{n}" for n in range(len(kinds))]
    for n, kind in enumerate(kinds):
        made.signature.input_arg.add(name=found[n], type=kind)
        made.signature.output_arg.add(name=f"result{n}", type=kind)
    return made, found
