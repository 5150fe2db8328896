"""Bytes that an allocator has in use while a schedule runs, rounding and slack included.

TensorFlow's best-fit allocator with coalescing (BFC, on GPUs and under oneDNN on CPUs) hands out
a free chunk whole unless it is at least twice as large as the request or 128 MiB larger, and its
statistics count whole chunks. On the plans of the benchmark models that is 5 to 40 % more than
the bytes asked for, so a budget checked against requested bytes would not be the peak. This
module runs a schedule's requests through the same rules: size classes by powers of two, best fit
within a class, regions that double, coalescing with free neighbours. A step's workspace is
requested after its results and freed when it ends. What loops keep are many requests, of which
`MOST_PIECES` are served at most. An iteration frees the entry of a list that it has read, and
appends one that may lie there: what a loop makes lies partly in the memory of what it was given, by
a share that is another one in each heap, since it depends on how many iterations run at once. A
variable that is updated while something still reads its value is copied to another address.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tfckpt.ir.costgraph import CostGraph, Vertex
from tfckpt.ir.schedule import Resolved
from tfckpt.ir.target import CPU_SMALLEST
from tfckpt.simulate.best_fit import FIRST_REGION, BestFit, Chunk
from tfckpt.simulate.liveness import Moment, walk

ALL_MEMORY = 1 << 42
"""Bytes of the first region of an allocator that has all memory: more than any step takes."""
MOST_PIECES = 64
"""Requests that stand for those of a loop's list: so many fill the gaps that others leave."""
BEFORE = (0, 2_000_000, 5_000_000, 11_000_000, 17_000_000, 43_000_000)
"""Bytes of a block that was allocated before the step."""
SMALL = 256
"""Bytes of a small result, such as a loss, at the beginning of each region of every other heap."""
SETTLED = 6
"""Steps until memory is in about as many pieces as it will be where variables move; and how many
are looked at then."""
MANY_STEPS = 10_000
"""In longer schedules no single request moves the peak much: one heap is enough."""


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
    return tuple(sorted(
        _peak(_Replay(requests, block, region, SMALL * (n % 2), (n + 0.5) / len(blocks)), settled)
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
_ALLOCATE, _RELEASE, _SOME, _RELEASE_SOME, _SWAP, _MOVE, _WORK, _UPDATE, _DONATE = range(9)


@dataclasses.dataclass(frozen=True)
class _Requests:
    """The requests of one step to an allocator, which are the same for every heap.

    Attributes:
      variables: bytes of those that are counted.
      slots: how many of them have a name of their own.
      steps: (kind, slot, bytes, count), one for each request, or for so many that are equal: to
        allocate a chunk for a slot; to release it; to allocate several, and to release these; to
        exchange some of them for those of another slot, whose number stands for the count, or for
        new ones; to allocate and release; to move a variable of that size, whose old chunk the slot
        gets; to release such a variable's old chunk, which the slot's replaces.
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
            if i in taken:
                found += _taken(i, taken[i], slots, size)
            elif size[i] >= smallest:
                pieces = (graph.storages[storage[i]] if i < len(storage) else vertex).pieces
                found += _new(vertex, i, _count(size[i], pieces, smallest), slots, size, storage)
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


def _new(vertex: Vertex, made: int, count: int, slots: dict[int, tuple[int, int]],
         size: Sequence[int], storage: Sequence[int]) -> list[_Request]:
    """Return the requests for an instance; of a list it changes places with those that are read."""
    piece, reads = size[made] // count, frozenset(vertex.reads)
    swaps = [(_SWAP, made, piece, slot) for i, (slot, many) in slots.items()
             if many > 1 and size[i] // many == piece and i < len(storage) and storage[i] in reads
             ] if count > 1 else []
    slots[made] = made, count
    return [(_ALLOCATE if count == 1 else _SOME, made, piece, count), *swaps]


def _taken(made: int, of: int, slots: dict[int, tuple[int, int]], size: Sequence[int]
           ) -> list[_Request]:
    """Return the requests for an instance that lies in the chunks of another, if it has any."""
    if of not in slots:
        return []
    slots[made] = slot, count = slots.pop(of)
    return [(_MOVE, slot, size[made] // count, count)] if count > 1 else []


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
    """Serves the requests of one step as often as wanted from the same heap.

    Args:
      requests: of a step.
      block: bytes of a block that was allocated before it.
      region, begun: as for `BestFit`.
      share: of the entries of a list that a loop makes, those that lie among what the loop reads;
        of one in the memory of what it reads, those that lie elsewhere.
    """

    def __init__(self, requests: _Requests, block: int, region: int, begun: int,
                 share: float) -> None:
        self.requests, self.heap, self.share = requests, BestFit(region, begun), share
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
            elif kind == _SWAP:
                chunks[slot], chunks[count] = self._swapped(chunks[slot], chunks[count], size)
            elif kind == _MOVE:
                chunks[slot] = self._moved(chunks[slot], size)
            elif kind == _WORK:
                heap.touch(size)
            elif kind == _UPDATE:
                variables[size].append(allocate(size))
                chunks[slot] = variables[size].popleft()
            else:
                variables[size].append(chunks[slot])
                release(variables[size].popleft())
        return heap.peak - start

    def _swapped(self, one: list[Chunk], other: list[Chunk], size: int
                 ) -> tuple[list[Chunk], list[Chunk]]:
        """Return the chunks of two lists of entries of one size with the last of both exchanged."""
        ours, theirs = self.heap.apart(one, size), self.heap.apart(other, size)
        some = int(self.share * min(len(ours), len(theirs)))
        here, there = len(ours) - some, len(theirs) - some
        return ours[:here] + theirs[there:], theirs[:there] + ours[here:]

    def _moved(self, chunks: list[Chunk], size: int) -> list[Chunk]:
        """Return the chunks of a list with the first of them elsewhere.

        What is there at once meanwhile is what the loop needs to run, which its vertex counts.
        """
        heap, ours = self.heap, self.heap.apart(chunks, size)
        some, peak = int(self.share * len(ours)), heap.peak
        new = heap.allocate_many(size, some)
        for chunk in ours[:some]:
            heap.release(chunk)
        heap.peak = max(peak, heap.in_use)
        return new + ours[some:]
