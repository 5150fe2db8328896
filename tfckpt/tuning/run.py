"""Plans settled by running them: a few steps of each, and everything put back afterwards."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from tfckpt.capture import tf_adapter
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.common.messages import say
from tfckpt.errors import InfeasibleBudgetError, PlanError
from tfckpt.report.observed import CALLS as OBSERVED
from tfckpt.report.report import Report
from tfckpt.request.budget import Budget, format_bytes
from tfckpt.request.device_budgets import OTHERS, Budgets
from tfckpt.request.options import Options
from tfckpt.tuning.effects import draws_numbers, refuse_lasting
from tfckpt.tuning.kept import Kept, place_of
from tfckpt.tuning.measuring import Bench, Ran
from tfckpt.tuning.result import PLAIN, Measured, Tuned, choice
from tfckpt.tuning.shares import MOST, for_share, next_share

TUNED = "tuned: the plain step fits, and nothing that fits is faster"
BY_XLA, BY_EXECUTOR = "XLA", "executor"


def tune(step: CheckpointedStep, *args: Any, limit_seconds: float = 120.0, steps: int = 3,
         xla: bool = False, **kwargs: Any) -> Tuned:
    """Run a few plans of a step, and have the step use the fastest whose measured peak fits.

    The budget is that of the step; a fraction is one of the measured plain peak. Variables that the
    step captures or is given (weights, slots, metrics, seeds) are put back bit for bit after each
    plan; their values wait in host memory. A plan that runs out of memory does not fit. Plans are
    priced with the times that the ops of the plain step are measured to take, where the executor
    runs it. What was chosen is kept in the plan store, and taken by the next process without a run.

    Args:
      step: what `tfckpt.checkpoint` made of a `tf.function`; it need not have run.
      *args: positional arguments of one call, as large as they will be.
      limit_seconds: after which no other plan is begun.
      steps: measured steps of each plan, after one that is not measured; of those that fit some
        more follow as time allows.
      xla: whether the step compiled by XLA is tried too, or without XLA where it is compiled. XLA
        rounds otherwise than TensorFlow's kernels do: what is taken may differ in the last bits.
      **kwargs: keyword arguments of the call.

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
    return _Tuning(step, Bench(args, kwargs, steps), limit_seconds, xla).run()


def note_tuned(asked: str, plain: Measured, taken: Measured, allowed: int | None,
               report: Report) -> None:
    """Fill in what tuning has measured, and what was asked of it: a plan is made for a share.

    Args:
      asked: the budget, in words.
      plain: what was measured of the plain step.
      taken: what was measured of what is taken.
      allowed: the bytes that a measured peak may have; None for the minimum.
      report: of what is taken; changed.
    """
    report.budget, report.allowed_bytes = f"{asked}, tuned", allowed
    report.measured_peak_bytes, report.measured_baseline_bytes = taken.peak_bytes, plain.peak_bytes
    report.observed_calls = OBSERVED


