"""With which of its terms the kernel of a sum begins.

`AddN` writes into the first term whose buffer nothing else uses and begins with it, in exchange
for the first one: a + b + c, but c + b + a where a and b are still to be read. Who uses a buffer
is told from the graph alone: what has read it by then in every order, and what reads it later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from tfckpt.verify.arithmetic.nodes import Node, Tensor


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
