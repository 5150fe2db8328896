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

from tfckpt.budget import Budget, parse_budget
from tfckpt.capture import tf_adapter
from tfckpt.capture.shapes import concrete_shapes, has_unknown_shapes
from tfckpt.capture.tfgraph import NESTED_CALLS, capture
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.costgraph import CostGraph
from tfckpt.errors import CostError, InfeasibleBudgetError, PlanError, RewriteError
from tfckpt.graph import Graph
from tfckpt.plan.allocator import CPU_SMALLEST
from tfckpt.plan.forward_ad import Decision, decide
from tfckpt.plan.planner import (
    AUTO,
    OBJECTIVES,
    SOLVER_NAMES,
    Planned,
    baseline,
    plan_step,
)
from tfckpt.plan.simulate import Timeline
from tfckpt.report import Report, make_report
from tfckpt.rewrite.apply_funcgraph import apply
from tfckpt.rewrite.build import build_edits
from tfckpt.rewrite.edits import Edits, check_edits
from tfckpt.rewrite.graph_diff import graph_edits, join_edits

_MARK = "_tfckpt_mark"


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options of one decorated step."""

    budget: Budget
    solver: str = AUTO
    objective: str = "time"
    batch_size: int | None = None
    free_moves: bool = True
    fad: str | bool = False


def make_options(budget: object = "min", solver: str = AUTO, objective: str = "time",
                 batch_size: int | None = None, free_moves: bool = True,
                 fad: str | bool = False) -> Options:
    """Checks options before anything is traced.

    Raises:
      PlanError: an option is malformed; the message says what may be written.
    """
    if solver not in SOLVER_NAMES:
        raise PlanError(f"plan: unknown solver {solver!r}; choose one of "
                        f"{', '.join(SOLVER_NAMES)}")
    if objective not in OBJECTIVES:
        raise PlanError(f"plan: unknown objective {objective!r}; choose one of "
                        f"{', '.join(OBJECTIVES)}")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)
                                   or batch_size <= 0):
        raise PlanError(f"plan: batch_size={batch_size!r} must be a positive int")
    if not isinstance(fad, bool) and fad != AUTO:
        raise PlanError(f"plan: fad={fad!r} must be {AUTO!r}, True or False")
    return Options(parse_budget(budget), solver, objective, batch_size, free_moves, fad)


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
        self.reports[signature] = report


@dataclasses.dataclass(frozen=True)
class Mark:
    """What the trace hook needs to know about a graph."""

    options: Options
    records: Records
    name: str
    jit_compile: bool = False


_calls = threading.local()
_without_gradient: set[str] = set()


def mark_tracing_graph(mark: Mark) -> bool:
    """Marks the FuncGraph being traced; False where there is none (eager execution)."""
    graph = tf_adapter.tracing_graph()
    if graph is None:
        return False
    tf_adapter.install_trace_hook(_on_trace)
    setattr(graph, _MARK, mark)
    return True


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
        dynamic peak as a float in (0, 1], or "min".
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
        feasible budget) or CostError (unknown dimensions).
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

        @functools.wraps(body)
        def marked(*args, **kwargs):
            if not mark_tracing_graph(mark):
                _warn_eager(name)
            return body(*args, **kwargs)

        self._plain = fn
        self._fn = tf_adapter.clone_function(fn, marked) if self._is_function else marked
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
        previous = getattr(_calls, "arguments", None)
        if tf.executing_eagerly():
            _calls.arguments = (args, kwargs)
        try:
            return self._fn(*args, **kwargs)
        finally:
            _calls.arguments = previous

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        return _BoundStep(self, instance)

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "_fn":
            raise AttributeError(name)
        return getattr(self._fn, name)


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


def _warn_eager(name: str) -> None:
    warnings.warn(
        f"tfckpt: {name} runs eagerly, so there is no graph to rewrite and no memory is saved; "
        "wrap it in tf.function (under Keras: run_eagerly=False)", stacklevel=4)


# The trace hook.


def _on_trace(func_graph) -> None:
    mark = getattr(func_graph, _MARK, None)
    if mark is None:
        return
    delattr(func_graph, _MARK)  # a graph is rewritten once
    report = rewrite_graph(func_graph, mark)
    if report is not None:
        mark.records.add(_signature(func_graph), report, func_graph)


def rewrite_graph(func_graph, mark: Mark) -> Report | None:
    """Captures, plans and rewrites one traced graph in place; None where nothing trains.

    Raises:
      CostError, InfeasibleBudgetError: the graph is untouched.
    """
    started = time.perf_counter()
    graph = _capture(func_graph, mark)
    if not graph.has_gradient():
        if mark.name not in _without_gradient:
            _without_gradient.add(mark.name)
            logging.warning("tfckpt: %s computes no gradient; it is left as it is", mark.name)
        return None
    cost = build_cost_graph(graph)
    single = _single_device(graph)
    try:
        decision = _plan(graph, cost, mark.options, single)
    except InfeasibleBudgetError:
        raise
    except PlanError as error:  # ours, not the caller's: options were checked before
        warnings.warn(f"tfckpt: {mark.name} trains unchanged: {error}", stacklevel=2)
        return None
    planned = decision.planned
    applied, reason = planned.peak_bytes < planned.baseline_bytes, ""
    fence_count = 0
    if not applied:
        reason = "no plan is predicted to lower the peak"
    else:
        try:
            edits = _edits(graph, decision, single)
            fence_count = sum(1 for op in edits.added if op.name.startswith("tfckpt/fence"))
            apply(func_graph, edits)
        except RewriteError as error:
            applied, reason = False, str(error)
            warnings.warn(f"tfckpt: {mark.name} trains unchanged: {error}", stacklevel=2)
    report = make_report(mark.name, graph, cost, decision, applied=applied, reason=reason,
                         fence_count=fence_count, seconds=time.perf_counter() - started,
                         refused=_refused(graph))
    logging.info("%s", report)
    return report


def _edits(graph: Graph, decision: Decision, single: bool) -> Edits:
    """Checked edits: what forward AD changes, then what the plan does, as one value."""
    edits = build_edits(decision.graph, decision.cost, decision.planned.plan,
                        await_updates=single)
    if decision.graph is not graph:
        edits = join_edits(graph_edits(graph, decision.graph), edits)
    check_edits(graph, edits)
    return edits


def _capture(func_graph, mark: Mark) -> Graph:
    options, shapes = mark.options, None
    if has_unknown_shapes(func_graph):
        batch = options.batch_size or getattr(_calls, "batch", None)
        shapes = concrete_shapes(func_graph, batch, _argument_shapes(func_graph))
    graph = capture(func_graph, shapes=shapes)
    return dataclasses.replace(graph, in_xla=True) if mark.jit_compile else graph


def _argument_shapes(func_graph) -> dict[str, Sequence[int]]:
    """Shapes of the call's real tensors, by the placeholders that stand for them."""
    args, kwargs = getattr(_calls, "arguments", None) or ((), {})
    tensors = [t for t in tf.nest.flatten((args, kwargs), expand_composites=True)
               if hasattr(t, "shape") and hasattr(t, "dtype")
               and not isinstance(t, tf.Variable)]
    captured = {t.name for t in func_graph.internal_captures}
    inputs = [t for t in func_graph.inputs if t.name not in captured]
    if len(tensors) != len(inputs):
        return {}
    found = {}
    for tensor, placeholder in zip(tensors, inputs, strict=True):
        shape = tf.TensorShape(tensor.shape)
        if shape.is_fully_defined() and placeholder.shape.is_compatible_with(shape):
            found[placeholder.op.name] = shape.as_list()
    return found


