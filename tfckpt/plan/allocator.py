"""What an allocator holds while a schedule runs: bytes in use, rounding and slack included.

TensorFlow's best-fit allocator with coalescing (BFC, on GPUs and under oneDNN on CPUs) hands out
a free chunk whole unless it is at least twice as large as the request or 128 MiB larger, and its
statistics count whole chunks. On the plans of the benchmark models that is 5 to 40 % more than
the bytes asked for, so a budget checked against requested bytes would not be the peak. This
module runs a schedule's requests through the same rules: size classes by powers of two, best fit
within a class, regions that double, coalescing with free neighbours. A step's workspace is one
request, made after its results and freed when it ends. A variable that is updated while something
still holds its value is copied to another address.
"""

from __future__ import annotations

import bisect
import collections
import statistics
from collections.abc import Sequence

from tfckpt.cost.costgraph import CostGraph
from tfckpt.plan.liveness import Moment, walk
from tfckpt.plan.schedule import Resolved
from tfckpt.target import CPU_SMALLEST

ALIGNMENT = 256
FIRST_REGION = 2 << 20
MAX_SLACK = 128 << 20
_GAP = 1 << 44  # regions are never adjacent
BEFORE = (0, 2_000_000, 5_000_000, 11_000_000, 17_000_000, 43_000_000)
"""Bytes of a block that was allocated before the step."""
SETTLED = 6
"""Steps until memory is in about as many pieces as it will be where variables move; and how many
are looked at then."""
MANY_STEPS = 10_000
"""In longer schedules no single request moves the peak much: one heap is enough."""


