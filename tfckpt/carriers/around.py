"""The step that functions of loops and branches are in, before and after they are rewritten."""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler.lowered_bodies import InPlace, LoweredStep
from tfckpt.capture.grappler.lowered_loops import NotRaised
from tfckpt.capture.grappler.question import question
from tfckpt.capture.grappler.terms import Terms
from tfckpt.capture.op_attributes import results_of
from tfckpt.capture.regions import is_gradient_scope
from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.driving.answers import XLA_WORDS
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import FORWARD, Graph, Op
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


class Place(enum.Enum):
    """Where the function runs that an op calls."""

    OP = "op"  # its ops stand in the place of the op, a loop or branch
    ELEMENT = "element"  # by itself, for each element of a dataset
    COMPILED = "compiled"  # by itself, as XLA compiles it


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that an op of a step calls and that computes a gradient.

    Attributes:
      graph: a FuncGraph of its own.
      op: what calls it, with the names of the calls around it; its own name where XLA compiles it.
      number: which of the functions of that op it is.
      sizes: of what it is called with; for a loop, in its first iteration.
      beside_bytes: what the results of the op take, as far as that is known, lists included.
      place: where it runs.
    """

    graph: Any
    op: str
    number: int
    sizes: CallSizes
    beside_bytes: int
    place: Place = Place.OP


class Around:
    """The step that functions are in, as it is before anything in it is changed.

    Args:
      graph: its FuncGraph; the trace is complete.
      jit_compile: whether XLA compiles it; ops may say so as well.
      options: how it is planned.
      shapes: more of the shapes in it; only asked where there is something to plan.
      terms: in which Grappler is asked about it; None: as calls have it asked.
    """

    def __init__(self, graph: Any, jit_compile: bool, options: Options, shapes: Shapes,
                 terms: Terms | None = None) -> None:
        self.graph, self.options, self.shapes = graph, options, functools.cache(shapes)
        self.terms = terms
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
            plain = question(self.graph, (), tf_adapter.shown_definition(self.graph),
                             terms=self.terms)
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
        inputs = [same(known, tensor.op) for tensor in self.graph.inputs]
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


def has_gradients(graph: Any) -> bool:
    """Return whether ops of a graph itself, not of functions that it calls, compute a gradient.

    Args:
      graph: FuncGraph or imported graph.
    """
    return any(is_gradient_scope(op.name) for op in graph.get_operations())


def same(known: tf.Graph, op: tf.Operation) -> tf.Operation:
    """Return the op of another graph with the name of an op; that itself where there is none.

    Args:
      known: the other graph.
      op: of the graph that the other was made of.
    """
    try:
        return known.get_operation_by_name(op.name)
    except KeyError:
        return op
