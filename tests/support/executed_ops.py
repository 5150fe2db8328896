"""The ops of a graph, counted so that what TensorFlow does after Grappler makes no difference."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable

import tensorflow as tf

_LEFT_OUT = {"Const", "NoOp", "Identity", "_Arg", "_Retval", "Placeholder", "InfeedDequeue"}
"""What may be shared, is named otherwise, or passes tensors on."""
_LOWERED = {"Switch", "SwitchN", "Merge", "Enter", "Exit", "NextIteration"}
_NUMBER = re.compile(r"/_\d+(?=/|$|:)")
_BODY = re.compile(r"Func/.*/_")
_WITH_BIAS, _BIAS = "WithBias", "BiasAddGrad"
"""Kernels of oneDNN that make the gradient of a bias as well, and the op that does it alone."""


def counted(graphs: Iterable[tf.compat.v1.GraphDef]) -> collections.Counter[tuple[str, str]]:
    """Count ops by kind and name, without the numbers of lowered bodies.

    Args:
      graphs: what runs, of each device, or what Grappler made.

    Returns:
      Of a lowered loop or branch, and of gradients of biases, the name is "".
    """
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for node in (node for graph in graphs for node in graph.node):
        if node.op in _LEFT_OUT:
            continue
        kind = node.op.replace("_Mkl", "").replace("Native", "").lstrip("_")
        kind = {"FusedBatchNormEx": "FusedBatchNormV3"}.get(kind, kind)
        found[_BIAS, ""] += kind == _BIAS or kind.endswith(_WITH_BIAS)
        if kind in _LOWERED:
            found[kind, ""] += 1
        elif kind != _BIAS:
            found[kind.removesuffix(_WITH_BIAS),
                  _NUMBER.sub("/_", _BODY.sub("Func/_", node.name))] += 1
    return found
