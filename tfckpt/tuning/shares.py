"""The choice of the next plan to try, given what earlier ones took."""

from __future__ import annotations

from tfckpt.report.report import Report
from tfckpt.request.budget import Budget
from tfckpt.request.device_budgets import OTHERS, Budgets
from tfckpt.tuning.result import Measured

MOST = 5
"""Plans that are run at most of a step on one runner."""
NEAR = 0.96
"""Of what is allowed, what a plan may leave unused before a faster one is looked for."""


def next_share(share: float, last: Measured, allowed: int, adds: bool = False) -> float:
    """Return what share of what is allowed the next plan may need; 0 where the last is near.

    Args:
      share: that the last plan was made for.
      last: what it took.
      allowed: bytes.
      adds: whether the runtime may exceed what is expected of it by the same bytes at any budget,
        as XLA does with variables that it makes anew: the difference is subtracted then.
    """
    peak = last.counted_bytes
    if peak is None:
        return 0.85 * share
    if NEAR * allowed <= peak <= allowed:
        return 0.0
    more = peak - (last.expected_bytes or 0)
    if adds and more > 0 and peak > allowed:
        return min(0.95 * share, max(0.0, 0.99 * (allowed - more) / max(allowed, 1)))
    return share * min(1.25, max(0.8, 0.99 * allowed / max(peak, 1)))


def for_share(asked: Budget, report: Report, allowed: int, share: float) -> Budgets:
    """Return the budget that is a share of what is allowed, as plans are simulated.

    Args:
      asked: the step's budget, which says whether bytes or a fraction are asked for.
      report: of a plan of the step.
      allowed: bytes that a measured peak may take above what the step starts with.
      share: of these, what the plan may need as it is simulated.
    """
    wanted = int(share * allowed)
    budget = Budget(device_bytes=wanted + report.resident_bytes) if asked.sized else Budget(
        fraction=min(1.0, wanted / max(report.expected_bytes[0], 1)))
    return Budgets(((OTHERS, budget),))
