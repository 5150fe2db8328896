"""The vertices of a cost graph as arrays, so that all steps of a schedule are counted at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tfckpt.ir.costgraph import CostGraph

Ints = np.ndarray


@dataclasses.dataclass(frozen=True)
class Rows:
    """A row of ints for each vertex, one after the other."""

    start: Ints
    count: Ints
    values: Ints

    def of(self, vertices: Ints) -> tuple[Ints, Ints]:
        """Return the rows of some vertices, and for each value which of them it is of.

        Args:
          vertices: int array of indices of vertices; a vertex may come several times.

        Returns:
          Two int arrays of one length: the values of the rows, one row after the other, and for
          each of them a position in `vertices`.
        """
        count = self.count[vertices]
        first = np.cumsum(count) - count
        number = np.repeat(np.arange(len(vertices)), count)
        return self.values[(self.start[vertices] - first)[number] + np.arange(len(number))], number


@dataclasses.dataclass(frozen=True)
class Tables:
    """Attributes of `CostGraph`, as arrays.

    Attributes:
      reads, writes: storages, for each vertex.
      takes: pairs of what a kernel may take over: the nth pair of each vertex, as places among its
        reads and its writes, -1 where it has none; sizes are equal.
      donates: the nth donated storage of each vertex, as places among its reads.
      bytes, fetched: of each storage.
      workspace: bytes, of each vertex.
      time: of each vertex; a list, since sums of floats depend on their order.
    """

    reads: Rows
    writes: Rows
    takes: tuple[tuple[Ints, Ints], ...]
    donates: tuple[Ints, ...]
    bytes: Ints
    fetched: Ints
    workspace: Ints
    time: list[float]


def tables_of(graph: CostGraph) -> Tables:
    """Return a graph's tables.

    Args:
      graph: cost graph of the joint graph; not changed.
    """
    vertices, storages = graph.vertices, graph.storages
    size = [s.bytes for s in storages]
    pairs = [[(v.reads.index(read), v.writes.index(written)) for written, read in v.reuses
              if size[written] == size[read]] for v in vertices]
    donated = [[v.reads.index(s) for s in v.donates] for v in vertices]
    return Tables(
        _rows([v.reads for v in vertices]), _rows([v.writes for v in vertices]),
        tuple((_nth([[read for read, _ in row] for row in pairs], n),
               _nth([[written for _, written in row] for row in pairs], n))
              for n in range(max(map(len, pairs), default=0))),
        tuple(_nth(donated, n) for n in range(max(map(len, donated), default=0))),
        _ints(size), np.array([s.fetched for s in storages], dtype=bool),
        _ints(v.workspace for v in vertices), [v.time for v in vertices])


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _nth(rows: Sequence[Sequence[int]], n: int) -> Ints:
    return _ints(row[n] if len(row) > n else -1 for row in rows)


def _rows(rows: Sequence[Sequence[int]]) -> Rows:
    count = _ints(map(len, rows))
    return Rows(np.cumsum(count) - count, count, _ints(s for row in rows for s in row))
