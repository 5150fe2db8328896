"""The machine that Grappler is told of, and where TensorFlow places the ops of a step on it.

TensorFlow places ops before it asks Grappler, which runs convolutions channels first on a GPU, and
puts transposes around what it does not know to handle in that form. So Grappler is asked here about
placed ops as well: those without a device run on the GPU, if there is one and they have a kernel
there. Which of the few that could run on either device TensorFlow moves to the CPU, beside what
they make integers of, makes no difference to Grappler.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.devices import device_key
from tfckpt.capture.grappler import without_results
from tfckpt.ops.names import FED

_SPELT = {device_key(name): name for name in (tf_adapter.HOST, tf_adapter.GPU)}
"""The devices that Grappler is told of, as the runtime writes them."""
_IMAGES = 4
"""Dimensions of a batch of images, and of none with fewer."""
_BY_LAYOUT = "-LayoutOptimizer"
"""Ends the names of the transposes that Grappler adds for that."""


def on_one_device(devices: Iterable[str]) -> bool:
    """Return whether ops with these devices, or none, run where those without one run.

    That has to be the first CPU or GPU: of others Grappler is told nothing.

    Args:
      devices: the device of each op, as the op names it; "" where it has none.
    """
    own = device_key(tf_adapter.device_of_calls())
    return own in _SPELT and all(device_key(name) == own for name in devices if name)


def spelt(device: str, gpu: bytes) -> str:
    """Return how the runtime writes the device of an op, or of one without any.

    Grappler takes two spellings of one device for two devices, and joins nothing of both.

    Args:
      device: as the op names it.
      gpu: of the machine; without one what has no device is on the CPU, otherwise it keeps none.
    """
    if not device and gpu:
        return ""
    return _SPELT.get(device_key(device), device)


def is_relaid(definition: tf.compat.v1.GraphDef) -> bool:
    """Return whether Grappler has changed how images lie in memory, of some op at least.

    Args:
      definition: what Grappler made of a graph.
    """
    return any(node.name.endswith(_BY_LAYOUT) for node in definition.node)


def says_more(known: tf.TensorShape, shape: tf.TensorShape, relaid: bool) -> bool:
    """Return whether a shape known of a result holds in Grappler's answer, and says more there.

    Args:
      known: its shape before Grappler was asked.
      shape: what follows for it from the shapes in Grappler's answer.
      relaid: whether images may lie in memory in another way since then.
    """
    if relaid and (known.rank is None or known.rank >= _IMAGES):
        return False
    return not shape.is_fully_defined() and bool(shape.is_compatible_with(known))


def optimized(config: Any, meta: tf.compat.v1.MetaGraphDef, gpu: bytes, returns: bool = True
              ) -> tf.compat.v1.GraphDef:
    """Return what Grappler makes of a graph; its ops are placed for that, and not afterwards.

    Args:
      config: a ConfigProto.
      meta: the graph; not changed.
      gpu: of the machine, a NamedDevice, serialised; empty where ops run on the CPU.
      returns: whether the graph is of a function that has results.

    Raises:
      ValueError, tf.errors.OpError: Grappler does not accept the graph.
    """
    def ask(meta: tf.compat.v1.MetaGraphDef) -> tf.compat.v1.GraphDef:
        return tf_adapter.optimize_graph(config, meta, gpu)

    answer = ask if returns else functools.partial(without_results.optimized, ask=ask)
    if not gpu:
        return answer(meta)
    placed = tf.compat.v1.MetaGraphDef.FromString(meta.SerializeToString())
    devices = {}
    for node in placed.graph_def.node:
        devices[node.name] = node.device
        if not node.device:
            fed = node.op == FED and node.attr["dtype"].type != tf.int32.as_datatype_enum
            node.device = (
                tf_adapter.GPU if fed or tf_adapter.has_gpu_kernel(node) else tf_adapter.HOST)
    found = answer(placed)
    for node in found.node:
        node.device = devices.get(node.name, "")
    return found
