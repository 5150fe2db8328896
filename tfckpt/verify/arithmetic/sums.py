"""Sums: with which of its terms a kernel begins, and those in which that does not matter.

`AddN` writes into the first term whose buffer nothing else uses and begins with it, in exchange
for the first one: a + b + c, but c + b + a where a and b are still to be read. Who uses a buffer
is told from the graph alone: what has read it by then in every order, and what reads it later.

Of the gradients of slices that do not overlap at most one is not zero anywhere, so that it does not
matter in which order they are added. To put the slices' own gradients side by side and to add zero
gives the same bits: of -0, and of numbers too small for the processor's mode, both make 0. How wide
a slice is, its gradient's shape says, which the kernels check: the same gradients in the same order
have the same places.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfckpt.ops import record
from tfckpt.verify.arithmetic.nodes import Node, Tensor
from tfckpt.verify.arithmetic.op_labels import ARRIVAL, CONSTANT, SUM, SUM_OF_TWO

_STACKED, _JOINED, _PADDED = "Pack", "ConcatV2", "Pad"
_HIDDEN = "PlaceholderWithDefault"
"""Hands a constant on, which Grappler does not know then."""
_FEWEST, _MOST_READ = 2, 64


class Starts:
    """Which terms the sums of a graph begin with.

    Args:
      nodes: the ops by name.
      ordered: their names, each after what it reads and waits for but for the ends of loops.
      source: returns the result in whose memory a tensor lies: what only hands it on, or shows it
        in another shape, makes no copy.
      lasting: whether the results of an op by name stay in memory after their readers have run:
        those of constants, arguments and variables.
      holding: whether an op by name keeps what it reads until the step ends.
    """

    def __init__(self, nodes: Mapping[str, Node], ordered: Sequence[str],
                 source: Callable[[Tensor], Tensor], lasting: Callable[[str], bool],
                 holding: Callable[[str], bool]) -> None:
        self.nodes, self.ordered, self.source = nodes, ordered, source
        self.lasting, self.holding = lasting, holding
        self.readers: dict[Tensor, list[str]] = {}
        self._before: dict[str, frozenset[str]] = {}

    def order(self, name: str, at_once: bool = False, begin: int | None = None
              ) -> tuple[tuple[int, ...], bool]:
        """Return the places of a sum's terms in the order in which they are added.

        Args:
          name: of the sum.
          begin: the place that it is taken to begin with, if it may.
          at_once: whether what nothing orders with the sum is taken to run before it where it is
            ready before it: where fewer ops have to run one after the other first. So it is where
            ops run in the order in which they become ready; of as many it is not known.

        Returns:
          And whether it is known. Where it depends on what runs first, it is that of the case
          in which no buffer is free that need not be.
        """
        if not self.readers:
            self._find_readers()
        terms = self.nodes[name].inputs
        free = [self._is_free(tensor, terms, name, at_once) for tensor in terms]
        surely = free.index(True) if True in free else 0
        last = surely if True in free else len(free)
        begins = {surely, *(i for i in range(last) if free[i] is None)}
        if begin in begins:
            surely, begins = begin, {begin}
        places = list(range(len(terms)))
        places[0], places[surely] = places[surely], places[0]
        return tuple(places), len({0 if i == 1 else i for i in begins}) == 1  # these two commute

    def _find_readers(self) -> None:
        for name, node in self.nodes.items():
            for tensor in node.inputs:
                self.readers.setdefault(self.source(tensor), []).append(name)

    def _is_free(self, tensor: Tensor, terms: Sequence[Tensor], name: str, at_once: bool
                 ) -> bool | None:
        """Return whether nothing else uses a term's buffer; None where that is open."""
        root = self.source(tensor)
        if self.lasting(root[0]) or sum(self.source(t) == root for t in terms) > 1:
            return False
        others = [reader for reader in self.readers[root] if reader != name]
        if any(self.holding(reader) for reader in others):
            return False
        late = [reader for reader in others if reader not in self._ancestors(name)]
        if any(name in self._ancestors(reader) for reader in late):
            return False
        if late and at_once:
            latest = max(self._depth[reader] for reader in late)
            return None if latest == self._depth[name] else latest < self._depth[name]
        return None if late else True

    def _ancestors(self, name: str) -> frozenset[str]:
        """Return what has run whenever an op runs."""
        if name not in self._before:
            seen: set[str] = set()
            pending: list[str] = [name]
            while pending:
                for other in self._sources(pending.pop()):
                    if other not in seen and other in self.nodes:
                        seen.add(other)
                        pending.append(other)
            self._before[name] = frozenset(seen)
        return self._before[name]

    @functools.cached_property
    def _depth(self) -> Mapping[str, int]:
        """Of each op, how many have to run one after the other until it has run."""
        found: dict[str, int] = {}
        for name in self.ordered:
            found[name] = 1 + max((found.get(other, 0) for other in self._sources(name)), default=0)
        return found

    def _sources(self, name: str) -> Iterable[str]:
        node = self.nodes[name]
        return (*(source for source, _ in node.inputs), *node.controls)


