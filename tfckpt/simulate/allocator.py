"""Bytes that an allocator has in use while a schedule runs, rounding and slack included.

TensorFlow's best-fit allocator with coalescing (BFC, on GPUs and under oneDNN on CPUs) hands out
a free chunk whole unless it is at least twice as large as the request or 128 MiB larger, and its
statistics count whole chunks. On the plans of the benchmark models that is 5 to 40 % more than
the bytes asked for, so a budget checked against requested bytes would not be the peak. This
module runs a schedule's requests through the same rules: size classes by powers of two, best fit
within a class, regions that double, coalescing with free neighbours. A step's workspace is
requested after its results and freed when it ends. What loops keep are many requests, of which
`MOST_PIECES` are served at most. A variable that is updated while something
still reads its value is copied to another address.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from tfckpt.ir.costgraph import CostGraph, Vertex
from tfckpt.ir.schedule import Resolved
from tfckpt.ir.target import CPU_SMALLEST
from tfckpt.simulate.liveness import Moment, walk

ALIGNMENT = 256
FIRST_REGION = 2 << 20
ALL_MEMORY = 1 << 42
"""Bytes of the first region of an allocator that has all memory: more than any step takes."""
MAX_SLACK = 128 << 20
MOST_PIECES = 64
"""Requests that stand for those of a loop's list: so many fill the gaps that others leave."""
_GAP = 1 << 44  # regions are never adjacent
_ADDRESS_BITS = 64
BEFORE = (0, 2_000_000, 5_000_000, 11_000_000, 17_000_000, 43_000_000)
"""Bytes of a block that was allocated before the step."""
SMALL = 256
"""Bytes of a small result, such as a loss, at the beginning of each region of every other heap."""
SETTLED = 6
"""Steps until memory is in about as many pieces as it will be where variables move; and how many
are looked at then."""
MANY_STEPS = 10_000
"""In longer schedules no single request moves the peak much: one heap is enough."""


class Chunk:
    """A piece of memory and its neighbours, which are None at the ends of a region."""

    __slots__ = ("address", "after", "before", "place", "size", "used")

    def __init__(self, size: int, address: int, before: Chunk | None, after: Chunk | None) -> None:
        self.size, self.address, self.before, self.after = size, address, before, after
        self.used = False
        self.place = 0  # among free chunks: by size, then by address


