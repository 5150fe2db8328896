"""Hashes of TensorFlow's own graph: what the answers of XLA and Grappler depend on.

Planning reads no more of an op than `Graph` has. XLA compiles it with all of its attributes, the
values of constants and the bodies of functions; Grappler orders operands by names besides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

_NAMES = frozenset({"_class", "_output_shapes", "shared_name", "container", "_gradient_op_type",
                    "_user_specified_name", "_input_shapes"})
"""Attributes that name things, numbered anew in each process, or say what the shapes say."""


def definition_digest(definition: Any) -> str:
    """Return a hash of a GraphDef, its functions included where something calls them.

    Args:
      definition: a GraphDef; not changed. The names of its nodes do not count.

    Returns:
      64 hexadecimal digits.
    """
    functions = _Functions(definition.library.function)
    return functions.nodes(definition.node, ())


def named_digest(definition: Any) -> str:
    """Return a hash of a GraphDef, names included. The order of control edges does not count.

    Args:
      definition: a GraphDef; not changed.

    Returns:
      64 hexadecimal digits.
    """
    copy = type(definition)()
    copy.CopyFrom(definition)
    for node in copy.node:
        awaited = sorted(name for name in node.input if name[0] == "^")
        if len(awaited) > 1:  # TensorFlow traces them in another order each time
            read = [name for name in node.input if name[0] != "^"]
            del node.input[:]
            node.input.extend([*read, *awaited])
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()


class _Functions:
    """Hashes of functions by name, each made when something calls it."""

    def __init__(self, library: Iterable[Any]) -> None:
        self.known = {function.signature.name: function for function in library}
        self.digests: dict[str, str] = {}

    def nodes(self, nodes: Iterable[Any], arguments: Iterable[str]) -> str:
        """Return a hash of ops, in their order.

        Args:
          nodes: NodeDefs, of a graph or of a function.
          arguments: what they read beside one another.
        """
        nodes = list(nodes)
        number = {name: str(-1 - i) for i, name in enumerate(arguments)}
        number.update((node.name, str(i)) for i, node in enumerate(nodes))
        digest = hashlib.sha256()
        for node in nodes:
            read = [_input(name, number) for name in node.input if name[0] != "^"]
            awaited = sorted(number.get(name[1:], name) for name in node.input if name[0] == "^")
            digest.update(repr((
                self._called(node.op), node.device, read, awaited,
                [(key, self._attr(node.attr[key])) for key in sorted(node.attr)
                 if key not in _NAMES])).encode())
        return digest.hexdigest()

    def _attr(self, value: Any) -> object:
        kind = value.WhichOneof("value")
        if kind == "func":
            return self._function(value.func)
        if kind == "list" and value.list.func:
            return [self._function(function) for function in value.list.func]
        return value.SerializeToString(deterministic=True)

    def _function(self, function: Any) -> object:
        return self._called(function.name), [
            (key, self._attr(function.attr[key])) for key in sorted(function.attr)]

    def _called(self, name: str) -> str:
        """Return what stands for the name of an op type or a function."""
        if name not in self.known:
            return name
        if name not in self.digests:
            self.digests[name] = "itself"
            self.digests[name] = self._body(self.known[name])
        return self.digests[name]

    def _body(self, function: Any) -> str:
        arguments = [argument.name for argument in function.signature.input_arg]
        number = {node.name: str(i) for i, node in enumerate(function.node_def)}
        number.update((name, str(-1 - i)) for i, name in enumerate(arguments))
        results = [_input(function.ret[result.name], number)
                   for result in function.signature.output_arg]
        kinds = [argument.type for argument in function.signature.input_arg]
        attrs = [(key, self._attr(function.attr[key])) for key in sorted(function.attr)
                 if key not in _NAMES]
        body = self.nodes(function.node_def, arguments)
        return hashlib.sha256(repr((body, results, kinds, attrs)).encode()).hexdigest()


def _input(name: str, number: dict[str, str]) -> tuple[str, ...]:
    """Return an input, such as "op", "op:1" or "op:values:0", with a number for the op."""
    op, *slot = name.split(":")
    return number.get(op, op), *slot
