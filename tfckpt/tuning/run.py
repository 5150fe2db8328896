"""Plans settled by running them: a few steps of each, and everything put back afterwards."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfckpt.api import CheckpointedStep
from tfckpt.budget import Budget, format_bytes
from tfckpt.capture import tf_adapter
from tfckpt.device_budgets import OTHERS, Budgets
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.observed import CALLS as OBSERVED
from tfckpt.options import Options
from tfckpt.report import Report
from tfckpt.say import say
from tfckpt.tuning.effects import draws_numbers, refuse_lasting
from tfckpt.tuning.result import PLAIN, Measured, Tuned, choice
from tfckpt.verify.memory import default_device, peak_of_call
from tfckpt.verify.snapshot import Snapshot

MOST = 5
"""Plans that are run at most."""
NEAR = 0.96
"""Of what is allowed, what a plan may leave unused before a faster one is looked for."""
CLOSE = 1.1
"""Times the fastest: what is measured again, in turns, before one is taken."""
TUNED = "tuned: the plain step fits, and nothing that fits is faster"


def tune(step: CheckpointedStep, *args: Any, limit_seconds: float = 120.0, steps: int = 3,
         **kwargs: Any) -> Tuned:
    """Run a few plans of a step, and have the step use the fastest whose measured peak fits.

    The budget is that of the step; a fraction is one of the measured plain peak. Variables that the
    step captures or is given (weights, slots, metrics, seeds) are put back bit for bit after each
    plan; their values wait in host memory. A plan that runs out of memory does not fit.

    Args:
      step: what `tfckpt.checkpoint` made of a `tf.function`; it need not have run.
      args, kwargs: of one call, as large as they will be.
      limit_seconds: after which no other plan is begun.
      steps: measured steps of each plan, after one that is not measured.

    Returns:
      What was measured; the step uses `chosen` from now on, for other arguments too.

    Raises:
      PlanError: it is no such step, or does what cannot be undone.
      InfeasibleBudgetError: no measured peak fits; names the smallest. The step is as it was.
      VerificationError: the device's allocator keeps no statistics.
    """
    if not isinstance(step, CheckpointedStep) or not tf_adapter.is_tf_function(step.plain):
        raise PlanError("plan: tfckpt.tune takes what tfckpt.checkpoint made of a tf.function; "
                        "decorate the function that trains, with tf.function below")
    if steps < 1 or limit_seconds <= 0:
        raise PlanError(f"plan: steps={steps!r} and limit_seconds={limit_seconds!r} must be "
                        "positive")
    return _Tuning(step, args, kwargs, limit_seconds, steps).run()


@dataclasses.dataclass
class _Ran:
    """A function that was run, and what came of it."""

    row: Measured
    function: Any
    peaks: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def report(self) -> Report | None:
        return getattr(self.function, "report", None)


class _Tuning:
    """One step that is being tuned."""

    def __init__(self, step: CheckpointedStep, args: tuple, kwargs: dict, limit: float,
                 steps: int):
        self.step, self.args, self.kwargs = step, args, kwargs
        self.limit, self.steps = limit, steps
        self.started = time.perf_counter()
        self.device = default_device()
        self.snapshot = Snapshot()
        self.ran: list[_Ran] = []
        self.plain: Measured | None = None
        self.seen: set[tuple] = set()
        self.draws = False
        self.complete = True

    def run(self) -> Tuned:
        """Measure the plain step and plans, and adopt one."""
        name = self.step.__name__
        say(f"tuning {name}: up to {MOST} plans, {self.limit:.0f} s")
        plain_function = self._again(self.step.plain)
        concrete = plain_function.get_concrete_function(*self.args, **self.kwargs)
        refuse_lasting(concrete.graph, name)
        self.draws = draws_numbers(concrete.graph)
        self.snapshot.add(concrete, (self.args, self.kwargs))
        del concrete
        plain = self._measured(_Ran(Measured(PLAIN), plain_function))
        options = self.step.options
        asked = options.budgets.of("")
        for planned in self._plans(options, asked, plain):
            self.ran.append(self._measured(planned))
        return self._settled(asked, plain)

    @staticmethod
    def _again(function: Any) -> Any:
        """Return the same `tf.function` without its traces."""
        return tf_adapter.clone_function(function, function.python_function)

    # Measuring.

    def _measured(self, ran: _Ran) -> _Ran:
        """Run a function, put everything back, and note what it took."""
        failure = ""
        try:
            self._once(ran.function)
            for _ in range(self.steps):
                peak, seconds = self._once(ran.function)
                ran.peaks.append(peak)
                ran.seconds.append(seconds)
        except tf.errors.ResourceExhaustedError:
            failure = "out of memory"
        finally:
            self.snapshot.restore()
        self._note(ran, failure)
        self.plain = self.plain or ran.row
        say(f"  {ran.row.line(self.plain)}")
        return ran

    def _once(self, function: Any) -> tuple[int, float]:
        """Return the peak of a call above what it starts with, in bytes, and its seconds."""
        began = time.perf_counter()
        peak = peak_of_call(function, self.args, self.kwargs, self.device)
        return peak, time.perf_counter() - began

    def _note(self, ran: _Ran, failure: str) -> None:
        ran.row = dataclasses.replace(
            ran.row, failure=failure, peak_bytes=None if failure else int(
                statistics.median(ran.peaks)),
            seconds=None if failure else statistics.median(ran.seconds))

    # Plans.

    def _plans(self, options: Options, asked: Budget, plain: _Ran) -> Iterator[_Ran]:
        """Yield planned functions in turn, each for what those before have taken."""
        if self._allowed(asked, plain) is not None:
            yield from self._sized(options, asked, plain)
        else:
            yield from self._least(options)

    def _least(self, options: Options) -> Iterator[_Ran]:
        """Yield the plans of the least peak: one that weighs time, and one that does not."""
        for objective in dict.fromkeys((options.objective, "memory")):
            if self._has_time():
                found = self._planned(dataclasses.replace(options, objective=objective),
                                      "min" if objective == options.objective else "least peak")
                if found is not None:
                    yield found

    def _sized(self, options: Options, asked: Budget, plain: _Ran) -> Iterator[_Ran]:
        """Yield plans for what is allowed, corrected by what they took; then that of the least."""
        share = 1.0
        for number in range(MOST - 1):
            if not self._has_time():
                return
            found = self._planned(self._for_share(options, asked, plain, share),
                                  str(asked) if not number else f"{100 * share:.0f} % of it")
            if found is None and not self.ran:
                break  # what is asked for is not predicted to be met at all
            if found is not None:
                yield found
            if self.ran[-1].row.fits(self._allowed(asked, plain)) and found is None:
                break
            share *= self._correction(asked, plain)
            if share == 0:
                break
        if self._has_time() and not any(
                r.row.fits(self._allowed(asked, plain)) for r in (plain, *self.ran)):
            found = self._planned(dataclasses.replace(options, budgets=Budgets()), "min")
            if found is not None:
                yield found

    def _correction(self, asked: Budget, plain: _Ran) -> float:
        """Return by how much more or less the next plan may need; 0 where the last is near."""
        peak, allowed = self.ran[-1].row.peak_bytes, self._allowed(asked, plain)
        assert allowed is not None
        if peak is None:
            return 0.85
        if NEAR * allowed <= peak <= allowed:
            return 0.0
        return min(1.25, max(0.8, 0.99 * allowed / max(peak, 1)))

    def _for_share(self, options: Options, asked: Budget, plain: _Ran, share: float) -> Options:
        """Return options whose budget is a share of what is allowed, as plans are simulated."""
        allowed, report = self._allowed(asked, plain), self._report
        if report is None or allowed is None:
            return options
        wanted = int(share * allowed)
        budget = Budget(device_bytes=wanted + report.resident_bytes) if asked.sized else Budget(
            fraction=min(1.0, wanted / max(report.expected_bytes[0], 1)))
        return dataclasses.replace(options, budgets=Budgets(((OTHERS, budget),)))

    def _allowed(self, asked: Budget, plain: _Ran) -> int | None:
        """Return what a measured peak may be; None for the least."""
        report = self._report
        if asked.fraction is not None:
            base = plain.row.peak_bytes
            if base is None:  # it ran out of memory: what is simulated of it
                base = report.expected_bytes[0] if report else 0
            return int(asked.fraction * base)
        if asked.device_bytes is not None:
            return asked.device_bytes - (report.resident_bytes if report else 0)
        return asked.free_bytes if asked.of_device else None

    @property
    def _report(self) -> Report | None:
        """Return what the first plan says of the step; None before there is one."""
        return self.ran[0].report if self.ran else None

    def _has_time(self) -> bool:
        self.complete &= time.perf_counter() - self.started <= self.limit
        return self.complete

    def _planned(self, options: Options, name: str) -> _Ran | None:
        """Return a function planned anew; None where its plan is known, or nothing is changed."""
        function: Any = CheckpointedStep(self._again(self.step.plain), options)
        try:
            function.get_concrete_function(*self.args, **self.kwargs)
        except InfeasibleBudgetError:
            return None
        report = function.report
        if report is None or not report.applied:
            return None
        key = (report.solver, report.planned_peak_bytes, report.recomputed_ops, report.overhead)
        if key in self.seen:
            return None
        self.seen.add(key)
        return _Ran(Measured(name, report.expected_bytes[1]), function)

    # The end.

    def _settled(self, asked: Budget, plain: _Ran) -> Tuned:
        """Measure again what is close, take one, and say what was found."""
        allowed = self._allowed(asked, plain)
        self._in_turns([plain, *self.ran], allowed)
        rows = [ran.row for ran in (plain, *self.ran)]
        chosen = choice(rows, allowed)
        report = self._report
        if chosen is None:
            self._refuse(asked, plain, report)
        taken = next(ran for ran in (plain, *self.ran) if ran.row is chosen)
        if report is None:
            report = self._report_of_plain()
        self._adopt(taken, plain, report)
        return Tuned(self.step.__name__, str(asked), allowed, plain.row,
                     tuple(ran.row for ran in self.ran), taken.row, report.front,
                     time.perf_counter() - self.started, self.complete)

    def _in_turns(self, every: list[_Ran], allowed: int | None) -> None:
        """Run those that fit and are nearly as fast as the fastest again, one after the other."""
        fitting = [ran for ran in every if ran.row.fits(allowed)]
        fastest = min((ran.row.seconds or 0.0 for ran in fitting), default=0.0)
        close = [ran for ran in fitting if (ran.row.seconds or 0.0) <= CLOSE * fastest]
        if len(close) < 2 or not self._has_time():
            return
        for _ in range(self.steps):
            for ran in close:
                peak, seconds = self._once(ran.function)
                ran.peaks.append(peak)
                ran.seconds.append(seconds)
        self.snapshot.restore()
        for ran in close:
            self._note(ran, "")

    def _refuse(self, asked: Budget, plain: _Ran, report: Report | None) -> None:
        """Raise `InfeasibleBudgetError`; the step is as it was."""
        measured = [r.row.peak_bytes for r in (plain, *self.ran) if r.row.peak_bytes is not None]
        if not measured:
            raise PlanError(f"plan: {self.step.__name__} cannot be tuned: the plain step and all "
                            "plans that were tried ran out of memory; use a smaller batch")
        raise asked.refusal(min(measured), plain.row.peak_bytes or max(measured),
                            report.resident_bytes if report else 0,
                            note=f". Measured on {self.device}")

    def _report_of_plain(self) -> Report:
        """Return the report of a step of which no plan was made."""
        function: Any = CheckpointedStep(self._again(self.step.plain), dataclasses.replace(
            self.step.options, budgets=Budgets(((OTHERS, Budget(fraction=1.0)),))))
        function.get_concrete_function(*self.args, **self.kwargs)
        if function.report is None:
            raise PlanError(f"plan: {self.step.__name__} cannot be tuned: it computes no gradient")
        return function.report

    def _adopt(self, taken: _Ran, plain: _Ran, report: Report) -> None:
        """Have the step do what was taken."""
        if isinstance(taken.function, CheckpointedStep):
            function = taken.function
            if self.draws:  # its generators have drawn: others begin anew
                function = CheckpointedStep(self._again(self.step.plain), function.options)
                function.get_concrete_function(*self.args, **self.kwargs)
            self.step.become(function)
            assert self.step.report is not None
            self.step.report.measured_peak_bytes = taken.row.peak_bytes
        else:
            self.step.leave(dataclasses.replace(
                report, applied=False, reason=TUNED, measured_peak_bytes=taken.row.peak_bytes,
                planned_peak_bytes=report.baseline_peak_bytes))
        assert self.step.report is not None
        self.step.report.measured_baseline_bytes = plain.row.peak_bytes
        self.step.report.observed_calls = OBSERVED
        say(f"  {taken.row.name} is taken: {format_bytes(taken.row.peak_bytes or 0)}")
        gc.collect()