class _Tuning:
    """One step that is being tuned."""

    def __init__(self, step: CheckpointedStep, bench: Bench, limit: float, xla: bool) -> None:
        self.step, self.bench, self.limit, self.xla = step, bench, limit, xla
        self.started = time.perf_counter()
        self.ran: list[Ran] = []
        self.seen: set[tuple] = set()
        self.draws = False
        self.complete = True

    def run(self) -> Tuned:
        """Take what was chosen before, or measure the plain step and plans, and adopt one."""
        name, options = self.step.__name__, self.step.options
        plain_function = self._again(False)
        concrete = plain_function.get_concrete_function(*self.bench.args, **self.bench.kwargs)
        place = place_of(name, concrete.graph, options, self.xla)
        found = self._as_before(place)
        if found is not None:
            return found
        say(f"tuning {name}: up to {MOST} plans{', and with XLA' if self.xla else ''}, "
            f"{self.limit:.0f} s")
        refuse_lasting(concrete.graph, name)
        self.draws = draws_numbers(concrete.graph)
        self.bench.snapshot.add(concrete, (self.bench.args, self.bench.kwargs))
        del concrete
        plain = self._measured(Ran(Measured(PLAIN), plain_function), lambda _: True)
        if not tf_adapter.compiles_with_xla(plain_function):
            options = dataclasses.replace(options, op_seconds=options.op_seconds or
                                          self.bench.profile(plain))
        for other in (False, True) if self.xla else (False,):
            for planned in self._plans(options, plain, other):
                self.ran.append(self._measured(
                    planned, lambda row: row.fits(self._allowed(plain))))
        return self._settled(plain, place)

    def _measured(self, ran: Ran, wanted: Callable[[Measured], bool]) -> Ran:
        left = self.limit - (time.perf_counter() - self.started)
        return self.bench.measured(ran, wanted, max(0.0, left) / MOST)

    def _again(self, other: bool) -> Any:
        """Return the same `tf.function` without its traces.

        Args:
          other: whether XLA compiles it where it does not compile the step, or the other way round.
        """
        function: Any = self.step.plain
        compiled = tf_adapter.compiles_with_xla(function) != other
        return tf_adapter.clone_function(function, function.python_function, compiled)

    def _as_before(self, place: Kept | None) -> Tuned | None:
        """Adopt what was chosen for the step before; return None where nothing is kept."""
        kept = place.read() if place is not None else None
        if kept is None:
            return None
        options = dataclasses.replace(
            self.step.options, budgets=Budgets(((OTHERS, kept.budget),)),
            objective=kept.objective, op_seconds=kept.op_seconds)
        report = self._adopt(kept.chosen, kept.plain, kept.allowed_bytes,
                             options if kept.planned else None, kept.other, None)
        return Tuned(self.step.__name__, str(self._asked), kept.allowed_bytes, kept.plain,
                     kept.plans, kept.chosen, report.front, time.perf_counter() - self.started,
                     made=kept.made)

    # Plans.

    @property
    def _asked(self) -> Budget:
        return self.step.options.budgets.of("")

    def _plans(self, options: Options, plain: Ran, other: bool) -> Iterator[Ran]:
        """Yield planned functions in turn, each for what those before have taken."""
        first = len(self.ran)
        if other:
            yield Ran(Measured(self._named(PLAIN, True)), self._again(True), optional=True)
            if self.ran[-1].row.failure.startswith("not"):
                return
        if self._allowed(plain) is not None:
            yield from self._sized(options, plain, other, first + other)
        else:
            yield from self._least(options, other)

    def _named(self, name: str, other: bool) -> str:
        """Return what a plan is called, with what runs it where that is not what runs the step."""
        if not other:
            return name
        compiled = tf_adapter.compiles_with_xla(self.step.plain)
        return f"{name}, {BY_EXECUTOR if compiled else BY_XLA}"

    def _least(self, options: Options, other: bool) -> Iterator[Ran]:
        """Yield the plans of the minimum peak: one that weighs time, and one that does not."""
        for objective in dict.fromkeys((options.objective, "memory")):
            if self._has_time():
                found = self._planned(dataclasses.replace(options, objective=objective),
                                      "min" if objective == options.objective else "minimum peak",
                                      other)
                if found is not None:
                    yield found

    def _sized(self, options: Options, plain: Ran, other: bool, first: int) -> Iterator[Ran]:
        """Yield plans for the allowed bytes, corrected by what they took; then the smallest peak's.

        Args:
          options: of the step, with the measured times of its ops.
          plain: the plain step, measured.
          other: whether XLA compiles the plans where it does not compile the step, or the other way
            round.
          first: how many of what has run are of another runner.
        """
        share = 1.0
        for number in range(MOST - 1):
            allowed = self._allowed(plain)
            if not self._has_time() or allowed is None:
                return
            found = self._planned(
                self._for_share(options, allowed, share, first),
                str(self._asked) if not number else f"{100 * share:.0f} % of it", other)
            if found is None and not self.ran[first:]:
                break  # what is asked for is not predicted to be met at all
            if found is not None:
                yield found
            allowed = self._allowed(plain) or 0  # the first plan says what is resident
            if self.ran[-1].row.fits(allowed) and found is None:
                break
            share = next_share(share, self.ran[-1].row, allowed, adds=other)
            if share == 0:
                break
        if self._has_time() and not any(
                r.row.fits(self._allowed(plain)) for r in (plain, *self.ran)):
            found = self._planned(dataclasses.replace(options, budgets=Budgets()), "min", other)
            if found is not None:
                yield found

    def _for_share(self, options: Options, allowed: int, share: float, first: int) -> Options:
        """Return options with a budget of a share of what is allowed, as plans are simulated."""
        report = self.ran[first].report if self.ran[first:] else None
        return options if report is None else dataclasses.replace(
            options, budgets=for_share(self._asked, report, allowed, share))

    def _allowed(self, plain: Ran) -> int | None:
        """Return the bytes that a measured peak may have; None for the minimum."""
        report, asked = self._report, self._asked
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
        return next((ran.report for ran in self.ran if ran.report is not None), None)

    def _has_time(self) -> bool:
        self.complete &= time.perf_counter() - self.started <= self.limit
        return self.complete

    def _planned(self, options: Options, name: str, other: bool) -> Ran | None:
        """Return a function planned anew; None where its plan is known, or nothing is changed."""
        function: Any = CheckpointedStep(self._again(other), options)
        try:
            function.get_concrete_function(*self.bench.args, **self.bench.kwargs)
        except InfeasibleBudgetError:
            return None
        report = function.report
        if report is None or not report.applied:
            return None
        key = (other, report.solver, report.planned_peak_bytes, report.recomputed_ops,
               report.overhead)
        if key in self.seen:
            return None
        self.seen.add(key)
        return Ran(Measured(self._named(name, other), report.expected_bytes[1]), function, other)

    # The end.

    def _settled(self, plain: Ran, place: Kept | None) -> Tuned:
        """Measure again what is close, take one, and say what was found."""
        allowed = self._allowed(plain)
        if self._has_time():
            self.bench.in_turns([plain, *self.ran], allowed)
        rows = [ran.row for ran in (plain, *self.ran)]
        chosen = choice(rows, allowed)
        if chosen is None:
            self._refuse(plain)
        taken = next(ran for ran in (plain, *self.ran) if ran.row is chosen)
        planned = isinstance(taken.function, CheckpointedStep)
        other = not planned and taken is not plain or planned and (
            tf_adapter.compiles_with_xla(taken.function.plain)
            != tf_adapter.compiles_with_xla(self.step.plain))
        options = taken.function.options if planned else None
        report = self._adopt(taken.row, plain.row, allowed, options, other,
                             None if self.draws else taken.function)
        found = Tuned(self.step.__name__, str(self._asked), allowed, plain.row,
                      tuple(ran.row for ran in self.ran), taken.row, report.front,
                      time.perf_counter() - self.started, self.complete)
        if place is not None and self.complete:
            place.write(found, options or self.step.options, planned, other)
        return found

    def _refuse(self, plain: Ran) -> None:
        """Raise `InfeasibleBudgetError`; the step is as it was."""
        measured = [r.row.peak_bytes for r in (plain, *self.ran) if r.row.peak_bytes is not None]
        if not measured:
            raise PlanError(f"plan: {self.step.__name__} cannot be tuned: the plain step and all "
                            "plans that were tried ran out of memory; use a smaller batch")
        raise self._asked.refusal(min(measured), plain.row.peak_bytes or max(measured),
                                  self._report.resident_bytes if self._report else 0,
                                  note=f". Measured on {self.bench.device}" + (
                                      "" if self.complete else f" in {self.limit:.0f} s; raise "
                                      "limit_seconds to try more plans"))

    def _adopt(self, taken: Measured, plain: Measured, allowed: int | None,
               options: Options | None, other: bool, function: Any) -> Report:
        """Have the step do what was taken, and return its report.

        Args:
          taken: what was measured of what is taken.
          plain: what was measured of the plain step.
          allowed: the bytes that were asked for, of which a plan may have been given a share; None
            for the minimum.
          options: those of a plan; None where the step is to run as it is.
          other: whether XLA compiles what is taken where it does not compile the step, or the other
            way round.
          function: what has run; None where its generators have drawn, so that others begin anew.
        """
        if options is not None and function is None:
            function = self._traced(options, other)
        if options is not None:
            self.step.become(function)
        else:
            report = self._report or self._traced(dataclasses.replace(
                self.step.options, budgets=Budgets(((OTHERS, Budget(fraction=1.0)),))), False
            ).report
            if report is None:
                raise PlanError(f"plan: {self.step.__name__} cannot be tuned: it computes no "
                                "gradient")
            self.step.leave(dataclasses.replace(
                report, applied=False, reason=TUNED,
                simulated_bytes=(report.simulated_bytes[0], report.simulated_bytes[0])),
                self._again(True) if other else self.step.plain)
        report = self.step.report
        assert report is not None
        note_tuned(str(self._asked), plain, taken, allowed, report)
        say(f"  {taken.name} is taken: {format_bytes(taken.peak_bytes or 0)}")
        gc.collect()
        return report

    def _traced(self, options: Options, other: bool) -> Any:
        """Return the step planned for some options."""
        function: Any = CheckpointedStep(self._again(other), options)
        function.get_concrete_function(*self.bench.args, **self.bench.kwargs)
        return function
