"""Steps in files: what the command line is made of.

Documents are read, planned step by step, and rewritten:

    document = read_path("model")                          # a SavedModel, GraphDef, MetaGraphDef
    results = [plan_file_step(step, make_options(budget=0.5))
               for step in training_steps(document, batch_size=32)]
    smaller = rewrite(document, results)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from tfckpt.capture.files import Document
from tfckpt.capture.steps import Step
from tfckpt.driver import ASKED_FROM, OFF, run, switched_off
from tfckpt.driving.carrier import Captured
from tfckpt.driving.here import place
from tfckpt.driving.parts import DevicePart, Part, priced
from tfckpt.ir.edits import Edits
from tfckpt.ir.target import Target
from tfckpt.report.report import Report
from tfckpt.request.budget import Budget
from tfckpt.request.options import Options
from tfckpt.rewrite.appliers.graphdef import (
    add_functions,
    edit_function_def,
    edit_graph_def,
    function_with_inlined,
    with_inlined,
)
from tfckpt.verify.arithmetic.certified import Arithmetic, doubt
from tfckpt.verify.arithmetic.same import Certificate
from tfckpt.verify.asking.grappler import Optimised
from tfckpt.verify.asking.xla import NotAsked


@dataclasses.dataclass(frozen=True)
class Result:
    """A planned step: edits (None where nothing is to be changed) and report."""

    step: Step
    edits: Edits | None
    report: Report


class InFile:
    """A step of a document; its edits are kept until the document is written."""

    kind: ClassVar[str] = "files"
    leaves_out: ClassVar[Mapping[str, str]] = {}
    optimised: ClassVar[bool] = False

    def __init__(self, step: Step) -> None:
        self.step = step
        self._edits: Edits | None = None
        self._arithmetic = None if step.plain is None else Arithmetic(step.live, step.plain)

    def capture(self, options: Options) -> Captured:
        """Return the step, which was read with the document.

        Args:
          options: how the step is planned; not looked at, since the step was read before.
        """
        step = self.step
        return Captured(step.name, step.graph, step.live, step.compiled, grappler=_grappler(step),
            arithmetic=None if self._arithmetic is None else self,
            doubt=functools.partial(doubt, step.live, step.compiled, step.inlined_late),
            layers=step.names)

    def apply(self, edits: Edits) -> None:
        """Keep the edits: see `rewrite`.

        Args:
          edits: what is done to the step; the document itself is not changed.
        """
        self._edits = edits

    def before(self, edits: Edits) -> Certificate:
        """Compare the function with what edits would make of it.

        Args:
          edits: what is done to the step; not applied. Only asked where `capture` gave an
            `arithmetic`.

        Returns:
          Whether both compute the same, as far as that can be known.
        """
        assert self._arithmetic is not None
        return self._arithmetic.before(edits)

    def loops(self, edits: Edits) -> Certificate:
        """Compare the bodies of loops that edits recompute in segments with those there were.

        Args:
          edits: what is done to the step; not applied. Only asked where `capture` gave an
            `arithmetic`.

        Returns:
          Whether these bodies compute the same, as far as that can be known.
        """
        assert self._arithmetic is not None
        return self._arithmetic.loops(edits)

    def after(self) -> Certificate:
        """Compare the function with what the edits will make of it."""
        return Certificate(True) if self._edits is None else self.before(self._edits)


def plan_file_step(step: Step, options: Options) -> Result:
    """Price and plan a step, and make the edits that realise the plan.

    Args:
      step: one of the training steps of a document.
      options: how the step is planned.

    Returns:
      The edits, None where nothing is to be changed, and the report.

    Raises:
      CostError: a tensor's bytes are unknown.
      InfeasibleBudgetError: states the smallest feasible budget in the unit it was given in.
      PlanError: no plan could be made.
    """
    outcome = run(InFile(step), options, OFF if switched_off() else "")
    assert outcome.report is not None  # a step of a document trains
    return Result(step, outcome.edits, outcome.report)


def _grappler(step: Step) -> Callable[[Target], Optimised] | None:
    """Return what makes Grappler to be asked of a target; None where it cannot be."""
    is_function = bool(step.function) and hasattr(step.live, "inputs")
    return functools.partial(
        Optimised, step.live, step.graph,
        terms=None if step.plain is None else step.plain.terms) if is_function else None


def plain_peak(step: Step, part: Part) -> int:
    """Return the peak in bytes that a step is expected to take as it stands, as reports say it.

    Args:
      step: as it was read from a document.
      part: the same, priced.
    """
    grappler = _grappler(step)
    if grappler is not None and not step.compiled and part.plain.peak_bytes >= ASKED_FROM:
        with contextlib.suppress(NotAsked):
            return grappler(part.target).memory().temp_bytes
    return part.plain.peak_bytes


def priced_plain(step: Step, target: Target | None = None) -> Part:
    """Return a step as it stands, priced as a whole.

    Args:
      step: as it was read from a document.
      target: default the devices of this process.

    Raises:
      CostError: a tensor's bytes are unknown.
    """
    return priced(DevicePart("", None, Budget(), place(target, step.compiled, False)(""),
                             step.graph))


def rewrite(document: Document, results: Sequence[Result]) -> Document:
    """Return the document with every planned step rewritten; the one given is left as it is.

    Args:
      document: what the steps were read from; not changed.
      results: one for each planned step; those without edits are skipped.

    Raises:
      RewriteError: an edit does not fit the document.
    """
    edited = document.copy()
    for result in results:
        if result.edits is None:
            continue
        definition = edited.graph_defs()[result.step.meta]
        if not result.step.function:
            if result.step.inlining is not None:
                with_inlined(definition, result.step.inlining)
            edit_graph_def(definition, result.edits)
            continue
        library = definition.library.function
        for function in library:
            if function.signature.name == result.step.function:
                if result.step.inlining is not None:
                    function_with_inlined(function, result.step.inlining, library)
                edit_function_def(function, result.edits, library)
        add_functions(definition, result.edits)
    return edited
