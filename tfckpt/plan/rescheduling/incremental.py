"""A schedule that changes by one copy at a time, priced by what the change touches.

The schedule is one order of originals with copies before each: *stage* t is the t-th original and
the copies that run just before it, in the order of their originals. Adding or removing a copy
changes how long its inputs and its outputs live and nothing else, so the live bytes are corrected
there instead of being counted anew. They are those of `tfckpt.simulate.simulate` to the byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule, with_copies
from tfckpt.plan.rescheduling.lifetimes import Lifetimes, Undo, inserted, left_out


class CopySchedule(Lifetimes):
    """A schedule of originals in a fixed order and of copies that come and go.

    Args:
      order: the originals; joins may be left out.
      copies: (stage, vertex) of each copy; a vertex runs again after its original only.

    Attributes:
      copies: keys of the copies, in the order in which they were added.
      time: of all steps.
      log: what the changes since it was cleared have replaced, for `undo`.

    Complexity: of a change, linear in the steps between the uses that it touches (vectorised).
    """

    def __init__(self, graph: CostGraph, order: Sequence[int],
                 copies: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__(graph, order)
        self.written = [sum(self.size[s] for s in v.writes) for v in graph.vertices]
        self.become(self.key(v, stage) for stage, v in copies)

    def become(self, copies: Iterable[int]) -> None:
        """Take a schedule's place at once, which no `undo` takes back.

        Args:
          copies: their keys, in the order in which they count as added.
        """
        vertices, count = self.graph.vertices, len(self.order)
        self.copies = dict.fromkeys(copies)
        self.keys = sorted([*(t * self.stride + count for t in range(count)), *self.copies])
        steps = [self.vertex(key) for key in self.keys]
        made: list[list[int]] = [[] for _ in self.graph.storages]
        used: list[list[int]] = [[] for _ in self.graph.storages]
        for key, v in zip(self.keys, steps, strict=True):
            for s in vertices[v].writes:
                made[s].append(key)
            for s in vertices[v].reads:
                used[s].append(key)
        self.makes = [tuple(keys) for keys in made]
        self.uses = [tuple(keys) for keys in used]
        self.time = sum(vertices[v].time for v in self.order)
        for key in self.copies:
            self.time += vertices[self.vertex(key)].time
        self.taken = {}
        self.log: list[Undo] = []
        self.spans = [self.spans_of(s) for s in range(len(made))]
        come = np.zeros(len(steps) + 1, dtype=np.int64)
        for s, spans in enumerate(self.spans):
            for span in spans:
                at = self.steps_of(*span)
                come[at.start] += self.size[s]
                come[at.stop] -= self.size[s]
        self.live = np.cumsum(come[:-1]) + np.array(
            [vertices[v].workspace for v in steps], dtype=np.int64)
        for key, v in zip(self.keys, steps, strict=True):
            if vertices[v].reuses:
                self.take_over(key, [])

    # What is there.

    def schedule(self) -> Schedule:
        """Return the schedule as a value."""
        rows: list[list[int]] = [[] for _ in self.order]
        for key in sorted(self.copies):
            rows[key // self.stride].append(self.vertex(key))
        return with_copies(self.order, rows)

    # Changes.

    def add(self, v: int, stage: int) -> None:
        """Run a vertex again in a stage after its original's, where it does not yet.

        Args:
          v: recomputable vertex that is among the originals.
          stage: number of the original before which the copy runs.
        """
        key = self.key(v, stage)
        index = bisect_left(self.keys, key)
        after = self.vertex(self.keys[index])
        before = (int(self.live[index]) - self.graph.vertices[after].workspace
                  - self.written[after] + self.taken.get(self.keys[index], 0))
        live = np.empty(len(self.live) + 1, dtype=np.int64)
        live[:index] = self.live[:index]
        live[index] = before + self.graph.vertices[v].workspace
        live[index + 1:] = self.live[index:]
        undo = self._begin(key, True)
        self.live = live
        self.keys.insert(index, key)
        self.copies[key] = None
        self.time += self.graph.vertices[v].time
        self.change(v, key, undo, inserted)

    def remove(self, key: int) -> None:
        """Leave the copy at a key out; its readers read the instance before it.

        Args:
          key: of a copy that is there.
        """
        v = self.vertex(key)
        undo = self._begin(key, False)
        self.live = self.live.copy()
        index = bisect_left(self.keys, key)
        self.change(v, key, undo, left_out)
        live = np.empty(len(self.live) - 1, dtype=np.int64)
        live[:index] = self.live[:index]
        live[index:] = self.live[index + 1:]
        self.live = live
        del self.keys[index]
        del self.copies[key]
        self.time -= self.graph.vertices[v].time
        if key in self.taken:
            undo.taken.append((key, self.taken.pop(key)))

    def undo(self, mark: int) -> None:
        """Take back all changes since the log had `mark` entries.

        Args:
          mark: a length that the log had before; 0 takes back all since it was cleared.
        """
        while len(self.log) > mark:
            undo = self.log.pop()
            self.live, self.time = undo.live, undo.time
            index = bisect_left(self.keys, undo.key)
            if undo.added:
                del self.keys[index]
                del self.copies[undo.key]
            else:
                self.keys.insert(index, undo.key)
                self.copies[undo.key] = None
            for s, keys in reversed(undo.makes):
                self.makes[s] = keys
            for s, keys in reversed(undo.uses):
                self.uses[s] = keys
            for s, spans in reversed(undo.spans):
                self.spans[s] = spans
            for key, size in reversed(undo.taken):
                self.taken[key] = size

    def _begin(self, key: int, added: bool) -> Undo:
        undo = Undo(key, added, self.live, self.time, [], [], [], [])
        self.log.append(undo)
        return undo
