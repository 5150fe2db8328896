"""Keep what a loop's gradient reads, recompute the loop whole, or segment by segment.

A graph whose loops are recomputed in segments (`tfckpt.plan.loops.change.in_segments`) is a step
like any other. So one decision means to plan several such graphs against the same plain step, and
to take the best plan of all: with all loops that save anything in segments, and with those alone
that save most for their time. Segments are as long as takes the minimum memory for the loop by
itself; and, where several loops are in segments, for all: their states exist at the same time,
while one segment at a time is computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from tfckpt.cost.build import cost_of
from tfckpt.cost.time import seconds
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph, Op
from tfckpt.ir.target import Target
from tfckpt.plan.choosing.rules import best_of
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops.change import in_segments
from tfckpt.plan.loops.segments import (
    Lengths,
    best_length,
    entry_bytes,
    list_bytes,
    segmentable,
    state_bytes,
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

Planner = Callable[[Graph, CostGraph, float], Iterator[Decision]]
"""Yields decisions about a graph of the step, best first, from a share of a search."""


def segmented(graph: Graph, cost: CostGraph, lengths: Lengths, target: Target
              ) -> tuple[Graph, CostGraph, Edits]:
    """Return the step with loops in segments, its cost, and the edits.

    Args:
      graph: the step; not changed.
      cost: its cost graph, returned where no loop is in segments.
      lengths: iterations of a segment, for each loop that is changed; may be empty.
      target: what the step is planned for; the new graph is priced with its rates.

    Raises:
      PlanError: a loop cannot be recomputed so.
    """
    if not lengths:
        return graph, cost, Edits()
    graph, edits = in_segments(graph, lengths, not target.orders_by_control)
    return graph, cost_of(graph, target, like=cost), edits


def with_loops_in_segments(graph: Graph, cost: CostGraph, plans: Planner, *, budget: int | None,
                           objective: str, target: Target,
                           allowed: Callable[[], bool] = lambda: True) -> Iterator[Decision]:
    """Yield decisions about a step, its loops as they are or in segments, best first.

    A budget that is met with nothing computed again ends the search.

    Args:
      graph: the step.
      cost: its cost graph.
      plans: what plans a graph of it.
      budget: dynamic bytes that `plans` plans for; None for the minimum peak.
      objective: "time" or "memory": what `plans` plans for.
      target: what the step is planned for.
      allowed: says, whenever a decision is asked for, whether it may have loops in segments.

    Raises:
      InfeasibleBudgetError: no plan fits; the smallest budget of those tried is named.
    """
    heads: dict[int, Decision] = {}
    others: dict[int, Iterator[Decision]] = {}
    refusals: list[InfeasibleBudgetError] = []
    most = max(1, SEARCHED // max(len(cost.vertices), 1))
    lengths = choices(graph, target)[:most] if allowed() else []
    for n, chosen in enumerate([{}, *lengths]):
        others[n] = _decisions(graph, cost, chosen, plans, target, 1.0 if n < 2 else OTHERS)
        try:
            heads[n] = next(others[n])
        except InfeasibleBudgetError as error:
            refusals.append(error)
        except StopIteration:
            continue
        if budget is not None and n in heads and not chosen and (
                not heads[n].planned.plan.recomputed):
            break
    if not heads and refusals:
        raise min(refusals, key=lambda error: error.smallest_bytes)
    while heads:
        order = [n for n in heads if not heads[n].segments or allowed()]
        if not order:
            return
        best = order[best_of([heads[n].planned for n in order], budget, objective)]
        yield heads.pop(best)
        following = next(others[best], None)
        if following is not None:
            heads[best] = following


def _decisions(graph: Graph, cost: CostGraph, lengths: Lengths, plans: Planner, target: Target,
               share: float = 1.0) -> Iterator[Decision]:
    changed, priced, edits = segmented(graph, cost, lengths, target)
    for found in plans(changed, priced, share):
        yield found if not lengths else Decision(
            found.graph, found.cost, found.planned, found.regions, edits.then(found.edits),
            tuple(lengths.items()))


def choices(graph: Graph, target: Target) -> list[dict[str, int]]:
    """Return which loops may be recomputed in segments, and how long these are: all loops first.

    Args:
      graph: the step.
      target: what the step is planned for: its rates give the loops' times.

    Returns:
      Lengths of segments by the name of the forward's loop, at most `CHOICES`; empty where no loop
      saves anything.
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
    found = []
    for size, together in itertools.product(sizes, (True, False)):
        taken = [loops[n] for n in sorted(worth[:size])]
        found.append({op.name: best_length(op, len(taken) if together else 1) for op in taken})
    return [entry for n, entry in enumerate(found) if entry not in found[:n]][:CHOICES]


def _saves(op: Op) -> float:
    """Return the bytes that a loop by itself keeps less in segments."""
    assert op.loop is not None
    k = best_length(op)
    return list_bytes(op) - k * entry_bytes(op) - -(-op.loop.trips // k) * state_bytes(op)
