"""Large-neighbourhood search over schedules, on graphs of any size.

`Neighbourhood.search` frees a window: the copies of some stages, of some vertices or a few at
random are left out, and what no longer fits is repaired (`Fitter.fit`), with some noise on the
prices of splits. What is better, or as good, is kept.

Source: ours; the scheme is Shaw 1998, "Using constraint programming and local search methods to
solve vehicle routing problems", with a greedy repair as in Ropke and Pisinger 2006. Deterministic:
the random numbers have a fixed seed, limits count evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.common.clock import check_time
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule
from tfckpt.plan.rescheduling.fitting import Copies, Fitter, copies_of

NOISE = 0.6
"""How much the price of a split may seem to differ when a window is repaired."""
STEP, SMALLEST_STEP, LARGEST_STEP = 0.03, 0.001, 0.08
"""Of the peak, by how much a search for less memory tries to lower it at once: at first, at least
and at most; more after each success, less after each failure."""
FREED = 0.7
"""Share of attempts that free a window where a budget is not met; the others force a split."""
PATIENCE = 50
"""Changes tried for one budget without gain before the next budget's turn comes."""
LOWER, DOWN = 0.3, 0.3
"""Of the evaluations, what lowering the peak takes, and a first sweep over falling budgets."""


class Neighbourhood(Fitter):
    """A search from one order of originals, begun at a schedule.

    Attributes:
      found: schedules worth pricing, each with its peak and time.
    """

    def __init__(self, graph: CostGraph, schedule: Schedule, seed: int = 1, ahead: bool = True
                 ) -> None:
        super().__init__(graph, schedule, seed, ahead)
        self.found: dict[Copies, tuple[int, float]] = {}

    def keep(self) -> None:
        """Remember the present schedule."""
        self.found[self.copies()] = self.peak, self.state.time

    def search(self, budget: int, evaluations: int, lower: bool = False) -> bool:
        """Free windows and repair them until that is of no more use; return whether it fits.

        It ends when the evaluations are spent, or `PATIENCE` of them since it was last of use.

        Where the budget is met the time is lowered, else the bytes above it.

        Args:
          budget: dynamic bytes that no step may pass.
          evaluations: changes that may be tried.
          lower: stop as soon as the budget is met.

        Raises:
          OutOfTimeError: planning has a time limit, which is over.
        """
        check_time()
        state = self.state
        rest, self.left = self.left - evaluations, evaluations - 1
        self.fit(budget)
        self.speed_up(budget)
        best = self.excess(budget), state.time
        since = self.left
        while self.left > max(0, since - PATIENCE) and (best[0] or state.copies and not lower):
            state.log.clear()
            if state.copies and (not best[0] or self.rng.random() < FREED):
                tabu = self._free()
            else:
                self._force(budget)
                tabu = frozenset()
            most = float("inf") if best[0] else best[1] + self.slack
            if self.fit(budget, most, tabu, NOISE) or best[0]:
                self.speed_up(budget)
            now = self.excess(budget), state.time
            if now[0] < best[0] or now[0] == best[0] and now[1] <= best[1] + self.slack:
                if not now[0] and now != best:
                    self.keep()
                if now[0] < best[0] or now[1] < best[1] - self.slack:
                    since = self.left
                best = now
            else:
                state.undo(0)
        state.log.clear()
        self.left = rest + self.left
        return not best[0]

    def lower(self, evaluations: int, bound: int = 0) -> int:
        """Lower the peak, in ever smaller steps where that fails, and return it.

        Args:
          evaluations: changes that may be tried.
          bound: bytes that no schedule stays below.

        Raises:
          OutOfTimeError: planning has a time limit, which is over.
        """
        self.left += evaluations
        end = self.left - evaluations
        best, peak, step = self.copies(), self.peak, STEP
        while self.left > end and peak > bound:
            target = max(bound, peak - max(1, int(peak * step)))
            if self.search(target, min(self.left - end, evaluations // 6), lower=True):
                best, peak = self.copies(), self.peak
                step = min(1.3 * step, LARGEST_STEP)
            else:
                step /= 2
                self.goto(best)
            if step < SMALLEST_STEP:
                step = STEP  # other windows, this time
        self.goto(best)
        self.left = end
        return peak

    def fastest(self, budget: int) -> Schedule:
        """Return the fastest schedule found that fits, which one has to be.

        Args:
          budget: dynamic bytes that no step may pass.
        """
        _, _, copies = min((time, peak, copies) for copies, (peak, time) in self.found.items()
                           if peak <= budget)
        self.goto(copies)
        return self.state.schedule()

    def sweep(self, budgets: Sequence[int], evaluations: int) -> None:
        """Lower the time within each budget, from the fastest schedule known that fits.

        Where none is known it goes on from the present one.

        Args:
          budgets: dynamic bytes that no step may pass, in the order in which they are tried.
          evaluations: changes that may be tried, shared evenly among the budgets.

        Raises:
          OutOfTimeError: planning has a time limit, which is over.
        """
        for budget in budgets:
            fitting = [(time, peak, copies) for copies, (peak, time) in self.found.items()
                       if peak <= budget]
            if fitting and self.peak > budget or fitting and min(fitting)[0] < self.state.time:
                self.goto(min(fitting)[2])
            self.left = evaluations // len(budgets)
            self.search(budget, self.left)
            self.keep()

    def _free(self) -> frozenset[int]:
        """Leave out the copies of a window of stages, of some vertices, or a few at random.

        Returns:
          Keys of those that may not come back at once.
        """
        state, rng = self.state, self.rng
        copies = sorted(state.copies)
        kind = rng.randrange(3)
        centre = rng.choice(copies)
        if kind == 0:
            width = 1 + rng.randrange(max(2, len(state.order) // 8))
            stage = centre // state.stride
            chosen = [k for k in copies if abs(k // state.stride - stage) < width]
        elif kind == 1:
            width = 1 + rng.randrange(3)
            place = centre % state.stride
            chosen = [k for k in copies if abs(k % state.stride - place) < width]
        else:
            chosen = [centre, *rng.sample(copies, min(len(copies), rng.randrange(3)))]
        if len(chosen) > 1 and rng.random() < 0.3:
            chosen = [k for k in chosen if rng.random() < 0.6] or chosen[:1]
        self.leave_out(chosen)
        return frozenset(chosen) if len(chosen) < 3 else frozenset((rng.choice(chosen),))

    def _force(self, budget: int) -> None:
        """Split something at an overfull step whatever that does elsewhere: for `fit` to repair."""
        splits = [split for split in self._splits(budget, NOISE) if split]
        self.left -= not splits
        if splits:
            self.left -= 1
            self._try(self.rng.choice(splits))


def front(graph: CostGraph, starts: Sequence[Schedule], rungs: Sequence[float],
          evaluations: int, ahead: bool = True) -> list[Schedule]:
    """Return schedules of which none is both slower and larger than another.

    Args:
      graph: joint graph.
      starts: schedules known before, over the same originals in the same order, at least one.
      rungs: where between the smallest and the largest peak a budget is tried, ascending.
      evaluations: changes that are tried, or a few more.
      ahead: whether inputs of copies may be made ahead of these.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    search = Neighbourhood(graph, starts[0], ahead=ahead)
    for start in starts:
        search.goto(copies_of(start))
        search.keep()
    low, high = (pick(search.found, key=search.found.__getitem__) for pick in (min, max))
    most = search.found[high][0]
    search.goto(low)
    smallest = search.lower(int(evaluations * LOWER), working_set(graph))
    search.keep()
    budgets = [smallest + int(rung * (most - smallest)) for rung in (0.0, *rungs)]
    search.goto(high)
    search.sweep(budgets[::-1], int(evaluations * DOWN))
    search.sweep(budgets, int(evaluations * (1 - LOWER - DOWN)))
    found = []
    fastest = float("inf")
    for copies, (_, time) in sorted(search.found.items(), key=lambda entry: entry[1]):
        if time < fastest:
            fastest = time
            search.goto(copies)
            found.append(search.state.schedule())
    return found


def working_set(graph: CostGraph) -> int:
    """Return bytes that no schedule stays below: the most that one vertex needs by itself.

    What it reads and writes is there while it runs, but for buffers that are taken over and what
    a donor may have handed over before.

    Args:
      graph: joint graph.
    """
    donated = {s for v in graph.vertices for s in v.donates}
    most = 0
    for vertex in graph.vertices:
        size = {s: graph.storages[s].bytes for s in (*vertex.reads, *vertex.writes)
                if s not in donated}
        over = {r for _, r in vertex.reuses}
        saved = min(sum(size.get(s, 0) for s in over),
                    sum(size.get(w, 0) for w in {w for w, _ in vertex.reuses}))
        most = max(most, sum(size.values()) + vertex.workspace - saved)
    return most
