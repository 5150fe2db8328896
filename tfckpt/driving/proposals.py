"""What could be done to a step: for each device's part its plans, best first, made when asked for.

A part has several sources of plans: fences that await updates or not (a step that trains twice may
read what an update wrote: no fence can then wait for updates), its loops recomputed or not, and in
the end neither such waits nor free moves. The best plan of each source is proposed first, then the
next best ones in turns. Replicas of one part get the same plans. A source that fails yields no
more plans; it costs no others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfckpt.capture.devices import device_parts, has_inner_collective
from tfckpt.capture.loops.repeated import without_loops
from tfckpt.common import faults
from tfckpt.cost.measured import measured_rates
from tfckpt.driving.decisions import Limits, decisions
from tfckpt.driving.parts import DevicePart, Part, Proposal, priced, unchanged
from tfckpt.errors import CostError, InfeasibleBudgetError, TfckptError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.graph import Graph
from tfckpt.ir.target import Target
from tfckpt.ops import record
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops.choice import Variants
from tfckpt.plan.loops.segments import Cut
from tfckpt.plan.planner import Memory, StepPlanner
from tfckpt.request.options import Options
from tfckpt.rewrite.passes.reference_variables import has_references

MOST = 8
"""Proposals for one part: the search is bounded by their number, never by the clock."""
FASTER = "a faster one is looked for"
"""Ends the reason of a plan that fits: it is taken after all where there is no faster one."""
FEWER = "a plan of fewer bytes is looked for"
"""Ends the reason of the first plan without a budget: it is taken after all where it is better."""
ALLOWED = "are allowed"
"""Ends the reason of one that may take more; it is taken where none is sure to take less."""
OTHER_WAY = "XLA is bound to it in another way"
ONE_BEFORE = "one before is faster"
BETWEEN = "a plan between others is looked for"
"""End the reasons of others that may be taken after all."""
NOTHING_TO_GAIN = "no plan is predicted to lower the peak"
LITTLE = "the results of the loop that it is in take many times what one iteration does"
PLAIN_FITS = "the plain step fits the budget"
EXCHANGES = ("replicas exchange something before the update (synchronised statistics); a fence "
             "that waited for another replica could wait for ever")


def device_parts_of(graph: Graph, options: Options, target_of: Callable[[str], Target]
                    ) -> list[DevicePart]:
    """Return the part of each device.

    Args:
      graph: the captured step.
      options: how the step is planned: budgets, and measured seconds.
      target_of: takes a device as ops spell it, "" for the default, and returns what it is planned
        for.

    Returns:
      One for each device that computes gradients; unnamed and unnumbered where there is only one.

    Raises:
      PlanError: a device has no budget, or one that is not there has.
    """
    split = device_parts(graph, target_of(""))
    options.budgets.check(split)
    several = len(split) > 1
    found = []
    for number, (device, part) in enumerate(split.items()):
        target = _measured(target_of(device), part, options)
        budget = options.budgets.of(device)
        if budget.of_device and target.asks_in_one_piece:
            budget = dataclasses.replace(budget, in_one_piece=True)
        found.append(DevicePart(device if several else "", number if several else None, budget,
                                target, part))
    return found


def priced_parts(graph: Graph, wanted: Sequence[DevicePart]) -> list[Part]:
    """Return the part of each device, priced.

    Args:
      graph: the captured step.
      wanted: the part of each device, as `device_parts_of` returns them.

    Raises:
      CostError: the bytes of a tensor are unknown, or those of a variable that a size counts.
    """
    parts = [priced(part) for part in wanted]
    for part in parts:
        if part.cost.unknown_variables and part.budget.device_bytes is not None:
            raise CostError(
                f"cost: budget={part.budget} counts variables, and {part.cost.unknown_variables} "
                f"of {graph.name!r} have an unknown size; pass a fraction of the plain peak such "
                'as budget=0.5, or budget="min"')
    return parts


def _measured(target: Target, part: Graph, options: Options) -> Target:
    """Return a target with the seconds of ops that were measured, where the executor runs them."""
    if not options.op_seconds or not target.orders_by_control:
        return target
    return dataclasses.replace(
        target, rates=measured_rates(part, options.op_seconds, target.rates))


def may_await_updates(graph: Graph) -> bool:
    """Return whether a fence may wait for updates.

    Only on one device, without collectives, and without reference variables: an update of such a
    variable awaits the copies that read it (`tfckpt.rewrite.passes.reference_variables`).

    Args:
      graph: the captured step, or the part of it that a device runs.
    """
    devices = {op.device for op in graph.ops if op.device}
    return len(devices) <= 1 and not has_references(graph) and not any(
        record(op.type).collective for op in graph.ops)


class Search:
    """The proposals for one part, in turn.

    Attributes:
      proposal: the present one; never None: the last is to change nothing.
      rejected: why the earlier ones were given up, a line each.
    """

    def __init__(self, part: Part, options: Options, refused: str = "",
                 leader: Search | None = None, memory: Memory | None = None) -> None:
        self.options, self._given, self.memory = options, part, memory
        self.proposal: Proposal
        self.rejected: list[str] = []
        self.leader = leader
        self._refused: set[bool] = set()  # loops that are not changed any more: see `_may_cut`
        self._reason = refused = refused or (
            PLAIN_FITS if _plain_fits(part, part.target.safety) and not part.cost.again else "")
        self.part = self._whole = part if refused else part.updated_late()
        self._known: dict[Limits, tuple[Iterator[Decision], list[Decision]]] = {}
        self._planners: dict[tuple, StepPlanner] = {}
        self._variants: dict[tuple[int, int], Variants] = {}
        self._proposals = iter(()) if refused else itertools.islice(self._all(), MOST)
        self._step()

    def reject(self, reason: str, room: int | None = None,
               instead: Proposal | None = None, segments: bool = False, loops: bool = False
               ) -> None:
        """Give the present proposal up and move on to the next.

        Args:
          reason: why, for the line in `rejected`.
          room: planned bytes that the next may need, where these have been corrected.
          instead: the next proposal, where it is one of those before.
          segments: whether loops are not to be cut any more as they are in the present proposal:
            in segments, or with entries computed again.
          loops: whether they are not to be cut in either way.
        """
        if segments:
            entries = any(cut.entries for _, cut in self.proposal.decision.segments)
            self._refused.add(entries)
        if loops:
            self._refused |= {False, True}
        self.rejected.append(f"{_called(self.proposal)}: {reason}")
        self._reason = reason
        if instead is not None:
            self.proposal = instead
            return
        if room is not None:
            self.part = self._whole = dataclasses.replace(self._whole, corrected=room)
            self._given = dataclasses.replace(self._given, corrected=room)
            self._known = {}
            self._proposals = itertools.islice(self._all(), MOST)
        self._step()

    def given_up(self) -> tuple[str, ...]:
        """Return the lines of `rejected` without those that say that the present plan may not fit.

        It has some where another plan was looked for and none was found, or where no plan is sure
        to fit and it is the likeliest to. No line is there twice.
        """
        taken = f"{_called(self.proposal)}: "
        may_be_taken = FASTER, FEWER, ALLOWED, OTHER_WAY, ONE_BEFORE, BETWEEN
        return tuple(dict.fromkeys(
            line for line in self.rejected
            if not line.endswith(may_be_taken) or not line.startswith(taken)))

    def _step(self) -> None:
        for found in self._proposals:
            if found.changes or not self.rejected:
                self.proposal = found
                return
        self.proposal = unchanged(self._given, self._reason)

    def _all(self) -> Iterator[Proposal]:
        later: list[tuple[Part, Iterator[Decision]]] = []
        for part, limits in self._sources():
            source = self._decisions(part, limits)
            first = self._next(source)
            if first is not None:
                later.append((part, source))
                yield self._proposal(part, first)
        while later:
            part, source = later.pop(0)
            decision = self._next(source)
            if decision is not None:
                later.append((part, source))
                yield self._proposal(part, decision)

    def _sources(self) -> Iterator[tuple[Part, Limits]]:
        """Yield the sources of plans, the simplest last: what runs the step has the least to do."""
        part, free_moves = self.part, self.options.free_moves
        if not part.target.orders_by_control:  # neither means anything there
            yield part, Limits(False, free_moves)
            return
        for part in self._graphs():
            if part.number is None and may_await_updates(part.graph):
                yield part, Limits(True, free_moves)
            yield part, Limits(False, free_moves)
        if free_moves:
            yield part, Limits(False, False)

    def _graphs(self) -> Iterator[Part]:
        """Yield the part, then the part with its loops as they are."""
        yield self.part
        try:
            kept = without_loops(self.part.graph, self._reason)
            if kept is not None:
                self.part = self.part.over(kept)
                self._given = self.part
        except Exception as error:
            self._failed(error)
        else:
            if kept is not None:
                yield self.part

    def _proposal(self, part: Part, decision: Decision) -> Proposal:
        gains = decision.planned.peak_bytes < decision.planned.baseline_bytes
        return Proposal(part, decision, "" if gains else NOTHING_TO_GAIN)

    def _next(self, source: Iterator[Decision]) -> Decision | None:
        """Return the next decision of a source; None at its end, or where planning failed."""
        try:
            return next(source, None)
        except InfeasibleBudgetError:
            if _plain_fits(self.part):
                self._reason = PLAIN_FITS
            elif not self.rejected:
                raise
        except Exception as error:
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        """Note that a source yields no more plans."""
        self._reason = str(error) if isinstance(error, TfckptError) else faults.said(
            error, "planning failed")
        self.rejected.append(f"planning: {self._reason}")

    def _decisions(self, part: Part, limits: Limits) -> Iterator[Decision]:
        if part is not self._whole:
            return decisions(part, self.options, limits, self._planners, self.memory,
                             self._may_cut, self._variants)
        if self.leader is None:
            return self.decided(limits)
        return (dataclasses.replace(d, graph=part.graph, cost=part.cost)
                for d in self.leader.decided(limits))

    def _may_cut(self, cuts: Iterable[Cut]) -> bool:
        """Return whether loops may be cut so: those with entries computed again, and others."""
        return not any(bool(cut.entries) in self._refused for cut in cuts if not cut.together)

    def decided(self, limits: Limits) -> Iterator[Decision]:
        """Yield the part's decisions from the best on, remembering them for replicas.

        Args:
          limits: what the plans may use.

        Yields:
          Decisions that are made when they are asked for; those that were made before are given
          again.

        Raises:
          InfeasibleBudgetError: no plan fits the budget.
        """
        source, known = self._known.setdefault(
            limits, (decisions(self._whole, self.options, limits, self._planners, self.memory,
                               self._may_cut, self._variants), []))
        for number in itertools.count():
            if number == len(known):
                decision = next(source, None)
                if decision is None:
                    return
                known.append(decision)
            yield known[number]


def _called(proposal: Proposal) -> str:
    planned = proposal.decision.planned
    return f"{planned.plan.solver}, {planned.peak_bytes:,} bytes"


def _plain_fits(part: Part, share: float = 1.0) -> bool:
    """Return whether the plain step's peak fits a share of the budget; not where none is given."""
    room = part.room
    return room is not None and part.plain.peak_bytes <= share * room


def searches(graph: Graph, parts: Sequence[Part], options: Options, refused: str = "",
             memory: Memory | None = None) -> list[Search]:
    """Return the search of each device's part; replicas follow the first of their kind.

    Args:
      graph: the whole step.
      parts: what `parts_of` returned, with what XLA said of them.
      options: how the step is planned.
      refused: why nothing is to be changed.
      memory: of searches of the same step for other sizes and budgets.

    Raises:
      InfeasibleBudgetError: a device's part does not fit its budget.
    """
    if len(parts) > 1 and has_inner_collective(graph):
        refused = refused or EXCHANGES
    found: list[Search] = []
    for part in parts:
        leader = None if options.fad is not False else next(
            (s for s in found if s.leader is None and s.part.budget == part.budget
             and s.part.target == part.target
             and _nameless(s.part.cost) == _nameless(part.cost)), None)
        found.append(Search(part, options, refused, leader, memory))
    return found


def _nameless(cost: CostGraph) -> tuple:
    return (tuple(dataclasses.replace(v, name="", ops=(), device="") for v in cost.vertices),
            tuple(dataclasses.replace(s, name="", tensor=(-1, -1)) for s in cost.storages))
