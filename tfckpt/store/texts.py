"""Texts that name ops, kept such that they can be said of the same step under other names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tfckpt.ir.graph import Graph

Pieces = str | list[str | int]
"""A text, or its pieces with the index of an op for each name."""
_WORD = re.compile(r"([A-Za-z0-9_./\\>-]+)")
_COPY = "-tfckpt"
"""What follows the name of the original in that of a copy (`tfckpt.rewrite.names`)."""


class Texts:
    """What is said of the ops of a step, by their indices."""

    def __init__(self, graph: Graph) -> None:
        self._names = tuple(op.name for op in graph.ops)
        self._index = {name: i for i, name in enumerate(self._names)}

    def index(self, name: str) -> int:
        """Return the index of an op."""
        return self._index[name]

    def indices(self, of: Iterable[tuple[str, int]]) -> list[tuple[int, int]]:
        """Return numbers with the index of an op for its name; other names are left out."""
        return [(self._index[name], number) for name, number in of if name in self._index]

    def name(self, index: int) -> str:
        """Return the name of an op.

        Raises:
          IndexError: there is no such op.
        """
        if index < 0:
            raise IndexError(index)
        return self._names[index]

    def pieces(self, text: str) -> Pieces:
        """Return a text with indices in the place of names, also in those of copies."""
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
        """Return the text that was made into pieces, with the names that ops have here."""
        if isinstance(pieces, str):
            return pieces
        return "".join(self.name(p) if isinstance(p, int) else str(p) for p in pieces)

    def all(self, several: Sequence[Pieces]) -> tuple[str, ...]:
        """Return several texts."""
        return tuple(map(self.text, several))
