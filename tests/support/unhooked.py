"""A TensorFlow without a trace hook, or of a version that nobody tested."""

from __future__ import annotations

import sys

MISSING, UNKNOWN = "missing", "unknown"


def take_away(what: str) -> None:
    """Changes TensorFlow itself; must run before tfckpt is imported."""
    import tensorflow as tf
    from tensorflow.python.eager.polymorphic_function import transform

    assert "tfckpt" not in sys.modules
    if what == MISSING:
        del transform.FUNC_GRAPH_TRANSFORMS
        transform.apply_func_graph_transforms = lambda graph: None
    else:
        tf.__version__ = "2.99.0"
