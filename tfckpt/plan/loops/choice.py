"""Keep what a loop's gradient reads, recompute the loop whole, or segment by segment.

A graph whose loops are recomputed in segments (`tfckpt.plan.loops.change.in_segments`) is a step
like any other. So one decision means to plan several such graphs against the same plain step, and
to take the best plan of all: with all loops that save anything in segments, and with those alone
that save most for their time. Segments are as long as takes the minimum memory for the loop by
itself; and, where several loops are in segments, for all: their states exist at the same time,
while one segment at a time is computed again.

The last iterations of a loop may be in no segment: they keep their lists, and need not run again.
Those of the last segment are not computed again for nothing, as their lists may be there when the
backward begins; and a budget that segments do not need is spent on more of them, since each
iteration saves as much time as any other.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfckpt.cost.build import cost_of
from tfckpt.cost.time import seconds
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.target import Rates, Target
from tfckpt.plan.choosing.rules import best_of
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops.again import with_entries_again
from tfckpt.plan.loops.change import in_segments
from tfckpt.plan.loops.entries import choices_of_entries
from tfckpt.plan.loops.segments import (
    Cut,
    Cuts,
    best_length,
    best_lengths,
    kept_bytes,
    list_bytes,
    may_keep_last,
    segmentable,
)

SMALLEST = 0.01
"""Of what all loops save, what one has to save to be looked at."""
CHOICES = 6
"""Graphs with loops in segments that are planned, at most."""
SEARCHED = 3_000
"""How many, times the vertices of the graph."""

OTHERS = 0.3
"""Share of a search that each graph but the first two gets: mostly one of these has the best plan,
the loops as they are or all in segments."""

FEWER = 0.8
"""Of the bytes that segments keep, what segments in segments may."""

SPENT = 3
"""How often lists are kept of more iterations, or of fewer."""

Planner = Callable[[Graph, CostGraph, float], Iterator[Decision]]
"""Yields decisions about a graph of the step, best first, from a share of a search."""


def segmented(graph: Graph, cost: CostGraph, cuts: Cuts, target: Target
              ) -> tuple[Graph, CostGraph, Edits]:
    """Return the step with loops in segments, or with entries computed again; its cost, the edits.

    Args:
      graph: the step; not changed.
      cost: its cost graph, returned where no loop is in segments.
      cuts: how each loop is cut that is changed; may be empty.
      target: what the step is planned for; the new graph is priced with its rates.

    Raises:
      PlanError: a loop cannot be recomputed so.
    """
    if not cuts:
        return graph, cost, Edits()
    lists = {name: cut.entries for name, cut in cuts.items() if cut.entries}
    graph, edits = in_segments(graph, {name: cut for name, cut in cuts.items()
                                       if name not in lists}, not target.orders_by_control)
    if lists:
        graph, more = with_entries_again(graph, lists)
        edits = edits.then(more)
    return graph, cost_of(graph, target, like=cost), edits


def with_loops_in_segments(graph: Graph, cost: CostGraph, plans: Planner, *, budget: int | None,
                           objective: str, target: Target,
                           allowed: Callable[[Iterable[Cut]], bool] = lambda cuts: True
                           ) -> Iterator[Decision]:
    """Yield decisions about a step, its loops as they are or in segments, best first.

    A budget that is met with nothing computed again ends the search.

    Args:
      graph: the step.
      cost: its cost graph.
      plans: what plans a graph of it.
      budget: dynamic bytes that `plans` plans for; None for the minimum peak.
      objective: "time" or "memory": what `plans` plans for.
      target: what the step is planned for.
      allowed: says, whenever a decision is asked for, whether loops may be cut as they are in it.

    Raises:
      InfeasibleBudgetError: no plan fits; the smallest budget of those tried is named.
    """
    found = _Decisions(functools.partial(_decisions, graph, cost, plans=plans, target=target),
                       budget, objective)
    most = max(1, SEARCHED // max(len(cost.vertices), 1))
    cuts = choices(graph, target)[:most]
    if target.orders_by_control:
        cuts += [{name: Cut(0, entries=slots) for name, slots in chosen.items()}
                 for chosen in choices_of_entries(graph, target.rates)]
    cuts = [chosen for chosen in cuts if allowed(chosen.values())]
    if cuts and budget is None and objective == "memory":
        cuts += inside_each_other(graph)
    for n, chosen in enumerate([{}, *cuts]):
        first = found.add(chosen, 1.0 if n < 2 else OTHERS)
        if budget is not None and first is not None and not chosen and (
                not first.planned.plan.recomputed):
            break
    else:
        if budget is not None and cuts and found.best() is None:
            for chosen in inside_each_other(graph):
                found.add(chosen, OTHERS)
        if budget is not None and objective == "time" and cuts:
            _spend(found, graph, budget, target.rates)
    yield from found.best_first(allowed)


class _Decisions:
    """Decisions about several graphs of a step.

    Args:
      of: yields decisions about the step with loops cut, best first, from a share of a search.
      budget, objective: as for `with_loops_in_segments`.
    """

    def __init__(self, of: Callable[[Cuts, float], Iterator[Decision]], budget: int | None,
                 objective: str) -> None:
        self._of, self._budget, self._objective = of, budget, objective
        self._left: list[tuple[Decision, Iterator[Decision]]] = []
        self._refusals: list[InfeasibleBudgetError] = []

    def add(self, cuts: Cuts, share: float) -> Decision | None:
        """Plan a graph more, and return its best decision; None where it has none that fits.

        Args:
          cuts: how its loops are cut; may be empty.
          share: of a search that it gets.
        """
        decisions = self._of(cuts, share)
        try:
            first = next(decisions, None)
        except InfeasibleBudgetError as error:
            self._refusals.append(error)
            return None
        if first is not None:
            self._left.append((first, decisions))
        return first

    def missing(self, budget: int) -> int:
        """Return by how many bytes the last graph missed the budget that did.

        Args:
          budget: dynamic bytes.
        """
        return self._refusals[-1].smallest_bytes - budget if self._refusals else 0

    def best(self, among: Callable[[Decision], bool] = lambda decision: True) -> int | None:
        """Return the place of the best decision that is left; None where there is none.

        Args:
          among: says of a decision whether it counts.
        """
        order = [n for n, (decision, _) in enumerate(self._left) if among(decision)]
        return order[best_of([self._left[n][0].planned for n in order], self._budget,
                             self._objective)] if order else None

    def at(self, place: int) -> Decision:
        """Return the decision at a place.

        Args:
          place: what `best` returned.
        """
        return self._left[place][0]

    def best_first(self, allowed: Callable[[Iterable[Cut]], bool]) -> Iterator[Decision]:
        """Yield what is left, best first; after each, what its graph has besides is looked at too.

        Args:
          allowed: as for `with_loops_in_segments`.

        Raises:
          InfeasibleBudgetError: no graph has a plan that fits.
        """
        if not self._left and self._refusals:
            raise min(self._refusals, key=lambda error: error.smallest_bytes)
        while (place := self.best(lambda d: allowed(dict(d.segments).values()))) is not None:
            decision, following = self._left.pop(place)
            yield decision
            if (after := next(following, None)) is not None:
                self._left.insert(place, (after, following))


def _spend(found: _Decisions, graph: Graph, budget: int, rates: Rates) -> None:
    """Have as many of the last iterations keep their lists as a budget has room for.

    What fits is planned again with what it leaves, what does not with less. Neither does what fits
    and is no faster, since another loop is computed again for it.

    Args:
      found: what was decided so far; more decisions are added.
      graph: the step.
      budget: dynamic bytes.
      rates: of the target.
    """
    loops = {op.name: op for op in segmentable(graph) if may_keep_last(op)}
    place = found.best(lambda d: any(name in loops and cut.length for name, cut in d.segments))
    if place is None:
        return
    base = found.at(place).planned
    cuts, room = dict(found.at(place).segments), budget - base.peak_bytes
    order = _by_worth([loops[name] for name in cuts if name in loops], graph, rates)
    entry = math.ceil(max(list_bytes(op) / max(op.loop.trips, 1) for op in order if op.loop))
    kept, least, too_much = 0, base.time, math.inf
    tried = cuts
    for _ in range(SPENT):
        before, tried = tried, _keeping(cuts, order, room)
        if room <= kept or tried in (before, cuts):
            return
        decision = found.add(tried, OTHERS)
        if decision is None:
            too_much, room = room, room - max(found.missing(budget), 0) - entry
        elif decision.planned.time >= least:
            too_much, room = room, (kept + room) // 2
        else:
            kept, least = room, decision.planned.time
            room = int(min(room + budget - decision.planned.peak_bytes, too_much - entry))


def _by_worth(loops: Sequence[Op], graph: Graph, rates: Rates) -> list[Op]:
    """Return loops in the order in which room is best spent on their lists.

    First those that take long for what they keep; of others that are about alike the last, whose
    lists are gone first.
    """
    worth = [round(math.log2(seconds(graph, op, rates) / list_bytes(op))) for op in loops]
    return [loops[n] for n in sorted(range(len(loops)), key=lambda n: (-worth[n], -n))]


def _keeping(cuts: Cuts, order: Sequence[Op], room: int) -> dict[str, Cut]:
    """Return cuts with which some bytes more of lists are kept; what is kept whole is in none.

    Args:
      cuts: how loops are cut.
      order: which of them keep more, first those on which it is spent first.
      room: bytes.
    """
    found = dict(cuts)
    for op in order:
        assert op.loop is not None
        cut = cuts[op.name]
        entry = list_bytes(op) / op.loop.trips
        more = min(int(max(room, 0) / entry), op.loop.trips - cut.last)
        room -= int(more * entry)
        found[op.name] = cut._replace(last=cut.last + more)
        if cut.last + more > op.loop.trips - cut.length:
            del found[op.name]
    return found


def _decisions(graph: Graph, cost: CostGraph, cuts: Cuts, share: float = 1.0, *, plans: Planner,
               target: Target) -> Iterator[Decision]:
    changed, priced, edits = segmented(graph, cost, cuts, target)
    for found in plans(changed, priced, share):
        yield found if not cuts else Decision(
            found.graph, found.cost, found.planned, found.regions, edits.then(found.edits),
            tuple(cuts.items()))


def choices(graph: Graph, target: Target) -> list[dict[str, Cut]]:
    """Return which loops may be recomputed in segments, and how they are cut: all loops first.

    Args:
      graph: the step.
      target: what the step is planned for: its rates give the loops' times.

    Returns:
      Cuts by the name of the forward's loop, at most `CHOICES`; empty where no loop saves anything.
    """
    loops = [op for op in segmentable(graph) if _saves(op) > 0]
    minimum = SMALLEST * sum(map(_saves, loops))
    loops = [op for op in loops if _saves(op) >= minimum]
    if not loops:
        return []
    worth = sorted(range(len(loops)), key=lambda n: -_saves(loops[n]) / seconds(
        graph, loops[n], target.rates))
    count = len(loops)
    sizes = dict.fromkeys(size for size in (count, count // 2, count // 4, 1) if size)
    found, later = list[dict[str, Cut]](), list[dict[str, Cut]]()
    for size, together in itertools.product(sizes, (True, False)):
        taken = [loops[n] for n in sorted(worth[:size])]
        cuts = {op.name: Cut(best_length(op, len(taken) if together else 1)) for op in taken}
        found.append(cuts)
        if size == count and may_keep_last(taken[-1]):
            (found if together else later).append(
                cuts | {taken[-1].name: _whole_last(taken[-1], cuts)})
    found += later
    return [entry for n, entry in enumerate(found) if entry not in found[:n]][:CHOICES]


def inside_each_other(graph: Graph) -> list[dict[str, Cut]]:
    """Return how loops are cut where segments alone keep too much: segments are in segments.

    Args:
      graph: the step.

    Returns:
      Cuts of all loops that save anything, those in which segments in segments keep `FEWER` bytes;
      nothing where that is none.
    """
    loops = [op for op in segmentable(graph) if _saves(op) > 0]
    cuts = {op.name: Cut(best_length(op, len(loops))) for op in loops}
    deeper = {}
    for op in loops:
        if op.loop is not None and op.loop.trips > 3:
            length, within = best_lengths(op, len(loops))
            cut = Cut(length, within=(within,))
            if kept_bytes(op, cut, len(loops)) < FEWER * kept_bytes(op, cuts[op.name], len(loops)):
                deeper[op.name] = cut
    return [cuts | deeper] if deeper else []


def _whole_last(op: Op, cuts: Cuts) -> Cut:
    """Return how a loop is cut whose last segment keeps its lists."""
    assert op.loop is not None
    length = cuts[op.name].length
    return Cut(length, min(length, op.loop.trips - 1))


def _saves(op: Op) -> float:
    """Return the bytes that a loop by itself keeps less in segments."""
    return list_bytes(op) - kept_bytes(op, Cut(best_length(op)))
