"""Measured memory and time of functions that the native pass rewrote, and choice of their plans.

All calls of `tf.function`s pass through here. The first ones of each that trains are compared with
its budget. With `tune=True` its next calls run with other plans, and from then on it runs with the
fastest whose measured peak fits: all plans compute the same, so that the calls by which they are
measured train as any other, and nothing has to be undone.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from grappler_ext.bridge import Rewriter
from tfckpt.common.messages import say
from tfckpt.errors import VerificationError
from tfckpt.report.observed import CALLS as OBSERVED
from tfckpt.report.observed import note, observing
from tfckpt.report.report import Report
from tfckpt.request.budget import Budget, format_bytes
from tfckpt.request.device_budgets import Budgets
from tfckpt.tuning.result import Measured, choice
from tfckpt.tuning.shares import MOST, for_share, next_share
from tfckpt.verify.memory import default_device, memory_info

STEPS = 3
"""Measured calls of each plan, after the one for which it is made."""


@dataclasses.dataclass
class _Plan:
    """A plan of a function, and what its calls have taken."""

    rewriter: Rewriter
    share: float
    row: Measured
    report: Report | None = None
    peaks: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def note(self, peak: int, seconds: float) -> None:
        """Note what a call has taken."""
        self.peaks.append(peak)
        self.seconds.append(seconds)
        self.row = dataclasses.replace(
            self.row, peak_bytes=int(statistics.median(self.peaks)), most_bytes=max(self.peaks),
            seconds=statistics.median(self.seconds))


class _Function:
    """A function, and its plans; the last of them is the one that is tried now.

    Attributes:
      settled: whether there is nothing more to try; `chosen` runs then.
    """

    def __init__(self, rewriter: Rewriter) -> None:
        self.plans = [_Plan(rewriter, 1.0, Measured(str(rewriter.options.budgets.of(""))))]
        self.chosen = rewriter
        self.settled = False
        self._made = 0

    def made(self, report: Report | None) -> None:
        """Note the report of the plan that has just been made, or that there is none."""
        plan = self.plans[-1]
        self._made += 1
        report = report if report is not None and _of_this_batch(report, plan.rewriter) else None
        if report is None or not report.applied or (
                len(self.plans) == 1 and _is_sized(plan) and report.allowed_bytes is None):
            self.plans.pop()
            self._settle()
            return
        if any((p.report.planned_peak_bytes, p.report.recomputed_ops) ==
               (report.planned_peak_bytes, report.recomputed_ops)
               for p in self.plans[:-1] if p.report is not None):
            self.plans.pop()
            last = self.plans[-1]
            self._follow(None if last.row.fits(self.allowed) else self._next(last, plan.share))
            return
        plan.report = report
        plan.row = dataclasses.replace(plan.row, expected_bytes=report.expected_bytes[1])
        report.observed_calls = OBSERVED

    def measured(self, peak: int, seconds: float) -> None:
        """Note what a call has taken, and decide what the next ones run with."""
        plan = self.plans[-1]
        plan.note(peak, seconds)
        if len(plan.peaks) < STEPS:
            return
        say(f"  {plan.row.line(plan.row)}")
        self._follow(self._next(plan, plan.share))

    def _follow(self, following: _Plan | None) -> None:
        """Have a plan be tried next, or settle where there is none."""
        if following is None:
            self._settle()
        else:
            self.plans.append(following)

    def _next(self, last: _Plan, share: float) -> _Plan | None:
        """Return what is tried next; None where nothing is.

        Args:
          last: the last that ran.
          share: of what is allowed, that was tried last; it may have led to a plan that is known.
        """
        first, allowed = self.plans[0], self.allowed
        options, strict = first.rewriter.options, first.rewriter.strict
        if allowed is None or first.report is None:
            options = dataclasses.replace(options, objective="memory")
            return _Plan(Rewriter(options, strict), 1.0, Measured("minimum peak")) if (
                last is first and options != first.rewriter.options) else None
        share = next_share(share, last.row, allowed)
        if share == 0 or self._made == MOST:
            return None
        if self._made == MOST - 1:
            if any(plan.row.fits(allowed) for plan in self.plans):
                return None
            options = dataclasses.replace(options, budgets=Budgets())
            return _Plan(Rewriter(options, strict), 0.0, Measured("min"))
        options = dataclasses.replace(options, budgets=for_share(
            options.budgets.of(""), first.report, allowed, share))
        return _Plan(Rewriter(options, strict, minimum=True), share,
                     Measured(f"{100 * share:.0f} % of it"))

    @property
    def allowed(self) -> int | None:
        """Return the bytes that a measured peak may have; None for the minimum."""
        report = self.plans[0].report
        return report.allowed_bytes if report is not None else None

    def _settle(self) -> None:
        """Take the fastest plan that fits; where none does, that of the smallest peak."""
        self.settled = True
        if not self.plans:
            return
        rows = [plan.row for plan in self.plans if plan.row.peak_bytes is not None]
        taken = choice(rows, self.allowed) or choice(rows, None)
        plan = next((p for p in self.plans if p.row is taken), self.plans[0])
        self.chosen = plan.rewriter
        if plan.report is not None and plan.row.peak_bytes is not None:
            name, first = plan.report.name, self.plans[0].report
            if first is not None:  # others were made for a share of what was asked for
                plan.report.budget, plan.report.allowed_bytes = first.budget, first.allowed_bytes
            self.plans[0].rewriter.reports[name] = plan.report
            say(f"{name}: {plan.row.name} is taken: {format_bytes(plan.row.peak_bytes)}")
            note(plan.report, plan.row.peak_bytes)


class Tuner:
    """Runs the calls of functions while a rewriter is enabled.

    Args:
      rewriter: the one that is enabled.
      use: takes a rewriter, and has functions that are called from now on pass it.
      tune: whether plans are settled by what calls take.
    """

    def __init__(self, rewriter: Rewriter, use: Callable[[Rewriter], None], tune: bool) -> None:
        self.rewriter, self.use, self.tune = rewriter, use, tune
        self._functions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._reports: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._warned = False
        self._busy = threading.Lock()  # a call inside of a call, or of another thread, runs as is

    def __call__(self, function: Any, run: Callable[[], Any]) -> Any:
        """Run a call of a function."""
        if not tf.executing_eagerly() or not self._busy.acquire(blocking=False):
            return run()
        try:
            known = self._functions.get(function)
            if known is None and not self.tune:
                return self._looked_at(function, run)
            return self._tuned(function, known, run)
        finally:
            self._busy.release()

    def _looked_at(self, function: Any, run: Callable[[], Any]) -> Any:
        """Run a call, and compare what it takes with the budget of what it is rewritten to."""
        if function in self._reports and self._reports[function] is None:
            return run()  # it does not train
        before = dict(self.rewriter.reports)

        def latest() -> Report | None:
            found = self._reports.get(function) or _new(before, self.rewriter.reports)
            return found if found is not None and _of_this_batch(found, self.rewriter) else None

        with observing(latest):
            result = run()
        self._reports[function] = latest()
        return result

    def _tuned(self, function: Any, known: _Function | None, run: Callable[[], Any]) -> Any:
        """Run a call with the plan that is tried now, or was taken."""
        if known is None:
            before = dict(self.rewriter.reports)
            result = run()
            report = _new(before, self.rewriter.reports)
            known = self._functions[function] = _Function(self.rewriter)
            known.made(report)
            return result
        rewriter = known.chosen if known.settled else known.plans[-1].rewriter
        if rewriter is self.rewriter:
            return run() if known.settled else self._measured(known, run)
        self.use(rewriter)
        try:
            if known.settled:
                return run()
            if known.plans[-1].report is not None:
                return self._measured(known, run)
            result = run()
            known.made(_new({}, rewriter.reports))
            return result
        finally:
            self.use(self.rewriter)

    def _measured(self, known: _Function, run: Callable[[], Any]) -> Any:
        """Run a call, wait for its results, and note what it took."""
        device = default_device()
        try:
            start = memory_info(device, reset=True)["current"]
        except VerificationError as error:
            known.settled = True
            if not self._warned:
                warnings.warn(f"tfckpt: tune=True tunes nothing. {error}", stacklevel=2)
            self._warned = True
            return run()
        began = time.perf_counter()
        result = run()
        for leaf in tf.nest.flatten(result):
            if isinstance(leaf, tf.Tensor):
                leaf.numpy()
        known.measured(memory_info(device)["peak"] - start, time.perf_counter() - began)
        return result


def _is_sized(plan: _Plan) -> bool:
    return plan.rewriter.options.budgets.of("") != Budget()


def _of_this_batch(report: Report, rewriter: Rewriter) -> bool:
    """Return whether a budget is of the batch that calls have, and not of one that was assumed."""
    return not report.planned_for or rewriter.options.batch_size is not None


def _new(before: dict[str, Report], after: dict[str, Report]) -> Report | None:
    """Return the report that a call has added; that of the largest step where it added several."""
    new = [report for name, report in after.items() if before.get(name) is not report]
    return max(new, key=lambda report: report.baseline_peak_bytes, default=None)
