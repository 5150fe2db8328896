"""A step that is being traced: TensorFlow's trace hook hands its graph over, edited in place.

The decorator marks the graph a step is traced into; the hook rewrites marked graphs. Nothing is
traced twice, no nested function is made, and no other graph is touched.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.inline import is_rewritten
from tfckpt.capture.shapes import uncaptured_inputs
from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.carriers.around import has_gradients
from tfckpt.carriers.import_route import announce, import_step, refusal
from tfckpt.carriers.records import Mark, Records, knowing, known_sizes
from tfckpt.carriers.traced import Traced, TracedApart
from tfckpt.driver import switched_off

_MARK = "_tfckpt_mark"
LAMBDA = "<lambda>"
_compiled_graphs: Callable[[Any], None] | None = None


def wrap_body(body: Callable, mark: Mark,
              records_of: Callable[[tuple], Records] | None = None) -> Callable:
    """Return the Python function of a step, such that what it is traced into is rewritten.

    Args:
      body: the Python function of the step.
      mark: what each graph that the step is traced into is marked with, but for what a call tells.
      records_of: takes a call's positional arguments and returns where its reports go; default to
        those of the mark.
    """
    problem = tf_adapter.hook_problem()
    if problem:
        announce(problem)

    @functools.wraps(body)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        graph = tf_adapter.tracing_graph()
        if switched_off():
            return body(*args, **kwargs)
        if graph is None:
            _warn_eager(mark.name)
            return body(*args, **kwargs)
        this = dataclasses.replace(mark, arguments=_python_values(args, kwargs),
                                   holders=lambda: (*mark.holders(), body, args, kwargs),
                                   records=records_of(args) if records_of else mark.records)
        if problem and refusal():
            warnings.warn(f"tfckpt: {mark.name} trains unchanged: {problem}, and {refusal()}",
                          stacklevel=2)
        elif problem:
            return import_step(body, args, kwargs, functools.partial(_rewrite_apart, graph, this),
                               tf_adapter.autograph_converts())
        else:
            tf_adapter.install_trace_hook(_on_trace)
            setattr(graph, _MARK, this)
        return body(*args, **kwargs)

    if wrapped.__name__ == LAMBDA:  # by that name AutoGraph would look for a lambda's source here
        wrapped.__name__ = LAMBDA.strip("<>")
    return wrapped


def on_compiled_graphs(callback: Callable[[Any], None] | None) -> None:
    """Have a callable called with each FuncGraph that XLA will compile and nobody marked.

    Only with those that compute a gradient themselves and have not been rewritten; before their
    FunctionDef is made. None ends it.

    Args:
      callback: takes the FuncGraph, and may change it in place; None for no callback.
    """
    global _compiled_graphs
    _compiled_graphs = callback
    if callback is not None:
        tf_adapter.install_trace_hook(_on_trace)


def called_with(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call what may trace, such that the trace knows with which arguments.

    Args:
      function: a `tf.function`, or another callable that may trace.
      *args: positional arguments of the call.
      **kwargs: keyword arguments of the call.

    Returns:
      What the function returns.
    """
    if not tf.executing_eagerly():
        return function(*args, **kwargs)
    with knowing(CallSizes.of((args, kwargs), known_sizes().batch)):
        return function(*args, **kwargs)


def traces_compiled() -> bool:
    """Return whether ops are being traced for XLA now."""
    graph = tf_adapter.tracing_graph()
    return graph is not None and tf_adapter.in_xla(graph)


def _python_values(args: tuple, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return plain Python values in a call's arguments, as text."""
    return tuple(repr(leaf) for leaf in tf.nest.flatten((args, kwargs))
                 if isinstance(leaf, bool | int | float | str | bytes))


def _warn_eager(name: str) -> None:
    warnings.warn(
        f"tfckpt: {name} runs eagerly, so there is no graph to rewrite and no memory is saved; "
        "wrap it in tf.function (under Keras: run_eagerly=False), and see that "
        "tf.config.run_functions_eagerly is off", stacklevel=4)


def _on_trace(func_graph: Any) -> None:
    mark = getattr(func_graph, _MARK, None)
    if mark is None:
        if _compiled_graphs is not None and _trains_compiled(func_graph) and (
                not tf_adapter.makes_variables(func_graph)):
            _compiled_graphs(func_graph)
        return
    delattr(func_graph, _MARK)  # a graph is rewritten once
    if tf_adapter.makes_variables(func_graph):
        return  # TensorFlow traces again
    Traced(func_graph, mark, uncaptured_inputs(func_graph)).rewrite_in(func_graph)


def _trains_compiled(func_graph: Any) -> bool:
    """Return whether an unmarked graph is compiled by XLA, has a gradient, and is as traced."""
    if not tf_adapter.in_xla(func_graph) or tf_adapter.made_by_a_gradient(func_graph):
        return False
    return has_gradients(func_graph) and not any(
        is_rewritten(op.name) for op in func_graph.get_operations())


def _rewrite_apart(outer: Any, mark: Mark, func_graph: Any, inputs: Sequence[tf.Tensor],
                   realise: Callable) -> None:
    """Rewrite a step that was traced by itself, in the graph that it is imported into."""
    TracedApart(func_graph, mark, inputs, realise).rewrite_in(outer)
