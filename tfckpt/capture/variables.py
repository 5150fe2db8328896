"""Which variables the ops of a graph may write.

An op that runs later than it did must find its variables as they were. A variable is known by
the op that makes its handle: two handles that a function captures, or two arguments of a function
in a file, are two variables, as TensorFlow's own control dependencies have it.
"""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from tfckpt.capture import tf_adapter

ANY = "*"
"""A variable that may be any."""
READS = frozenset({"ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd",
                   "VarIsInitializedOp"})
"""Ops that only read the variables whose handles they are given."""
_HANDLES = frozenset({"Placeholder", "_Arg", "VarHandleOp"})
PASSES = ("Identity", "IdentityN")
"""Ops that pass on what they read."""
_HARMLESS = frozenset({*PASSES, "NoOp"})
_NO_VARIABLES = ("Iterator", "OneShotIterator", "AnonymousIterator", "MakeIterator",
                 "DeleteIterator", "LookupTable", "HashTable", "MutableHashTable", "Summary",
                 "WriteScalar", "WriteHistogram", "WriteImage", "WriteSummary", "FlushSummary")
_PYTHON = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})


def behind(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that ops which do nothing else pass on."""
    while tensor.op.type in PASSES:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def variable(handle: tf.Tensor, unsure: Collection[str] = ()) -> str:
    """What a resource tensor refers to, by name; `ANY` where that is not known.

    Args:
      unsure: placeholders for resources that may be the same as others.
    """
    handle = behind(handle)
    op = handle.op
    if op.type not in _HANDLES or op.name in unsure:
        return ANY
    if op.type == "VarHandleOp" and op.get_attr("shared_name"):
        return f"{op.get_attr('container')!r}/{op.get_attr('shared_name')!r}"
    return str(handle.name)


def may_write(op: tf.Operation, unsure: Collection[str] = ()) -> tuple[str, ...]:
    """The variables that an op may write, `ANY` among them if that cannot be told."""
    if op.type in _PYTHON:
        return (ANY,)
    if op.type in READS | _HARMLESS | _HANDLES or op.type.startswith(_NO_VARIABLES):
        return ()
    called = tf_adapter.called_functions(op)
    if called and any(_writes_unseen(op, name, set()) for name in called):
        return (ANY,)
    only_read = (tf_adapter.node_attrs(op)["_read_only_resource_inputs"].list.i
                 if called and "_read_only_resource_inputs" in tf_adapter.node_attrs(op) else ())
    return tuple(dict.fromkeys(
        variable(t, unsure) for i, t in enumerate(op.inputs)
        if t.dtype == tf.resource and i not in only_read))


def _writes_unseen(op: tf.Operation, name: str, seen: set[str]) -> bool:
    """Whether a function may write variables whose handles it is not given."""
    if name in seen:
        return False
    seen.add(name)
    function = tf_adapter.find_function(op.graph, name)
    if function is None:
        return True
    inner = [attr.func.name for node in function.node_def for attr in node.attr.values()
             if attr.HasField("func")]
    inner += [f.name for node in function.node_def for attr in node.attr.values()
              for f in attr.list.func]
    return (any(node.op in _PYTHON or node.op in ("VarHandleOp", "VarHandlesOp")
                for node in function.node_def)
            or any(_writes_unseen(op, other, seen) for other in inner))
