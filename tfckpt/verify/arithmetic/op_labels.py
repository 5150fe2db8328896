"""What an executed op is by itself: its kernel, and the attributes that the kernel reads.

Equal labels of two ops mean that equal operands give equal results.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.ir.edits import COPY
from tfckpt.ops import Calls, record

ARGUMENT, RESULT, CONSTANT = "_Arg", "_Retval", "Const"
SUM, SUM_OF_TWO = "AddN", "AddV2"
RECEIVE, SEND = "_Recv", "_Send"
ARRIVAL = "DestroyTemporaryVariable"
SAME_ENDS = frozenset((
    "AddV2", "Mul", "SquaredDifference", "Equal", "NotEqual", "LogicalAnd", "LogicalOr"))
"""Of two operands, whose order changes no bit."""
BACK = frozenset(("NextIteration", "RefNextIteration"))
ENTERS, EXITS = frozenset(("Enter", "RefEnter")), frozenset(("Exit", "RefExit"))
SWITCHES, MERGES = frozenset(("Switch", "RefSwitch")), frozenset(("Merge", "RefMerge"))
HANDED_ON = ENTERS | EXITS | SWITCHES | MERGES | BACK
"""Through which a handle gets into a loop or branch."""
SHAPED = frozenset(("Reshape",))
"""What changes a shape alone: Grappler takes it out where the shape is what it was, as far as it
knows shapes, and these follow from those of the arguments whatever it knows."""
WHOLE: Mapping[str, bool | int] = {"LogicalAnd": True, "LogicalOr": False, "Mul": 1}
"""Of two operands: the one that leaves the other as it is. Grappler takes it out where it knows the
shapes of both."""
PRODUCT = "Mul"
POOL, POOL_GRADIENT = "MaxPool", "MaxPoolGrad"
ADDS = "AssignAdd"
SHAPE_OF_ALL = frozenset(("VariableShape",))
"""What reads the shape of a variable, which is that of all values that are written to it."""
SHAPES = frozenset(("Shape", "Size", "Rank"))
"""What Grappler makes constants of where it knows a shape."""
NO_ARITHMETIC = frozenset((
    "frame_name", "parallel_iterations", "is_filter_const", "is_weight_const", "var_name",
    "shared_name", "container", "token", "workspace_enabled", "output_shapes"))
"""Attributes that decide nothing of what is computed, or that each trace has another of."""
_OTHERWISE_CALLED = {"Add": "AddV2", "_HostRecv": "_Recv", "_HostSend": "_Send",
                     "_MklNativeMaxPool": "MaxPool", "_MklNativeMaxPoolGrad": "MaxPoolGrad",
                     "_MklNativeFusedConv2D": "_FusedConv2D"}
"""The largest of numbers is the same whatever kernel looks for it. What a step is made of that runs
as Grappler leaves it may have a name that ops get elsewhere just before they run.
"""
_NO_EFFECT = frozenset((
    ARGUMENT, RESULT, ARRIVAL, "TemporaryVariable", SEND, RECEIVE, "Assert"))
"""What TensorFlow calls stateful and changes no number. What an assertion asserts Grappler may know
in one graph alone, and then it writes another condition there."""


def hashed(value: object) -> str:
    """Return a digest of a value.

    Args:
      value: anything whose `repr` is the same for equal values.

    Returns:
      32 hexadecimal digits.
    """
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def called(kind: str) -> str:
    """Return the name of an op type, the same for types that compute the same.

    Args:
      kind: an op type; one that has no other name is returned as it is.
    """
    return _OTHERWISE_CALLED.get(kind, kind)


def has_effect(kind: str) -> bool:
    """Return whether ops of a type do more than compute, such as draw numbers or print.

    Args:
      kind: an op type.
    """
    return (kind not in _NO_EFFECT
            and record(kind).access is None and tf_adapter.is_stateful_type(kind))


def sum_of_two(definition: Any) -> str:
    """Return the label of a sum of two of the terms that an op adds.

    Args:
      definition: a NodeDef.
    """
    kind = definition.attr["T"].SerializeToString(deterministic=True)
    return hashed((SUM_OF_TWO, [("T", kind)], False))


class Labels:
    """The labels of ops of one computation.

    Args:
      arguments: for each argument, in order, what it is.
      function: gives the FunctionDef that is called by a name; None where it is not known.
    """

    def __init__(self, arguments: Sequence[str], function: Callable[[str], Any]) -> None:
        self._arguments, self._find = arguments, function
        self._functions: dict[str, str] = {}

    def of(self, definition: Any) -> str:
        """Return the label of an op, of which a NodeDef is given.

        Args:
          definition: a NodeDef of the computation; its name and inputs do not count.

        Returns:
          A digest, 32 hexadecimal digits.
        """
        kind = called(definition.op)
        if kind == ARGUMENT:
            number = definition.attr["index"].i
            return hashed((kind, self._arguments[number]))
        if kind == CONSTANT:
            value = tf.make_ndarray(definition.attr["value"].tensor)
            return hashed((kind, str(value.dtype), value.shape, value.tobytes()
                           if value.dtype != object else repr(value.tolist())))
        if kind == SUM:  # that of the sums of two which it consists of
            return sum_of_two(definition)
        again = COPY in definition.attr and has_effect(kind)  # it draws other numbers
        return hashed((kind, self._attrs(definition), again))

    def _attrs(self, definition: Any) -> list[tuple[str, object]]:
        """Return the attributes that say what is computed, but for those that nobody gave.

        A dataset's function is a step by itself, and compared as such.
        """
        usual, alone = _defaults(definition.op), record(definition.op).calls is Calls.DATASET
        return [(name, self._attr(definition.attr[name])) for name in sorted(definition.attr)
                if not name.startswith("_") and name not in NO_ARITHMETIC
                and definition.attr[name] != usual.get(name)
                and not (alone and definition.attr[name].HasField("func"))]

    def _attr(self, value: Any) -> object:
        if value.HasField("func"):
            return self._function(value.func.name)
        if value.list.func:
            return [self._function(entry.name) for entry in value.list.func]
        return value.SerializeToString(deterministic=True)

    def _function(self, name: str) -> str:
        """Return what a function computes, op by op; its name where it is not known."""
        if name in self._functions:
            return self._functions[name]
        function = self._find(name)
        self._functions[name] = name if function is None else "itself"  # where it calls itself
        if function is not None:
            self._functions[name] = self._body(function)
        return self._functions[name]

    def _body(self, function: Any) -> str:
        nodes = [(node.name, node.op, list(node.input), self._attrs(node))
                 for node in sorted(function.node_def, key=lambda node: node.name)]
        return hashed((nodes, sorted(function.ret.items()), sorted(function.control_ret.items())))


@functools.cache
def _defaults(kind: str) -> dict[str, Any]:
    """Return what the attributes of an op type are that a definition may leave out."""
    known = tf_adapter.op_definition(kind)
    return {} if known is None else {
        attr.name: attr.default_value for attr in known.attr if attr.HasField("default_value")}
