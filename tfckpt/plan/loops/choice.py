"""Keep what a loop's gradient reads, recompute the loop whole, or segment by segment.

A graph whose loops are recomputed in segments (`tfckpt.plan.loops.change.in_segments`) is a step
like any other. So one decision means to plan several such graphs against the same plain step, those
whose bounds allow a better plan (`tfckpt.plan.loops.decided`), and to take the best plan of all:
with all loops that save anything in segments, and with those alone
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
from collections.abc import Callable, Iterable, Iterator

from tfckpt.cost.build import cost_of
from tfckpt.cost.time import seconds
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.target import Target
from tfckpt.plan.choosing.planned import Plain
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops.again import with_entries_again
from tfckpt.plan.loops.bounds import Bounds
from tfckpt.plan.loops.change import in_segments
from tfckpt.plan.loops.decided import OTHERS, Decisions
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
from tfckpt.plan.loops.spending import spend
from tfckpt.plan.sums import put_together, sums_of_slices

SMALLEST = 0.01
"""Of what all loops save, what one has to save to be looked at."""
CHOICES = 6
"""Graphs with loops in segments that are planned, at most."""
SEARCHED = 3_000
"""How many of each kind, times the vertices of the graph: in segments, or with entries again."""

FEWER = 0.8
"""Of the bytes that segments keep, what segments in segments may."""

Planner = Callable[[Graph, CostGraph, float], Iterator[Decision]]
"""Yields decisions about a graph of the step, best first, from a share of a search.

Of no share at most one, which computes nothing again and fits: no search finds a faster one.
"""


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
    sums = [name for name, cut in cuts.items() if cut.together]
    graph, edits = in_segments(graph, {
        name: cut for name, cut in cuts.items() if cut.length}, not target.orders_by_control)
    if lists:
        graph, more = with_entries_again(graph, lists)
        edits = edits.then(more)
    if sums:
        graph, more = put_together(graph, sums)
        edits = edits.then(more)
    return graph, cost_of(graph, target, like=cost), edits


class Variants:
    """A step with its loops cut in several ways, each made and priced once.

    Args:
      graph, cost, target: as for `segmented`.
    """

    def __init__(self, graph: Graph, cost: CostGraph, target: Target) -> None:
        self.graph, self.cost, self.target = graph, cost, target
        self._made: dict[tuple[tuple[str, Cut], ...], tuple[Graph, CostGraph, Edits]] = {}
        self._bounds: dict[tuple[tuple[str, Cut], ...], Bounds] = {}

    @functools.cached_property
    def sums(self) -> dict[str, Cut]:
        """Return the sums that may be put together; XLA fuses them by itself."""
        if not self.target.orders_by_control:
            return {}
        return dict.fromkeys(sums_of_slices(self.graph, self.cost), Cut(0, together=True))

    @functools.cached_property
    def cuts(self) -> list[dict[str, Cut]]:
        """Return how loops may be cut: in segments, then with entries computed again."""
        most = max(1, SEARCHED // max(len(self.cost.vertices), 1))
        found = choices(self.graph, self.target)[:most]
        if self.target.orders_by_control:
            found += [{name: Cut(0, entries=slots) for name, slots in chosen.items()}
                      for chosen in choices_of_entries(self.graph, self.target.rates)[:most]]
        return found

    def at(self, cuts: Cuts) -> tuple[Graph, CostGraph, Edits]:
        """Return the step with loops cut, its cost, and the edits; see `segmented`.

        Args:
          cuts: how each loop is cut that is changed; may be empty.
        """
        key = tuple(cuts.items())
        if key not in self._made:
            self._made[key] = segmented(self.graph, self.cost, cuts, self.target)
        return self._made[key]

    def bounds(self, cuts: Cuts) -> Bounds:
        """Return what plans of the step with loops cut take at least.

        Args:
          cuts: as for `at`.
        """
        key = tuple(cuts.items())
        if key not in self._bounds:
            self._bounds[key] = Bounds(self.at(cuts)[1], self.target.smallest_counted or 0)
        return self._bounds[key]


def with_loops_in_segments(graph: Graph, cost: CostGraph, plans: Planner, *, budget: int | None,
                           objective: str, target: Target,
                           allowed: Callable[[Iterable[Cut]], bool] = lambda cuts: True,
                           plain: Plain | None = None, variants: Variants | None = None
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
      plain: the plain step, where plans are of the cost graphs that `plans` is handed: of those
        whose bounds are worse than what is found none is asked for.
      variants: what is known of the step with its loops cut.

    Raises:
      InfeasibleBudgetError: no plan fits; the smallest budget of those tried is named.
    """
    variants = variants or Variants(graph, cost, target)
    found = Decisions(functools.partial(_decisions, graph, cost, plans=plans, target=target,
                                        variants=variants),
                      variants.bounds, plain, budget, objective,
                      0 if budget is None else int(budget * target.safety))
    as_is = found.announce({}, 1.0)
    if budget is None or not found.nothing_again(as_is):
        sums = variants.sums
        cuts = [chosen for chosen in variants.cuts if allowed(chosen.values())]
        if cuts and budget is None and objective == "memory":
            cuts += inside_each_other(graph)
        if sums:
            cuts.append({})
        for n, chosen in enumerate(cuts):
            found.announce(chosen | sums, OTHERS if n else 1.0)
        if budget is not None and cuts:
            _within(found, graph, sums, budget, objective, target)
    yield from found.best_first(allowed)


def _within(found: Decisions, graph: Graph, sums: Cuts, budget: int, objective: str,
            target: Target) -> None:
    """Cut loops further where a budget is too small, and less where there is room in it."""
    def in_segments(cuts: Cuts) -> bool:
        return any(cut.length for cut in cuts.values())

    if found.best(in_segments) is None and found.best() is None:
        for chosen in inside_each_other(graph):
            found.announce({**chosen, **sums}, OTHERS)
    if objective == "time":
        spend(found, graph, budget, target.rates)


def _decisions(graph: Graph, cost: CostGraph, cuts: Cuts, share: float = 1.0, *, plans: Planner,
               target: Target, variants: Variants | None = None) -> Iterator[Decision]:
    changed, priced, edits = (variants or Variants(graph, cost, target)).at(cuts)
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