def _single_device(graph: Graph) -> bool:
    """Whether a fence may wait for updates: one device and no collective."""
    devices = {op.device for op in graph.ops if op.device}
    return len(devices) <= 1 and not any(op.type.startswith(("Collective", "Nccl"))
                                         for op in graph.ops)


def price_plain(graph: Graph, cost: CostGraph) -> tuple[int | None, tuple[Timeline, int]]:
    """The smallest request that is counted in bytes, and what `baseline` says of the step."""
    smallest: int | None = 0 if tf.config.list_logical_devices("GPU") else CPU_SMALLEST
    plain = baseline(cost, in_xla=graph.in_xla, smallest=smallest)
    if 2 * plain[1] < plain[0].peak_bytes:  # hardly any request would be counted
        smallest = None
        plain = baseline(cost, in_xla=graph.in_xla, smallest=None)
    return smallest, plain


def _plan(graph: Graph, cost: CostGraph, options: Options, single: bool) -> Decision:
    smallest, plain = price_plain(graph, cost)
    budget = options.budget.dynamic(plain[1], cost.resident_bytes)

    def plan(graph_cost: CostGraph) -> Planned:
        return plan_step(graph_cost, budget, solver=options.solver, objective=options.objective,
                         free_moves=options.free_moves, await_updates=single,
                         in_xla=graph.in_xla, smallest=smallest, plain=plain)

    fad = options.fad if options.solver == AUTO or options.fad is True else False
    try:
        try:
            return decide(graph, cost, plan, fad=fad, budget=budget, objective=options.objective,
                          plain_bytes=plain[1])
        except CostError as error:  # of forward AD: the graph itself was priced before
            warnings.warn(f"tfckpt: no derivatives are kept: {error}", stacklevel=2)
            return Decision(graph, cost, plan(cost))
    except InfeasibleBudgetError as error:
        raise options.budget.explain(error, plain[1], cost.resident_bytes) from None


def _refused(graph: Graph) -> list[str]:
    return [f"{op.name}: a nested function is treated as one op, not looked into"
            for op in graph.ops if op.type in NESTED_CALLS][:8]


def _signature(func_graph) -> str:
    captured = {t.name for t in func_graph.internal_captures}
    parts = [f"{t.dtype.name}{t.shape.as_list() if t.shape.rank is not None else '[?]'}"
             for t in func_graph.inputs if t.name not in captured]
    return f"{func_graph.name}({', '.join(parts)})"
