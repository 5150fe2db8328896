"""The emergency stop: a time after which a step is left as it was.

What limits a search is the number of its evaluations, so that processes agree on a plan however
busy their machines are. The clock is for steps on which even that takes too long. Nothing is
interrupted: code with pieces of work of seconds at most asks between them whether time is left.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

from tfckpt.errors import PlanError

_limit: contextvars.ContextVar[tuple[float, float] | None] = contextvars.ContextVar(
    "tfckpt_time_limit", default=None)


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Have `check_time` raise in this thread once so many seconds are over; None: never.

    Args:
      seconds: how long from now, by a clock that never goes back; None: no limit.
    """
    token = _limit.set(None if seconds is None else (time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def time_is_over() -> bool:
    """Return whether there is a time limit, and it is over."""
    limit = _limit.get()
    return limit is not None and time.monotonic() > limit[0]


def check_time() -> None:
    """Return while there is time left.

    Raises:
      PlanError: there is none.
    """
    limit = _limit.get()
    if limit is not None and time.monotonic() > limit[0]:
        raise PlanError(f"plan: planning took longer than time_limit={limit[1]:g} seconds; the "
                        "step is left as it was")
