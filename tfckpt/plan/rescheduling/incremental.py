"""A schedule that changes by one copy at a time, priced by what the change touches.

The schedule is one order of originals with copies before each: *stage* t is the t-th original and
the copies that run just before it, in the order of their originals. Adding or removing a copy
changes how long its inputs and its outputs live and nothing else, so the live bytes are corrected
there instead of being counted anew. They are those of `tfckpt.simulate.simulate` to the byte.

A step is known by its *key*: its stage times the stride plus its place in the stage; keys ascend in
the order of execution and stay when other copies come and go.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.schedule import Schedule, with_copies

Keys = tuple[int, ...]
Spans = list[tuple[int, int]]
"""Keys of the first and the last step at which each instance of a storage is live."""
FOREVER = 1 << 62
"""The last key of a storage that is live until the step ends."""


@dataclasses.dataclass(slots=True)
class _Undo:
    """The values that one change replaced."""

    key: int
    added: bool
    live: np.ndarray
    time: float
    makes: list[tuple[int, Keys]]
    uses: list[tuple[int, Keys]]
    spans: list[tuple[int, Spans]]
    taken: list[tuple[int, int]]


class CopySchedule:
    """A schedule of originals in a fixed order and of copies that come and go.

    Args:
      order: the originals; joins may be left out.
      copies: (stage, vertex) of each copy; a vertex runs again after its original only.

    Attributes:
      live: live bytes at each step, an int64 array in the order of execution.
      keys: the steps' keys, ascending.
      copies: keys of the copies, in the order in which they were added.
      time: of all steps.
      makes, uses: for each storage the keys of the steps that make and read it, ascending.
      spans: for each storage when its instances are live.

    Complexity: of a change, linear in the steps between the uses that it touches (vectorised).
    """

    def __init__(self, graph: CostGraph, order: Sequence[int],
                 copies: Iterable[tuple[int, int]] = ()) -> None:
        self.graph, self.order = graph, tuple(order)
        count = len(self.order)
        self.place = {v: i for i, v in enumerate(self.order)}
        self.stride = count + 1
        self.size = [s.bytes for s in graph.storages]
        self.written = [sum(self.size[s] for s in v.writes) for v in graph.vertices]
        self.donors = self._donors()
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
        self.makes: list[Keys] = [tuple(keys) for keys in made]
        self.uses: list[Keys] = [tuple(keys) for keys in used]
        self.time = sum(vertices[v].time for v in self.order)
        for key in self.copies:
            self.time += vertices[self.vertex(key)].time
        self.taken: dict[int, int] = {}
        self.log: list[_Undo] = []
        self.spans = [self._spans(s) for s in range(len(made))]
        come = np.zeros(len(steps) + 1, dtype=np.int64)
        for s, spans in enumerate(self.spans):
            for span in spans:
                at = self._slice(*span)
                come[at.start] += self.size[s]
                come[at.stop] -= self.size[s]
        self.live = np.cumsum(come[:-1]) + np.array(
            [vertices[v].workspace for v in steps], dtype=np.int64)
        for key, v in zip(self.keys, steps, strict=True):
            if vertices[v].reuses:
                self._take(key, [])

    def _donors(self) -> list[frozenset[int]] | None:
        """Return for each storage the keys of what donates it; None where nothing donates."""
        if not any(v.donates for v in self.graph.vertices):
            return None
        found: list[set[int]] = [set() for _ in self.graph.storages]
        for t, v in enumerate(self.order):
            for s in self.graph.vertices[v].donates:
                found[s].add(t * self.stride + len(self.order))
        return [frozenset(keys) for keys in found]

    # What is there.

    def vertex(self, key: int) -> int:
        """Return the vertex that a step runs.

        Args:
          key: of a step; it may be that of a copy which is not there now.
        """
        stage, place = divmod(key, self.stride)
        return self.order[stage if place == len(self.order) else place]

    def key(self, v: int, stage: int) -> int:
        """Return the key that a copy of a vertex has in a stage.

        Args:
          v: vertex that is among the originals.
          stage: number of the original before which the copy runs.
        """
        return stage * self.stride + self.place[v]

    def schedule(self) -> Schedule:
        """Return the schedule as a value."""
        rows: list[list[int]] = [[] for _ in self.order]
        for key in sorted(self.copies):
            rows[key // self.stride].append(self.vertex(key))
        return with_copies(self.order, rows)

    def instance(self, s: int, key: int) -> tuple[int, int]:
        """Return the keys that make and last use what a step at `key` reads or would read.

        Args:
          s: storage.
          key: of the step; above that of the first step that makes the storage.
        """
        makes, uses = self.makes[s], self.uses[s]
        number = bisect_left(makes, key) - 1
        stop = bisect_left(uses, makes[number + 1]) if number + 1 < len(makes) else len(uses)
        first = bisect_right(uses, makes[number])
        return makes[number], uses[stop - 1] if stop > first else makes[number]

    def last_use(self, s: int, key: int) -> int:
        """Return the key of the last step before another that makes or reads a storage.

        Args:
          s: storage.
          key: of the other step; above that of the first step that makes the storage.
        """
        makes, uses = self.makes[s], self.uses[s]
        start, following = makes[bisect_left(makes, key) - 1], bisect_left(uses, key)
        return max(start, uses[following - 1]) if following else start

    def idle(self, key: int) -> bool:
        """Return whether nothing reads what the copy at a key makes.

        Args:
          key: of a copy that is there.
        """
        for s in self.graph.vertices[self.vertex(key)].writes:
            uses = self.uses[s]
            first = bisect_right(uses, key)
            if first < len(uses):
                following = bisect_right(self.makes[s], key)
                if following == len(self.makes[s]) or uses[first] < self.makes[s][following]:
                    return False
        return True

    def _spans(self, s: int) -> Spans:
        makes, uses = self.makes[s], self.uses[s]
        fetched = self.graph.storages[s].fetched
        donors = None if self.donors is None else self.donors[s]
        found = []
        stop = 0
        for number, start in enumerate(makes):
            first = stop
            stop = bisect_left(uses, makes[number + 1], first) if number + 1 < len(makes) \
                else len(uses)
            end = FOREVER if fetched else uses[stop - 1] if stop > first else start
            if donors:
                end = next((k for k in uses[first:stop] if k in donors), end)
            found.append((start, end))
        return found

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
        self._change(v, key, undo, _inserted)

    def remove(self, key: int) -> None:
        """Leave the copy at a key out; its readers read the instance before it.

        Args:
          key: of a copy that is there.
        """
        v = self.vertex(key)
        undo = self._begin(key, False)
        self.live = self.live.copy()
        index = bisect_left(self.keys, key)
        self._change(v, key, undo, _left_out)
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

    def _begin(self, key: int, added: bool) -> _Undo:
        undo = _Undo(key, added, self.live, self.time, [], [], [], [])
        self.log.append(undo)
        return undo

    def _slice(self, start: int, end: int) -> slice:
        keys = self.keys
        return slice(bisect_left(keys, start), bisect_right(keys, end))

    def _change(self, v: int, key: int, undo: _Undo, change: Callable[[Keys, int], Keys]) -> None:
        """Change what a vertex's inputs and outputs are used or made by, and what is live."""
        vertex = self.graph.vertices[v]
        touched = [key] if vertex.reuses else []
        for s in vertex.reads:
            undo.uses.append((s, self.uses[s]))
            self.uses[s] = change(self.uses[s], key)
            touched += self._correct(s, undo)
        for s in vertex.writes:
            undo.makes.append((s, self.makes[s]))
            self.makes[s] = change(self.makes[s], key)
            touched += self._correct(s, undo)
        for k in dict.fromkeys(touched):
            if k in self.taken or k != FOREVER and self.graph.vertices[self.vertex(k)].reuses:
                self._take(k, undo.taken)

    def _correct(self, s: int, undo: _Undo) -> Keys:
        """Correct the live bytes where the spans of a storage changed; return the ends of these."""
        before, now = self.spans[s], self._spans(s)
        if now == before:
            return ()
        undo.spans.append((s, before))
        self.spans[s] = now
        gone = [span for span in before if span not in now]
        come = [span for span in now if span not in before]
        keys, size, live = self.keys, self.size[s], self.live
        if size and len(gone) == len(come) == 1 and gone[0][0] == come[0][0]:
            (_, old), (_, new) = gone[0], come[0]
            if new > old:
                live[bisect_right(keys, old):bisect_right(keys, new)] += size
            else:
                live[bisect_right(keys, new):bisect_right(keys, old)] -= size
            return old, new
        if size:
            for span in gone:
                live[self._slice(*span)] -= size
            for span in come:
                live[self._slice(*span)] += size
        return tuple(end for _, end in (*gone, *come))

    def _take(self, key: int, undo: list[tuple[int, int]]) -> None:
        """Count what a step takes over from dying inputs, first pair first."""
        vertex = self.graph.vertices[self.vertex(key)]
        if not vertex.reuses:
            return
        index = bisect_left(self.keys, key)
        if index == len(self.keys) or self.keys[index] != key:
            return
        used: list[int] = []
        total = 0
        for w, r in vertex.reuses:
            if (w not in used and r not in used and self.size[w] == self.size[r]
                    and self._dies(r, key)):
                used += (w, r)
                total += self.size[r]
        before = self.taken.get(key, 0)
        if total != before:
            undo.append((key, before))
            self.taken[key] = total
            self.live[index] += before - total

    def _dies(self, s: int, key: int) -> bool:
        """Return whether the step at a key is the last to use what it reads of a storage."""
        if self.graph.storages[s].fetched:
            return False
        start, last = self.instance(s, key)
        if last != key:
            return False
        return self.donors is None or not any(start < k < key for k in self.donors[s])


def _inserted(keys: Keys, key: int) -> Keys:
    index = bisect_left(keys, key)
    return (*keys[:index], key, *keys[index:])


def _left_out(keys: Keys, key: int) -> Keys:
    index = bisect_left(keys, key)
    return keys[:index] + keys[index + 1:]
