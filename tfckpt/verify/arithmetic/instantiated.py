"""A rewritten step compared with the plain one by what TensorFlow instantiates of both.

Both are asked of TensorFlow as they will run: instantiated, inlined, placed and optimised, and not
run. `tfckpt.verify.arithmetic.certified` asks Grappler instead; random steps show that the two say
the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.errors import VerificationError
from tfckpt.ir.edits import traced
from tfckpt.verify.arithmetic import certified
from tfckpt.verify.arithmetic.same import COMPILED, UNCHANGED, Certificate, compared
from tfckpt.verify.arithmetic.terms import Computation


def same_arithmetic(step: Callable, *args: Any, **kwargs: Any) -> Certificate:
    """Compare what a decorated step runs with what it would run without tfckpt. Nothing runs.

    The plain step is traced for it, and both are optimised once more. The step's report has the
    answer from then on.

    Args:
      step: what `tfckpt.checkpoint` made of a `tf.function`, with its variables made.
      *args: positional arguments of one call; only their dtypes and shapes count.
      **kwargs: keyword arguments of that call.

    Returns:
      Whether all results and writes are the same, and what is not.

    Raises:
      VerificationError: it is no such step.
    """
    plain: Any = getattr(step, "plain", None)
    if plain is None or not tf_adapter.is_tf_function(plain):
        raise VerificationError(
            "verify: same_arithmetic takes what tfckpt.checkpoint made of a tf.function")
    ours = step.get_concrete_function(*args, **kwargs)  # type: ignore[attr-defined]
    report = getattr(step, "report", None)
    if report is None or not report.applied:
        return Certificate(True, reason=UNCHANGED)
    if tf_adapter.compiles_with_xla(plain):
        return Certificate(None, reason=COMPILED)
    again: Any = tf_adapter.clone_function(plain, plain.python_function)
    wanted = again.get_concrete_function(*args, **kwargs)
    called: dict[int, str] = {}
    found = _around_segments(wanted.graph, ours.graph) if (
        report.segments or report.again) else compared(
        *(computation_of(function, args, kwargs, called) for function in (wanted, ours)))
    report.certified(found.same, str(found))
    return found


def _around_segments(plain: tf.Graph, ours: tf.Graph) -> Certificate:
    """Compare a step with what has become of it, but for the bodies of loops over segments."""
    marked = any(traced(op.name) != op.name for op in ours.get_operations())
    return certified.Arithmetic(ours, certified.question(plain), marked).after()


def computation_of(function: Any, args: tuple, kwargs: dict, called: dict[int, str]) -> Computation:
    """Return what a function would run.

    Args:
      function: a concrete function.
      args: the positional arguments of its call.
      kwargs: the keyword arguments of its call.
      called: what each captured tensor is called, by identity; filled in.
    """
    graphs = tf_adapter.instantiated(function, args, kwargs)
    variables = {id(v.handle): v.name for v in function.graph.variables}
    for tensor in function.captured_inputs:
        if id(tensor) not in called:
            name = variables.get(id(tensor), "what is captured")
            again = sum(other.partition(" (")[0] == name for other in called.values())
            called[id(tensor)] = f"{name} ({again + 1})" if again else name
    given = len(function.graph.inputs) - len(function.captured_inputs)
    return Computation([node for graph in graphs for node in graph.node],
                       [*(f"argument {i}" for i in range(given)),
                        *(called[id(tensor)] for tensor in function.captured_inputs)],
                       functools.partial(tf_adapter.find_function, function.graph))
