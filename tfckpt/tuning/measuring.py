"""Functions that are run for a few steps, and everything put back after each of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.common.messages import say
from tfckpt.report.observed import CALLS as OBSERVED
from tfckpt.report.report import Report
from tfckpt.tuning.profile import profiled
from tfckpt.tuning.result import PLAIN, Measured
from tfckpt.verify.memory import default_device, peak_of_call
from tfckpt.verify.snapshot import Snapshot

SETTLING = 8
"""Further steps of what fits, as time allows."""
CLOSE = 1.1
"""Times the fastest: what is measured again, in turns, before one is taken."""


@dataclasses.dataclass
class Ran:
    """A function that was run, and what came of it.

    Attributes:
      row: what was measured.
      function: a `tf.function`, or a decorated step.
      optional: whether it may fail otherwise than for lack of memory: XLA may not compile it.
      peaks, seconds: of each measured call.
    """

    row: Measured
    function: Any
    optional: bool = False
    peaks: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def report(self) -> Report | None:
        """Return the function's report; None of one that is not decorated, or not traced."""
        return getattr(self.function, "report", None)

    def note(self, failure: str) -> None:
        """Fill in what was measured; nothing where it failed.

        Args:
          failure: why the function could not be run, such as "out of memory"; "" where it could.
        """
        self.row = dataclasses.replace(
            self.row, failure=failure,
            peak_bytes=None if failure else int(statistics.median(self.peaks)),
            most_bytes=None if failure or self.row.name == PLAIN else max(self.peaks),
            seconds=None if failure else statistics.median(self.seconds))


class Bench:
    """Runs functions with the same arguments.

    Attributes:
      snapshot: what is put back after each of them.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int) -> None:
        self.args, self.kwargs, self.steps = args, kwargs, steps
        self.device = default_device()
        self.snapshot = Snapshot()
        self._plain: Measured | None = None

    def measured(self, ran: Ran, wanted: Callable[[Measured], bool], limit: float) -> Ran:
        """Run a function, put everything back, and note what it took.

        Args:
          ran: the function, and what is noted of it.
          wanted: whether what was measured is worth some steps more: memory is in more pieces after
            a few, and peaks may rise.
          limit: seconds that these may take.
        """
        failure = ""
        if ran.report is not None:
            ran.report.observed_calls = OBSERVED  # tuning looks at them itself
        try:
            self._once(ran.function)
            for _ in range(self.steps):
                self._run(ran)
            ran.note("")
            if wanted(ran.row):
                for _ in range(min(SETTLING, int(limit / max(ran.row.seconds or 0.0, 1e-9)))):
                    self._run(ran)
        except tf.errors.ResourceExhaustedError:
            failure = "out of memory"
        except tf.errors.OpError as error:
            if not ran.optional:
                raise
            failure = f"not compiled: {str(error.message).strip().splitlines()[0][:80]}"
        finally:
            self.snapshot.restore()
        ran.note(failure)
        if ran.row.name == PLAIN:
            self._plain = ran.row
        over = "" if ran.row.failure or wanted(ran.row) else ": more than is allowed"
        say(f"  {ran.row.line(self._plain or ran.row)}{over}")
        return ran

    def profile(self, ran: Ran) -> dict[str, float]:
        """Return the seconds of a function's ops; nothing where no profile can be taken.

        Args:
          ran: the function, run before.

        Returns:
          Seconds by the name of what ran.
        """
        if ran.row.failure:
            return {}
        try:
            return profiled(lambda: ran.function(*self.args, **self.kwargs))
        except tf.errors.OpError:  # a profile is being taken already, or memory is short
            return {}
        finally:
            self.snapshot.restore()

    def in_turns(self, every: Sequence[Ran], allowed: int | None) -> None:
        """Run those that fit and are nearly as fast as the fastest again, one after the other.

        Args:
          every: functions that were run before; `row` of those that are run again is filled in
            anew.
          allowed: bytes that a call may take; None for no limit.
        """
        fitting = [ran for ran in every if ran.row.fits(allowed)]
        fastest = min((ran.row.seconds or 0.0 for ran in fitting), default=0.0)
        close = [ran for ran in fitting if (ran.row.seconds or 0.0) <= CLOSE * fastest]
        if len(close) < 2:
            return
        try:
            for _ in range(self.steps):
                for ran in close:
                    self._run(ran)
        finally:
            self.snapshot.restore()
        for ran in close:
            ran.note("")

    def _run(self, ran: Ran) -> None:
        peak, seconds = self._once(ran.function)
        ran.peaks.append(peak)
        ran.seconds.append(seconds)

    def _once(self, function: Any) -> tuple[int, float]:
        """Return the peak of a call above what it starts with, in bytes, and its seconds."""
        began = time.perf_counter()
        peak = peak_of_call(function, self.args, self.kwargs, self.device)
        return peak, time.perf_counter() - began