class SideBySide(NamedTuple):
    """What a sum adds.

    Attributes:
      axis: along which; below 0 from the last on.
      begin: where the first piece is; there are zeros before.
      stacked: whether pieces lack the axis.
      pieces: one after the other.
      other: a further term; None where there is none.
    """

    axis: int
    begin: int
    stacked: bool
    pieces: tuple[Tensor, ...]
    other: Tensor | None = None


class _Slice(NamedTuple):
    """What a gradient is the gradient of, from `begin` up to `end`."""

    axis: int
    stacked: bool
    begin: int
    end: int
    tensor: Tensor


class SliceSums:
    """Finds sums of the gradients of slices, and slices that are put side by side.

    Args:
      nodes: of a graph, by name.
      definitions: NodeDefs by name.
      source: returns what a tensor is, seen through what only passes it on.
      added: of each accumulator the ops that add to it, by name.
    """

    def __init__(self, nodes: Mapping[str, Node], definitions: Mapping[str, Any],
                 source: Callable[[Tensor], Tensor], added: Mapping[Tensor, Sequence[str]]) -> None:
        self.nodes, self.definitions, self.source = nodes, definitions, source
        self.added = added

    def of(self, name: str) -> SideBySide | None:
        """Return what an op adds side by side; None where it does something else.

        Args:
          name: of the op.
        """
        node = self.nodes[name]
        if node.type == SUM:
            return self._sum(node.inputs)
        if node.type == ARRIVAL:
            return self._sum([self.nodes[n].inputs[1] for n in self.added.get(node.inputs[0], ())])
        if node.type == SUM_OF_TWO:
            for tensor, zero in (node.inputs, node.inputs[::-1]):
                if self._numbers(zero) == [0]:
                    return self._put_together(self.source(tensor)[0])
        return None

    def _sum(self, terms: Sequence[Tensor]) -> SideBySide | None:
        known = [(tensor, self._slice(self.source(tensor)[0])) for tensor in terms]
        slices = sorted((one for _, one in known if one is not None), key=lambda one: one.begin)
        others = [tensor for tensor, one in known if one is None]
        if len(slices) < _FEWEST or len(others) > 1 or any(
                one[:2] != after[:2] or one.end != after.begin
                for one, after in itertools.pairwise(slices)):
            return None
        first = slices[0]
        return SideBySide(first.axis, first.begin, first.stacked,
                          tuple(one.tensor for one in slices), others[0] if others else None)

    def _slice(self, name: str) -> _Slice | None:
        """Return what a slice's gradient spreads; None of other ops, and of slices of two axes."""
        node = self.nodes[name]
        if not record(node.type).slice_gradient:
            return None
        begin, end, strides = (self._numbers(tensor) for tensor in node.inputs[1:4])
        given = self.definitions[name].attr
        if begin is None or end is None or strides is None or (
                given["new_axis_mask"].i or set(strides) != {1}):
            return None
        found, after = [], False
        for place, (first, last) in enumerate(zip(begin, end, strict=True)):
            opens, closes, rest, stacked = (given[f"{key}_mask"].i >> place & 1 for key in (
                "begin", "end", "ellipsis", "shrink_axis"))
            after = after or bool(rest)
            if rest or opens and closes and not stacked:
                continue
            first = 0 if opens and not stacked else first
            size = self._size(node.inputs[0], place - len(begin) if after else place)
            until = first + 1 or size if stacked else size if closes else last
            if size is not None:
                first, until = (n + size if n < 0 else n for n in (first, until or 0))
            if until is None or first < 0 or until <= first:
                return None
            if stacked or (first, until) != (0, size):
                found.append(_Slice(place - len(begin) if after else place, bool(stacked),
                                    first, until, node.inputs[4]))
        return found[0] if len(found) == 1 else None

    def _size(self, shape: Tensor, axis: int) -> int | None:
        """Return the length of an axis, of a shape that is a constant."""
        known = self._numbers(shape)
        return known[axis] if known is not None and -len(known) <= axis < len(known) else None

    def _put_together(self, name: str) -> SideBySide | None:
        """Return what an op puts side by side; None where it does something else."""
        node = self.nodes[name]
        if node.type == _STACKED:
            return SideBySide(self.definitions[name].attr["axis"].i, 0, True, node.inputs)
        if node.type == _JOINED and (axis := self._numbers(node.inputs[-1])) is not None:
            return SideBySide(axis[0], 0, False, node.inputs[:-1])
        around = self._numbers(node.inputs[1]) if node.type == _PADDED else None
        inner = self._put_together(self.source(node.inputs[0])[0]) if around else None
        if inner is None or around is None:
            return None
        rows = list(zip(around[::2], around[1::2], strict=True))
        before, after = rows.pop(inner.axis % len(rows))
        return inner._replace(begin=before) if (
            not any(map(any, rows)) and min(before, after) >= 0) else None

    def _numbers(self, tensor: Tensor) -> list[int] | None:
        """Return the numbers of a constant, one after the other; None of anything else."""
        name, _ = self.source(tensor)
        if self.nodes[name].type == _HIDDEN:
            name, _ = self.source(self.nodes[name].inputs[0])
        if self.nodes[name].type != CONSTANT:
            return None
        value = tf.make_ndarray(self.definitions[name].attr["value"].tensor)
        return value.ravel().tolist() if value.size <= _MOST_READ else None
