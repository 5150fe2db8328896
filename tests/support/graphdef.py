"""Reads a plain GraphDef into a `Graph`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfckpt.capture.tfgraph import capture
from tfckpt.errors import CaptureError
from tfckpt.ir.graph import Graph


def capture_graph_def(graph_def: tf.compat.v1.GraphDef, fetches: Sequence[str] = (),
                      name: str = "graph") -> tuple[Graph, tf.Graph]:
    """Import a GraphDef and captures it.

    Args:
      graph_def: the definition; shapes are inferred by TensorFlow on import.
      fetches: names of tensors ("op:0") that leave the step.

    Returns:
      The captured graph, and the imported `tf.Graph`, to which edits can be applied in place.

    Raises:
      CaptureError: the definition cannot be imported, or a fetch does not exist.
    """
    imported = tf.Graph()
    try:
        with imported.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
        wanted = [imported.get_tensor_by_name(fetch) for fetch in fetches]
    except (ValueError, KeyError, tf.errors.OpError) as error:
        raise CaptureError(f"capture: {name!r} cannot be read as a GraphDef: {error}") from error
    return capture(imported, fetches=wanted, name=name), imported
