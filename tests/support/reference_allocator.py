"""TensorFlow's best-fit allocator with coalescing, written down again to check ours against.

The rules are those of `xla/tsl/framework/bfc_allocator.{h,cc}` in TensorFlow 2.21 with
`allow_growth`, as the CPU has it under `TF_CPU_ALLOCATOR_USE_BFC=1`:

1. A request is rounded up to a multiple of 256 bytes (`RoundedBytes`).
2. Free chunks lie in bins by power of two, and in a bin by size, then address. The first one that
   is large enough, in the bin of the request or one above, is taken. Larger bins have larger
   chunks, so that this is the smallest free chunk that is large enough, at the lowest address.
3. It is split where it is at least twice the request, or at least 128 MiB larger
   (`max_internal_fragmentation_bytes_`); otherwise all of it is handed out, and counted.
4. Where no chunk is large enough, a region is added (`Extend`). The size of the next region starts
   at 2 MiB and is doubled until the request fits; where it was not doubled for that, it is
   doubled afterwards.
5. A freed chunk is merged with a free chunk after it and with one before it, in the same region.

Every region is a plain list of chunks by address, searched from one end to the other. Nothing is
shared with `tfckpt.simulate.allocator`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.support import liveness

UNIT = 256
BLOCKS = (0, 2_000_000, 5_000_000, 11_000_000, 17_000_000, 43_000_000)
"""Sizes of what may have been allocated before a step; see `peaks`."""
BETWEEN_REGIONS = 1 << 40


@dataclasses.dataclass
class Chunk:
    """A piece of a region, free or in use."""

    address: int
    size: int
    used: bool = False


class ReferenceAllocator:
    """The five rules above.

    Args:
      begun: bytes at the start of each region that are not to be had.
    """

    def __init__(self, begun: int = 0):
        self.begun = begun
        self.regions: list[list[Chunk]] = []
        self.next_region = 2 * 1024 * 1024
        self.peak = 0

    @property
    def in_use(self) -> int:
        """Return bytes of the chunks in use, counted anew."""
        return sum(chunk.size for chunk in self._chunks() if chunk.used)

    @property
    def reserved(self) -> int:
        """Return bytes of all regions."""
        return sum(chunk.size for chunk in self._chunks())

    def _chunks(self):
        return [chunk for region in self.regions for chunk in region]

    def size_at(self, address: int) -> int:
        """Return bytes of the chunk in use at an address."""
        (size,) = [c.size for c in self._chunks() if c.used and c.address == address]
        return size

    def allocate(self, requested: int, new_region_at: int | None = None) -> int:
        """Return the address of a chunk.

        Args:
          new_region_at: where the region starts that has to be added, if one has.
        """
        wanted = requested + (-requested) % UNIT
        if not self._fitting(wanted):
            self._add_region(wanted, new_region_at)
        chunk = min(self.equal_holes(wanted), key=lambda c: c.address)
        if chunk.size // 2 >= wanted or chunk.size >= wanted + 128 * 1024 * 1024:
            (region,) = [r for r in self.regions if chunk in r]
            rest = Chunk(chunk.address + wanted, chunk.size - wanted)
            region.insert(region.index(chunk) + 1, rest)
            chunk.size = wanted
        chunk.used = True
        self.peak = max(self.peak, self.in_use)
        return chunk.address

    def release(self, address: int) -> None:
        """Free the chunk at an address."""
        for region in self.regions:
            for chunk in region:
                if chunk.address == address:
                    assert chunk.used, f"nothing is in use at {address}"
                    chunk.used = False
                    region[:] = _merged(region)
                    return
        raise AssertionError(f"there is no chunk at {address}")

    def equal_holes(self, requested: int) -> list[Chunk]:
        """Return the free chunks of the smallest sufficient size; the address decides."""
        fitting = self._fitting(requested + (-requested) % UNIT)
        return [c for c in fitting if c.size == min(f.size for f in fitting)]

    def _fitting(self, wanted: int) -> list[Chunk]:
        return [c for c in self._chunks() if not c.used and c.size >= wanted]

    def _add_region(self, wanted: int, start: int | None) -> None:
        size = self.next_region
        while size < wanted + self.begun:
            size *= 2
        self.next_region = 2 * size if size == self.next_region else size
        if start is None:
            start = (len(self.regions) + 1) * BETWEEN_REGIONS
        self.regions.append([Chunk(start + self.begun, size - self.begun)])


def _merged(region: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks of a region with each run of free ones made one."""
    result: list[Chunk] = []
    for chunk in region:
        if result and not chunk.used and not result[-1].used:
            result[-1] = Chunk(result[-1].address, result[-1].size + chunk.size)
        else:
            result.append(chunk)
    return result


