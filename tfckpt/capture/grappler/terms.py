"""How the runtime asks Grappler about a function: what it does first, and what it forbids.

A function that is called eagerly has its functions inlined, and its loops lowered, before Grappler
sees it. That of a dataset only has its loops lowered: Grappler inlines the functions itself, and
removes no op with state (TensorFlow's `captured_function.cc`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.compiled_calls import is_compiled
from tfckpt.capture.inlining.inline import is_call
from tfckpt.ir.edits import PROTECTED


@dataclasses.dataclass(frozen=True)
class Terms:
    """How the runtime asks Grappler.

    Attributes:
      config: a ConfigProto, serialised.
      inlines: whether the runtime inlines functions, whose bodies wait for less then.
      keeps_stateful: whether ops with state stay, with all that they need, though nothing needs
        them.
    """

    config: bytes
    inlines: bool = True
    keeps_stateful: bool = False


def terms_of_calls() -> Terms:
    """Return the terms of a function that this thread calls."""
    return Terms(tf_adapter.configured().SerializeToString())


def terms_of_datasets() -> Terms:
    """Return the terms of a function that a dataset calls for each element."""
    config = tf_adapter.configured()
    rewriting = config.graph_options.rewrite_options
    rewriting.constant_folding = rewriting.OFF
    rewriting.layout_optimizer = rewriting.OFF
    return Terms(config.SerializeToString(), inlines=False, keeps_stateful=True)


def has_calls(definition: tf.compat.v1.GraphDef) -> bool:
    """Return whether functions are called in a graph, or in the functions of it.

    Args:
      definition: the graph.
    """
    return any(is_call(node.op) and not is_compiled(node.attr)
               for node in tf_adapter.nodes_with_bodies(definition))


@contextlib.contextmanager
def stateful_kept(definition: tf.compat.v1.GraphDef) -> Iterator[frozenset[str]]:
    """Have Grappler leave all ops with state in a graph, those of functions as well.

    Args:
      definition: changed while this context lasts.

    Yields:
      The names of the ops that may be marked so for another reason; others are to lose the mark.
    """
    marked = [node for node in tf_adapter.nodes_with_bodies(definition)
              if tf_adapter.is_stateful_type(node.op) and PROTECTED not in node.attr]
    before = frozenset(node.name for node in tf_adapter.nodes_with_bodies(definition)
                       if PROTECTED in node.attr)
    for node in marked:
        node.attr[PROTECTED].b = True
    yield before
    for node in marked:
        node.attr.pop(PROTECTED)


def unmark(definition: tf.compat.v1.GraphDef, marked: frozenset[str]) -> None:
    """Take the mark of `stateful_kept` from what Grappler made of a graph.

    Args:
      definition: changed.
      marked: the names of ops that keep the mark.
    """
    for node in definition.node:
        if node.name not in marked:
            node.attr.pop(PROTECTED, None)
