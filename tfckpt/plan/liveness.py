"""What each executed step allocates, takes over and frees: the one account of memory.

A step allocates what it writes, unless the kernel can take over the buffer of an input that dies
in this very step (`Vertex.reuses`); its inputs stay until it ends; a storage is freed after its
last reader. Fetched storages stay to the end of the step, donated ones pass to the resident set
when they are donated. The simulator sums these requests, the allocator's replay serves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tfckpt.cost.costgraph import CostGraph, Vertex
from tfckpt.plan.schedule import Resolved

Moment = tuple[Vertex, Sequence[int], Mapping[int, int], Sequence[int]]
"""The vertex that a step runs, the instances it makes, for those of them that take a buffer over
the instance whose buffer it was, and the instances that are freed after the step."""
_NEVER_READ, _GONE = -1, -2
_NOTHING: Mapping[int, int] = {}


def walk(graph: CostGraph, resolved: Resolved, order: Sequence[int] | None) -> Iterator[Moment]:
    """Yield the moments of an execution.

    Args:
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
    """Return dying instances by the written one that takes the buffer over, first pair first."""
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
