"""Asking Grappler about a function that returns nothing.

Grappler does more, and other things, where it knows what is fetched of a graph. Of a function that
runs it knows the results; one that only writes to variables has none. What TensorFlow's Python
interface takes has to name something, so such a graph is asked about as a function of a graph
that calls it: Grappler optimises functions as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.nodes import results_of
from tfckpt.capture.shapes import to_variable
from tfckpt.ops.names import ARG, PARTITIONED_CALL, PLACEHOLDER

_NAME = "tfckpt_asked"


def optimized(meta: tf.compat.v1.MetaGraphDef,
              ask: Callable[[tf.compat.v1.MetaGraphDef], tf.compat.v1.GraphDef]
              ) -> tf.compat.v1.GraphDef:
    """Return what Grappler makes of a graph where it knows of no results.

    Args:
      meta: the graph; its collection `train_op` names what has to run. Not changed.
      ask: takes such a graph, and returns what Grappler makes of it with its functions.

    Raises:
      ValueError, tf.errors.OpError: Grappler does not accept the graph.
    """
    arguments = {node.name: node for node in meta.graph_def.node if node.op == ARG}
    running = list(meta.collection_def["train_op"].node_list.value)
    answer = ask(_calling(meta, running))
    found = next((function for function in answer.library.function
                  if function.signature.name == _NAME), None)
    if found is None:
        raise ValueError("Grappler gave no function back")
    result = tf.compat.v1.GraphDef(versions=answer.versions)
    result.library.function.extend(f for f in answer.library.function if f is not found)
    for node in found.node_def:
        added = result.node.add()
        added.CopyFrom(arguments.get(node.name, node))
    slots = {name: {slot: i for i, slot in enumerate(results)}
             for name, results in _results(found.node_def).items()}
    for node in result.node:
        node.input[:] = [_flat(text, slots) for text in node.input]
    return result


def _calling(meta: tf.compat.v1.MetaGraphDef, running: Sequence[str]
             ) -> tf.compat.v1.MetaGraphDef:
    """Return a graph that calls the graph as a function without arguments and results.

    What is known of an argument Grappler would not believe, so that ops of the function stand for
    them.
    """
    made = tf.compat.v1.MetaGraphDef()
    made.graph_def.versions.CopyFrom(meta.graph_def.versions)
    made.graph_def.library.CopyFrom(meta.graph_def.library)
    function = made.graph_def.library.function.add()
    function.signature.name, function.signature.is_stateful = _NAME, True
    for node in meta.graph_def.node:
        _stand_in(function.node_def.add(), node)
    results = _results(function.node_def)
    for node in function.node_def:
        node.input[:] = [_nested(text, results) for text in node.input]
    for name in dict.fromkeys(running):
        function.control_ret[name] = name
        function.signature.control_output.append(name)
    call = made.graph_def.node.add(name=_NAME, op=PARTITIONED_CALL)
    call.attr["f"].func.name = _NAME
    for attr in ("Tin", "Tout"):
        call.attr[attr].list.SetInParent()
    made.collection_def["train_op"].node_list.value.append(_NAME)
    return made


def _stand_in(node: tf.compat.v1.NodeDef, given: tf.compat.v1.NodeDef) -> None:
    """Write a node like another; of an argument, one without inputs that is known as much of."""
    node.CopyFrom(given)
    if given.op != ARG:
        return
    dtype, attrs = given.attr["T"].type, given.attr
    shapes = attrs["_handle_shapes"].list.shape
    if dtype == tf.resource.as_datatype_enum and shapes:
        to_variable(node, tf.TensorShape(shapes[0]),
                    tf.as_dtype(attrs["_handle_dtypes"].list.type[0]))
        return
    node.op = PLACEHOLDER
    node.ClearField("attr")
    node.attr["dtype"].type = dtype


def _results(nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, list[str]]:
    """Return what a function calls the results of each op, by the op's name."""
    found = {}
    for node in nodes:
        definition = tf_adapter.op_definition(node.op)
        if definition is None:
            raise ValueError(f"op type {node.op!r} of {node.name!r} is not registered")
        found[node.name] = results_of(node, definition)
    return found


def _nested(text: str, results: Mapping[str, Sequence[str]]) -> str:
    """Return an input as a function writes it."""
    name, _, slot = text.partition(":")
    return text if text.startswith("^") else f"{name}:{results[name][int(slot or 0)]}"


def _flat(text: str, slots: Mapping[str, Mapping[str, int]]) -> str:
    """Return a function's input as a graph writes it."""
    name, _, slot = text.partition(":")
    number = slots[name][slot] if slot else 0
    return f"{name}:{number}" if number else name
