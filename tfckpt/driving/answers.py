"""What tells how much a step takes when it runs, and what it said of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from tfckpt.driving.parts import Part, Proposal
from tfckpt.ir.edits import Edits
from tfckpt.ir.hlo import XlaMemory
from tfckpt.plan.choosing.planned import executed_peaks
from tfckpt.verify.asking.xla import NotAsked


@dataclasses.dataclass(frozen=True)
class Words:
    """How what is asked is called.

    Attributes:
      who: is asked.
      takes: what a plan does by its answer.
      refuses: what it does where it gives none.
      option: how many plans it is asked about at most; "" where nobody chooses that.
    """

    who: str
    takes: str
    refuses: str
    option: str = ""


XLA_WORDS = Words(who="XLA", takes="compiled by XLA it takes", refuses="XLA does not compile it",
                  option="xla_trials")
GRAPPLER_WORDS = Words(who="Grappler", takes="as Grappler leaves it, it takes",
                       refuses="Grappler does not accept it")
SIMULATED_WORDS = Words(who="the simulator", takes="simulated as it may run, it takes up to",
                        refuses="it is not simulated")


class Compiler(Protocol):
    """What can be asked how much a step takes when it is compiled, or when it runs."""

    def memory(self, edits: Edits | None = None) -> XlaMemory:
        """Return it, for the step as it is or with edits; raise `NotAsked` where it is unknown.

        Args:
          edits: what is done to the step; None for the step as it is.

        Raises:
          NotAsked: it is unknown.
        """


class Simulated:
    """What a step takes that nothing will change any more: its plans simulated as they run.

    A plan of such a step is a plan of what runs, so that nobody has to be asked what becomes of it.
    """

    def __init__(self, part: Part) -> None:
        self._part = part

    def memory_of(self, proposal: Proposal | None) -> XlaMemory:
        """Return the peak with a proposal, and the most of it; of the plain step in the middle.

        Args:
          proposal: what is done to the part; None for the plain step.
        """
        part = self._part
        if proposal is None:
            return XlaMemory(executed_peaks(part.cost, part.target)[0])
        decision = proposal.decision
        middle, most = executed_peaks(decision.cost, part.target, plan=decision.planned.plan)
        return XlaMemory(middle, most_bytes=most)


class Recorded:
    """Answers that another process got, given again in their order."""

    def __init__(self, answers: Iterable[XlaMemory | None]) -> None:
        self._answers = iter(answers)

    def memory(self, edits: Edits | None = None) -> XlaMemory:
        """Return the next answer.

        Args:
          edits: what is done to the step; not looked at, since answers come in the order of the
            questions.

        Raises:
          NotAsked: there was none.
        """
        answer = next(self._answers, None)
        if answer is None:
            raise NotAsked("it was not asked, or did not tell")
        return answer


@dataclasses.dataclass(frozen=True)
class Trial:
    """A plan and what it takes: as planned, and as compiled (temporary bytes)."""

    proposal: Proposal
    memory: XlaMemory

    @property
    def planned(self) -> int:
        """Return the planned bytes."""
        return self.proposal.decision.planned.peak_bytes

    @property
    def overhead(self) -> float:
        """Return the planned extra time of the plan, as a fraction."""
        planned = self.proposal.decision.planned
        return planned.time / max(planned.baseline.time, 1e-12) - 1.0

    @property
    def recomputes(self) -> bool:
        """Return whether the plan runs anything again."""
        return bool(self.proposal.decision.planned.plan.recomputed)

    @property
    def otherwise(self) -> Proposal:
        """Return the same plan, to which XLA is bound in the other way."""
        part = self.proposal.part
        target = dataclasses.replace(part.target, otherwise=True)
        return dataclasses.replace(self.proposal, part=dataclasses.replace(part, target=target))


def alike(one: Proposal, other: Proposal) -> bool:
    """Return whether two proposals are one plan of one graph, to which XLA is bound in one way.

    Args:
      one: a proposal.
      other: another of the same step.
    """
    return (one.decision.planned.plan == other.decision.planned.plan
            and one.decision.segments == other.decision.segments
            and one.part.target.otherwise == other.part.target.otherwise)
