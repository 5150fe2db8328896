"""The decorator: marks the graph a step is traced into; the trace hook rewrites marked graphs.

Nothing is traced twice, no nested function is made, and no other graph is touched.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.inline import Inlining, is_rewritten
from tfckpt.capture.regions import is_gradient_scope
from tfckpt.capture.shapes import (
    argument_shapes,
    concrete_shapes,
    has_unknown_shapes,
    uncaptured_inputs,
)
from tfckpt.capture.tfgraph import capture, gradient_inside
from tfckpt.errors import CostError, PlanError, RewriteError
from tfckpt.graph import Graph
from tfckpt.import_route import announce, import_step, refusal
from tfckpt.pipeline import (
    NOTHING_TO_GAIN,
    Options,
    join,
    make_options,
    plan_parts,
    report_of,
    unplanned_part,
)
from tfckpt.plan.planner import AUTO
from tfckpt.report import Report
from tfckpt.rewrite.apply_funcgraph import apply
from tfckpt.rewrite.plain_step import LiveStep

_MARK = "_tfckpt_mark"


class Records:
    """The reports of one decorated step: the latest, and one for each traced signature."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.reports: dict[str, Report] = {}
        self.graph: Callable[[], tf.Graph | None] = lambda: None

    def add(self, signature: str, report: Report, graph: tf.Graph) -> None:
        """Notes the report of a trace, and its graph for as long as TensorFlow keeps that."""
        self.graph = weakref.ref(graph)
        self.report = report
        key, number = signature, 1
        while key in self.reports:  # traces that differ by something else, such as captured objects
            number += 1
            key = f"{signature} #{number}"
        self.reports[key] = report


@dataclasses.dataclass(frozen=True)
class Mark:
    """What the trace hook needs to know about a graph."""

    options: Options
    records: Records
    name: str
    jit_compile: bool = False
    arguments: tuple[str, ...] = ()
    """Python values among the arguments: a trace is made for each."""


_calls = threading.local()
_without_gradient: set[str] = set()
_compiled_graphs: Callable[[Any], None] | None = None


def wrap_body(body: Callable, mark: Mark) -> Callable:
    """The Python function of a step, such that what it is traced into is rewritten."""
    problem = tf_adapter.hook_problem()
    if problem:
        announce(problem)

    @functools.wraps(body)
    def wrapped(*args, **kwargs):
        graph = tf_adapter.tracing_graph()
        if graph is None:
            _warn_eager(mark.name)
            return body(*args, **kwargs)
        this = dataclasses.replace(mark, arguments=_python_values(args, kwargs))
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

    return wrapped


def on_compiled_graphs(callback: Callable[[Any], None] | None) -> None:
    """Has a callable called with each FuncGraph that XLA will compile and nobody marked.

    Only with those that compute a gradient themselves and have not been rewritten; before their
    FunctionDef is made. None ends it.
    """
    global _compiled_graphs
    _compiled_graphs = callback
    if callback is not None:
        tf_adapter.install_trace_hook(_on_trace)


def set_batch_hint(size: int | None) -> int | None:
    """Sets what an unknown leading dimension stands for in traces of this thread."""
    previous = getattr(_calls, "batch", None)
    _calls.batch = size
    return previous


def checkpoint(fn: Callable | None = None, *, budget: object = "min", solver: str = AUTO,
               objective: str = "time", batch_size: int | None = None, free_moves: bool = True,
               fad: str | bool = False):
    """Rewrites a training step so that it needs less memory and computes the same.

    Use it bare, with options, or as a call, above `tf.function` or on a Keras `train_step`
    method. The step's graph is rewritten once for each trace.

    Args:
      fn: a `tf.function`, or a Python function that is traced inside one.
      budget: bytes of the whole device as an int or "6GiB", a fraction of the plain step's
        dynamic peak as a float in (0, 1], or "min"; or a mapping from devices to such budgets
        (see `tfckpt.device_budgets`): a single one is that of each device.
      solver: "auto", "store_all", "chen", "lcg", "acg", "exact_dp",
        "approx_dp" or "optimal".
      objective: "time" (fastest plan that fits) or "memory" (least peak).
      batch_size: what an unknown leading dimension stands for.
      free_moves: whether moves that cost no time may be used.
      fad: whether the derivative of an element-wise activation may be kept instead of the
        tensors that it is computed from (nested forward AD). False takes none: recomputation
        alone changes no bit. True takes every region that saves bytes; "auto" weighs it against
        recomputing, with solver "auto" only. A kept derivative may change rounding, by 1e-6 of a
        gradient in float32 and 1e-2 in half precision, and may be finite where the plain
        gradient overflows.

    Returns:
      A callable with the same signature and `report` (None before the first trace) and
      `reports` (by signature).

    Raises:
      PlanError: malformed options. At trace time: InfeasibleBudgetError (states the smallest
        feasible budget), CostError (unknown dimensions), or PlanError where a mapping of budgets
        lacks a device of the step or has one that does not exist.
    """
    options = make_options(budget, solver, objective, batch_size, free_moves, fad)
    if fn is None:
        return lambda function: CheckpointedStep(function, options)
    if not callable(fn):
        raise PlanError(f"plan: tfckpt.checkpoint takes a function, not {type(fn).__name__}; "
                        "options are keyword-only")
    return CheckpointedStep(fn, options)


