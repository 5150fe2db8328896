"""Steps inside of loops and branches: gradient accumulation, a critic's updates, epochs in a loop.

A function of a loop or branch that computes a gradient itself is a step. It is planned like one
that is traced by itself, for what an iteration is handed, and the op calls what becomes of it.
Inside of that, and of functions that the step calls, the same is looked for first. What a dataset
calls for each element (`for x in dataset`), and what XLA compiles by itself, is a step of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.compiled_calls import is_compiled_call
from tfckpt.capture.inlining.inline import is_rewritten, readable
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.capture.loops.lists import kept_lists
from tfckpt.capture.regions import is_gradient_scope
from tfckpt.capture.shapes import planned_shapes
from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.capture.steps import computes_gradient
from tfckpt.carriers.around import Around, Function, Place, Shapes, same
from tfckpt.carriers.records import known_sizes
from tfckpt.common import faults
from tfckpt.errors import CostError, InfeasibleBudgetError, PlanError
from tfckpt.ir.edits import TAKES
from tfckpt.ops import Calls, record
from tfckpt.report.report import Report

SUFFIX = "_recomputed"
_AT_ONCE = "parallel_iterations"


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What a function has become.

    Attributes:
      name: of another function.
      bytes: that it is planned to take while it runs; 0 where that is not known.
    """

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Planned:
    """What has become of a function's graph.

    Attributes:
      reports: of the function, and of what is inside of it.
      changed: whether it is another graph now.
    """

    reports: Sequence[Report]
    changed: bool


Plan = Callable[[Function], int | None]
"""Plans a function; returns the bytes that it is planned to take, None where it is as it was."""


def rewrite_inside(around: Around, changes: LiveChanges,
                   rewrite: Callable[[Function, Around], Planned]) -> tuple[list[Report], str]:
    """Have loops, branches and datasets call rewritten functions where theirs compute gradients.

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
        if function.place is Place.OP:
            around.remember()
        planned = rewrite(function, around)
        reports.extend(planned.reports)
        if not planned.changed:
            return None
        return max(report.planned_peak_bytes for report in planned.reports)

    try:
        changed = _Inside(around.graph, changes, around.shapes, plan, around.compiled).run()
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
                 compiled: bool, scope: str = "", trains: dict[str, bool] | None = None) -> None:
        self.graph, self.changes, self.plan, self.scope = graph, changes, plan, scope
        self.compiled = compiled
        self._known: dict[tuple, Rewritten | None] = {}
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
        sizes = functools.cache(lambda: self._sizes(op, body))
        place = self._place(op)
        if place is Place.COMPILED:
            within = f"{self.scope}{readable(name)}"
        if place is not Place.OP:
            return self._by_itself(Function(body, within, number, sizes(), 0, place), name)
        inner = _Inside(body, LiveChanges(body), lambda: _known(body, sizes()), self.plan,
                        self.compiled, f"{within}/", self._trains).run()
        takes = None
        if record(op.type).has_bodies and self._computes_gradient(name):
            takes = self.plan(Function(body, within, number, sizes(), self._result_bytes(op)))
        if not inner and takes is None:
            return None
        return self._defined(body, name, takes or 0)

    def _defined(self, body: Any, name: str, takes: int) -> Rewritten:
        return Rewritten(tf_adapter.define_function(body, self.graph, name + SUFFIX), takes)

    def _by_itself(self, function: Function, name: str) -> Rewritten | None:
        """Return what is to be called instead of a function that runs by itself.

        All that call it with the same sizes call the same.
        """
        key = name, function.place, function.sizes.leaves
        if key not in self._known:
            takes = self.plan(function)
            self._known[key] = None if takes is None else self._defined(function.graph, name, takes)
        return self._known[key]

    def _place(self, op: tf.Operation) -> Place:
        if record(op.type).calls is Calls.DATASET:
            return Place.ELEMENT
        return Place.COMPILED if not self.compiled and is_compiled_call(op) else Place.OP

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

    def _sizes(self, op: tf.Operation, body: Any) -> CallSizes:
        """Return the sizes of what an op hands to a function, and numbers that are known."""
        known = self._shapes() or self.graph  # of ops that return a number it may know nothing
        leaves: list[tuple[tuple[int, ...] | None]] = []
        numbers: dict[int, Any] = {}
        given = tf_adapter.handed(op, len(body.inputs))
        for n, (tensor, argument) in enumerate(zip(given, body.inputs, strict=True)):
            shape = argument.shape  # of an element
            if tensor is not None:
                there = same(known, tensor.op).outputs[tensor.value_index]
                shape = there.shape if there.shape.is_fully_defined() else tensor.shape
                number = tf_adapter.static_value(there) if (
                    there.dtype.is_integer and there.shape.rank == 0) else None
                numbers |= {} if number is None else {n: number}
            leaves.append((tuple(shape.as_list()) if shape.is_fully_defined() else None,))
        return CallSizes(tuple(leaves), known_sizes().batch, numbers=numbers)

    def _result_bytes(self, op: tf.Operation) -> int:
        known = functools.partial(same, self._shapes() or self.graph)
        lists = kept_lists(op, known).bytes if record(op.type).is_loop else {}
        return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size
                   for tensor in known(op).outputs) + sum(lists.values())


def _known(graph: Any, sizes: CallSizes) -> tf.Graph | None:
    """Return a graph with as many shapes known as can be; None where no more are."""
    now = tf_adapter.shown_definition(graph)  # with functions that graphs around it know
    try:
        return planned_shapes(graph, None, may_assume=False, sizes=sizes,
                              placeholders=graph.inputs, library=now.library)[0]
    except CostError:
        return None


def _is_differentiated(op: tf.Operation) -> bool:
    """Return whether an op is of a gradient, or one reads what it makes."""
    return is_gradient_scope(op.name) or any(
        is_gradient_scope(reader.name) for made in op.outputs for reader in made.consumers())
