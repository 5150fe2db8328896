"""Whether what a step is rewritten to leaves its arithmetic as it is, without a run.

The terms of the plain and of the edited step are compared as `tfckpt.verify.arithmetic.same` does,
of what Grappler makes of both once functions are inlined and loops and branches lowered.
`tfckpt.verify.same_arithmetic` reads what TensorFlow has instantiated instead; that the two say the
same is tested with random steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler.machine import on_one_device
from tfckpt.capture.grappler.question import Question, question
from tfckpt.errors import TfckptError
from tfckpt.ir.edits import Edits
from tfckpt.ops.names import ARG
from tfckpt.rewrite.appliers.graphdef import apply_to_graph_def, protected
from tfckpt.verify.arithmetic import loop_bodies, loop_entries
from tfckpt.verify.arithmetic.same import COMPILED, SEGMENTED, Certificate, compared
from tfckpt.verify.arithmetic.single_loops import has_segments, with_single_loops
from tfckpt.verify.arithmetic.terms import Computation

ELSEWHERE = ("of a step on several devices, on another than the default or with DTensor it is not "
             "known whether the arithmetic stays the same")
IMPORTED = ("of a step that is imported into another graph it is not known whether the arithmetic "
            "stays the same")
FOR_ELEMENTS = ("of a step for each element of a dataset that calls functions it is not known "
                "whether the arithmetic stays the same")
AT_TOP = "of a step that a session runs it is not known whether the arithmetic stays the same"
IN_A_LOOP = ("the step is called in a loop or branch of another function, where TensorFlow may "
             "fuse less of it than where it runs by itself; that is not looked into")
_REFUSALS = (ValueError, TfckptError, MemoryError, tf.errors.OpError)


def doubt(live: Any, compiled: bool, called: bool = False) -> str:
    """Return why nothing can be said of a step; "" where Grappler's answer is what will run.

    Args:
      live: TensorFlow's graph that the step was read from; not changed.
      compiled: whether XLA compiles the step.
      called: whether Grappler itself inlines functions in it, among all else that it does.
    """
    if compiled:
        return COMPILED
    if called:
        return FOR_ELEMENTS
    if not hasattr(live, "inputs"):
        return AT_TOP
    if tf_adapter.is_traced_in_control_flow(live):
        return IN_A_LOOP
    here = on_one_device(op.device for op in live.get_operations())
    return "" if here and not tf_adapter.uses_custom_device(live) else ELSEWHERE


class Arithmetic:
    """How a step computes, to be compared with how it does once it is edited.

    Args:
      live: its FuncGraph; one of which there is no `doubt`.
      plain: what the step was, before anything was changed.
      marked: whether its ops are what Grappler made, and marked so that Grappler leaves them alone.
      answer: what Grappler makes of the plain step, where that is known.
    """

    def __init__(self, live: Any, plain: Question, marked: bool = False,
                 answer: tf.compat.v1.GraphDef | None = None) -> None:
        self.live, self.marked, self._plain, self._known = live, marked, plain, answer

    def before(self, edits: Edits) -> Certificate:
        """Compare the step with the same as edited, before the edits are applied.

        Args:
          edits: what is done to the step; not applied.

        Returns:
          Whether both compute the same; unknown where Grappler does not answer or the edits do not
          fit.
        """
        try:
            return self._compared(self._question(self._edited(edits), edits.renamed))
        except _REFUSALS as error:
            return _unknown(error)

    def loops(self, edits: Edits) -> Certificate:
        """Compare the bodies of loops that edits change with those of the step.

        Nothing else is compared.

        Args:
          edits: what is done to the step; not applied.

        Returns:
          Whether these bodies compute the same; unknown where Grappler does not answer or the edits
          do not fit.
        """
        try:
            ours = question(self.live, (), self._edited(edits), edits.renamed,
                            self._plain.terms).answer(lower=True)
            found = (*loop_bodies.differences(self._answer, ours, edits),
                     *loop_entries.differences(self._answer, ours, edits))
        except _REFUSALS as error:
            return _unknown(error)
        return Certificate(not found, found, found)

    def _edited(self, edits: Edits) -> tf.compat.v1.GraphDef:
        edited = apply_to_graph_def(tf_adapter.shown_definition(self.live), edits)
        return protected(edited) if self.marked else edited

    def after(self) -> Certificate:
        """Compare the step with what has become of it, by now or by the call of `keep`."""
        try:
            return self._compared(self._kept)
        except _REFUSALS as error:
            return _unknown(error)

    def keep(self) -> None:
        """Remember what has become of the step: its graph is about to be changed by others."""
        with contextlib.suppress(*_REFUSALS):
            self._kept  # noqa: B018 - cached

    @functools.cached_property
    def _kept(self) -> Question | None:
        return self._question(tf_adapter.shown_definition(self.live))

    def _compared(self, ours: Question | None) -> Certificate:
        if ours is None:
            return Certificate(None, reason=SEGMENTED)
        return certificate_of_definitions(
            self._answer, ours.answer(lower=True),
            functools.partial(tf_adapter.find_function, self.live))

    def _question(self, edited: tf.compat.v1.GraphDef, renamed: Mapping[str, str] | None = None
                  ) -> Question | None:
        """Return the edited step to be asked about, called as the plain one was.

        None where what is around loops in segments might be rearranged otherwise than is seen here.
        """
        if has_segments(edited):
            if not self.marked:
                return None
            edited = with_single_loops(edited, self.live)
        return question(self.live, (), edited, renamed, self._plain.terms)

    @functools.cached_property
    def _answer(self) -> tf.compat.v1.GraphDef:
        return self._known or self._plain.answer(lower=True)


def _unknown(error: Exception) -> Certificate:
    return Certificate(None, reason=f"Grappler cannot be asked: {type(error).__name__}: {error}")


def certificate_of_definitions(plain: tf.compat.v1.GraphDef, edited: tf.compat.v1.GraphDef,
                               function: Callable[[str], Any]) -> Certificate:
    """Compare two graphs that nothing optimises any more.

    Args:
      plain: the plain step, as it runs.
      edited: the rewritten step, as it runs.
      function: gives the FunctionDef that is called by a name; None where it is not known.
    """
    return compared(*(_computation(graph, function) for graph in (plain, edited)))


def _computation(graph: tf.compat.v1.GraphDef, function: Callable[[str], Any]) -> Computation:
    count = max((node.attr["index"].i for node in graph.node if node.op == ARG), default=-1) + 1
    return Computation(list(graph.node), [f"argument {i}" for i in range(count)], function)
