"""A best-fit allocator with coalescing, as TensorFlow has it (BFC), over imaginary addresses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

ALIGNMENT = 256
FIRST_REGION = 2 << 20
MAX_SLACK = 128 << 20
_GAP = 1 << 44  # regions are never adjacent
_ADDRESS_BITS = 64


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

    def apart(self, chunks: Iterable[Chunk], size: int) -> list[Chunk]:
        """Return the chunks of each request for which `allocate_many` returned these.

        Args:
          chunks: in use; not to be used afterwards.
          size: bytes that each request asked for.
        """
        size = -(-size // ALIGNMENT) * ALIGNMENT
        found = []
        for chunk in chunks:
            while chunk.size >= 2 * size:
                rest = _rest(chunk, size)
                rest.used = True
                found.append(chunk)
                chunk = rest
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
        self._insert(_rest(chunk, size))

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


def _rest(chunk: Chunk, size: int) -> Chunk:
    """Make a chunk so large, and return what is left of it."""
    rest = Chunk(chunk.size - size, chunk.address + size, chunk, chunk.after)
    if rest.after is not None:
        rest.after.before = rest
    chunk.size, chunk.after = size, rest
    return rest


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
