"""The memory that the first calls of a rewritten step take, compared with its budget.

The allocator's highest count starts again with each of the few calls that a budget is compared
with: whatever ran before may have taken more (the plain step, or on a GPU the call that tries
kernels out). Without a budget it is left to other users: a call is measured only if nothing before
it has taken more. Calls by which the step is traced may
create variables that remain; these are no part of its peak. On a GPU such a call tries kernels
out, takes more memory for that than any later call, and is not looked at.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

from tfckpt.driving.proposals import PLAIN_FITS
from tfckpt.errors import VerificationError
from tfckpt.report.report import Report
from tfckpt.request.budget import OVER, format_bytes
from tfckpt.verify.memory import addresses_are_limited, default_device, memory_info

CALLS = 3
"""Calls of a trace that are looked at."""
FAR = 1.5
"""Of what a budget allows, what only a step of larger sizes than planned for is taken to pass."""


@contextlib.contextmanager
def observing(latest: Callable[[], Report | None]) -> Iterator[None]:
    """Note what a call takes in the report of the step that it runs, and warn of a missed budget.

    Args:
      latest: returns the step's latest report; None before the first trace.
    """
    known = latest()
    before = _now(known, known is not None and known.allowed_bytes is not None)
    yield
    report = latest()
    if report is None or before is None or not _is_looked_at(report):
        return
    if report is not known and not default_device().startswith("CPU"):
        return
    report.observed_calls += 1
    after = _now(report)
    if after is None or len(report.devices) > 1 or after["peak"] <= before["peak"]:
        return
    note(report, after["peak"] - max(before["current"], after["current"]))


def note(report: Report, measured: int) -> None:
    """Fill a measured peak in, in bytes above what the step starts with; warn once of a miss.

    Args:
      report: of the step; changed.
      measured: the peak in bytes, above what the step starts with.
    """
    report.measured_peak_bytes = measured
    allowed = report.allowed_bytes
    if allowed is None or measured <= OVER * allowed or report.missed:
        return
    report.missed = True
    more = (f"{100 * (measured / allowed - 1):.0f} % more than its budget allows "
            f"({format_bytes(allowed)})" if allowed > 0 else
            "and its budget allows less than it starts with")
    warnings.warn(f"tfckpt: {report.name} was measured at {format_bytes(measured)} above what it "
                  f"starts with, {more}; {_advice(report, measured, allowed)}", stacklevel=5)


def _advice(report: Report, measured: int, allowed: int) -> str:
    """Return what to do about a budget that was missed.

    XLA's temporary bytes are one request. A free block that is smaller than twice as large is given
    to it whole, also where a larger one is free (`tfckpt.driving.free_block`).
    """
    asked = report.compiled
    request = asked.after.temp_bytes if asked and asked.by_xla and asked.after else None
    others = asked.after.result_bytes if asked and asked.after else 0
    if request is not None and request <= allowed and measured < 2 * request + others:
        whose = ("tfckpt leaves no larger one where addresses are limited (ulimit -v, -d): train "
                 "without that limit" if addresses_are_limited() else
                 "mostly earlier training left that block, and a new process does not have it")
        return (f"XLA asks for {format_bytes(request)} in one request, and the allocator gave it a "
                f"larger free block whole, whose rest stays unused; {whose}")
    if not report.applied:
        found = f"it trains unchanged ({report.reason})"
        if report.reason != PLAIN_FITS:
            return found
        return f"{found}; a budget that is smaller by as much has it planned, or use tfckpt.tune"
    if report.most_bytes > allowed:
        return (f"no plan was sure to meet it: of this one {format_bytes(report.most_bytes)} were "
                "simulated at most. Pass a budget with room for that")
    if measured > FAR * allowed and report.planned_for:
        return (f"it was planned for {report.planned_for}; begin with its largest sizes: the first "
                "batch in fit, the first call of a step")
    chosen = report.front.chosen
    if chosen and chosen.live_peak_bytes * allowed < measured * min(
            point.live_peak_bytes for point in (chosen, *report.front.points)):
        return ("no plan is known that takes so much less. Use tfckpt.tune, which measures plans, "
                "or a smaller batch")
    return "pass a budget that is smaller by as much, or use tfckpt.tune"


def _is_looked_at(report: Report) -> bool:
    """Return whether a call is measured: what is left as it is too, where it has to fit."""
    return report.observed_calls < CALLS and (
        report.applied or report.allowed_bytes is not None)


def _now(report: Report | None, reset: bool = False) -> dict[str, int] | None:
    """Return what is allocated; None where that is not known, or was read often enough."""
    if report is not None and not _is_looked_at(report):
        return None
    try:
        return memory_info(default_device(), reset)
    except VerificationError:
        return None
