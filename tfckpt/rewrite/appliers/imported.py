"""Applies edits where TensorFlow offers no way into a graph that is being traced.

The step was traced by itself; its definition is edited and then imported into the graph that is
being traced, in the place of the call.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import Edits
from tfckpt.rewrite.appliers.graphdef import apply_to_graph_def


def import_edited(concrete: Any, edits: Edits | None, graph: Any) -> Any:
    """Add what a traced function computes, with edits, to `graph`, which is being traced.

    Args:
      concrete: a concrete function without arguments: all it reads is captured.
      edits: None changes nothing.
      graph: the current FuncGraph. Its automatic control dependencies run what has side effects.

    Returns:
      What the function returns, as tensors of `graph`.

    Raises:
      RewriteError: the definition cannot be edited or imported; `graph` computes what it did.
    """
    definition = concrete.graph.as_graph_def()
    if edits is not None:
        definition = apply_to_graph_def(definition, edits)
    inputs = concrete.graph.inputs
    _drop_placeholders(definition, {placeholder.op.name for placeholder in inputs})
    fed = {placeholder.name: graph.capture(external)
           for placeholder, external in zip(inputs, concrete.captured_inputs, strict=True)}
    for variable in concrete.graph.variables:
        graph.watch_variable(variable)
    tf_adapter.keep_alive(graph, concrete)  # TensorFlow forgets its loops' functions with it
    changes = LiveChanges(graph)
    start = changes.point()
    try:
        return _imported(concrete, definition, graph, fed)
    except Exception as error:
        changes.revert(start)
        raise RewriteError(f"rewrite: TensorFlow cannot import the traced step: {error}") from error


def _imported(concrete: Any, definition: tf.compat.v1.GraphDef, graph: Any,
              fed: dict[str, tf.Tensor]) -> Any:
    outputs = [t for t in tf.nest.flatten(concrete.structured_outputs, expand_composites=True)
               if t is not None]
    made = list(dict.fromkeys(t.name for t in outputs if t.name not in fed))
    imported = tf.graph_util.import_graph_def(definition, input_map=fed,
                                              name=_scope(definition, graph), return_elements=made)
    found = {**fed, **dict(zip(made, imported, strict=True))}
    for tensor in outputs:
        found[tensor.name].set_shape(tensor.shape)
    return tf.nest.map_structure(lambda t: None if t is None else found[t.name],
                                 concrete.structured_outputs, expand_composites=True)


def _scope(definition: tf.compat.v1.GraphDef, graph: Any) -> str:
    """Return the name scope to import into: "" unless a name is taken.

    Numbers appended to single names would change their order, and with it that of operands.
    """
    taken = {op.name for op in tf_adapter.every_operation(graph)}
    return graph.unique_name("step") if any(
        node.name in taken for node in definition.node) else ""


def _drop_placeholders(definition: tf.compat.v1.GraphDef, names: set[str]) -> None:
    """Remove placeholders, which the import feeds, and requests to be placed beside them."""
    kept = [node for node in definition.node if node.name not in names]
    for node in kept:
        node.attr.pop("_class", None)
    del definition.node[:]
    definition.node.extend(kept)
