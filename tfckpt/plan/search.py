"""The search of `auto`: a pool of priced candidates, the same for every budget.

All solvers' proposals are priced, the most promising are led down to less memory
(`tfckpt.plan.improve.descend`), and between the least peak found and the plain one several rungs
are climbed back, each spending its room on time (`hasten`). Since no budget enters, a larger
budget chooses from the same plans and never gets a slower one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from tfckpt.cost.costgraph import CostGraph
from tfckpt.plan.coarsen import coarsen
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced, non_dominated, proposed
from tfckpt.plan.improve import descend, hasten
from tfckpt.plan.order import base_order, deferrable, moves_of_xla, releasable
from tfckpt.plan.refine import front
from tfckpt.plan.schedule import Moves
from tfckpt.plan.solvers.candidates import recursive
from tfckpt.target import HERE, ORDER, Target

EVALUATIONS, FEWEST, MOST = 300_000, 60, 1200
"""Candidates priced: the first divided by the graph's vertices, within the other two."""
DESCENTS = (0.4, 0.12, 0.08)
"""Of the evaluations, what leading down the best starts may take."""
REFINEMENTS, WORTHWHILE, ENOUGH = 16_000_000, 500, 8_000
"""Schedules priced in `tfckpt.plan.refine`: the first divided by the square of the vertices, so
that the work is the same for all; none where fewer than the second, at most the third."""
LARGEST = 2_500
"""Vertices searched one by one; larger graphs are coarsened to about this size."""
REFINED = 14
"""Plans of the coarse graph that are priced on the fine one; fewer where each takes long."""
CLIMB = 0.3
"""Of the evaluations, what making plans faster may take once recursive ones are priced."""
RUNGS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.13, 0.17, 0.21, 0.26, 0.31, 0.37, 0.43,
         0.5, 0.57, 0.64, 0.71, 0.78, 0.85, 0.92)
"""Where between the least and the plain peak plans are made faster; dense where `min` chooses."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan on the Pareto front: planned peak in bytes, time in the graph's unit, its solver."""

    peak_bytes: int
    time: float
    solver: str


