"""How long tensors live in a schedule of originals and copies, and what is live at each step.

A step is known by its *key*: its stage times the stride plus its place in the stage; keys ascend in
the order of execution and stay when other copies come and go. See `incremental`.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from tfckpt.ir.costgraph import CostGraph

Keys = tuple[int, ...]
Spans = list[tuple[int, int]]
"""Keys of the first and the last step at which each instance of a storage is live."""
FOREVER = 1 << 62
"""The last key of a storage that is live until the step ends."""


@dataclasses.dataclass(slots=True)
class Undo:
    """The values that one change replaced.

    Attributes:
      key: of the copy that came or went.
      added: whether it came.
      live, time: of the schedule before.
      makes, uses, spans, taken: those of single storages and steps before.
    """

    key: int
    added: bool
    live: np.ndarray
    time: float
    makes: list[tuple[int, Keys]]
    uses: list[tuple[int, Keys]]
    spans: list[tuple[int, Spans]]
    taken: list[tuple[int, int]]


class _Vertices(dict[int, int]):
    """The vertex that each step runs, by its key; found when it is asked for first."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = order

    def __missing__(self, key: int) -> int:
        stage, place = divmod(key, len(self.order) + 1)
        found = self[key] = self.order[stage if place == len(self.order) else place]
        return found


