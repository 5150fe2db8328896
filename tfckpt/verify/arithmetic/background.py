"""What is asked while a step trains already: whether its arithmetic is still that of the plain one.

Grappler takes about as long as the trace, so that nobody waits for it. One thread asks, some time
after the trace, when the first calls are over; TensorFlow goes on meanwhile. What has begun is
finished before the process ends, and what has not is dropped.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from absl import logging

from tfckpt.verify.arithmetic.same import Certificate

DELAY = 5.0
"""Seconds after a step is rewritten: its first call is being prepared then."""
PENDING = "being compared in the background"
_OFF = ("off", "0", "false")


def wanted() -> bool:
    """Return whether no `TFCKPT_CERTIFICATES=off` keeps it from being asked."""
    return os.environ.get("TFCKPT_CERTIFICATES", "").strip().lower() not in _OFF


class Report(Protocol):
    """Of a step (`tfckpt.report.report`)."""

    name: str
    identical: bool | None

    def certified(self, identical: bool | None, certificate: str) -> None:
        """Note what is known of the step's arithmetic, and in words.

        Args:
          identical: whether it is that of the plain step; None where that is not known.
          certificate: the same in words.
        """


class _Worker:
    """One thread, and what it is to ask."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[float, Callable[[], None]]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._busy = self._hurries = self._ends = False

    def add(self, job: Callable[[], None], delay: float) -> None:
        with self._changed:
            self._waiting.append((time.monotonic() + delay, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="tfckpt")
                self._thread.start()
                atexit.register(self._end)
            self._changed.notify_all()

    def wait(self, seconds: float | None) -> bool:
        """Do what is waiting at once, and return whether all of it is done by then."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)
            self._hurries = False
            return done

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            finally:
                del job
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._ends:
                left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left is not None and (left <= 0 or self._hurries):
                    self._busy = True
                    return self._waiting.popleft()[1]
                self._changed.wait(left)
            return None

    def _end(self) -> None:
        with self._changed:
            self._ends = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()


_worker = _Worker()


def certify(report: Report, compare: Callable[[], Certificate]) -> None:
    """Note on a step's report, later, whether its arithmetic is that of the plain step.

    Where it is not, that is logged as a warning.

    Args:
      report: of a rewritten step; it says that the answer is pending until then.
      compare: says so.
    """
    def job() -> None:
        if report.identical is not None:  # somebody has asked meanwhile
            return
        try:
            found = compare()
        except Exception as error:  # the step trains all the same
            found = Certificate(None, reason=f"{type(error).__name__}: {error}")
            logging.info("tfckpt: %s could not be compared with the plain step: %s",
                         report.name, found)
        report.certified(found.same, str(found))
        if found.same is False:
            logging.warning("tfckpt: %s may train to other last bits than the plain step: %s. "
                            "exact=True applies only plans of which that is not so",
                            report.name, found)
    report.certified(None, PENDING)
    _worker.add(job, DELAY)


def wait_for_certificates(seconds: float | None = None) -> bool:
    """Make what certificates are pending now, and wait for them.

    Args:
      seconds: to wait at most; None for as long as it takes.

    Returns:
      Whether all reports have theirs: `report.identical` and `report.certificate`.
    """
    return _worker.wait(seconds)