class BestFit:
    """A best-fit allocator with coalescing over imaginary addresses."""

    def __init__(self) -> None:
        self.in_use = 0
        self.peak = 0
        self._region = FIRST_REGION
        self._end = 0
        self._free: list[list[tuple[int, int]]] = [[] for _ in range(48)]
        # address -> [size, used, previous address, next address]
        self._chunks: dict[int, list] = {}

    def allocate(self, size: int) -> int:
        """Address of a chunk of at least `size` bytes."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        address = self._find(size)
        if address is None:
            self._extend(size)
            address = self._find(size)
        assert address is not None
        chunk = self._chunks[address]
        chunk[1] = True
        self.in_use += chunk[0]
        self.peak = max(self.peak, self.in_use)
        return address

    def release(self, address: int) -> None:
        """Frees a chunk and merges it with its free neighbours."""
        chunk = self._chunks[address]
        chunk[1] = False
        self.in_use -= chunk[0]
        following = chunk[3]
        if following is not None and not self._chunks[following][1]:
            self._remove(following)
            self._absorb(address, following)
        before = chunk[2]
        if before is not None and not self._chunks[before][1]:
            self._remove(before)
            self._absorb(before, address)
            address = before
        self._insert(address)

    @staticmethod
    def _bin(size: int) -> int:
        return max(0, (size // ALIGNMENT).bit_length() - 1)

    def _insert(self, address: int) -> None:
        size = self._chunks[address][0]
        bisect.insort(self._free[self._bin(size)], (size, address))

    def _remove(self, address: int) -> None:
        size = self._chunks[address][0]
        entries = self._free[self._bin(size)]
        entries.pop(bisect.bisect_left(entries, (size, address)))

    def _absorb(self, left: int, right: int) -> None:
        gone = self._chunks.pop(right)
        self._chunks[left][0] += gone[0]
        self._chunks[left][3] = gone[3]
        if gone[3] is not None:
            self._chunks[gone[3]][2] = left

    def _find(self, size: int) -> int | None:
        for entries in self._free[self._bin(size):]:
            i = bisect.bisect_left(entries, (size, -1))
            if i < len(entries):
                found, address = entries.pop(i)
                if found >= 2 * size or found - size >= MAX_SLACK:
                    self._split(address, size)
                return address
        return None

    def _split(self, address: int, size: int) -> None:
        chunk = self._chunks[address]
        rest = address + size
        self._chunks[rest] = [chunk[0] - size, False, address, chunk[3]]
        if chunk[3] is not None:
            self._chunks[chunk[3]][2] = rest
        chunk[0], chunk[3] = size, rest
        self._insert(rest)

    def _extend(self, size: int) -> None:
        grown = False
        while size > self._region:
            self._region *= 2
            grown = True
        self._chunks[self._end] = [self._region, False, None, None]
        self._insert(self._end)
        self._end += self._region + _GAP
        if not grown:
            self._region *= 2


def allocated_peaks(graph: CostGraph, resolved: Resolved, order: Sequence[int] | None,
                    smallest: int = CPU_SMALLEST) -> tuple[int, ...]:
    """The allocator's peak above the step's start, over heaps that began differently.

    Where a request falls depends on everything the process allocated before, and one large
    request that meets a chunk just below twice its size moves the peak by tens of percent. What
    came before is not known, so the step is replayed behind blocks of several sizes.

    Args:
      order: positions in execution order; None as scheduled.
      smallest: requests below this size are not counted.

    Returns:
      Bytes, ascending. Variables are allocated first; a donated buffer replaces a variable's old
      one.
    """
    return replayed_peaks(graph, list(walk(graph, resolved, order)),
                          [graph.storages[s].bytes for s in resolved.storage],
                          resolved.storage, smallest)


def replayed_peaks(graph: CostGraph, moments: Sequence[Moment], size: Sequence[int],
                   storage: Sequence[int], smallest: int = CPU_SMALLEST,
                   before: Sequence[int] = BEFORE, settled: bool = False) -> tuple[int, ...]:
    """The same for the moments of an execution, in whatever way it came about.

    Args:
      size: bytes of each instance.
      storage: of each instance that is one of a storage; instances behind them are of none.
      before: bytes of a block that was allocated before the step, for each of the heaps.
      settled: where variables move, so that each step meets another heap, whether the middle one
        of some later steps counts, and not the second step.
    """
    peaks = []
    for block in before if len(moments) <= MANY_STEPS else before[:1]:
        replay = _Replay(graph, moments, size, storage, smallest, block)
        replay.step()  # the first step meets an empty heap
        peak = replay.step()
        if settled and replay.moved:
            later = [replay.step() for _ in range(2 * SETTLED)]
            peak = statistics.median_high(later[SETTLED:])
        peaks.append(peak)
    return tuple(sorted(peaks))


class _Replay:
    """Replays the allocations of one step as often as wanted on the same heap."""

    def __init__(self, graph: CostGraph, moments: Sequence[Moment], size: Sequence[int],
                 storage: Sequence[int], smallest: int, block: int):
        self.moments, self.storage, self.size = moments, storage, size
        self.moved = False  # whether a step has updated a variable at another address
        self.bytes = graph.variable_bytes
        self.holders = collections.Counter(v for vertex, *_ in moments for v in vertex.holds)
        self.smallest = max(smallest, 1)  # an empty tensor has no chunk
        self.heap = BestFit()
        if block:
            self.heap.allocate(block)
        self.variables: dict[int, list[int]] = {}
        for held in graph.variable_bytes:
            if held >= self.smallest:
                self.variables.setdefault(held, []).append(self.heap.allocate(held))

    def step(self) -> int:
        """One step; its peak above what was in use when it started."""
        start = self.heap.in_use
        self.heap.peak = start
        address: dict[int, int] = {}
        left, old = self.holders.copy(), dict[int, int]()
        for vertex, made, taken, freed in self.moments:
            for i in made:
                if i not in taken:
                    if self.size[i] >= self.smallest:
                        address[i] = self.heap.allocate(self.size[i])
                elif taken[i] in address:
                    address[i] = address.pop(taken[i])
            if vertex.updates in left and self.bytes[vertex.updates] >= self.smallest:
                old[vertex.updates] = self._moved(self.bytes[vertex.updates])
            if vertex.workspace >= self.smallest:
                self.heap.release(self.heap.allocate(vertex.workspace))
            for i in freed:
                if i in address:
                    donated = i < len(self.storage) and self.storage[i] in vertex.donates
                    self._free(i, address.pop(i), donated)
            for variable in vertex.holds:
                left[variable] -= 1
                if not left[variable]:
                    del left[variable]
                    if variable in old:
                        self.heap.release(old.pop(variable))
        for held in address.values():
            self.heap.release(held)
        return self.heap.peak - start

    def _moved(self, size: int) -> int:
        """Return the address that a variable had; it has another one from now on."""
        self.moved = True
        addresses = self.variables[size]
        addresses.append(self.heap.allocate(size))
        return addresses.pop(0)

    def _free(self, instance: int, address: int, donated: bool) -> None:
        """Frees a buffer, or the one of the variable that takes it over."""
        old = self.variables.get(self.size[instance])
        if donated and old:
            self.moved = True
            old.append(address)
            address = old.pop(0)
        self.heap.release(address)
