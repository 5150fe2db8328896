"""Schedules of recursive checkpoints: what each run of the forward keeps for the backward.

`tfckpt.plan.keep_sets` keeps storages of the original run alone. Here each later run of the forward
may keep some of its storages as well, from which the stages after them can be run again. When the
backward needs a stage, the forward is run from the storages that are in memory up to that stage's
cut; what the stage made is then recomputed as the backward reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph
from tfckpt.ir.schedule import Schedule, Step


@dataclasses.dataclass(frozen=True, eq=False)
class Recursion:
    """The storages that each run of the forward keeps.

    Attributes:
      made, through: for each storage the stage that makes it and the last that reads it in the
        forward, or -1 (`tfckpt.solvers.forward.forward_stages.Stages`).
      kept: for each stage the storages that stay of the run that leads to it; the run that leads
        to the last stage is the original one.
    """

    made: tuple[int, ...]
    through: tuple[int, ...]
    kept: tuple[frozenset[int], ...]

    @property
    def original(self) -> frozenset[int]:
        """Return the storages that the original run keeps.

        They are those chosen for it, all of the last stage, and those that have no stage.
        """
        return self.kept[-1] | {s for s, stage in enumerate(self.made)
                                if stage in (-1, len(self.kept) - 1)}


def turning_point(graph: CostGraph, order: Sequence[int]) -> int:
    """Return the position at which an order turns from the forward to the backward.

    Some of the backward may run before (what depends on labels alone), and some of the forward
    after it (a mask that was deferred), so it is the position with the fewest vertices on the
    wrong side.

    Args:
      graph: joint graph.
      order: vertices in a planned order.
    """
    regions = [graph.vertices[v].region for v in order]
    wrong = fewest = regions.count(FORWARD)
    turn = 0
    for position, region in enumerate(regions, start=1):
        wrong += (region == BACKWARD) - (region == FORWARD)
        if wrong < fewest:
            fewest, turn = wrong, position
    return turn


def recursive_schedule(graph: CostGraph, recursion: Recursion, keep: frozenset[int],
                       order: Sequence[int]) -> Schedule:
    """Return the schedule in which each run of the forward keeps what `recursion` states.

    Args:
      graph: joint graph.
      recursion: what each run keeps for the stage that it leads to.
      keep: storages that the original run keeps (`Recursion.original`, or another choice).
      order: base order (`tfckpt.simulate.order.base_order`).

    Complexity: linear in the steps and reads of the schedule, and in the storages that cross cuts.
    """
    return _Builder(graph, recursion, keep).build(order)


class _Builder:
    """Walks the base order and inserts the copies that each backward vertex needs."""

    def __init__(self, graph: CostGraph, recursion: Recursion, keep: frozenset[int]) -> None:
        self.graph, self.recursion = graph, recursion
        self.free = [stage >= 0 for stage in recursion.made]
        self.there = [not free or s in keep for s, free in enumerate(self.free)]
        self.stage = len(recursion.kept) - 1
        self.crossing: list[list[int]] = [[] for _ in recursion.kept]
        for s, (made, through) in enumerate(zip(recursion.made, recursion.through, strict=True)):
            if made >= 0:
                for cut in range(made + 1, through + 1):
                    self.crossing[cut].append(s)
        self.later: set[int] = set()  # storages that no original has made yet
        self.copies = [0] * len(graph.vertices)
        self.steps: list[Step] = []

    def build(self, order: Sequence[int]) -> Schedule:
        """Return the whole schedule."""
        vertices = self.graph.vertices
        turn = turning_point(self.graph, order)
        self.later.update(s for v in order[turn:] for s in vertices[v].writes)
        for position, v in enumerate(order):
            if position >= turn and vertices[v].region in (BACKWARD, UPDATE):
                self._restore(vertices[v].reads)
            self.steps.append((v, 0))
            for s in self.later.intersection(vertices[v].writes):
                self.there[s] = True
            self.later.difference_update(vertices[v].writes)
        return tuple(self.steps)

    def _restore(self, reads: Sequence[int]) -> None:
        """Recompute those of some storages that are not in memory, stage by stage."""
        through = self.recursion.through
        while missing := [s for s in reads if not self.there[s]]:
            wanted = max(through[s] for s in missing)
            if wanted < self.stage:
                self._descend(wanted)
            else:
                for s in self._run(missing):
                    self.there[s] = True

    def _descend(self, stage: int) -> None:
        """Run the forward up to a stage, and keep the storages chosen for that run.

        If stages are skipped because the backward reads nothing of them, the storages of earlier
        stages that their runs would have kept are kept as well.
        """
        recursion = self.recursion
        wanted: set[int] = set()
        for passed in recursion.kept[stage:self.stage]:
            wanted.update(s for s in passed if recursion.made[s] < stage)
        wanted.update(self.crossing[stage])
        self.stage = stage
        missing = sorted(s for s in wanted if not self.there[s] and s not in self.later)
        self._run(missing)
        for s in missing:
            self.there[s] = True

    def _run(self, storages: Sequence[int]) -> list[int]:
        """Append copies of what makes some storages, and return all storages that copies make."""
        graph = self.graph
        needed: set[int] = set()
        pending = [graph.storages[s].producer for s in storages]
        while pending:
            v = pending.pop()
            if v not in needed:
                needed.add(v)
                pending.extend(graph.storages[s].producer for s in graph.vertices[v].reads
                               if not self.there[s])
        made: list[int] = []
        for v in sorted(needed):
            self.copies[v] += 1
            self.steps.append((v, self.copies[v]))
            made.extend(graph.vertices[v].writes)
        return made
