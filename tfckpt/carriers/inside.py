"""Steps inside of loops and branches: gradient accumulation, a critic's updates, epochs in a loop.

A function of a loop or branch that computes a gradient itself is a step. It is planned like one
that is traced by itself, for what an iteration is handed, and the op calls what becomes of it.
Inside of that, and of functions that the step calls, the same is looked for first.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler.lowered_bodies import InPlace, LoweredStep
from tfckpt.capture.grappler.lowered_loops import NotRaised
from tfckpt.capture.grappler.question import question
from tfckpt.capture.inlining.inline import is_rewritten
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.capture.loops.lists import kept_lists
from tfckpt.capture.op_attributes import results_of
from tfckpt.capture.regions import is_gradient_scope
from tfckpt.capture.shapes import CallSizes, planned_shapes
from tfckpt.capture.steps import computes_gradient
from tfckpt.common import faults
from tfckpt.driving.answers import XLA_WORDS
from tfckpt.driving.carrier import Outcome
from tfckpt.errors import CostError, InfeasibleBudgetError, PlanError
from tfckpt.ir.edits import TAKES, Edits
from tfckpt.ir.graph import FORWARD, Graph, Op
from tfckpt.ops import Calls, record
from tfckpt.report.report import Report
from tfckpt.report.values import CompiledReport
from tfckpt.request.budget import format_bytes
from tfckpt.request.options import Options
from tfckpt.verify.arithmetic.certified import Arithmetic
from tfckpt.verify.arithmetic.same import SEGMENTED, Certificate
from tfckpt.verify.arithmetic.single_loops import has_segments
from tfckpt.verify.asking.elsewhere import asked_for
from tfckpt.verify.asking.xla import Asked, NotAsked

Shapes = Callable[[], tf.Graph | None]
"""Gives a graph whose ops have the same names, with more shapes known; None where there is none."""
SUFFIX = "_recomputed"
_AT_ONCE = "parallel_iterations"


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of a loop or branch that computes a gradient.

    Attributes:
      graph: a FuncGraph of its own.
      op: what calls it, with the names of the calls around it.
      number: which of the functions of that op it is.
      sizes: of what it is called with; for a loop, in its first iteration.
      beside_bytes: what the results of the op take, as far as that is known, lists included.
    """

    graph: Any
    op: str
    number: int
    sizes: CallSizes
    beside_bytes: int


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What a function has become.

    Attributes:
      name: of another function.
      bytes: that it is planned to take while it runs; 0 where that is not known.
    """

    name: str
    bytes: int


class Around:
    """The step that functions are in, as it is before anything in it is changed.

    Args:
      graph: its FuncGraph; the trace is complete.
      jit_compile: whether XLA compiles it; ops may say so as well.
      options: how it is planned.
      shapes: more of the shapes in it; only asked where there is something to plan.
    """

    def __init__(self, graph: Any, jit_compile: bool, options: Options, shapes: Shapes) -> None:
        self.graph, self.options, self.shapes = graph, options, functools.cache(shapes)
        self.compiled = jit_compile or tf_adapter.in_xla(graph)
        self._remembered = False
        self._lowered: LoweredStep | None = None
        self._arithmetic: Arithmetic | None = None
        self._compiler: Asked | None = None

    def remember(self) -> None:
        """Remember what the step is, the first time that this is called."""
        if self._remembered:
            return
        self._remembered = True
        if self.compiled:
            self._compiler = self._as_compiled() if self.options.xla_trials else None
            if self._compiler is not None:
                self._compiler.definition  # noqa: B018 - cached, as it is now
        else:
            plain = question(self.graph, (), tf_adapter.shown_definition(self.graph))
            self._lowered = LoweredStep(plain)
            self._arithmetic = Arithmetic(self.graph, plain)

    def lowered(self, function: Function) -> InPlace:
        """Return what Grappler makes of a function where it is lowered.

        Args:
          function: of the step.

        Raises:
          NotRaised: it is not understood.
        """
        if self._lowered is None:
            raise NotRaised("Grappler is not asked about what XLA compiles")
        scope = self._lowered.scope(function.op, function.number)
        return self._lowered.body(function.graph, scope)

    def compared(self) -> Certificate | None:
        """Compare the arithmetic of the step with what has become of it; None under XLA."""
        if self._arithmetic is None:
            return None
        now = tf_adapter.shown_definition(self.graph)
        if any(map(has_segments, now.library.function)):
            return Certificate(None, reason=SEGMENTED)
        return self._arithmetic.after()

    def refusal(self, reports: Sequence[Report]) -> str:
        """Return why the step is to be left as it was; "" where what has become of it may stay.

        Args:
          reports: of the functions in it; what XLA says of the step is noted there.
        """
        if self._compiler is not None:
            return self._asked(self._compiler, reports)
        found = self.compared() if self.options.exact else None
        return "" if found is None or found.same else f"exact=True: {found}"

    def _asked(self, compiler: Asked, reports: Sequence[Report]) -> str:
        started = time.perf_counter()
        now = self._as_compiled()
        assert now is not None  # since there was a compiler before
        try:
            before, after = compiler.memory(), now.memory()
        except NotAsked as error:
            logging.info("tfckpt: XLA is not asked about %s: %s", self.graph.name, error)
            return ""
        if after.temp_bytes > before.temp_bytes or (
                after.temp_bytes == before.temp_bytes and not has_gradients(self.graph)):
            return (f"{XLA_WORDS.takes} {format_bytes(after.temp_bytes)}, and "
                    f"{format_bytes(before.temp_bytes)} as it is")
        told = CompiledReport(before, after, 1, seconds=time.perf_counter() - started)
        for report in reports:
            report.compiled = told
        return ""

    def _as_compiled(self) -> Asked | None:
        """Return what asks XLA about the step as it is now; None where nobody compiles for it."""
        known = self.shapes() or self.graph
        inputs = [_same(known, tensor.op) for tensor in self.graph.inputs]
        return asked_for(self.graph, Graph(self.graph.name, tuple(
            Op(op.name, op.type, (), (), results_of(op, {}), FORWARD, False) for op in inputs),
            (), ()), self.options.target)


@dataclasses.dataclass(frozen=True)
class InStep:
    """How a function computes, to be compared with how it does once it is edited.

    Attributes:
      alone: the function by itself.
      around: the step that it is in: in that it is compared in the end.
    """

    alone: Arithmetic
    around: Around

    def before(self, edits: Edits) -> Certificate:
        """Compare the function with what edits would make of it.

        Args:
          edits: what is done to the function; not applied.
        """
        return self.alone.before(edits)

    def after(self) -> Certificate:
        """Compare the step with what has become of it."""
        found = self.around.compared()
        assert found is not None  # a step that XLA compiles is in doubt
        return found

    def loops(self, edits: Edits) -> Certificate:
        """Compare the bodies of loops in the function that are recomputed in segments.

        Args:
          edits: what is done to the function; not applied.
        """
        return self.alone.loops(edits)


Plan = Callable[[Function], int | None]
"""Plans a function; returns the bytes that it is planned to take, None where it is as it was."""


def rewrite_inside(around: Around, changes: LiveChanges,
                   rewrite: Callable[[Function, Around], Outcome]) -> tuple[list[Report], str]:
    """Have loops and branches call rewritten functions where theirs compute gradients themselves.

    What the gradient of the graph itself reads stays as it is: it belongs to a larger step.

    Args:
      around: the step.
      changes: of its graph; what is done can be taken back by it.
      rewrite: plans such a function, and changes its graph.

    Returns:
      The reports of the functions, and why they are left as they are; "" where they are not.

    Raises:
      InfeasibleBudgetError, PlanError, CostError: one cannot be planned; the step is untouched.
    """
    start, reports = changes.point(), list[Report]()

    def plan(function: Function) -> int | None:
        around.remember()
        outcome = rewrite(function, around)
        if outcome.report is None:
            return None
        reports.append(outcome.report)
        return outcome.report.planned_peak_bytes if outcome.edits is not None else None

    try:
        changed = _Inside(around.graph, changes, around.shapes, plan).run()
        why = around.refusal(reports) if changed else ""
    except (InfeasibleBudgetError, PlanError, CostError):
        changes.revert(start)
        raise
    except Exception as error:
        why = faults.said(error, f"loops and branches of {around.graph.name} are left as they are")
    if why:
        changes.revert(start)
        reports.clear()
    return reports, why


class _Inside:
    def __init__(self, graph: Any, changes: LiveChanges, shapes: Shapes, plan: Plan,
                 scope: str = "", trains: dict[str, bool] | None = None) -> None:
        self.graph, self.changes, self.plan, self.scope = graph, changes, plan, scope
        self._shapes = functools.cache(shapes)
        self._trains = {} if trains is None else trains

    def run(self) -> bool:
        changed = False
        for op in self.graph.get_operations():
            if record(op.type).calls is None or _is_differentiated(op):
                continue
            called = tf_adapter.functions_of(op)
            instead = [self._instead(op, name, number) for number, name in enumerate(
                name for names in called.values() for name in names)]
            if any(instead):
                changed = True
                self._change(op, called, instead)
        return changed

    def _change(self, op: tf.Operation, called: Mapping[str, Sequence[str]],
                instead: Sequence[Rewritten | None]) -> None:
        """Have an op call other functions, one iteration of a loop after the other."""
        left = iter(instead)
        for attr, names in called.items():
            self.changes.call(op, attr, [new.name if (new := next(left)) else name
                                         for name in names])
        if record(op.type).has_bodies:
            self.changes.set_attribute(op, TAKES, tf_adapter.integers(
                [new.bytes if new else 0 for new in instead]))
        if record(op.type).is_loop:
            self.changes.set_attribute(op, _AT_ONCE, tf_adapter.integer(1))

    def _instead(self, op: tf.Operation, name: str, number: int) -> Rewritten | None:
        """Return what an op is to call instead of a function; None where it stays."""
        if not self._has_gradient(name):
            return None
        body, within = tf_adapter.function_copied(op, name), f"{self.scope}{op.name}"
        sizes = functools.cache(lambda: self._sizes(op))
        inner = _Inside(body, LiveChanges(body), lambda: _known(body, sizes()), self.plan,
                        f"{within}/", self._trains).run()
        takes = None
        if record(op.type).has_bodies and self._computes_gradient(name):
            takes = self.plan(Function(body, within, number, sizes(), self._result_bytes(op)))
        if not inner and takes is None:
            return None
        return Rewritten(tf_adapter.define_function(body, self.graph, name + SUFFIX), takes or 0)

    def _has_gradient(self, name: str) -> bool:
        """Return whether a function, or one that it calls, computes a gradient.

        Not where tfckpt has rewritten it: the user has decorated what is called there.
        """
        if name not in self._trains:
            self._trains[name] = False  # until it is known: it may call itself
            function = tf_adapter.find_function(self.graph, name)
            if function is not None and "api_implements" not in function.attr:
                called = (other for node in function.node_def if record(node.op).calls
                          for other in tf_adapter.functions_named(node))
                self._trains[name] = not any(is_rewritten(n.name) for n in function.node_def) and (
                    any(map(computes_gradient, function.node_def))
                    or any(map(self._has_gradient, called)))
        return self._trains[name]

    def _computes_gradient(self, name: str) -> bool:
        """Return whether a function, or one that is inlined in it, computes a gradient."""
        function = tf_adapter.find_function(self.graph, name)
        return function is not None and any(
            computes_gradient(node) or record(node.op).calls is Calls.FUNCTION and any(
                map(self._computes_gradient, tf_adapter.functions_named(node)))
            for node in function.node_def)

    def _sizes(self, op: tf.Operation) -> CallSizes:
        """Return the sizes of what an op hands to its functions, and numbers that are known."""
        known = self._shapes() or self.graph  # of ops that return a number it may know nothing
        given = [(tensor, _same(known, tensor.op).outputs[tensor.value_index])
                 for tensor in op.inputs[record(op.type).first_argument:]]
        shapes = [there.shape if there.shape.is_fully_defined() else mine.shape
                  for mine, there in given]
        numbers = {n: tf_adapter.static_value(there) for n, (_, there) in enumerate(given)
                   if there.dtype.is_integer and there.shape.rank == 0}
        return CallSizes(
            tuple((tuple(shape.as_list()) if shape.is_fully_defined() else None,)
                  for shape in shapes),
            numbers={n: value for n, value in numbers.items() if value is not None})


    def _result_bytes(self, op: tf.Operation) -> int:
        known = functools.partial(_same, self._shapes() or self.graph)
        lists = kept_lists(op, known).bytes if record(op.type).is_loop else {}
        return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size
                   for tensor in known(op).outputs) + sum(lists.values())


def _same(known: tf.Graph, op: tf.Operation) -> tf.Operation:
    """Return the op of another graph with a name; the op itself where there is none."""
    try:
        return known.get_operation_by_name(op.name)
    except KeyError:
        return op


def _known(graph: Any, sizes: CallSizes) -> tf.Graph | None:
    """Return a graph with as many shapes known as can be; None where no more are."""
    now = tf_adapter.shown_definition(graph)  # with functions that graphs around it know
    try:
        return planned_shapes(graph, None, may_assume=False, sizes=sizes,
                              placeholders=graph.inputs, library=now.library)[0]
    except CostError:
        return None


def has_gradients(graph: Any) -> bool:
    """Return whether ops of a graph itself, not of functions that it calls, compute a gradient.

    Args:
      graph: FuncGraph or imported graph.
    """
    return any(is_gradient_scope(op.name) for op in graph.get_operations())


def _is_differentiated(op: tf.Operation) -> bool:
    """Return whether an op is of a gradient, or one reads what it makes."""
    return is_gradient_scope(op.name) or any(
        is_gradient_scope(reader.name) for made in op.outputs for reader in made.consumers())
