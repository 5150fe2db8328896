"""By which rules one of several plans is taken: for the minimum peak, and within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfckpt.plan.choosing.planned import Planned

ROOM = 0.045
"""The minimum peak is asked for: how much more, as a fraction of the plain one, a plan may take."""
WORTH = 0.75
"""... and only where each percent of the plain peak buys 1 / 0.75 percent of the plain time."""
TAIL = 0.1
"""What is no minimum: a peak where each percent less takes more than 1 / 0.1 percent of the plain
time more."""
MARGIN = 0.002
"""Of the plain peak and time: plans nearer to each other than this are equal."""


def best_of(plans: Sequence[Planned], budget: int | None, objective: str) -> int:
    """Return which of several plans of one step to take: an index, the earliest among equals.

    The plans may be of different graphs of the step; all fit the budget and share one baseline.
    The rule is that by which a plan of one graph is chosen: time under a budget, and `TAIL`, `ROOM`
    and `WORTH` for the minimum peak. Plans within `MARGIN` of the best are its equals.

    Args:
      plans: at least one.
      budget: dynamic bytes that they were planned for; None for the minimum peak.
      objective: "time" or "memory": what they were planned for.
    """
    if budget is not None and objective == "time":
        scores = [p.time / max(p.baseline.time, 1e-12) for p in plans]
    else:
        near = most_for_minimum([(p.peak_bytes, p.time) for p in plans], plans[0].baseline_bytes,
                                plans[0].baseline.time, objective)
        scores = [cost_of(p.peak_bytes, p.time, p.baseline_bytes, p.baseline.time, objective)
                  if p.peak_bytes <= near else math.inf for p in plans]
    return next(n for n, score in enumerate(scores) if score <= min(scores) + MARGIN)


def minimum_of(points: Sequence[tuple[int, float]], plain_peak: int, plain_time: float,
               objective: str) -> int:
    """Return the peak in bytes that is taken for the minimum of some plans: `TAIL` says which.

    Args:
      points: peak and time of each plan; at least one.
      plain_peak: bytes of the plain step, counted in the same way.
      plain_time: of the plain step, in the same unit.
      objective: "memory" takes the smallest peak, whatever its time.
    """
    return min(points, key=lambda point: (
        cost_of(point[0], point[1], plain_peak, plain_time, objective, TAIL), point))[0]


def most_for_minimum(points: Sequence[tuple[int, float]], plain_peak: int, plain_time: float,
                     objective: str) -> float:
    """Return up to which peak in bytes a plan is near the minimum: `ROOM` above it.

    Args:
      points: peak and time of each plan; at least one.
      plain_peak: bytes of the plain step, counted in the same way.
      plain_time: of the plain step, in the same unit.
      objective: as for `minimum_of`.
    """
    return minimum_of(points, plain_peak, plain_time, objective) + ROOM * plain_peak


def cost_of(peak: int, time: float, plain_peak: int, plain_time: float, objective: str,
            worth: float = WORTH) -> float:
    """Return what the minimum plan is chosen by; bytes alone where the objective is memory.

    Args:
      peak: bytes of a plan.
      time: of the plan.
      plain_peak: bytes of the plain step, counted in the same way.
      plain_time: of the plain step, in the same unit.
      objective: as for `minimum_of`.
      worth: what time counts beside bytes; `TAIL` for what is taken for the minimum at all.
    """
    worth = 0.0 if objective == "memory" else worth
    return peak / max(plain_peak, 1) + worth * time / max(plain_time, 1e-12)
