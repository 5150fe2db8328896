"""Judges: what a plan has to pass before it is applied. New kinds of truth are new judges here.

A judge is a function that takes a `Candidate` and raises `Rejected`, which costs that plan and
never the step: the next one is tried, and the report lists what was given up and why. Whatever
else it raises is a fault of ours, and costs as much.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from tfckpt.driving.parts import Proposal
from tfckpt.errors import PlanError, RewriteError
from tfckpt.ir.edits import Edits
from tfckpt.rewrite.passes.manager import Context, Realised
from tfckpt.rewrite.realise import realise


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A proposal for each part of a step.

    Attributes:
      proposals: one for each device's part.
      context: what the rewrite passes read, but for the parts.
    """

    proposals: tuple[Proposal, ...]
    context: Context

    @functools.cached_property
    def realised(self) -> Realised | None:
        """Return the checked edits of the whole step, and what each pass did; None without changes.

        Raises:
          RewriteError, PlanError: they cannot be realised.
        """
        changing = [p for p in self.proposals if p.changes]
        return self._realised(changing) if changing else None

    @property
    def edits(self) -> Edits | None:
        """Return the checked edits of the whole step; None where nothing is changed."""
        return self.realised.edits if self.realised is not None else None

    def _realised(self, proposals: Sequence[Proposal]) -> Realised:
        parts = tuple(p.planned_part for p in proposals)
        return realise(dataclasses.replace(self.context, parts=parts))

    def to_blame(self) -> str | None:
        """Return the first device whose part alone cannot be realised; None where each can."""
        changing = [p for p in self.proposals if p.changes]
        for proposal in changing if len(changing) > 1 else ():
            try:
                self._realised([proposal])
            except (RewriteError, PlanError):
                return proposal.part.device
        return None


class Rejected(Exception):
    """A judge does not accept a candidate.

    Attributes:
      device: whose part is to blame; None where all are.
      room: planned bytes that the next plan may need; None for no other than before.
      instead: a proposal that was judged before and is better; None where none is.
      segments: whether no loop of the step may be cut as in the candidate: in segments, or with
        entries computed again.
      loops: whether none may be cut in any way.
    """

    def __init__(self, reason: str, device: str | None = None, room: int | None = None,
                 instead: Proposal | None = None, segments: bool = False, loops: bool = False
                 ) -> None:
        super().__init__(reason)
        self.device, self.room, self.instead = device, room, instead
        self.segments, self.loops = segments, loops


def realisable(candidate: Candidate) -> None:
    """Accept a candidate whose edits can be made and pass their checks.

    Args:
      candidate: whose edits are made here, if they have not been.

    Raises:
      Rejected: they cannot be made, or fail a check.
    """
    try:
        _ = candidate.realised
    except (RewriteError, PlanError) as error:
        raise Rejected(str(error), candidate.to_blame()) from error


JUDGES: Sequence[Callable[[Candidate], None]] = (realisable,)
"""In the order in which they are asked."""
