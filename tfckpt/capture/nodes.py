"""The inputs of a NodeDef, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfckpt.ops import record

LOWER = "_lower_using_switch_merge"
"""Attribute of loops and branches in whose place their bodies' ops will be."""


def op_of(text: str) -> str:
    """Return the op that an input of a NodeDef names.

    Args:
      text: as the node has it: a result, with or without its number, or what is waited for.
    """
    return text.lstrip("^").partition(":")[0]


def results_of(node: tf.compat.v1.NodeDef, definition: Any) -> list[str]:
    """Return what a function's body calls the results of an op, `argument:number`, in their order.

    Args:
      node: of a graph or of a function's body.
      definition: the OpDef of its type.
    """
    found = []
    for argument in definition.output_arg:
        count = 1
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        found += [f"{argument.name}:{number}" for number in range(count)]
    return found


def is_loop(node: tf.compat.v1.NodeDef) -> bool:
    """Return whether an op is a loop or a branch that is not lowered.

    Args:
      node: of a graph or of a function's body.
    """
    return record(node.op).has_bodies


def is_lowered(op: tf.Operation) -> bool:
    """Return whether TensorFlow will put the ops of its bodies in the place of a loop or branches.

    Args:
      op: of a live graph.
    """
    try:
        return bool(op.get_attr(LOWER))
    except ValueError:
        return False


def calls_functions(node: tf.compat.v1.NodeDef) -> bool:
    """Return whether an op calls functions, in whatever way.

    Args:
      node: of a graph or of a function's body.
    """
    return any(attr.HasField("func") or attr.list.func for attr in node.attr.values())


def functions_of(node: tf.compat.v1.NodeDef) -> list[Any]:
    """Return what names the functions that an op calls.

    Args:
      node: of a graph or of a function's body.

    Returns:
      The node's own NameAttrLists: who changes the name in one changes what the op calls.
    """
    return [function for attr in node.attr.values() for function in (
        [attr.func] if attr.HasField("func") else attr.list.func)]


def bodies_of(node: tf.compat.v1.NodeDef, definition: tf.compat.v1.GraphDef) -> Iterator[Any]:
    """Yield the FunctionDefs of the functions that an op calls.

    Args:
      node: of a graph or of a function's body.
      definition: has the functions in its library; those that it has not are left out.
    """
    names = {function.name for function in functions_of(node)}
    yield from (function for function in definition.library.function
                if function.signature.name in names)


def arguments_read(function: Any) -> frozenset[int]:
    """Return which arguments of a function its ops read, or it returns: membership only.

    Args:
      function: FunctionDef.
    """
    read = {text.partition(":")[0] for node in function.node_def for text in node.input}
    read.update(function.ret.values())
    return frozenset(n for n, given in enumerate(function.signature.input_arg)
                     if given.name in read)