def explore(evaluator: Evaluator, patterns: Sequence[Candidate], solvers: Sequence[Callable],
            objective: str, plain_bytes: int) -> list[Priced]:
    """The pool of `auto`.

    Args:
      patterns: what `templates` returned.
      plain_bytes: requested peak of the plain step.

    Graphs of more than `LARGEST` vertices are searched on a coarse graph; the front found there
    is priced on the fine one.
    """
    graph = evaluator.graph
    if len(graph.vertices) <= LARGEST:
        improve(evaluator, starts(evaluator, patterns, solvers, objective), plain_bytes)
        refine(evaluator, evaluator.price(patterns[-1]))
        recurse(evaluator, patterns, objective, plain_bytes)
        return list(evaluator.priced)
    pattern = patterns[-1]
    coarse = coarsen(graph, base_order(graph, pattern.moves),
                     -(-2 * len(graph.vertices) // LARGEST))
    rough = Evaluator(coarse.graph)
    found = starts(rough, templates(rough, False), solvers, objective)
    best = non_dominated(improve(rough, found, plain_bytes))
    for untouched in patterns:
        evaluator.price(untouched)
    refined = [evaluator.price(dataclasses.replace(
        pattern, keep=coarse.fine(p.candidate.keep), again=coarse.fine(p.candidate.again),
        source=p.candidate.source)) for p in spread(best, few(graph, REFINED))]
    climb(evaluator, min(p.peak for p in refined), plain_bytes,
          EVALUATIONS // len(graph.vertices))
    recurse(evaluator, patterns, objective, plain_bytes)
    return list(evaluator.priced)


def recurse(evaluator: Evaluator, patterns: Sequence[Candidate], objective: str,
            plain_bytes: int) -> None:
    """Prices recursive checkpoints and makes them faster; after all else, which they do not touch.
    """
    for proposal in recursive(evaluator, objective):
        evaluator.price(proposed(patterns[-1], proposal, recursive.__name__))
    vertices = max(len(evaluator.graph.vertices), 1)
    climb(evaluator, min(p.peak for p in evaluator.priced), plain_bytes,
          int(CLIMB * max(FEWEST, min(MOST, EVALUATIONS // vertices))))


def few(graph: CostGraph, count: int) -> int:
    """How many plans to look at where `count` suit a graph of 1,500 to 10,000 vertices.

    Up to three times as many in smaller graphs, ever fewer in larger ones.
    """
    vertices = max(len(graph.vertices), 1)
    return max(2, min(count * 10_000 // vertices, max(count, min(3 * count,
                                                                 count * 1_500 // vertices))))


def spread(front: Sequence[Priced], count: int) -> list[Priced]:
    """At most `count` of the candidates, evenly, both ends among them."""
    count = min(len(front), count)
    return [front[i * (len(front) - 1) // max(count - 1, 1)] for i in range(count)]


def templates(evaluator: Evaluator, free_moves: bool, target: Target = HERE) -> list[Candidate]:
    """Everything kept, under each combination of free moves; the most moves last.

    Under XLA the moves are its own; the backward is reordered where XLA can be made to follow.
    """
    plain = Candidate(evaluator.everything(), source="store_all")
    if not target.orders_by_control:
        moved = dataclasses.replace(plain, moves=moves_of_xla(evaluator.graph))
        thrifty = dataclasses.replace(moved, thrifty=True)
        return [moved, thrifty] if target.hold == ORDER else [moved]
    if not free_moves:
        return [plain]
    graph = evaluator.graph
    joins = releasable(graph)
    found = [plain, dataclasses.replace(plain, moves=Moves(deferrable(graph)))]
    if joins:
        found.append(dataclasses.replace(plain, moves=Moves(deferrable(graph, joins), joins)))
    return found + [dataclasses.replace(t, thrifty=True) for t in found[1:]]


def starts(evaluator: Evaluator, patterns: Sequence[Candidate], solvers: Iterable[Callable],
           objective: str) -> list[Priced]:
    """The solvers' proposals, priced under the last pattern's moves, and the patterns."""
    found = [evaluator.price(proposed(patterns[-1], proposal, solve.__name__))
             for solve in solvers for proposal in solve(evaluator, objective)]
    return found + [evaluator.price(p) for p in patterns]


def improve(evaluator: Evaluator, pool: list[Priced], plain_bytes: int) -> list[Priced]:
    """Everything priced on the way down from the best starts and back up.

    Args:
      pool: the priced starts.
      plain_bytes: requested peak of the plain step.
    """
    vertices = max(len(evaluator.graph.vertices), 1)
    evaluations = max(FEWEST, min(MOST, EVALUATIONS // vertices))
    order = sorted(pool, key=lambda p: (p.peak, p.time))
    lowest = min((descend(evaluator, start, 0, int(evaluations * share))
                  for start, share in zip(order, DESCENTS, strict=False)),
                 key=lambda p: (p.peak, p.time))
    climb(evaluator, lowest.peak, plain_bytes, int(evaluations * (1 - sum(DESCENTS))))
    return list(evaluator.priced)


def climb(evaluator: Evaluator, lowest: int, plain_bytes: int, evaluations: int) -> None:
    """Makes plans faster on every rung between the least and the plain peak, in bytes."""
    each = evaluations // len(RUNGS)
    for rung in RUNGS if each else ():
        limit = lowest + int(rung * max(plain_bytes - lowest, 0))
        fitting = [p for p in evaluator.priced if p.peak <= limit]
        hasten(evaluator, min(fitting, key=lambda p: (p.time, p.peak)), limit, each)


def refine(evaluator: Evaluator, untouched: Priced) -> None:
    """Prices the front that a search over schedules finds, where the graph is small enough.

    It starts from a plan that recomputes nothing and from the one of the least peak so far.
    """
    graph = evaluator.graph
    evaluations = min(ENOUGH, REFINEMENTS // max(len(graph.vertices), 1) ** 2)
    if evaluations < WORTHWHILE:
        return
    lowest = min(evaluator.priced, key=lambda p: (p.peak, p.time))
    for start in (untouched, lowest):
        for schedule in front(graph, start.schedule, RUNGS, evaluations // 2):
            evaluator.price(dataclasses.replace(
                start.candidate, schedule=schedule, source=f"{start.candidate.source}, refined"))


def best_of_each(pool: Sequence[Priced]) -> list[Priced]:
    """What is not dominated by another of the same solver, solvers in the order of the pool."""
    solvers: dict[str, list[Priced]] = {}
    for priced in pool:
        solvers.setdefault(priced.candidate.source, []).append(priced)
    return [p for mine in solvers.values() for p in non_dominated(mine)]
