"""A step whose trace is complete: its graph is captured, planned and edited in place.

A step by itself (`Traced`), a function of a loop or branch that is one (`InBody`), and a step that
is imported into the graph that calls it (`TracedApart`). Nothing is traced twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler import question as grappler
from tfckpt.capture.grappler.in_place import Body, optimise_in_place, wanted
from tfckpt.capture.grappler.question import Question
from tfckpt.capture.grappler.terms import Terms, has_calls, terms_of_datasets
from tfckpt.capture.inlining.inline import Inlining
from tfckpt.capture.inlining.live_changes import LiveChanges, Point
from tfckpt.capture.shapes import STAND_IN, planned_shapes
from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.capture.steps import trains
from tfckpt.capture.tfgraph import capture, gradient_inside
from tfckpt.carriers.around import Around, Function, InStep, Place, has_gradients
from tfckpt.carriers.branch_results import hand_out_what_is_read
from tfckpt.carriers.inside import Planned, rewrite_inside
from tfckpt.carriers.keras_layers import layer_names
from tfckpt.carriers.records import Mark, Records, knowing, known_sizes
from tfckpt.driver import INLINED, failed, run
from tfckpt.driving.carrier import Captured, Outcome
from tfckpt.errors import CostError, InfeasibleBudgetError, PlanError
from tfckpt.ir.edits import Edits
from tfckpt.ir.layers import LayerNames
from tfckpt.report.report import Report
from tfckpt.request.device_budgets import Budgets
from tfckpt.request.options import Options
from tfckpt.rewrite.appliers.funcgraph import apply
from tfckpt.verify.arithmetic.certified import IMPORTED, Arithmetic, doubt
from tfckpt.verify.asking.elsewhere import asked_for
from tfckpt.verify.asking.grappler import Optimised


class Traced:
    """A FuncGraph whose trace is complete, rewritten in place.

    Args:
      inputs: the tensors in the graph that stand for those of the call.
    """

    kind: ClassVar[str] = "trace hook"
    leaves_out: ClassVar[Mapping[str, str]] = {}

    def __init__(self, func_graph: Any, mark: Mark, inputs: Sequence[tf.Tensor]) -> None:
        self.func_graph, self.inputs = func_graph, inputs
        self.mark = dataclasses.replace(mark, holders=tuple)  # lives no longer than the trace
        self._layers = layer_names(mark.holders())
        self.changes = LiveChanges(func_graph)
        self.inside: list[Report] = []  # of loops and branches that are steps by themselves
        self._body: Body | None = None
        self._arithmetic: Arithmetic | None = None

    @property
    def terms(self) -> Terms | None:
        """Return how Grappler is asked; None: as calls have it asked."""
        return None

    @property
    def optimised(self) -> bool:
        """Return whether the step is what Grappler made of it."""
        return self._body is not None

    def capture(self, options: Options) -> Captured | None:
        """Return the step, nested functions inlined.

        Args:
          options: how the step is planned.
        """
        graph, sizes = self.func_graph, known_sizes()
        compiled = self.mark.jit_compile or tf_adapter.in_xla(graph)
        plain = None if compiled else grappler.question(
            graph, (), tf_adapter.shown_definition(graph), terms=self.terms)
        self._body = None if plain is None else self._optimise(plain)
        inlining = self._inline()
        if not compiled:
            hand_out_what_is_read(graph, self.changes)
        shapes, planned_for = planned_shapes(
            graph, options.batch_size, may_assume=not options.budgets.sized, sizes=sizes,
            placeholders=self.inputs)
        told = sizes if sizes.inputs(self.inputs) else CallSizes()
        self.mark.records.note(told, shapes is not None)
        body = self._body
        self._arithmetic = None if plain is None else Arithmetic(
            graph, plain, body is not None, body.answer if body else None)
        if inlining is not None and body is not None:
            inlining.functions = (*body.inlined, *inlining.functions)
        found = capture(graph, shapes=shapes, inlining=inlining, compiled=compiled,
                        forward=body.forward if body else (), later=body.later if body else (),
                        others=lambda: self._other_shapes(options, sizes))
        return Captured(self.mark.name, found, graph, compiled, planned_for,
                        asked_for(graph, found, options.target) if compiled else None,
                        functools.partial(Optimised, graph, found,
                                          plain=None if body is None else plain,
                                          terms=self.terms),
                        gradient_inside=lambda: gradient_inside(graph),
                        arithmetic=self._arithmetic,
                        doubt=functools.partial(self._doubt, compiled),
                        layers=LayerNames.of(
                            self._layers, (op.name for op in found.ops)).with_gradients(found))

    def _other_shapes(self, options: Options, sizes: CallSizes) -> tf.Graph | None:
        """Return a graph like the one that knows the planned shapes, of a larger call."""
        batch = options.batch_size or sizes.batch or STAND_IN
        with contextlib.suppress(CostError):
            return planned_shapes(
                self.func_graph, 2 * batch, may_assume=True,
                sizes=sizes.larger(self.inputs), placeholders=self.inputs)[0]
        return None

    def _doubt(self, compiled: bool) -> str:
        return doubt(self.func_graph, compiled)

    def _inline(self) -> Inlining | None:
        return Inlining(self.func_graph, changes=self.changes)

    def _optimise(self, plain: Question) -> Body | None:
        """Have Grappler's answer take the place of the step's ops."""
        return optimise_in_place(self.func_graph, self.changes, plain) if wanted() else None

    def apply(self, edits: Edits) -> None:
        """Edit the graph in place, all or nothing.

        Args:
          edits: what is done to the step.

        Raises:
          RewriteError: the edits do not fit the graph; it is as it was.
        """
        apply(self.func_graph, edits, self.changes, protected=self.optimised)

    def rewrite(self) -> Outcome:
        """Run the driver on the step; where nothing is changed the graph is as it was traced.

        Nothing is raised in a step that has trained before: a budget that a later trace cannot
        meet is given up for the minimum peak, with a warning.

        Raises:
          InfeasibleBudgetError, PlanError: the graph is untouched.
          CostError: of a budget in bytes; the graph is untouched.
          RewriteError: the graph cannot be put back.
        """
        options, name = self.mark.options, self.mark.name
        trained = self.mark.records.report is not None
        start = self.changes.point()
        try:
            refused = self._plan_inside(options)
            if has_gradients(self.func_graph):
                outcome = self._run(options, "")
                if outcome.report is not None:
                    outcome.report.note_inside(self.inside, refused)
            elif self.inside:
                outcome = Outcome(max(self.inside, key=lambda report: report.simulated_bytes))
            else:
                outcome = self._run(options, refused)
            if self.inside:
                tf_adapter.before_gradients(
                    self.func_graph, functools.partial(self._before_gradients, start))
            return outcome
        except InfeasibleBudgetError as error:
            if not trained:
                raise
            warnings.warn(f"tfckpt: {name} was traced again, and now {error}; it is planned for "
                          "the minimum peak instead", stacklevel=2)
            return self._run(dataclasses.replace(options, budgets=Budgets()), "")
        except (CostError, PlanError) as error:
            if not trained and (isinstance(error, PlanError) or options.budgets.sized):
                raise
            warnings.warn(f"tfckpt: {name} trains unchanged: {error}", stacklevel=2)
            return Outcome()

    def _plan_inside(self, options: Options) -> str:
        """Plan the functions of loops and branches that compute gradients; note their reports.

        Returns:
          Why they are left as they are though they could be rewritten; "" else.
        """
        def rewrite(function: Function, around: Around) -> Planned:
            with knowing(function.sizes):
                return _WITHIN[function.place](function, self.mark, around).planned()

        def shapes() -> tf.Graph | None:
            return planned_shapes(self.func_graph, options.batch_size,
                                  may_assume=not options.budgets.sized, sizes=known_sizes(),
                                  placeholders=self.inputs)[0]

        self.inside, why = rewrite_inside(
            Around(self.func_graph, self.mark.jit_compile, options, shapes, self.terms),
            self.changes, rewrite)
        return why

    def _run(self, options: Options, refused: str) -> Outcome:
        start, outcome = self.changes.point(), Outcome()
        try:
            outcome = run(self, options, refused)
        except (CostError, PlanError):
            raise
        except Exception as error:
            self.changes.revert(start)
            outcome = failed(self.mark.name, self.func_graph, error)
        finally:
            if outcome.edits is None:
                self.changes.revert(start)
        if outcome.unwanted:
            warnings.warn(f"tfckpt: {self.mark.name} trains unchanged: {outcome.unwanted}",
                          stacklevel=2)
        if outcome.edits is not None:
            tf_adapter.before_gradients(self.func_graph,
                                        functools.partial(self._before_gradients, start))
        return outcome

    def _before_gradients(self, start: Point) -> None:
        """Prepare the graph for a tape outside of the step, which wants gradients of its ops.

        TensorFlow adds results to it. Where the ops are Grappler's everything is taken back.
        """
        if self._arithmetic is not None:
            self._arithmetic.keep()
        if self._body is None and not self.inside:
            return
        self.changes.revert(start)
        warnings.warn(f"tfckpt: a tape around {self.mark.name} asks for its gradient: calls that a "
                      "tape watches run as traced, without tfckpt; other calls do not change",
                      stacklevel=2)

    def rewrite_in(self, graph: Any) -> None:
        """Rewrite the step, and note the report with the graph that the step ends up in.

        Args:
          graph: that the step ends up in: its own, or the one that it is imported into.

        Raises:
          InfeasibleBudgetError, CostError, PlanError, RewriteError: as `rewrite`.
        """
        report = self.rewrite().report
        if report is not None:
            signature = self._signature(graph)
            for inner in self.inside:
                self.mark.records.add(f"{signature}: {inner.name}", inner, graph)
            self.mark.records.add(signature, report, graph)

    def _signature(self, graph: Any) -> str:
        """Return the traced signature as text."""
        parts = [f"{t.dtype.name}{t.shape.as_list() if t.shape.rank is not None else '[?]'}"
                 for t in self.inputs]
        compiled = " compiled" if self.mark.jit_compile or tf_adapter.in_xla(graph) else ""
        return f"{graph.name}({', '.join([*parts, *self.mark.arguments])}){compiled}"


class Within(Traced):
    """A function of a step that is a step in a graph of its own, rewritten in place.

    Args:
      function: that computes a gradient.
      mark: of the step that it is in.
      around: that step.
    """

    given: ClassVar[str]

    def __init__(self, function: Function, mark: Mark, around: Around) -> None:
        records = Records()
        records.report = mark.records.report
        super().__init__(function.graph, dataclasses.replace(
            mark, name=f"{mark.name}, in {function.op!r}", records=records,
            jit_compile=around.compiled or function.place is Place.COMPILED), function.graph.inputs)
        self.function, self.around = function, around
        called_in = around.graph if function.place is Place.OP else function.graph
        self._inlined_late = (self.terms is not None and not self.terms.inlines
                              and has_calls(tf_adapter.shown_definition(called_in)))

    def _doubt(self, compiled: bool) -> str:
        return doubt(self.func_graph, compiled, self._inlined_late)

    def capture(self, options: Options) -> Captured | None:
        """Return the function as a step; None where it only has a gradient of what it is handed.

        Args:
          options: how the step is planned.
        """
        step = super().capture(options)
        if step is None or not trains(step.graph):
            return None
        more = step.planned_for.removeprefix(str(self.function.sizes)).lstrip(", ")
        words = [self.given, more] if more else [self.given]
        return dataclasses.replace(
            step, planned_for=", ".join(words) if step.planned_for else "",
            beside_bytes=self.function.beside_bytes)

    def planned(self) -> Planned:
        """Rewrite the function, and return what has become of it.

        Raises:
          InfeasibleBudgetError, CostError, PlanError, RewriteError: as `rewrite`.
        """
        start, report = self.changes.point(), self.rewrite().report
        mine = [] if report is None or any(report is inner for inner in self.inside) else [report]
        return Planned([*self.inside, *mine], self.changes.point().changes != start.changes)


class InBody(Within):
    """The function of a loop or branch, in whose place its ops are lowered."""

    given = "what the loop's first iteration, or the branch, is given"

    @property
    def terms(self) -> Terms | None:
        """Return how Grappler is asked about the step around it."""
        return self.around.terms

    def capture(self, options: Options) -> Captured | None:
        """Return the function as a step; it is compared in the step around it.

        Args:
          options: how the step is planned.
        """
        step = super().capture(options)
        if step is None or self._arithmetic is None:
            return step
        return dataclasses.replace(step, arithmetic=InStep(self._arithmetic, self.around))

    def _plan_inside(self, options: Options) -> str:
        """Do nothing: what is inside of the function was looked for before."""
        return ""

    def _optimise(self, plain: Question) -> Body | None:
        """Have what Grappler makes of the function in the step take the place of its ops."""
        if not wanted():
            return None
        try:
            asked = self.around.lowered(self.function)
        except Exception as error:  # whatever TensorFlow makes of the step
            logging.info("tfckpt: %s is planned as it was traced: %s", self.mark.name, error)
            return None
        return optimise_in_place(self.func_graph, self.changes, asked)


class ForElement(Within):
    """The function that a dataset calls for each element, which runs by itself."""

    given = "an element of the dataset"

    @property
    def terms(self) -> Terms:
        """Return how the runtime of datasets asks Grappler."""
        return terms_of_datasets()


class CompiledCall(Within):
    """A function that XLA compiles by itself, called in a step that the executor runs."""

    given = "what the call is given"


_WITHIN = {Place.OP: InBody, Place.ELEMENT: ForElement, Place.COMPILED: CompiledCall}


class TracedApart(Traced):
    """A step that was traced by itself, to be imported into the graph that calls it.

    Args:
      realise: takes the graph and edits, and imports it with them.
    """

    kind: ClassVar[str] = "import route"
    leaves_out: ClassVar[Mapping[str, str]] = {
        INLINED: "a call in the imported definition stays one"}
    optimised: ClassVar[bool] = False

    def __init__(self, func_graph: Any, mark: Mark, inputs: Sequence[tf.Tensor],
                 realise: Callable[[Any, Edits], None]) -> None:
        super().__init__(func_graph, mark, inputs)
        self._realise = realise

    def _inline(self) -> None:
        return None

    def _optimise(self, plain: Question) -> None:
        return None

    def _doubt(self, compiled: bool) -> str:
        return IMPORTED

    def apply(self, edits: Edits) -> None:
        """Import the step with its edits.

        Args:
          edits: what is done to the step; made to its definition before that is imported.
        """
        self._realise(self.func_graph, edits)
