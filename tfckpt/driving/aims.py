"""What to ask about next, from the plans that were asked about: planned bytes and those taken.

More planned bytes mostly mean that more are taken, so a line through what is known says where a
budget is met. XLA is an exception at times: what is recomputed stands in the way of its fusions,
and a plan of fewer bytes takes more. Then what takes the least lies between others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[int, int]
"""Bytes of a plan: as planned, and as it takes them."""

AIM = 0.99
"""Of what is allowed, what a corrected plan aims at."""
LAST_AIM = 0.88
"""The lowest share that the last of them aims at."""
LOWEST = 0.7
"""Of what is right in proportion, the lowest share that a line may say: far out it says little."""
OFF = 0.1
"""Of the plain step, what a plan may take more than planned before others are looked for."""
APART = 1.04
"""How many times the bytes of another a plan has to take for one between them to be looked for."""


def corrected(point: Point, others: Sequence[Point], limit: int, left: int) -> int:
    """Return the planned bytes that are expected to become what is allowed.

    In the middle of what is right in proportion and what lies, if it is less, on the line through
    the plan and what is nearest to the aim of the others; below what is allowed by as much as this
    one is above, where only one more may be tried.

    Args:
      point: of the plan that was asked about last.
      others: of the plain step and of plans before.
      limit: bytes that are allowed.
      left: how many more plans may be asked about.
    """
    planned, taken = point
    aim = limit * (AIM if left > 1 else min(AIM, max(LAST_AIM, 2 - taken / limit)))
    known = [(p, c) for p, c in others if (p - planned) * (c - taken) > 0]
    in_proportion = planned * aim / max(taken, 1)
    if not known:
        return int(in_proportion)
    p, c = min(known, key=lambda other: abs(other[1] - aim))
    on_line = planned + (aim - taken) * (p - planned) / (c - taken)
    lowest = min(max(on_line, LOWEST * in_proportion), in_proportion)
    return int((lowest + in_proportion) / 2)


def between(tried: Sequence[Point], plain: Point) -> int | None:
    """Return planned bytes between what takes the fewest and one of its neighbours.

    The neighbour is that which takes fewer; in the middle by the ratio of the two.

    Args:
      tried: of the plans; at least one.
      plain: of the plain step.

    Returns:
      None where the best plan takes about what was planned, or has no neighbour that is far enough.
    """
    taken: dict[int, int] = {}
    for planned, bytes_taken in (plain, *tried):
        taken[planned] = min(bytes_taken, taken.get(planned, bytes_taken))
    order = sorted(taken)
    best = min(range(len(order)), key=lambda n: taken[order[n]])
    middle = order[best]
    if middle != plain[0] and taken[middle] / plain[1] - middle / plain[0] <= OFF:
        return None
    beside = [p for p in order[max(0, best - 1):best + 2]
              if not middle / APART < p < middle * APART]
    return math.isqrt(middle * min(beside, key=taken.__getitem__)) if beside else None
