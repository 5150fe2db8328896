"""Texts that name ops, kept such that they can be said of the same step under other names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tfckpt.ir.graph import Graph

Pieces = str | list[str | int]
"""A text, or its pieces with the index of an op for each name."""
_WORD = re.compile(r"([A-Za-z0-9_./\\>-]+)")
_COPY = "-tfckpt"
"""The suffix that a copy's name adds to the original's (`tfckpt.rewrite.names`)."""


class Texts:
    """Texts about the ops of a step, with indices in place of names."""

    def __init__(self, graph: Graph) -> None:
        self._names = tuple(op.name for op in graph.ops)
        self._index = {name: i for i, name in enumerate(self._names)}

    def index(self, name: str) -> int:
        """Return the index of an op.

        Args:
          name: of an op of the step.

        Raises:
          KeyError: there is no such op.
        """
        return self._index[name]

    def indices(self, of: Iterable[tuple[str, int]]) -> list[tuple[int, int]]:
        """Return numbers with the index of an op for its name; other names are left out.

        Args:
          of: names of ops, each with a number.
        """
        return [(self._index[name], number) for name, number in of if name in self._index]

    def name(self, index: int) -> str:
        """Return the name of an op.

        Args:
          index: that of the op in `Graph.ops`; negative ones are refused.

        Raises:
          IndexError: there is no such op.
        """
        if index < 0:
            raise IndexError(index)
        return self._names[index]

    def pieces(self, text: str) -> Pieces:
        """Return a text with indices in the place of names, also in those of copies.

        Args:
          text: may name ops of the step, or copies of them.

        Returns:
          The text itself where it names no op.
        """
        found: list[str | int] = [""]
        for word in _WORD.split(text):
            name, copy, number = word.partition(_COPY)
            if word in self._index:
                found += [self._index[word], ""]
            elif copy and name in self._index:
                found += [self._index[name], copy + number]
            else:
                found[-1] = f"{found[-1]}{word}"
        return text if len(found) == 1 else found

    def text(self, pieces: Pieces) -> str:
        """Return the text that was made into pieces, with the names that ops have here.

        Args:
          pieces: what `pieces` returned, for this step or the same one under other names.

        Raises:
          IndexError: there is no such op.
        """
        if isinstance(pieces, str):
            return pieces
        return "".join(self.name(p) if isinstance(p, int) else str(p) for p in pieces)

    def all(self, several: Sequence[Pieces]) -> tuple[str, ...]:
        """Return several texts.

        Args:
          several: what `pieces` returned for each text.

        Returns:
          The texts, in the same order, as of `text`.
        """
        return tuple(map(self.text, several))
