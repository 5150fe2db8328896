"""What a search has priced, and those of it from which plans are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from tfckpt.common.clock import check_time
from tfckpt.ir.costgraph import CostGraph
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced, non_dominated


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan on the Pareto front: planned peak in bytes, time in the graph's unit, its solver."""

    peak_bytes: int
    time: float
    solver: str


class Run(Evaluator):
    """An evaluator that lends its prices and counts what one run has asked for."""

    def __init__(self, whole: Evaluator) -> None:
        self.graph, self.whole = whole.graph, whole
        self._mine: dict[Candidate, Priced] = {}

    def price(self, candidate: Candidate) -> Priced:
        """Return what the shared evaluator says, while there is time.

        Args:
          candidate: to be priced.

        Raises:
          OutOfTimeError: planning has a time limit, which is over.
        """
        check_time()
        return self.take(candidate)

    def take(self, candidate: Candidate) -> Priced:
        """Return what the shared evaluator says, whatever the time.

        Args:
          candidate: to be priced.
        """
        found = self._mine[candidate] = self.whole.price(candidate)
        return found

    def order(self, candidate: Candidate) -> tuple[int, ...]:
        """Return what the shared evaluator has.

        Args:
          candidate: whose order of originals is wanted.
        """
        return self.whole.order(candidate)

    @property
    def priced(self) -> Collection[Priced]:
        """Return everything that this run has priced."""
        return self._mine.values()


@dataclasses.dataclass(frozen=True)
class Pool:
    """All that was priced, and those of it from which a plan is chosen.

    Attributes:
      priced: everything.
      choices: what nothing of its own run, or of its own solver and objective, beats in both
        requested peak and time. Other runs beat some of it, but not always once an allocator has
        counted; and a run more must not take a choice away.
    """

    priced: tuple[Priced, ...]
    choices: tuple[Priced, ...]


def pool_of(priced: Iterable[Priced], groups: Iterable[Iterable[Priced]]) -> Pool:
    """Return the pool with the fronts of some groups as choices.

    Args:
      priced: everything that was priced.
      groups: candidates that compete with each other only; may share some.
    """
    fronts = (p for group in groups for p in non_dominated(group))
    return Pool(tuple(priced), tuple({p.candidate: p for p in fronts}.values()))


def few(graph: CostGraph, count: int) -> int:
    """Return how many plans to look at where `count` suit a graph of 1,500 to 10,000 vertices.

    Up to three times as many in smaller graphs, ever fewer in larger ones.

    Args:
      graph: cost graph; only its number of vertices counts.
      count: plans that suit a graph of medium size.
    """
    vertices = max(len(graph.vertices), 1)
    return max(2, min(count * 10_000 // vertices, max(count, min(3 * count,
                                                                 count * 1_500 // vertices))))


def spread(front: Sequence[Priced], count: int) -> list[Priced]:
    """Return at most `count` of the candidates, evenly, both ends among them.

    Args:
      front: candidates in any order that is to be kept.
      count: how many are wanted; all where there are fewer.
    """
    count = min(len(front), count)
    return [front[i * (len(front) - 1) // max(count - 1, 1)] for i in range(count)]


def best_of_each(pool: Sequence[Priced]) -> list[Priced]:
    """Return what is not dominated by another of the same solver.

    Solvers come in the order of the pool.

    Args:
      pool: priced candidates; their `source` names the solver.
    """
    solvers: dict[str, list[Priced]] = {}
    for priced in pool:
        solvers.setdefault(priced.candidate.source, []).append(priced)
    return [p for mine in solvers.values() for p in non_dominated(mine)]
