"""Decisions about several graphs of a step, each planned only where it may have the best plan.

To plan a graph takes a search, to bound what its plans take a few sums (`Bounds`). So graphs are
announced first, with what none of their plans stays below, and planned one by one, the likeliest
first, until what is left cannot change which decision is the best: by the rules of
`tfckpt.plan.choosing.rules`, and as if all of them had been planned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfckpt.errors import InfeasibleBudgetError
from tfckpt.plan.choosing.planned import Plain
from tfckpt.plan.choosing.rules import MARGIN, ROOM, TAIL, best_of, cost_of
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops.bounds import Bounds
from tfckpt.plan.loops.segments import Cut, Cuts

OTHERS = 0.3
"""Share of a search that each graph but the first two gets: mostly one of these has the best plan,
the loops as they are or all in segments."""


@dataclasses.dataclass(frozen=True)
class Least:
    """What no plan of a graph stays below, as a share of what the plain step takes.

    Attributes:
      time, peak: of its time, and of its peak; infinite time where no plan fits the budget.
      cost, tail: of both, as `cost_of` weighs them to choose a plan, and to find the minimum.
    """

    time: float
    peak: float
    cost: float
    tail: float


@dataclasses.dataclass(eq=False)
class Announced:
    """A graph of the step.

    Attributes:
      number: its place among all: of equal decisions the first is taken.
      cuts: how its loops are cut.
      share: of a search that it gets.
      least: None where that is not known, so that it has to be planned.
      pending: whether it has not been planned yet.
      decision: the best that is left of it.
      following: what comes after that, or after a search where `at_once`.
    """

    number: int
    cuts: Cuts
    share: float
    least: Least | None
    pending: bool = True
    decision: Decision | None = None
    following: Iterator[Decision] = iter(())
    at_once: bool = False

    @property
    def found(self) -> Decision:
        """Return the best decision that is left, where there is one."""
        assert self.decision is not None
        return self.decision


class Decisions:
    """Decisions about the graphs of a step.

    Args:
      of: yields decisions about the step with loops cut, best first, from a share of a search; from
        none, at most one: what computes nothing again, so that no search finds a faster one.
      bounds: returns what plans of the step with loops cut take at least.
      plain: the plain step; None where nothing is known of what plans take.
      budget, objective: as for `with_loops_in_segments`.
      usable: bytes that a plan within the budget may take.
    """

    def __init__(self, of: Callable[[Cuts, float], Iterator[Decision]],
                 bounds: Callable[[Cuts], Bounds], plain: Plain | None, budget: int | None,
                 objective: str, usable: int) -> None:
        self._of, self._bounds, self._usable = of, bounds, usable
        self._budget, self._objective = budget, objective
        self._by_time = budget is not None and objective == "time"
        # a plain step that fits is a plan of every graph, whatever that takes
        self._plain = None if plain is None or budget is not None and (
            plain.peak_bytes <= budget) else plain
        self._graphs: list[Announced] = []
        self._refusals: list[InfeasibleBudgetError] = []

    def announce(self, cuts: Cuts, share: float) -> Announced:
        """Have a graph planned where it may have the best plan.

        Args:
          cuts: how its loops are cut; may be empty.
          share: of a search that it gets.
        """
        self._graphs.append(Announced(len(self._graphs), cuts, share, self._least(cuts)))
        return self._graphs[-1]

    def add(self, cuts: Cuts, share: float) -> Decision | None:
        """Plan a graph, and return its best decision; None where it has none that fits.

        Args:
          cuts: as for `announce`.
          share: as for `announce`.
        """
        graph = self.announce(cuts, share)
        self._plan(graph)
        return graph.decision

    def nothing_again(self, graph: Announced) -> bool:
        """Return whether a graph has a plan that fits a budget with nothing computed again.

        Args:
          graph: what `announce` returned; planned here unless that is known without a search.
        """
        if self._by_time and graph.least is not None:
            self._plan_at_once(graph)
        else:
            self._plan(graph)
        return graph.decision is not None and not graph.decision.planned.plan.recomputed

    def missing(self, budget: int) -> int:
        """Return by how many bytes the last graph missed the budget that did.

        Args:
          budget: dynamic bytes.
        """
        return self._refusals[-1].smallest_bytes - budget if self._refusals else 0

    def best(self, among: Callable[[Cuts], bool] = lambda cuts: True) -> Decision | None:
        """Return the best decision that is left, all graphs planned that may have it; or None.

        Args:
          among: says of cuts whether decisions about them count.
        """
        graph = self._best(among)
        return None if graph is None else graph.decision

    def best_first(self, allowed: Callable[[Iterable[Cut]], bool]) -> Iterator[Decision]:
        """Yield what is left, best first; after each, what its graph has besides is looked at too.

        Args:
          allowed: as for `with_loops_in_segments`.

        Raises:
          InfeasibleBudgetError: no graph has a plan that fits.
        """
        if self.best() is None:
            self._refuse()
        while (graph := self._best(lambda cuts: allowed(cuts.values()))) is not None:
            if graph.at_once:  # its search tells what else there is
                graph.decision, graph.at_once = next(graph.following, graph.decision), False
            yield graph.found
            graph.decision = next(graph.following, None)

    def _best(self, among: Callable[[Cuts], bool]) -> Announced | None:
        graphs = [graph for graph in self._graphs if among(graph.cuts)]
        while (following := self._likeliest(graphs)) is not None:
            self._plan(following)
        left = [graph for graph in graphs if graph.decision is not None]
        return left[best_of([graph.found.planned for graph in left], self._budget,
                            self._objective)] if left else None

    def _refuse(self) -> None:
        """Raise the refusal of the smallest budget: one of a graph not planned yet may be it."""
        def smallest(graph: Announced) -> float:
            assert graph.least is not None and self._plain is not None
            return min(graph.least.peak, 1.0) * self._plain.peak_bytes

        pending = sorted((graph for graph in self._graphs if graph.pending), key=smallest)
        for graph in pending:
            if not self._refusals or smallest(graph) < min(
                    error.smallest_bytes for error in self._refusals):
                self._plan(graph)
        if self._refusals:
            raise min(self._refusals, key=lambda error: error.smallest_bytes)

    def _plan(self, graph: Announced) -> None:
        """Plan a graph: without a search where that is known to be as good."""
        if self._by_time and graph.least is not None and self._plan_at_once(graph):
            return
        graph.pending, graph.following = False, self._of(graph.cuts, graph.share)
        try:
            graph.decision = next(graph.following, None)
        except InfeasibleBudgetError as error:
            self._refusals.append(error)

    def _plan_at_once(self, graph: Announced) -> bool:
        """Take the plan that computes nothing again; return whether there is one that fits."""
        try:
            graph.decision = next(self._of(graph.cuts, 0.0), None)
        except InfeasibleBudgetError:
            return False
        if graph.decision is None:
            return False
        graph.pending, graph.at_once = False, True
        graph.following = self._of(graph.cuts, graph.share)
        return True

    def _least(self, cuts: Cuts) -> Least | None:
        plain = self._plain
        if plain is None:
            return None
        bounds, bytes_, time = self._bounds(cuts), max(plain.peak_bytes, 1), plain.timeline.time
        worth, tail = (cost_of(0, time, bytes_, time, self._objective, *more)
                       for more in ((), (TAIL,)))
        price = bytes_ / max(time, 1e-12)
        return Least(
            (bounds.time if self._budget is None else bounds.time_within(self._usable))
            / max(time, 1e-12), bounds.peak / bytes_,
            *(bounds.weighed(each * price) / bytes_ for each in (worth, tail)))

    def _likeliest(self, graphs: Sequence[Announced]) -> Announced | None:
        """Return a graph to be planned next; None where none can change which is the best."""
        pending = [(graph, graph.least) for graph in graphs if graph.pending]
        if (unknown := next((graph for graph, least in pending if least is None), None)):
            return unknown
        known = [(graph, least) for graph, least in pending
                 if least is not None and least.time < math.inf]
        done = [graph for graph in graphs if graph.decision is not None]
        if not known:
            return None
        return (_fastest if self._by_time else self._smallest)(known, done)

    def _smallest(self, pending: Sequence[tuple[Announced, Least]], done: Sequence[Announced]
                  ) -> Announced | None:
        """Return what to plan where memory is weighed against time."""
        plain = self._plain
        assert plain is not None

        def point(graph: Announced, *worth: float) -> float:
            planned = graph.found.planned
            return cost_of(planned.peak_bytes, planned.time, plain.peak_bytes,
                           plain.timeline.time, self._objective, *worth)

        def peak(graph: Announced) -> float:
            return graph.found.planned.peak_bytes / max(plain.peak_bytes, 1)

        if not done:
            lowest = min((least.tail, least.peak) for _, least in pending)[1]
            return min((least.cost, graph.number, graph) for graph, least in pending
                       if least.peak <= lowest + ROOM)[2]
        tail, lowest = min((point(graph, TAIL), peak(graph)) for graph in done)
        # what may be the minimum instead, and between which peaks that lies then
        lower = [(graph, least) for graph, least in pending if least.tail <= tail]
        worth = cost_of(0, 1.0, 1, 1.0, self._objective, TAIL)
        from_, to = (ROOM + end for end in (
            min([lowest, *(least.peak for _, least in lower)]),
            max([lowest, *(tail - worth * least.time for _, least in lower)])))
        scores = [{graph.number: point(graph) for graph in done if peak(graph) <= near}
                  for near in (from_, to)]
        if not scores[0] or _first(scores[0]) != _first(scores[1]):
            return min((least.tail, graph.number, graph) for graph, least in lower)[2]
        return _of_least(((graph, least.cost) for graph, least in pending if least.peak <= to),
                         scores[0])


def _fastest(pending: Sequence[tuple[Announced, Least]], done: Sequence[Announced]
             ) -> Announced | None:
    """Return what to plan where the fastest plan is taken."""
    scores = {graph.number: graph.found.planned.time / max(
        graph.found.planned.baseline.time, 1e-12) for graph in done}
    return _of_least(((graph, least.time) for graph, least in pending), scores)


def _of_least(pending: Iterable[tuple[Announced, float]], scores: dict[int, float]
              ) -> Announced | None:
    """Return which graph of the lowest score to plan; None where none may be taken.

    Args:
      pending: graphs, and what their scores are not below.
      scores: of decisions, by the numbers of their graphs.
    """
    taken = _first(scores) if scores else 0
    found = [(least, graph.number, graph) for graph, least in pending if not scores or (
        least <= min(scores.values()) + MARGIN if graph.number < taken
        else least < scores[taken] - MARGIN)]
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _first(scores: dict[int, float]) -> int:
    """Return the number of the decision that `best_of` takes."""
    return min(number for number, score in scores.items()
               if score <= min(scores.values()) + MARGIN)
