"""How a step comes in, what is known of it, and what becomes of it: values between the stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from tfckpt.common import faults
from tfckpt.driving.answers import Compiler
from tfckpt.driving.parts import Proposal
from tfckpt.driving.proposals import LITTLE, NOTHING_TO_GAIN, PLAIN_FITS
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph
from tfckpt.ir.layers import UNKNOWN, LayerNames
from tfckpt.ir.schedule import Plan
from tfckpt.ir.target import Target
from tfckpt.report.report import Report
from tfckpt.request.options import Options
from tfckpt.rewrite.passes.manager import Outcome as PassOutcome
from tfckpt.verify.arithmetic.same import Certificate


@dataclasses.dataclass(frozen=True)
class Captured:
    """A step as a carrier brings it in, and what the carrier knows of it.

    Attributes:
      name: as a person calls it.
      graph: the step as plain data.
      live: TensorFlow's graph that it was read from, not edited.
      compiled: whether XLA compiles the step.
      planned_for: where the trace leaves sizes open, what they are taken to be, in words.
      compiler: answers how much memory the step needs as XLA compiles it; None where XLA cannot
        be asked, and where it does not compile the step.
      grappler: takes what runs the step, and returns what answers how much memory it needs once
        Grappler has optimised it; None where Grappler cannot be asked.
      gradient_inside: names the op inside which a gradient is computed, where the graph has none;
        "" where none is.
      stored: whether its plan may come from the plan store, and go there.
      arithmetic: compares the step's arithmetic with the plain step's; None where that is not
        wanted.
      doubt: says why the two cannot be compared; "" where they can.
      layers: the Keras layers that the step calls, where they are known.
      beside_bytes: what is live beside the step while it runs, however it is planned: results of
        the loop that it is an iteration of.
    """

    name: str
    graph: Graph
    live: Any
    compiled: bool = False
    planned_for: str = ""
    compiler: Compiler | None = None
    grappler: Callable[[Target], Compiler] | None = None
    gradient_inside: Callable[[], str] = str
    stored: bool = True
    arithmetic: Arithmetic | None = None
    doubt: Callable[[], str] = str
    layers: LayerNames = UNKNOWN
    beside_bytes: int = 0


class Arithmetic(Protocol):
    """How a step computes: see `tfckpt.verify.arithmetic.certified`."""

    def before(self, edits: Edits) -> Certificate:
        """Compare the step with what edits would make of it.

        Args:
          edits: what is done to the step; not applied.

        Returns:
          Whether both compute the same, as far as that can be known.
        """

    def after(self) -> Certificate:
        """Compare the step with what edits have made of it."""

    def loops(self, edits: Edits) -> Certificate:
        """Compare the bodies of loops that edits recompute in segments with those of the step.

        Args:
          edits: what is done to the step; not applied.

        Returns:
          Whether these bodies compute the same, as far as that can be known.
        """


class Carrier(Protocol):
    """How a step comes in and how its edits go back; nothing else.

    Attributes:
      kind: what it is called in the table of `docs/architecture.md`.
      leaves_out: stages that it needs not, with the reason.
    """

    kind: ClassVar[str]
    leaves_out: ClassVar[Mapping[str, str]]

    @property
    def optimised(self) -> bool:
        """Return whether Grappler has seen its steps already and will not change them again."""

    def capture(self, options: Options) -> Captured | None:
        """Return the step; None where nothing trains.

        Args:
          options: how the step is planned.
        """

    def apply(self, edits: Edits) -> None:
        """Take the edits of the step back.

        Args:
          edits: what is done to the step; ops are named as in the captured graph.

        Raises:
          Exception: they cannot be applied; the step is as it was, and other edits may be.
        """


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of running the stages on a step.

    Attributes:
      report: None where nothing trains.
      edits: what was handed to the carrier; None where the step is as it was.
      proposals: those that were accepted, of the fullest device first.
      passes: what became of each rewrite pass.
      failure: why the step could not even be read or priced; "" where it was.
    """

    report: Report | None = None
    edits: Edits | None = None
    proposals: tuple[Proposal, ...] = ()
    passes: tuple[PassOutcome, ...] = ()
    failure: str = ""

    @property
    def plans(self) -> tuple[tuple[str, Plan], ...]:
        """Return the plan of each device's part that is rewritten."""
        return tuple((p.part.device, p.decision.planned.plan)
                     for p in self.proposals if p.changes)

    @property
    def unwanted(self) -> str:
        """Return why the step is as it was, where that is no choice of the planner."""
        reasons = (p.reason for p in self.proposals
                   if not p.changes and p.reason not in (NOTHING_TO_GAIN, PLAIN_FITS, LITTLE))
        return faults.with_advice(self.failure or next(reasons, ""))
