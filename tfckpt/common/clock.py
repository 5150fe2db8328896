"""The emergency stop: a time after which a search ends with the best that it has found.

What limits a search is the number of its evaluations, so that processes agree on a plan however
busy their machines are. The clock is for steps on which even that takes too long. Nothing is
interrupted: searches, whose pieces of work take seconds at most, ask between them whether time is
left. What comes after a search, and what is priced before it, is done whatever the clock says.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Iterator

from tfckpt.errors import PlanError


@dataclasses.dataclass
class _Limit:
    """A time limit in seconds, when it is over, and whether it has ended a search."""

    seconds: float
    ends: float
    ended: bool = False


_limit: contextvars.ContextVar[_Limit | None] = contextvars.ContextVar(
    "tfckpt_time_limit", default=None)


class OutOfTimeError(PlanError):
    """The time limit is over; who searches catches it."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Have `check_time` raise in this thread once so many seconds are over; None: never.

    Args:
      seconds: how long from now, by a clock that never goes back; None: no limit.
    """
    token = _limit.set(None if seconds is None else _Limit(seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def time_is_over() -> bool:
    """Return whether there is a time limit, and it is over."""
    limit = _limit.get()
    return limit is not None and (limit.ended or time.monotonic() > limit.ends)


def check_time() -> None:
    """Return while there is time left.

    Raises:
      OutOfTimeError: there is none.
    """
    if time_is_over():
        raise OutOfTimeError("plan: the time limit is over")


@contextlib.contextmanager
def until_time_is_over() -> Iterator[None]:
    """Have what runs within end, without an error, where the time limit does."""
    try:
        yield
    except OutOfTimeError:
        limit = _limit.get()
        if limit is not None:
            limit.ended = True


def ended_by() -> str:
    """Return in words what has ended a search; "" where nothing did."""
    limit = _limit.get()
    return f"time_limit={limit.seconds:g} seconds" if limit is not None and limit.ended else ""