class Lifetimes:
    """What makes and reads each storage, when its instances are live, and the live bytes.

    Args:
      order: the originals; joins may be left out.

    Attributes:
      live: live bytes at each step, an int64 array in the order of execution.
      keys: the steps' keys, ascending.
      makes, uses: for each storage the keys of the steps that make and read it, ascending.
      spans: for each storage when its instances are live.
      taken: bytes that steps take over from dying inputs, by key.
      vertex: takes the key of a step, also of a copy that is not there now, and returns its vertex.
    """

    live: np.ndarray
    keys: list[int]
    makes: list[Keys]
    uses: list[Keys]
    spans: list[Spans]
    taken: dict[int, int]

    def __init__(self, graph: CostGraph, order: Sequence[int]) -> None:
        self.graph, self.order = graph, tuple(order)
        self.place = {v: i for i, v in enumerate(self.order)}
        self.stride = len(self.order) + 1
        self.vertex = _Vertices(self.order).__getitem__
        self.size = [s.bytes for s in graph.storages]
        self.donors = self._donors()

    def _donors(self) -> list[frozenset[int]] | None:
        """Return for each storage the keys of what donates it; None where nothing donates."""
        if not any(v.donates for v in self.graph.vertices):
            return None
        found: list[set[int]] = [set() for _ in self.graph.storages]
        for t, v in enumerate(self.order):
            for s in self.graph.vertices[v].donates:
                found[s].add(t * self.stride + len(self.order))
        return [frozenset(keys) for keys in found]

    def key(self, v: int, stage: int) -> int:
        """Return the key that a copy of a vertex has in a stage.

        Args:
          v: vertex that is among the originals.
          stage: number of the original before which the copy runs.
        """
        return stage * self.stride + self.place[v]

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

    def spans_of(self, s: int) -> Spans:
        """Return when each instance of a storage is live.

        Args:
          s: storage.
        """
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

    # Corrections, where a copy comes or goes.

    def steps_of(self, start: int, end: int) -> slice:
        """Return where in `live` the steps are from one key to another, both among them.

        Args:
          start: key of the first.
          end: key of the last; none need be of a step.
        """
        keys = self.keys
        return slice(bisect_left(keys, start), bisect_right(keys, end))

    def change(self, v: int, key: int, undo: Undo, change: Callable[[Keys, int], Keys]) -> None:
        """Change what a vertex's inputs and outputs are used or made by, and what is live.

        Args:
          v: the vertex.
          key: of the copy of it that comes or goes.
          undo: takes what was there before.
          change: `inserted` or `left_out`, of keys and the copy's.
        """
        vertex = self.graph.vertices[v]
        touched = [key] if vertex.reuses else []
        for s in vertex.reads:
            undo.uses.append((s, self.uses[s]))
            self.uses[s] = change(self.uses[s], key)
            touched += self._follow(s, key, undo)
        for s in vertex.writes:
            undo.makes.append((s, self.makes[s]))
            self.makes[s] = change(self.makes[s], key)
            touched += self._divide(s, key, undo)
        for k in dict.fromkeys(touched):
            if k in self.taken or k != FOREVER and self.graph.vertices[self.vertex(k)].reuses:
                self.take_over(k, undo.taken)

    def _follow(self, s: int, key: int, undo: Undo) -> Keys:
        """Correct the live bytes where a step began or ceased to read; return the ends that moved.

        That is one span's end, if any, so that the others need not be looked at.
        """
        makes, uses, spans = self.makes[s], self.uses[s], self.spans[s]
        number = bisect_left(makes, key) - 1
        is_made_there = number + 1 < len(makes) and makes[number + 1] == key
        if is_made_there or self.donors is not None and self.donors[s]:
            return self._correct(s, undo)
        start, end = spans[number]
        place = bisect_left(uses, key)
        if place < len(uses) and uses[place] == key:
            now = max(end, key)
        elif end != key:
            return ()
        else:
            now = max(start, uses[place - 1]) if place else start
        if now == end:
            return ()
        undo.spans.append((s, spans))
        self.spans[s] = [*spans[:number], (start, now), *spans[number + 1:]]
        keys, size = self.keys, self.size[s]
        if now > end:
            self.live[bisect_right(keys, end):bisect_right(keys, now)] += size
        else:
            self.live[bisect_right(keys, now):bisect_right(keys, end)] -= size
        return end, now

    def _divide(self, s: int, key: int, undo: Undo) -> Keys:
        """Correct the live bytes where a copy began or ceased to make; return the ends that moved.

        One span becomes two, or two become one.
        """
        makes, uses, spans = self.makes[s], self.uses[s], self.spans[s]
        number, place = bisect_left(makes, key), bisect_left(uses, key)
        is_read_there = place < len(uses) and uses[place] == key
        if (is_read_there or self.graph.storages[s].fetched
                or self.donors is not None and self.donors[s]):
            return self._correct(s, undo)
        start, end = spans[number - 1]
        undo.spans.append((s, spans))
        if len(makes) > len(spans):
            before, after = max(start, uses[place - 1]) if place else start, max(key, end)
            self.spans[s] = [*spans[:number - 1], (start, before), (key, after), *spans[number:]]
            change = -self.size[s]
        else:
            before, after = end, spans[number][1]
            end = after if after > key else before
            self.spans[s] = [*spans[:number - 1], (start, end), *spans[number + 1:]]
            change = self.size[s]
        index = bisect_left(self.keys, key)
        if after > key:  # what is read there was live since the instance before was made
            self.live[bisect_right(self.keys, before):index] += change
        else:
            self.live[index] -= change
        return before, after, end

    def _correct(self, s: int, undo: Undo) -> Keys:
        """Correct the live bytes where the spans of a storage changed; return the ends of these."""
        before, now = self.spans[s], self.spans_of(s)
        if now == before:
            return ()
        undo.spans.append((s, before))
        self.spans[s] = now
        gone = [span for span in before if span not in now]
        come = [span for span in now if span not in before]
        size, live = self.size[s], self.live
        if size:
            for span in gone:
                live[self.steps_of(*span)] -= size
            for span in come:
                live[self.steps_of(*span)] += size
        return tuple(end for _, end in (*gone, *come))

    def take_over(self, key: int, undo: list[tuple[int, int]]) -> None:
        """Count what a step takes over from dying inputs, first pair first.

        Args:
          key: of the step; one that is not there takes over nothing.
          undo: takes what was counted before, where that was another.
        """
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


def inserted(keys: Keys, key: int) -> Keys:
    """Return ascending keys with one more.

    Args:
      keys: ascending.
      key: is none of them.
    """
    index = bisect_left(keys, key)
    return (*keys[:index], key, *keys[index:])


def left_out(keys: Keys, key: int) -> Keys:
    """Return ascending keys without one.

    Args:
      keys: ascending.
      key: one of them.
    """
    index = bisect_left(keys, key)
    return keys[:index] + keys[index + 1:]
