"""Whether edits that are not applied yet leave the arithmetic of a step as it is.

The terms of the plain and of the edited step are compared as `tfckpt.verify.same` does, of what
Grappler makes of both. `tfckpt.verify.same_arithmetic` asks about a step that is traced already,
and reads what TensorFlow has instantiated; here Grappler is asked during the trace, which says the
same of steps without loops, branches and calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.optimised_body import is_flat
from tfckpt.edits import PROTECTED, Edits
from tfckpt.errors import TfckptError
from tfckpt.ops.names import ARG
from tfckpt.rewrite.apply_graphdef import apply_to_graph_def
from tfckpt.verify.same import COMPILED, Certificate, certificate_of
from tfckpt.verify.terms import Computation, terms_of

NOT_FLAT = ("of a step with loops, branches or calls, on several devices or on a GPU, it is not "
            "known whether the arithmetic stays the same")
AT_TOP = "of a step that a session runs it is not known whether the arithmetic stays the same"


def doubt(live: Any, compiled: bool) -> str:
    """Return why nothing can be said of a step; "" where Grappler's answer is what will run."""
    if compiled:
        return COMPILED
    if not hasattr(live, "inputs"):
        return AT_TOP
    return "" if is_flat(live.get_operations()) else NOT_FLAT


def certificate_of_trace(live: Any, answer: tf.compat.v1.GraphDef | None, edits: Edits
                         ) -> Certificate:
    """Compare a step that is being traced, or was read from a file, with the same as edited.

    Args:
      live: its FuncGraph, which is left as it is; one of which there is no `doubt`.
      answer: what Grappler makes of the plain step, where its ops stand in `live`, marked so that
        Grappler leaves them alone; None where `live` is as it was traced.
    """
    definition = tf_adapter.shown_definition(live)
    try:
        edited = apply_to_graph_def(definition, edits)
        for node in edited.node if answer is not None else ():
            node.attr[PROTECTED].b = True
        plain = answer or tf_adapter.optimized(live, (), definition)
        ours = tf_adapter.optimized(live, (), edited)
    except (ValueError, TfckptError, tf.errors.OpError) as error:
        return Certificate(None, reason=f"Grappler cannot be asked: {error}")
    return certificate_of_definitions(plain, ours, functools.partial(
        tf_adapter.find_function, live))


def certificate_of_definitions(plain: tf.compat.v1.GraphDef, edited: tf.compat.v1.GraphDef,
                               function: Callable[[str], Any]) -> Certificate:
    """Compare two graphs that nothing optimises any more.

    Args:
      function: gives the FunctionDef that is called by a name; None where it is not known.
    """
    return certificate_of(*terms_of([_computation(graph, function) for graph in (plain, edited)]))


def _computation(graph: tf.compat.v1.GraphDef, function: Callable[[str], Any]) -> Computation:
    count = max((node.attr["index"].i for node in graph.node if node.op == ARG), default=-1) + 1
    return Computation(list(graph.node), [f"argument {i}" for i in range(count)], function)
