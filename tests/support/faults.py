"""Faults put into what changes graphs: the n-th call of any of some functions fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any


class MadeUpError(RuntimeError):
    """A fault of a test."""


@dataclasses.dataclass
class Faults:
    """Counts the calls of functions and lets some fail.

    Attributes:
      fail: numbers of the calls that fail, from 1 on.
      late: whether they fail when they have done what they do, instead of before.
      calls: the names of the functions that were called, in order.
    """

    fail: Collection[int] = ()
    late: bool = False
    calls: list[str] = dataclasses.field(default_factory=list)

    def inject(self, monkeypatch: Any, functions: Sequence[tuple[Any, str]]) -> None:
        """Replace functions, each given by its module or class and its name."""
        for holder, name in functions:
            monkeypatch.setattr(holder, name, self.wrapped(getattr(holder, name), name))

    def wrapped(self, real: Callable, name: str) -> Callable:
        """Return a function that is counted, and fails when its turn comes."""
        def counted(*args, **kwargs):
            self.calls.append(name)
            fails = len(self.calls) in self.fail
            if fails and not self.late:
                raise MadeUpError(f"before {name}")
            result = real(*args, **kwargs)
            if fails:
                raise MadeUpError(f"after {name}")
            return result

        return counted