class CheckpointedStep:
    """A training step whose traces are rewritten. Works as a function and as a method."""

    def __init__(self, fn: Any, options: Options):
        self._records = Records()
        self._is_function = tf_adapter.is_tf_function(fn)
        body = fn.python_function if self._is_function else fn
        name = getattr(body, "__name__", "step")
        mark = Mark(options, self._records, name,
                    self._is_function and tf_adapter.compiles_with_xla(fn))

        marked = wrap_body(body, mark)
        self._plain = fn
        self._fn = tf_adapter.clone_function(fn, marked) if self._is_function else marked
        # inside a compiled function: what was traced for the executor would be of no use there
        self._compiled = tf_adapter.clone_function(fn, marked) if self._is_function else marked
        functools.update_wrapper(self, body)

    @property
    def report(self) -> Report | None:
        """The latest trace's report; None before the first trace."""
        return self._records.report

    @property
    def reports(self) -> dict[str, Report]:
        """Reports by traced signature."""
        return dict(self._records.reports)

    @property
    def plain(self) -> Callable:
        """The step as it was given."""
        return self._plain

    def __call__(self, *args, **kwargs):
        graph = tf_adapter.tracing_graph()
        compiled = graph is not None and tf_adapter.in_xla(graph)
        return _called_with(self._compiled if compiled else self._fn, *args, **kwargs)

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        return _BoundStep(self, instance)

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "_fn":
            raise AttributeError(name)
        found = getattr(self._fn, name)
        if name == "get_concrete_function":  # traces as a call does
            return functools.partial(_called_with, found)
        return found


def _called_with(function: Callable, *args, **kwargs):
    """Calls what may trace, such that the trace knows with which arguments."""
    previous = getattr(_calls, "arguments", None)
    if tf.executing_eagerly():
        _calls.arguments = (args, kwargs)
    try:
        return function(*args, **kwargs)
    finally:
        _calls.arguments = previous


class _BoundStep(functools.partial):
    """A method: the step with its instance filled in, and the step's reports."""

    def __new__(cls, step: CheckpointedStep, instance):
        return super().__new__(cls, step, instance)

    @property
    def report(self) -> Report | None:
        step: Any = self.func
        return step.report

    @property
    def reports(self) -> dict[str, Report]:
        step: Any = self.func
        return step.reports


def _python_values(args, kwargs) -> tuple[str, ...]:
    """Plain Python values in a call's arguments, as text."""
    return tuple(repr(leaf) for leaf in tf.nest.flatten((args, kwargs))
                 if isinstance(leaf, bool | int | float | str | bytes))


def _warn_eager(name: str) -> None:
    warnings.warn(
        f"tfckpt: {name} runs eagerly, so there is no graph to rewrite and no memory is saved; "
        "wrap it in tf.function (under Keras: run_eagerly=False)", stacklevel=4)


# The trace hook.


def _on_trace(func_graph) -> None:
    mark = getattr(func_graph, _MARK, None)
    if mark is None:
        if _compiled_graphs is not None and _trains_compiled(func_graph):
            _compiled_graphs(func_graph)
        return
    delattr(func_graph, _MARK)  # a graph is rewritten once
    inputs = uncaptured_inputs(func_graph)
    report = rewrite_graph(func_graph, mark, inputs)
    if report is not None:
        mark.records.add(_signature(func_graph, mark, inputs), report, func_graph)


