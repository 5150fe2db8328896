"""Keep, recompute, or keep the derivative: the step is planned with and without forward AD.

A graph in which alternatives were taken (`tfckpt.fad.transform.take`) is a step like any other:
its derivatives are pure forward ops that a plan may keep or recompute. So one decision means to
plan several such graphs against the same plain step, and to take the best plan of all. Nothing of
forward AD is taken where recomputation alone does as well, since that keeps every bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tfckpt.cost.build import cost_of
from tfckpt.cost.storage import roots
from tfckpt.errors import CostError, InfeasibleBudgetError, PlanError
from tfckpt.fad.alternatives import Alternative, Offers, find_alternatives
from tfckpt.fad.regions import Region
from tfckpt.fad.transform import take
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import Graph, TensorId
from tfckpt.ir.target import HERE, Target
from tfckpt.plan.choosing.planned import Planned
from tfckpt.plan.choosing.rules import best_of
from tfckpt.plan.loops.segments import Cut
from tfckpt.plan.names import AUTO

FAD = (AUTO, True, False)
"""Allowed values of `fad`."""
WORTHWHILE = 0.04
"""Of the plain peak, what all regions together must save before `auto` plans with them."""
HALVES, SEARCHED = 3, 3_000
"""How often the regions taken are halved: at most, and times the vertices of the graph."""
CHANGES = 1_000
"""Choices that differ from the best in one region: so many, by the vertices, are planned."""
NOTICED = 0.001
"""Of the plain peak, what one region must save before `auto` looks at it."""

Planner = Callable[[CostGraph], Iterator[Planned]]
"""Yields plans of a cost graph of the step, against the plain step, best first."""
Taken = tuple[int, ...]
"""Indices of the alternatives that are taken, ascending."""


@dataclasses.dataclass(frozen=True)
class ForwardAdRegion:
    """The decision about one element-wise region.

    Attributes:
      source: name of the op that makes the region's input.
      ops: names of its ops.
      saved_bytes: bytes fewer kept for the backward with its derivatives; negative if more, None
        where its backward was not understood.
      taken: whether its derivatives are kept.
      why: the reason.
    """

    source: str
    ops: tuple[str, ...]
    saved_bytes: int | None
    taken: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """A plan, and the graph that it is a plan of.

    Attributes:
      graph, cost: the step with the chosen alternatives taken; the captured ones where none are.
      edits: what makes that graph of the captured one.
      planned: its plan, against the plain step.
      regions: what became of each region, in the order of the graph; empty where forward AD was
        switched off.
      segments: loops that are recomputed segment by segment, and how they are cut.
    """

    graph: Graph
    cost: CostGraph
    planned: Planned
    regions: tuple[ForwardAdRegion, ...] = ()
    edits: Edits = Edits()
    segments: tuple[tuple[str, Cut], ...] = ()


def decisions_of(graph: Graph, cost: CostGraph, plans: Planner, *, fad: object = AUTO,
                 budget: int | None = None, objective: str = "time", plain_bytes: int = 0,
                 target: Target = HERE) -> Iterator[Decision]:
    """Yield plans of a step with the derivatives that are worth keeping, best first.

    Args:
      graph: the captured step.
      cost: its cost graph.
      plans: what plans any cost graph of this step; see `plans_of`.
      fad: False keeps no derivative, True every one that saves bytes, "auto" weighs them.
      budget: dynamic bytes that `plans` plans for; None for the minimum peak.
      objective: "time" or "memory": what `plans` plans for.
      plain_bytes: dynamic peak of the plain step.
      target: what the step is planned for; `cost` was priced with its rates.

    Raises:
      InfeasibleBudgetError: no plan fits; the smallest budget of those tried is named.

    "auto" plans the step without forward AD, with all regions that save enough, and with the last
    half, quarter and eighth of them, fewer of these in large graphs; in small ones it then tries
    to change the choice for single regions. A budget that is met with nothing recomputed ends the
    search, as it leaves nothing to gain. Each of these plans may keep a derivative or recompute it.
    The next decision is the best, by the same rule, of the next plans of all graphs planned.
    """
    if fad is False:
        yield from _with(graph, cost, (), plans, target)
        return
    offers = find_alternatives(graph, roots(graph))
    minimum = 1 if fad is True else max(1, int(NOTICED * plain_bytes))
    reasons = {a.region.source: _too_little(a, minimum) for a in offers.alternatives
               if a.saves < minimum}
    useful, conflicts = _compatible(graph, [a for a in offers.alternatives if a.saves >= minimum])
    reasons.update(conflicts)
    if fad is True:
        for found in _with(graph, cost, useful, plans, target):
            yield _told(graph, offers, found, useful, reasons, "")
    elif sum(a.saves for a in useful) < WORTHWHILE * plain_bytes:
        why = f"all such regions together save less than {WORTHWHILE:.0%} of the plain peak"
        for found in _with(graph, cost, (), plans, target):
            yield _told(graph, offers, found, (), reasons, why)
    else:
        yield from _weighed(graph, cost, plans, target, offers, useful, reasons, budget, objective)


def with_derivatives(graph: Graph, cost: CostGraph, taken: Sequence[bool], target: Target
                     ) -> tuple[Graph, CostGraph, Edits]:
    """Return the step with derivatives kept as in an earlier decision, its cost, and the edits.

    Args:
      graph: the captured step.
      cost: its cost graph.
      taken: whether each of that decision's regions keeps its derivative, in their order.
      target: what the step is planned for.

    Raises:
      PlanError: the step has other regions.
    """
    if not any(taken):
        return graph, cost, Edits()
    offers = find_alternatives(graph, roots(graph))
    sources = sorted({a.region.source for a in offers.alternatives}
                     | {r.region.source for r in offers.refusals})
    if len(sources) != len(taken):
        raise PlanError(f"plan: what was kept is of {len(taken)} element-wise regions, and there "
                        f"are {len(sources)}")
    kept = frozenset(s for s, keeps in zip(sources, taken, strict=True) if keeps)
    graph, edits = take(graph, [a for a in offers.alternatives if a.region.source in kept], target)
    return graph, cost_of(graph, target), edits


def _weighed(graph: Graph, cost: CostGraph, plans: Planner, target: Target, offers: Offers,
             useful: Sequence[Alternative], reasons: dict[TensorId, str], budget: int | None,
             objective: str) -> Iterator[Decision]:
    """Yield the plans without, with all, and with part of the alternatives, best first."""
    tried: dict[Taken, Decision | None] = {}  # the next decision for each
    others: dict[Taken, Iterator[Decision]] = {}
    refusals: list[InfeasibleBudgetError] = []

    def attempt(taken: Taken) -> None:
        if taken not in tried:
            others[taken] = _with(graph, cost, [useful[i] for i in taken], plans, target)
            try:
                tried[taken] = next(others[taken])
            except InfeasibleBudgetError as error:
                tried[taken] = None
                refusals.append(error)

    for taken in _suffixes(len(useful), len(cost.vertices)):
        attempt(taken)
        if budget is not None and _nothing_again(tried[taken]):
            break  # nothing is left that fewer derivatives could save
    best = _best(tried, budget, objective)
    room = CHANGES // max(len(cost.vertices), 1)
    while best is not None and room and not (budget is not None and _nothing_again(tried[best])):
        before = best
        for taken in [t for t in _changes(best, len(useful)) if t not in tried][:room]:
            room -= 1
            attempt(taken)
        best = _best(tried, budget, objective)
        if best == before:
            break
    if best is None:
        raise min(refusals, key=lambda error: error.smallest_bytes)
    while best is not None:
        why = ("without it the plan is better" if best else
               "recomputation alone gives as good a plan" if len(tried) > 1 else
               "the budget is met without it")
        decision = tried[best]
        assert decision is not None
        yield _told(graph, offers, decision, [useful[i] for i in best], reasons, why)
        tried[best] = next(others[best], None)
        best = _best(tried, budget, objective)


def _nothing_again(decision: Decision | None) -> bool:
    return decision is not None and not decision.planned.plan.recomputed


def _best(tried: dict[Taken, Decision | None], budget: int | None,
          objective: str) -> Taken | None:
    """Return the regions of the best plan: the earliest among equals; None where no plan fits."""
    found = {taken: d.planned for taken, d in tried.items() if d is not None}
    if not found:
        return None
    return list(found)[best_of(list(found.values()), budget, objective)]


def _changes(taken: Taken, count: int) -> list[Taken]:
    """Return all choices that differ in one region, last regions first."""
    return [tuple(j for j in range(count) if (j in taken) != (j == i))
            for i in reversed(range(count))]


def _suffixes(count: int, vertices: int) -> list[Taken]:
    """Return the last regions of the graph: none, all, half, a quarter ..., as planning allows.

    What the last layers keep is freed first in the backward, so that their derivatives cost
    little; what the first layers keep stays longest and is worth recomputing.
    """
    halves = min(HALVES, SEARCHED // max(vertices, 1))
    found = [0, count, *(count >> n for n in range(1, halves + 1))]
    return [tuple(range(count - n, count)) for n in sorted(set(found), key=found.index)]


def _with(graph: Graph, cost: CostGraph, alternatives: Sequence[Alternative],
          plans: Planner, target: Target) -> Iterator[Decision]:
    """Yield the decisions for some of the alternatives, best first."""
    edits = Edits()
    if alternatives:
        graph, edits = take(graph, alternatives, target)
        cost = cost_of(graph, target)
    for planned in plans(cost):
        yield Decision(graph, cost, planned, edits=edits)


def _compatible(graph: Graph, alternatives: Sequence[Alternative]
                ) -> tuple[list[Alternative], dict[TensorId, str]]:
    """Return the alternatives that can be taken together, and why the others cannot.

    All of them but where one removes what another reads; then one after the other.
    """
    try:
        take(graph, alternatives)
        return list(alternatives), {}
    except CostError:
        pass
    found: list[Alternative] = []
    reasons = {}
    for alternative in alternatives:
        try:
            take(graph, [*found, alternative])
            found.append(alternative)
        except CostError as error:
            reasons[alternative.region.source] = f"cannot be taken with the others: {error}"
    return found, reasons


def _too_little(alternative: Alternative, minimum: int) -> str:
    if alternative.saves <= 0:
        return "keeping the derivative saves nothing"
    return f"saves less than {minimum:,} bytes"


def _told(graph: Graph, offers: Offers, decision: Decision, chosen: Sequence[Alternative],
          reasons: dict[TensorId, str], otherwise: str) -> Decision:
    """Return the decision with a line for each region; its plan records which are taken."""
    taken = {a.region.source for a in chosen}
    names = tuple(graph.ops[op].name for op, _ in sorted(taken))
    planned = decision.planned
    planned = dataclasses.replace(
        planned, plan=dataclasses.replace(planned.plan, alternatives=names))
    lines = {}
    for a in offers.alternatives:
        source = a.region.source
        why = ("only its derivative is kept" if source in taken
               else reasons.get(source, otherwise))
        lines[source] = _line(graph, a.region, a.saves, source in taken, why)
    for r in offers.refusals:
        lines[r.region.source] = _line(graph, r.region, None, False, r.reason)
    return dataclasses.replace(decision, planned=planned,
                               regions=tuple(lines[s] for s in sorted(lines)))


def _line(graph: Graph, region: Region, saved: int | None, taken: bool, why: str
          ) -> ForwardAdRegion:
    return ForwardAdRegion(graph.ops[region.source[0]].name,
                           tuple(graph.ops[i].name for i in region.ops), saved, taken, why)