def peaks(graph, schedule, order, smallest: int, blocks: Sequence[int] = BLOCKS,
          workspace: bool = False) -> list[int]:
    """Return the peak of a step above its start for heaps that began with each of several blocks.

    In each, the block and the variables are allocated, then the step runs twice; the second run
    counts. In the second, fourth and sixth each region begins with a chunk of `UNIT` bytes that was
    there before. What an op writes is allocated while its inputs are live, unless it takes over the
    buffer of one of them. Freed after it, in this order: what it read last, in the order of
    `Vertex.reads`, then what it made that nothing reads, then what it donates although it is read
    later or fetched. A donated buffer becomes the variable's, and the oldest buffer of a variable
    of its size is freed instead. Other fetched tensors are freed when the step ends.

    Args:
      smallest: requests for fewer bytes are not counted, nor are empty ones.
      workspace: whether what a vertex uses while it runs is requested as well, after its results.
    """
    events = _events(graph, schedule, order, workspace)
    return [_second_peak(graph, events, smallest, block, (0, UNIT)[at & 1])
            for at, block in enumerate(blocks)]


def _second_peak(graph, events, smallest, block, begun) -> int:
    heap = ReferenceAllocator(begun)
    if block:
        heap.allocate(block)
    smallest = max(smallest, 1)
    variables = [(size, heap.allocate(size)) for size in graph.variable_bytes if size >= smallest]
    peak = 0
    for _ in range(2):
        start = heap.in_use
        peak = 0
        address = {}
        for kind, what, size in events:
            if kind == "make" and size >= smallest:
                address[what] = heap.allocate(size)
            elif kind == "take" and what[0] in address:
                address[what[1]] = address.pop(what[0])
            elif kind in ("free", "donate") and what in address:
                freed = address.pop(what)
                old = [entry for entry in variables if entry[0] == size]
                if kind == "donate" and old:
                    variables.remove(old[0])
                    variables.append((size, freed))
                    freed = old[0][1]
                heap.release(freed)
            peak = max(peak, heap.in_use - start)
        assert not address
    return peak


def _events(graph, schedule, order, workspace):
    """Return what a step asks of the allocator: (make, take, free or donate; instance; bytes)."""
    order = list(range(len(schedule)) if order is None else order)
    live = liveness.live_sets(graph, schedule, order)
    reads = liveness.bindings(graph, schedule)
    taken = {}
    for turn, position in enumerate(order):
        vertex = graph.vertices[schedule[position][0]]
        made = [liveness.Instance(s, position) for s in vertex.writes]
        taken |= _taken(graph, vertex, [i for i in reads[position] if i not in live[turn]], made)
    events = []
    for turn, position in enumerate(order):
        vertex = graph.vertices[schedule[position][0]]
        made = [liveness.Instance(s, position) for s in vertex.writes]
        later = live[turn + 1] if turn + 1 < len(order) else set()
        for i in made:
            size = graph.storages[i.storage].bytes
            events.append(("take", (taken[i], i), size) if i in taken else ("make", i, size))
        if workspace:
            events.append(("make", "workspace", vertex.workspace))
            events.append(("free", "workspace", vertex.workspace))
        gone = [i for i in [*reads[position], *made]
                if i in live[turn] and i not in later and i not in taken.values()]
        wanted = [i for i in gone if graph.storages[i.storage].fetched
                  or any(i in reads[p] for p in order[turn + 1:])]
        for i in [*(i for i in gone if i not in wanted), *wanted]:
            donated = i in reads[position] and i.storage in vertex.donates
            if donated or i not in wanted:
                kind = "donate" if donated else "free"
                events.append((kind, i, graph.storages[i.storage].bytes))
    freed = [what for kind, what, _ in events if kind in ("free", "donate")]
    fetched = [liveness.Instance(s, position) for position in order
               for s in graph.vertices[schedule[position][0]].writes if graph.storages[s].fetched]
    return events + [("free", i, graph.storages[i.storage].bytes)
                     for i in fetched if i not in freed]


def _taken(graph, vertex, gone, made):
    """For what a vertex makes, the input whose buffer it takes over: first pair first."""
    source_of = {}
    for written, read in vertex.reuses:
        source = [i for i in gone if i.storage == read and i not in source_of.values()]
        target = [i for i in made if i.storage == written and i not in source_of]
        if source and target and graph.storages[read].bytes == graph.storages[written].bytes:
            source_of[target[0]] = source[0]
    return source_of