def _trains_compiled(func_graph) -> bool:
    """Whether an unmarked graph is compiled by XLA, computes a gradient and is as it was traced."""
    if not tf_adapter.in_xla(func_graph):
        return False
    names = [op.name for op in func_graph.get_operations()]
    return any(map(is_gradient_scope, names)) and not any(map(is_rewritten, names))


def _rewrite_apart(outer, mark: Mark, func_graph, inputs, apply_edits: Callable) -> None:
    """The same for a step that was traced by itself, in the graph that it is imported into."""
    report, _ = _rewrite(func_graph, mark, inputs, None, apply_edits)
    if report is not None:
        mark.records.add(_signature(outer, mark, inputs), report, outer)


def rewrite_graph(func_graph, mark: Mark, inputs: Sequence[tf.Tensor]) -> Report | None:
    """Captures, plans and rewrites one traced graph in place; None where nothing trains.

    Args:
      inputs: the tensors in the graph that stand for those of the call.

    Raises:
      CostError, InfeasibleBudgetError: the graph is untouched.
    """
    inlining = Inlining(func_graph)
    applied = False
    try:
        report, applied = _rewrite(func_graph, mark, inputs, inlining, apply)
        return report
    finally:
        if not applied:
            inlining.undo()


def _rewrite(func_graph, mark: Mark, inputs: Sequence[tf.Tensor], inlining: Inlining | None,
             apply_edits: Callable) -> tuple[Report | None, bool]:
    """The report, and whether the graph was changed.

    Args:
      inlining: nested functions give way to their bodies where there is one.
      apply_edits: takes the graph and `Edits`; realises them, or raises RewriteError.
    """
    started = time.perf_counter()
    graph = _capture(func_graph, mark, inputs, inlining)
    if not graph.has_gradient():
        hidden = gradient_inside(func_graph)
        if hidden:
            return _report_hidden(graph, mark, hidden, time.perf_counter() - started), False
        if mark.name not in _without_gradient:
            _without_gradient.add(mark.name)
            logging.warning("tfckpt: %s computes no gradient; it is left as it is", mark.name)
        return None, False
    plain = LiveStep(func_graph)
    parts = plan_parts(graph, mark.options, plain)
    reason = ""
    try:
        edits = join(graph, parts, mark.options, plain)
        if edits is not None:
            apply_edits(func_graph, edits)
    except RewriteError as error:
        reason = str(error)
    if reason:
        parts = [dataclasses.replace(p, edits=None, reason=reason) for p in parts]
    if any(p.edits is None and p.reason != NOTHING_TO_GAIN for p in parts):
        warnings.warn(f"tfckpt: {mark.name} trains unchanged: {parts[0].reason}", stacklevel=2)
    report = report_of(mark.name, graph, parts, time.perf_counter() - started)
    logging.info("%s", report)
    return report, any(p.edits is not None for p in parts)


def _report_hidden(graph: Graph, mark: Mark, inside: str, seconds: float) -> Report | None:
    """The report of a step whose gradient is computed by a function that the step calls."""
    reason = (f"the gradient is computed inside of a loop, branch or function ({inside}); put the "
              "decorator on the function that is called there")
    warnings.warn(f"tfckpt: {mark.name} trains unchanged: {reason}", stacklevel=2)
    try:
        return report_of(mark.name, graph, [unplanned_part(graph, reason)], seconds)
    except CostError:  # of a step that is not looked into anyway
        return None


def _capture(func_graph, mark: Mark, inputs: Sequence[tf.Tensor],
             inlining: Inlining | None) -> Graph:
    options, shapes = mark.options, None
    if has_unknown_shapes(func_graph):
        batch = options.batch_size or getattr(_calls, "batch", None)
        arguments: object = getattr(_calls, "arguments", None) or ((), {})
        shapes = concrete_shapes(func_graph, batch, argument_shapes(inputs, arguments))
    return capture(func_graph, shapes=shapes, inlining=inlining, in_xla=mark.jit_compile)


def _signature(graph, mark: Mark, inputs: Sequence[tf.Tensor]) -> str:
    parts = [f"{t.dtype.name}{t.shape.as_list() if t.shape.rank is not None else '[?]'}"
             for t in inputs]
    compiled = " compiled" if mark.jit_compile or tf_adapter.in_xla(graph) else ""
    return f"{graph.name}({', '.join([*parts, *mark.arguments])}){compiled}"
