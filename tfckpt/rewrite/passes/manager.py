"""Passes: what each requires and ensures, what they are given, and what runs them in order.

A pass takes edits and returns new ones. The edits that the last pass returns are checked, so that
nothing changes them after their checker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol

from tfckpt.errors import PlanError, RewriteError
from tfckpt.ir.edits import Edits, check_edits
from tfckpt.ir.graph import Graph
from tfckpt.ir.target import HERE, Target
from tfckpt.plan.forward_ad import Decision


class Property(enum.StrEnum):
    """Properties of the edited graph that a pass can ensure."""

    DERIVATIVES = "kept derivatives are computed"
    COPIES = "copies and what delays them exist"
    OPERANDS = "operands are sorted as in the plain step"
    LOOP_STATE = "variables are written after the copies of loops that read them"
    REFERENCES = "reference variables are written after the new ops that read them"


@dataclasses.dataclass(frozen=True)
class Node:
    """An op of an optimised graph; inputs are written as in a GraphDef."""

    name: str
    type: str
    inputs: tuple[str, ...]


class PlainStep(Protocol):
    """Questions that TensorFlow can answer about the step as it was captured."""

    def attributes(self, op: str) -> Hashable:
        """Return the attributes of an op, such that equal ops have equal ones.

        Args:
          op: name of an op of the captured step.
        """

    def is_stateful(self, op: str) -> bool:
        """Return whether an op is registered as stateful.

        Args:
          op: name of an op of the captured step.
        """

    def optimised(self) -> Mapping[str, Node] | None:
        """Return what Grappler makes of the step, by name; None where it refuses the graph."""


@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """The decision for the part of a step that one device runs.

    Attributes:
      decision: graph, cost, plan and the edits of forward AD.
      device, label: of one of several parts: where its fences stand, and what tells the names of
        its new ops from those of others.
      target: what runs the part.
    """

    decision: Decision
    device: str = ""
    label: str = ""
    target: Target = HERE


@dataclasses.dataclass(frozen=True)
class Context:
    """The input of passes.

    Attributes:
      graph: the whole step as captured, whose edits are made.
      parts: of each device of which anything is changed.
      plain: the captured step, to be asked what Grappler makes of it; None where it is not at
        hand.
      target: what runs the step.
    """

    graph: Graph
    parts: Sequence[PlannedPart] = ()
    plain: PlainStep | None = None
    target: Target = HERE


@dataclasses.dataclass(frozen=True)
class Pass:
    """One step of the rewriter.

    Attributes:
      name: for messages and tables.
      run: returns new edits; it raises `RewriteError` or `PlanError`.
      requires: what passes before it must have ensured.
      ensures: what is true after it, whatever runs later.
      refusal: why it does not apply in a context; "" where it does. What it ensures then counts
        as settled.
    """

    name: str
    run: Callable[[Context, Edits], Edits]
    requires: frozenset[Property] = frozenset()
    ensures: frozenset[Property] = frozenset()
    refusal: Callable[[Context], str] = lambda _: ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a pass: whether it changed the edits, or why it was not run."""

    name: str
    modified: bool
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Realised:
    """Checked edits, and what became of each pass."""

    edits: Edits
    outcomes: tuple[Outcome, ...]


def run_passes(passes: Sequence[Pass], context: Context) -> Realised:
    """Run passes in the order given and check the edits that come out.

    Args:
      passes: in the order in which they run; one that refuses the context is left out.
      context: the step, and what was decided for each of its parts.

    Returns:
      The edits that the last pass returns, and what became of each pass, in their order.

    Raises:
      RewriteError: a pass requires what none before it ensures, a pass failed, or the edits are
        wrong; the message names the passes that ran before.
      PlanError: a plan cannot be realised.
    """
    check_order(passes)
    edits = Edits()
    outcomes: list[Outcome] = []
    for each in passes:
        refusal = each.refusal(context)
        with _naming(each.name, outcomes):
            made = edits if refusal else each.run(context, edits)
        outcomes.append(Outcome(each.name, made != edits, refusal))
        edits = made
    with _naming("check", outcomes):
        check_edits(context.graph, edits)
    return Realised(edits, tuple(outcomes))


def check_order(passes: Sequence[Pass]) -> None:
    """Raise `RewriteError` unless each pass finds ensured what it requires.

    Args:
      passes: in the order in which they run.

    Raises:
      RewriteError: a pass requires what none before it ensures; the message names the pass.
    """
    ensured: frozenset[Property] = frozenset()
    for number, each in enumerate(passes):
        missing = sorted(each.requires - ensured)
        if missing:
            before = ", ".join(p.name for p in passes[:number]) or "none"
            raise RewriteError(f"rewrite: the pass {each.name!r} requires that {missing[0]}; no "
                               f"pass before it ensures that (before it: {before})")
        ensured |= each.ensures


@contextlib.contextmanager
def _naming(name: str, outcomes: Sequence[Outcome]) -> Iterator[None]:
    """Add to what is raised where it was, and what ran before."""
    try:
        yield
    except (PlanError, RewriteError) as error:
        before = ", ".join(o.name for o in outcomes if not o.refusal) or "none"
        raise type(error)(f"{error} (pass: {name}; before it: {before})") from error