class BestFit:
    """A best-fit allocator with coalescing over imaginary addresses.

    TensorFlow looks for a free chunk in bins of ascending sizes, and in a bin by size and address:
    what it finds is the first by size and address of all that are large enough.

    Args:
      region: bytes of the first region; each further one has twice as many.
      begun: bytes at the beginning of each region that something small has.
    """

    def __init__(self, region: int = FIRST_REGION, begun: int = 0) -> None:
        self.in_use = 0
        self.peak = 0
        self._region, self._begun = region, begun
        self._end = 0
        self._places: list[int] = []
        self._free: list[Chunk] = []  # in the order of their places

    def allocate(self, size: int) -> Chunk:
        """Return a chunk of at least `size` bytes.

        Args:
          size: bytes asked for, rounded up to `ALIGNMENT`.
        """
        size = -(-size // ALIGNMENT) * ALIGNMENT
        chunk = self._taken(size)
        if _is_split(chunk.size, size):
            self._cut(chunk, size)
        self._use(chunk)
        return chunk

    def allocate_many(self, size: int, count: int) -> list[Chunk]:
        """Serve equal requests one after the other, and return their chunks.

        Chunks that lie side by side come as one: they are to be freed together. What is left of a
        free chunk is the smallest that is large enough for the next request.

        Args:
          size: bytes that each asks for, rounded up to `ALIGNMENT`.
          count: how many there are.
        """
        size = -(-size // ALIGNMENT) * ALIGNMENT
        found = []
        while count:
            chunk = self._taken(size)
            split = (chunk.size - splittable(size)) // size + 1 if _is_split(
                chunk.size, size) else 0
            served = min(count, split)
            count -= served
            if count and chunk.size - served * size >= size:
                count -= 1  # and gets all that is left
            else:
                self._cut(chunk, served * size)
            self._use(chunk)
            found.append(chunk)
        return found

    def touch(self, size: int) -> None:
        """Allocate and release at once: nothing changes but the peak and, perhaps, new regions.

        Args:
          size: bytes asked for, rounded up to `ALIGNMENT`.
        """
        size = -(-size // ALIGNMENT) * ALIGNMENT
        i = bisect_left(self._places, size << _ADDRESS_BITS)
        if i == len(self._places):
            self.release(self.allocate(size))
            return
        found = self._free[i].size
        self.peak = max(self.peak, self.in_use + (size if _is_split(found, size) else found))

    def release(self, chunk: Chunk) -> None:
        """Free a chunk and merge it with its free neighbours.

        Args:
          chunk: in use; not to be used afterwards.
        """
        chunk.used = False
        self.in_use -= chunk.size
        after, before = chunk.after, chunk.before
        if after is not None and not after.used:
            self._remove(after)
            _absorb(chunk, after)
        if before is not None and not before.used:
            self._remove(before)
            _absorb(before, chunk)
            chunk = before
        self._insert(chunk)

    def _taken(self, size: int) -> Chunk:
        """Take the smallest free chunk that is large enough from the free ones."""
        i = bisect_left(self._places, size << _ADDRESS_BITS)
        if i == len(self._places):
            self._extend(size)
            i = bisect_left(self._places, size << _ADDRESS_BITS)
        del self._places[i]
        return self._free.pop(i)

    def _cut(self, chunk: Chunk, size: int) -> None:
        """Make a chunk so large, and what is left of it a free one."""
        rest = Chunk(chunk.size - size, chunk.address + size, chunk, chunk.after)
        if rest.after is not None:
            rest.after.before = rest
        chunk.size, chunk.after = size, rest
        self._insert(rest)

    def _use(self, chunk: Chunk) -> None:
        chunk.used = True
        self.in_use += chunk.size
        if self.in_use > self.peak:
            self.peak = self.in_use

    def _insert(self, chunk: Chunk) -> None:
        chunk.place = place = chunk.size << _ADDRESS_BITS | chunk.address
        i = bisect_left(self._places, place)
        self._places.insert(i, place)
        self._free.insert(i, chunk)

    def _remove(self, chunk: Chunk) -> None:
        i = bisect_left(self._places, chunk.place)
        del self._places[i], self._free[i]

    def _extend(self, size: int) -> None:
        grown = False
        while size > self._region - self._begun:
            self._region *= 2
            grown = True
        self._insert(Chunk(self._region - self._begun, self._end + self._begun, None, None))
        self._end += self._region + _GAP
        if not grown:
            self._region *= 2


def _is_split(found: int, size: int) -> bool:
    return found >= 2 * size or found - size >= MAX_SLACK


def splittable(size: int) -> int:
    """Return the bytes of the smallest free chunk of which a request gets no more than it asks for.

    Args:
      size: bytes asked for, rounded up to `ALIGNMENT`.
    """
    size = -(-size // ALIGNMENT) * ALIGNMENT
    return min(2 * size, size + MAX_SLACK)


def _absorb(chunk: Chunk, gone: Chunk) -> None:
    chunk.size += gone.size
    chunk.after = gone.after
    if gone.after is not None:
        gone.after.before = chunk


def allocated_peaks(graph: CostGraph, resolved: Resolved, order: Sequence[int] | None,
                    smallest: int = CPU_SMALLEST, all_memory: bool = False) -> tuple[int, ...]:
    """Return the allocator's peak above the step's start, over heaps that began differently.

    Where a request falls depends on everything the process allocated before, and one large
    request that meets a chunk just below twice its size moves the peak by tens of percent. What
    came before is not known, so the step is replayed after blocks of several sizes. Every other
    heap has something small at the beginning of each region, as a loss of the step before: where
    regions and tensors are powers of two, the last chunk is just below twice the size of a tensor.

    Args:
      graph: joint graph.
      resolved: its schedule, resolved.
      order: positions in execution order; None as scheduled.
      smallest: requests below this size are not counted.
      all_memory: whether the allocator has all memory from the start; one heap is enough then.

    Returns:
      Bytes, ascending. Variables are allocated first; a donated buffer replaces a variable's old
      one.
    """
    return replayed_peaks(graph, list(walk(graph, resolved, order)),
                          [graph.storages[s].bytes for s in resolved.storage],
                          resolved.storage, smallest, all_memory=all_memory)


def replayed_peaks(graph: CostGraph, moments: Sequence[Moment], size: Sequence[int],
                   storage: Sequence[int], smallest: int = CPU_SMALLEST,
                   before: Sequence[int] = BEFORE, settled: bool = False,
                   all_memory: bool = False) -> tuple[int, ...]:
    """Return the same for the moments of an execution, in whatever way it came about.

    Args:
      graph: joint graph.
      moments: in the order of execution.
      size: bytes of each instance.
      storage: of each instance that is one of a storage; later instances are of none.
      smallest: requests below this size, in bytes, are not counted.
      before: bytes of a block that was allocated before the step, for each of the heaps.
      settled: where variables move, so that each step meets another heap, whether the middle one
        of some later steps counts, and not the second step.
      all_memory: as for `allocated_peaks`.
    """
    requests = _requests(graph, moments, size, storage, max(smallest, 1))
    blocks = before if len(moments) <= MANY_STEPS and not all_memory else before[:1]
    region = ALL_MEMORY if all_memory else FIRST_REGION
    return tuple(sorted(_peak(_Replay(requests, block, region, SMALL * (n % 2)), settled)
                        for n, block in enumerate(blocks)))


def _peak(replay: _Replay, settled: bool) -> int:
    """Return the peak of a step in the heap that it finds; see `replayed_peaks`."""
    replay.step()  # the first step meets an empty heap
    peak = replay.step()
    if settled and replay.requests.moves:
        later = [replay.step() for _ in range(2 * SETTLED)]
        peak = statistics.median_high(later[SETTLED:])
    return peak


_Request = tuple[int, int, int, int]
_ALLOCATE, _RELEASE, _SOME, _RELEASE_SOME, _WORK, _UPDATE, _DONATE = range(7)


@dataclasses.dataclass(frozen=True)
class _Requests:
    """The requests of one step to an allocator, which are the same for every heap.

    Attributes:
      variables: bytes of those that are counted.
      slots: how many of them have a name of their own.
      steps: (kind, slot, bytes, count), one for each request, or for so many that are equal: to
        allocate a chunk for a slot; to release it; to allocate several, and to release these; to
        allocate and release; to move a variable of that size, whose old chunk the slot gets; to
        release such a variable's old chunk, which the slot's replaces.
      moves: whether a variable gets another address.
    """

    variables: tuple[int, ...]
    slots: int
    steps: tuple[_Request, ...]
    moves: bool


def _requests(graph: CostGraph, moments: Sequence[Moment], size: Sequence[int],
              storage: Sequence[int], smallest: int) -> _Requests:
    """Return the requests of the moments of an execution (see `replayed_peaks`)."""
    variables, in_use = graph.variable_bytes, collections.Counter(
        v for vertex, *_ in moments for v in vertex.reads_variables)
    sizes = frozenset(v for v in variables if v >= smallest)
    names = itertools.count(len(size) + len(variables))
    slots: dict[int, tuple[int, int]] = {}  # of each instance that has chunks, and how many
    old: set[int] = set()  # variables whose old value is still to be read
    found: list[_Request] = []

    for vertex, made, taken, freed in moments:
        for i in made:
            if i not in taken:
                if size[i] >= smallest:
                    of = graph.storages[storage[i]] if i < len(storage) else vertex
                    count = _count(size[i], of.pieces, smallest)
                    slots[i] = i, count
                    found.append((_ALLOCATE if count == 1 else _SOME, i, size[i] // count, count))
            elif taken[i] in slots:
                slots[i] = slots.pop(taken[i])
        updated = vertex.updates
        if updated in in_use and variables[updated] >= smallest:
            old.add(updated)
            found.append((_UPDATE, len(size) + updated, variables[updated], 1))
        if vertex.workspace >= smallest:
            found += _work(vertex, smallest, names)
        for i in freed:
            if i in slots:
                donated = i < len(storage) and storage[i] in vertex.donates
                slot, count = slots.pop(i)
                kind = _RELEASE_SOME if count > 1 else (
                    _DONATE if donated and size[i] in sizes else _RELEASE)
                found.append((kind, slot, size[i], count))
        if vertex.reads_variables:
            found.extend((_RELEASE, len(size) + variable, 0, 1)
                         for variable in _let_go(vertex.reads_variables, in_use) if variable in old)
    found.extend((_RELEASE if count == 1 else _RELEASE_SOME, slot, 0, count)
                 for slot, count in slots.values())
    return _Requests(tuple(v for v in variables if v >= smallest), next(names),
                     tuple(found), any(kind in (_UPDATE, _DONATE) for kind, *_ in found))


def _count(total: int, pieces: int, smallest: int) -> int:
    """Return how many equal requests stand for so many bytes in pieces."""
    return max(1, min(pieces, MOST_PIECES, total // smallest))


def _work(vertex: Vertex, smallest: int, names: Iterator[int]) -> list[_Request]:
    """Return the requests for a workspace that is freed when its step ends."""
    count = _count(vertex.workspace, vertex.pieces, smallest)
    if count == 1:
        return [(_WORK, 0, vertex.workspace, 1)]
    slot = next(names)
    return [(_SOME, slot, vertex.workspace // count, count), (_RELEASE_SOME, slot, 0, count)]


def _let_go(reads: Sequence[int], in_use: collections.Counter[int]) -> list[int]:
    """Count off the variables that a vertex reads; return those that nothing reads any more."""
    gone = []
    for variable in reads:
        in_use[variable] -= 1
        if not in_use[variable]:
            del in_use[variable]
            gone.append(variable)
    return gone


class _Replay:
    """Serves the requests of one step as often as wanted from the same heap."""

    def __init__(self, requests: _Requests, block: int, region: int, begun: int) -> None:
        self.requests, self.heap = requests, BestFit(region, begun)
        if block:
            self.heap.allocate(block)
        self.variables: dict[int, collections.deque[Chunk]] = {}
        for size in requests.variables:
            self.variables.setdefault(size, collections.deque()).append(self.heap.allocate(size))

    def step(self) -> int:
        """Serve one step; return its peak above what was in use when it started."""
        heap, variables = self.heap, self.variables
        allocate, release = heap.allocate, heap.release
        start = heap.peak = heap.in_use
        chunks: list[Any] = [None] * self.requests.slots
        for kind, slot, size, count in self.requests.steps:
            if kind == _ALLOCATE:
                chunks[slot] = allocate(size)
            elif kind == _RELEASE:
                release(chunks[slot])
            elif kind == _SOME:
                chunks[slot] = heap.allocate_many(size, count)
            elif kind == _RELEASE_SOME:
                for chunk in chunks[slot]:
                    release(chunk)
            elif kind == _WORK:
                heap.touch(size)
            elif kind == _UPDATE:
                variables[size].append(allocate(size))
                chunks[slot] = variables[size].popleft()
            else:
                variables[size].append(chunks[slot])
                release(variables[size].popleft())
        return heap.peak - start
