"""The allocations, reuses and releases of each executed step: the one account of memory.

A step allocates what it writes, unless the kernel can take over the buffer of an input that dies
in this very step (`Vertex.reuses`); its inputs stay until it ends; a storage is freed after its
last reader. Fetched storages stay to the end of the step, donated ones pass to the resident set
when they are donated. The allocator's replay serves these requests one by one (`walk`), the
simulator sums them all at once (`Account`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tfckpt.ir.costgraph import CostGraph, Vertex
from tfckpt.ir.schedule import Resolved, Schedule, resolve

Moment = tuple[Vertex, Sequence[int], Mapping[int, int], Sequence[int]]
"""The vertex that a step runs, the instances it makes, for those of them that take a buffer over
the instance whose buffer it was, and the instances that are freed after the step."""
_NEVER_READ, _GONE = -1, -2
_NOTHING: Mapping[int, int] = {}


def walk(graph: CostGraph, resolved: Resolved, order: Sequence[int] | None) -> Iterator[Moment]:
    """Yield the moments of an execution.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      order: positions in execution order; None as scheduled.

    Complexity: linear in the number of steps and reads.
    """
    steps = range(len(resolved.schedule)) if order is None else order
    vertices, schedule, storage = graph.vertices, resolved.schedule, resolved.storage
    reads, writes = resolved.reads, resolved.writes
    last = _last_reads(graph, resolved, steps)
    for when, position in enumerate(steps):
        vertex = vertices[schedule[position][0]]
        made = writes[position]
        freed = [i for i in reads[position] if last[i] == when]
        taken = _NOTHING
        if freed and vertex.reuses:
            taken = taken_buffers(graph, vertex, storage, freed, made)
            if taken:
                gone = taken.values()
                freed = [i for i in freed if i not in gone]
        for i in made:
            if last[i] == _NEVER_READ:
                freed.append(i)
        if vertex.donates:
            for i in reads[position]:
                if last[i] > when and storage[i] in vertex.donates:
                    freed.append(i)
                    last[i] = _GONE
        yield vertex, made, taken, freed


class Account:
    """The same account of a schedule as `walk`'s, of all steps at once.

    Instances have the numbers that `tfckpt.ir.schedule.resolve` gives them.

    Attributes:
      vertex: of each step.
      storage, maker: of each instance.
      read, reader: an instance and the step that reads it, for each read.

    Raises:
      PlanError: a step reads a storage that nothing has made yet.
    """

    def __init__(self, graph: CostGraph, schedule: Schedule) -> None:
        tables = self.tables = graph.tables
        count = len(schedule)
        self.vertex = np.fromiter((v for v, _ in schedule), np.int64, count)
        self.storage, self.maker = tables.writes.of(self.vertex)
        wanted, self.reader = tables.reads.of(self.vertex)
        made = self.storage * count + self.maker
        by_storage = np.argsort(made, kind="stable")
        place = np.searchsorted(made[by_storage], wanted * count + self.reader) - 1
        self.read = by_storage[place] if len(made) else wanted
        if len(wanted) and (not len(made) or place.min() < 0
                            or (self.storage[self.read] != wanted).any()):
            resolve(graph, schedule)  # names what is missing
        first_read = _before(tables.reads.count[self.vertex])
        first_made = _before(tables.writes.count[self.vertex])
        self._takes = []
        for reads, writes in tables.takes:
            step = np.flatnonzero(reads[self.vertex] >= 0)
            v = self.vertex[step]
            self._takes.append((step, self.read[first_read[step] + reads[v]],
                                first_made[step] + writes[v]))
        self._donates = []
        for reads in tables.donates:
            step = np.flatnonzero(reads[self.vertex] >= 0)
            self._donates.append((step, self.read[first_read[step] + reads[self.vertex[step]]]))

    def spans(self, order: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
        """Return for each instance the first and the last moment at which it is live.

        Args:
          order: positions in execution order; None as scheduled.
        """
        count = len(self.vertex)
        when, reader, read = np.arange(count), self.reader, self.read
        if order is not None:
            when = np.empty(count, np.int64)
            when[np.array(order, dtype=np.int64)] = np.arange(count)
            reader = when[reader]
            by_time = np.argsort(reader, kind="stable")
            reader, read = reader[by_time], read[by_time]
        born = when[self.maker]
        last = np.full(len(self.storage), _NEVER_READ)
        last[read] = reader  # the last one of each stays
        last[self.tables.fetched[self.storage]] = count
        end = np.where(last == _NEVER_READ, born, last)
        for step, instance in self._donates:
            early = last[instance] > when[step]
            np.minimum.at(end, instance[early], when[step][early])
        dying = np.where(end == last, last, _GONE)
        taken = np.zeros(len(self.storage), dtype=bool)
        for step, instance, written in self._takes:
            free = (dying[instance] == when[step]) & ~taken[written]
            taken[written[free]] = True
            end[instance[free]] -= 1  # its buffer is another's when the step runs
            dying[instance[free]] = _GONE
        return born, end


def _before(count: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(count) - count


def _last_reads(graph: CostGraph, resolved: Resolved, steps: Sequence[int]) -> list[int]:
    """For each instance when it is read for the last time; after all steps where it is fetched."""
    reads = resolved.reads
    last = [_NEVER_READ] * len(resolved.storage)
    for when, position in enumerate(steps):
        for i in reads[position]:
            last[i] = when
    fetched = graph.fetched
    if fetched:
        for i, s in enumerate(resolved.storage):
            if s in fetched:
                last[i] = len(steps)
    return last


def taken_buffers(graph: CostGraph, vertex: Vertex, storage: Sequence[int],
                   dying: Sequence[int], made: Sequence[int]) -> Mapping[int, int]:
    """Return dying instances by the written one that takes the buffer over, first pair first.

    Args:
      graph: joint graph.
      vertex: what the step runs; says which buffers it may take over.
      storage: of each instance.
      dying: instances that the step is the last to read.
      made: instances that the step makes.
    """
    taken: dict[int, int] = {}
    size = graph.bytes
    for written, read in vertex.reuses:
        if size[written] != size[read]:
            continue
        for i in dying:
            if storage[i] == read and i not in taken.values():
                for target in made:
                    if storage[target] == written and target not in taken:
                        taken[target] = i
                        break
                break
    return taken
