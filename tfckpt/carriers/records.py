"""What is known of a decorated step besides its graph: options, reports, sizes of its calls."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture.sizes.calls import CallSizes
from tfckpt.report.report import Report
from tfckpt.request.options import Options

GROWTH = 1.1
"""A batch this much larger than what was planned for is planned anew, or warned about."""


class Records:
    """The reports of one decorated step: the latest, and one for each traced signature.

    Attributes:
      open_for: what a trace with open dimensions was planned for, the latest of them; None where
        no call told.
      opened: whether there was such a trace.
      around: the records of the decorator, where these are of one object whose method it made.
      tune: takes the first batch that a model trains with, and settles its plan; None where that is
        done, or not wanted.
      settled: fills in what tuning has measured in the report of each trace that follows.
    """

    def __init__(self, around: Records | None = None) -> None:
        self.report: Report | None = None
        self.reports: dict[str, Report] = {}
        self.graph: Callable[[], tf.Graph | None] = lambda: None
        self.open_for: CallSizes | None = None
        self.opened = False
        self.tune: Callable[[Any], None] | None = None
        self.settled: Callable[[Report], None] | None = None
        self._traced: set[tuple] = set()
        self.around = around

    def note(self, sizes: CallSizes, is_open: bool) -> None:
        """Note the sizes that a trace is planned for, and whether it leaves dimensions open.

        Args:
          sizes: what the call told of sizes; without leaves where it told nothing.
          is_open: whether the trace leaves dimensions open.
        """
        self._traced.add(sizes.leaves)
        if is_open:
            self.open_for = sizes.without_values() if sizes.leaves else None
        self.opened |= is_open
        if self.around is not None:
            self.around.opened |= self.opened

    @contextlib.contextmanager
    def watching(self, sizes: CallSizes, name: str) -> Iterator[None]:
        """Warn, once for a plan, of a call that runs an open trace and is larger than planned.

        Args:
          sizes: those of the call that is made in this context.
          name: of the step, for the warning.

        Yields:
          Nothing, before the call; what it did is looked at when the context ends.
        """
        traces = len(self.reports)
        yield
        planned = self.open_for
        if (planned is None or len(self.reports) > traces or sizes.leaves in self._traced
                or sizes.elements <= GROWTH * planned.elements):
            return
        self.open_for = None
        warnings.warn(
            f"tfckpt: {name} was planned for {planned} and is called with {sizes} now: its peak "
            "will be higher than planned. Call it with its largest batch first, pass batch_size=, "
            "or let each size be traced and planned: without an open dimension in an "
            "input_signature", stacklevel=5)

    def add(self, signature: str, report: Report, graph: tf.Graph) -> None:
        """Note the report of a trace, and its graph for as long as TensorFlow keeps that.

        Args:
          signature: the traced signature as text; one that is known already gets a number.
          report: of the trace.
          graph: that the step is in; only a weak reference is kept.
        """
        self.graph = weakref.ref(graph)
        self.report = report
        if self.settled is not None:
            self.settled(report)
        key, number = signature, 1
        while key in self.reports:  # traces that differ by something else, such as captured objects
            number += 1
            key = f"{signature} #{number}"
        self.reports[key] = report
        if self.around is not None:
            self.around.add(signature, report, graph)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A mark on a graph: all that the trace hook needs to know about it.

    Attributes:
      arguments: Python values among the arguments: a trace is made for each.
      holders: what the step may reach Keras layers by: its function, its arguments, a model.
    """

    options: Options
    records: Records
    name: str
    jit_compile: bool = False
    arguments: tuple[str, ...] = ()
    holders: Callable[[], Sequence[object]] = tuple


_calls = threading.local()


def known_sizes() -> CallSizes:
    """Return what is known of the call that traces now."""
    return getattr(_calls, "sizes", CallSizes())


@contextlib.contextmanager
def knowing(sizes: CallSizes) -> Iterator[None]:
    """Let what is traced in this context by this thread know the sizes of the call.

    Args:
      sizes: what the call says of sizes; after the context the previous ones apply again.

    Yields:
      Nothing, once the sizes are known.
    """
    previous = known_sizes()
    _calls.sizes = sizes
    try:
        yield
    finally:
        _calls.sizes = previous
