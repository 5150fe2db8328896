"""Candidates and their price: the planned peak and time of a keep set under given free moves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from tfckpt.ir.costgraph import FORWARD, CostGraph
from tfckpt.ir.schedule import Moves, Schedule
from tfckpt.plan.keep_sets import Ordered, dropped
from tfckpt.plan.policy import recompute_as_asked
from tfckpt.simulate.branchwise import BranchwiseOrder
from tfckpt.simulate.order import base_order, idle
from tfckpt.simulate.simulate import Timeline, simulate
from tfckpt.solvers.recursion import Recursion, recursive_schedule


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice that determines a schedule.

    Attributes:
      keep: forward storages kept until the backward reads them.
      again: dropped storages recomputed for every group of uses (see `keep_schedule`).
      moves: free moves.
      reordered: whether the backward is reordered to need less memory.
      early: whether, if so, it begins wherever it can, before the forward goes on.
      source: the solver it comes from.
      schedule: the schedule itself, where a solver decides more than a keep set can say; `keep`
        and `again` then mean nothing.
      recursion: what later runs of the forward keep, besides what the original one keeps (`keep`);
        `again` then means nothing.
    """

    keep: frozenset[int]
    again: frozenset[int] = frozenset()
    moves: Moves = Moves()
    reordered: bool = False
    source: str = ""
    schedule: Schedule | None = None
    recursion: Recursion | None = None
    early: bool = False


def proposed(pattern: Candidate, proposal: frozenset[int] | Recursion, source: str) -> Candidate:
    """Return a proposal as a candidate with the moves of a pattern.

    Args:
      pattern: gives the moves, and whether the backward is reordered; its keep set is replaced.
      proposal: storages to keep, or what each run of the forward keeps.
      source: name of the solver that the proposal comes from.
    """
    if isinstance(proposal, Recursion):
        return dataclasses.replace(pattern, keep=proposal.original, recursion=proposal,
                                   source=source)
    return dataclasses.replace(pattern, keep=proposal, source=source)


@dataclasses.dataclass(frozen=True)
class Priced:
    """A candidate with its schedule and planned timeline.

    Attributes:
      excess: bytes times steps above 97 % of the peak; tells candidates of equal peak apart.
    """

    candidate: Candidate
    schedule: Schedule
    timeline: Timeline
    excess: int

    @property
    def peak(self) -> int:
        """Planned peak in bytes."""
        return self.timeline.peak_bytes

    @property
    def time(self) -> float:
        """Planned time, in the unit of the graph."""
        return self.timeline.time


class Evaluator:
    """Prices candidates on one graph and remembers what it has priced."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        self._known: dict[Candidate, Priced] = {}
        self._base_order = functools.cache(functools.partial(base_order, graph))
        self._ordered = functools.cache(functools.partial(Ordered, graph))
        waiting = functools.cache(functools.partial(idle, graph))
        self._branchwise = functools.cache(lambda moves, early: BranchwiseOrder(
            graph, moves, waiting(moves.released), early))

    def price(self, candidate: Candidate) -> Priced:
        """Return a candidate with its schedule and timeline, made once for each candidate.

        Args:
          candidate: of this evaluator's graph.

        Raises:
          PlanError: the schedule cannot be executed.
          OutOfTimeError: planning has a time limit, which is over (where a search asks).
        """
        known = self._known.get(candidate)
        if known is not None:
            return known
        schedule = recompute_as_asked(self.graph, candidate.schedule or self._made(candidate),
                                      candidate.moves.deferred)
        timeline = simulate(self.graph, schedule)
        floor = int(timeline.peak_bytes * 0.97)
        excess = sum(live - floor for live in timeline.live_bytes if live > floor)
        priced = Priced(candidate, schedule, timeline, excess)
        self._known[candidate] = priced
        return priced

    @property
    def priced(self) -> Collection[Priced]:
        """Everything priced so far, in the order in which it was."""
        return self._known.values()

    def _made(self, candidate: Candidate) -> Schedule:
        order = self.order(candidate)
        if candidate.recursion is not None:
            return recursive_schedule(self.graph, candidate.recursion, candidate.keep, order)
        return self._ordered(order).schedule(dropped(self.graph, candidate.keep), candidate.again)

    def order(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the originals in the order in which a candidate runs them.

        Args:
          candidate: its moves count, and where the backward is reordered, its keep set.

        Returns:
          Vertices; released joins are left out.
        """
        if not candidate.reordered:
            return self._base_order(candidate.moves)
        return self._branchwise(candidate.moves, candidate.early).order(
            dropped(self.graph, candidate.keep))

    def everything(self) -> frozenset[int]:
        """Return the keep set that recomputes nothing."""
        return frozenset(i for i, s in enumerate(self.graph.storages)
                         if self.graph.vertices[s.producer].region == FORWARD)


_Timed = TypeVar("_Timed", bound=Any)


def non_dominated(pool: Iterable[_Timed]) -> list[_Timed]:
    """Return what no other beats in both peak and time of its `timeline`, by rising time.

    Args:
      pool: what has a `timeline`, in any order; of equals the first is taken.
    """
    front: list[_Timed] = []
    for entry in sorted(pool, key=lambda p: (p.timeline.time, p.timeline.peak_bytes)):
        if not front or entry.timeline.peak_bytes < front[-1].timeline.peak_bytes:
            front.append(entry)
    return front
