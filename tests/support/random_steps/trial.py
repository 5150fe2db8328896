"""Trains a random step plain and rewritten, and says what became of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import re
import time
import warnings
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import grappler_ext
import tfckpt
from tests.support import process
from tests.support.random_steps.assembly import RandomStep, Spec, build, draw_spec
from tests.zoo import entry as zoo
from tfckpt.driving.proposals import NOTHING_TO_GAIN, PLAIN_FITS
from tfckpt.verify.arithmetic.certified import FOR_ELEMENTS

APPLIED, NO_GAIN, NO_GRADIENT, INSIDE = "applied", "no gain", "no gradient", "gradient in a loop"
UNKNOWN, FITS = "size unknown", "fits as it is"
UNREPEATABLE, SLOW = "plain differs from plain", "plain takes too long"
SAID = "differs, as its report says"
NOT_SMALLER = ("compiled by XLA, none of the plans tried", "as Grappler leaves it, it takes")
GOOD = (APPLIED, SAID, NO_GAIN, NO_GRADIENT, INSIDE, UNKNOWN, FITS,
        UNREPEATABLE, SLOW)
"""Possible outcomes of a step. `UNKNOWN`: sizes depend on data, and report or error says so."""
INTERNAL, DIFFERS, EXCEPTION, HANG, CRASH = "internal", "differs", "exception", "hang", "crash"
REFUSED, BAD = "refused", "bad step"
"""TensorFlow itself cannot trace or run it (no gradient for this in a loop, say); so it was with
all that were drawn in its place."""
DRAWS = 6
PLAIN_SECONDS = 60.0
"""A step that takes longer without tfckpt (XLA compiles some for minutes) is not tried with it."""
GIVEN_UP = "gave up a plan"
"""The step is rewritten, but a plan before the one applied could not be realised."""
PLAIN_AGAIN = 4
"""How often a plain step is trained again before a difference is not its own."""
_LOWERED = "inside of a loop that TensorFlow has lowered"
XLA_SHARE = 0.02
_REASONS = {NOTHING_TO_GAIN: NO_GAIN, PLAIN_FITS: FITS, **dict.fromkeys(NOT_SMALLER, NO_GAIN),
            "the gradient is computed inside of": INSIDE}
SILENT = 4
"""One step of so many returns nothing, as many loops of people's own do."""


@dataclasses.dataclass
class Result:
    """The outcome of a step.

    Attributes:
      kind: one of the words above.
      text: reason, error or difference.
      plain, planned: peaks in bytes.
      seconds: of the whole trial.
      identical, certificate: what the report says of the arithmetic, where the step is rewritten.
    """

    kind: str
    text: str = ""
    plain: int = 0
    planned: int = 0
    seconds: float = 0.0
    trail: str = ""
    spec: str = ""
    identical: str = ""
    certificate: str = ""


class Failed(Exception):
    """A trial ends with this kind and text."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def describe(spec: Spec) -> Result:
    """Say what a step is made of."""
    made = build(spec)
    return Result("", trail=" ".join(made.trail), spec=repr(made.spec))


def try_spec(spec: Spec, native: bool = False) -> Result:
    """Train a step plain and rewritten."""
    started, made = time.monotonic(), None
    with contextlib.ExitStack() as stack:
        if spec.compiled:
            stack.enter_context(process.without_determinism())
        try:
            made, wanted = _plain(spec)
            print("\nPLAIN RAN", flush=True)
            if time.monotonic() - started > PLAIN_SECONDS:
                raise Failed(SLOW, f"{time.monotonic() - started:.0f} s")
            result = _compared(made.spec, wanted, native)
        except Failed as error:
            result = Result(error.kind, str(error))
        finally:
            process.without_pass()
    result.seconds = time.monotonic() - started
    said = describe(made.spec if made is not None else spec)
    result.trail, result.spec = said.trail, said.spec
    keras.backend.clear_session()
    gc.collect()
    return result


def try_seed(seed: int, native: bool = False, style: str | None = None) -> Result:
    """Draw a step and train it; where TensorFlow refuses it (`REFUSED`), draw another one.

    The native pass sees no step whose every size is open, and none compiled.
    """
    for number in range(DRAWS):
        spec = draw_spec(seed + number * 10**6, style)
        if native:
            spec = dataclasses.replace(spec, compiled=False,
                                       open=spec.open.replace("all", "batch"))
        result = try_spec(spec, native)
        if result.kind != REFUSED:
            return result
    return dataclasses.replace(result, kind=BAD)


def _plain(spec: Spec) -> tuple[RandomStep, zoo.Trained]:
    """Train a step without tfckpt; what XLA cannot compile is left to the executor."""
    try:
        return _trained(spec, lambda step, function: function)
    except Exception as error:
        if spec.compiled and "conversion failed" in str(error):
            return _plain(dataclasses.replace(spec, compiled=False))
        raise Failed(REFUSED, _said(error)) from error


def _trained(spec: Spec, wrap) -> tuple[RandomStep, zoo.Trained]:
    """Train a step that is made anew; `wrap(step, function)` wraps its `tf.function`."""
    process.fresh()
    step = build(spec)
    body = step.function if spec.seed % SILENT else _silent(step.function)
    function = wrap(step, tf.function(body, input_signature=step.signature,
                                      jit_compile=spec.compiled or None))
    results, states = [], []
    for batch in step.batches:
        results.append(zoo.arrays(function(*batch)))
        states.append(zoo.arrays(step.variables))
    reports = list(getattr(function, "reports", {}).values())
    training = zoo.Training(function, step.batches, lambda: step.variables)
    return step, zoo.Trained(results, states, reports, training)


def _silent(function):
    """Return the same step, which tells nothing but what it leaves in the variables."""
    def step(x, y):
        function(x, y)
    return step


def _compared(spec: Spec, wanted: zoo.Trained, native: bool) -> Result:
    rewrite = _rewritten_natively if native else _rewritten
    with warnings.catch_warnings(record=True) as said, _faults() as faults:
        warnings.simplefilter("always")
        found, refusal = rewrite(spec)
        tfckpt.verify.wait_for_certificates()
    if faults:
        raise Failed(INTERNAL, " | ".join(faults))
    texts = zoo.differences(found, wanted, spec.by_xla)
    if texts and not _as_far_as_xla(spec, found, wanted):
        text = f"{len(texts)} differ: " + "; ".join(texts[:3])
        for _ in range(PLAIN_AGAIN):
            if zoo.differences(_plain(spec)[1], wanted, spec.by_xla):
                raise Failed(UNREPEATABLE, text)
        if not any(report.identical is False or report.certificate == FOR_ELEMENTS
                   for report in found.reports):
            raise Failed(DIFFERS, text)
        return dataclasses.replace(_judged(found.reports, []), kind=SAID, text=text)
    if refusal:
        return Result(INSIDE if _LOWERED in refusal else UNKNOWN, refusal)
    ours = [str(w.message) for w in said if "tfckpt" in str(w.message)]
    return _judged(found.reports, ours)


@contextlib.contextmanager
def _faults() -> Iterator[list[str]]:
    """Collect the faults that tfckpt logs: a step that could not be read has no report."""
    found: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.getMessage().startswith("tfckpt: "):
                found.append(f"{record.getMessage()}: {_said(record.exc_info[1])}")

    handler = Collecting(logging.ERROR)
    logging.getLogger("absl").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("absl").removeHandler(handler)


def _judged(reports: list, said: list[str]) -> Result:
    if not reports:
        return Result(NO_GRADIENT)
    worst = max(reports, key=lambda r: (not r.applied, r.baseline_peak_bytes))
    result = Result(APPLIED, "", worst.baseline_peak_bytes, worst.planned_peak_bytes)
    result.identical, result.certificate = _identical(
        [report for report in reports if report.applied])
    given_up = [line for r in reports for line in r.rejected]
    if given_up:
        result.kind, result.text = GIVEN_UP, " | ".join(given_up)
    if not worst.applied:
        result.kind = next((kind for said, kind in _REASONS.items()
                            if worst.reason.startswith(said)), INTERNAL)
        result.text = " | ".join(dict.fromkeys([worst.reason, *given_up, *said]))
    return result


def _identical(reports: list) -> tuple[str, str]:
    """Return the weakest statement of the reports of rewritten steps about the arithmetic."""
    if not reports:
        return "", ""
    weakest = min(reports, key=lambda report: (False, None, True).index(report.identical))
    return str(weakest.identical), weakest.certificate


def _rewritten(spec: Spec) -> tuple[zoo.Trained, str]:
    """Train with the decorator."""
    def train(options):
        return _trained(spec, lambda step, f: tfckpt.checkpoint(f, **options))[1]
    return _within_budget(spec, train, dict(spec.options))


def _rewritten_natively(spec: Spec) -> tuple[zoo.Trained, str]:
    """Train with the native pass, strictly."""
    options = dict(spec.options)
    if spec.open != "static":
        options["batch_size"] = int(build(spec).batches[0][1].shape[0])

    def train(options):
        process.without_pass()
        with grappler_ext.enabled(strict=True, **options):
            _, found = _trained(spec, lambda step, f: f)
            return dataclasses.replace(found, reports=list(grappler_ext.reports().values()))
    return _within_budget(spec, train, options)


def _within_budget(spec: Spec, train, options: dict) -> tuple[zoo.Trained, str]:
    """Train; a budget that is refused is replaced by the one that the refusal names.

    Where sizes are unknown, or the native pass finds the gradient inside of a loop, return the
    plain training and what was said.
    """
    budget = options["budget"]
    options["budget"] = 1 if budget == "bytes" else budget  # a byte: refused, with what suffices
    try:
        return train(options), ""
    except Exception as error:
        named = re.search(r"Pass budget=([0-9]+(\.[0-9]+)?)", str(error))
        if "cost: " in str(error) or _LOWERED in str(error):
            process.without_pass()
            return _plain(spec)[1], _said(error)
        if named is None:
            raise Failed(EXCEPTION, _said(error)) from error
    number = float(named[1])
    options["budget"] = number if isinstance(budget, float) else int(number)
    try:
        return train(options), ""
    except Exception as error:
        raise Failed(EXCEPTION, f"with the budget that was named: {_said(error)}") from error


def _as_far_as_xla(spec: Spec, found: zoo.Trained, wanted: zoo.Trained) -> bool:
    """Return whether a compiled step differs by far less than XLA itself changes."""
    if not spec.compiled:
        return False
    _, executed = _trained(dataclasses.replace(spec, compiled=False), lambda step, f: f)
    return _distance(found, wanted) <= XLA_SHARE * _distance(executed, wanted)


def _distance(one: zoo.Trained, other: zoo.Trained) -> float:
    """Return the largest difference of two trainings, relative to each array's largest number."""
    worst = 0.0
    for a, b in _arrays_of(one, other):
        if a.shape != b.shape:
            return math.inf
        if b.dtype.kind == "f" and b.size:
            gap = np.abs(a.astype(np.float64) - b).max()
            worst = max(worst, float(gap / max(np.abs(b).max(), 1e-6)))
    return worst


def _arrays_of(one: zoo.Trained, other: zoo.Trained) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for kind in ("results", "states"):
        for a, b in zip(getattr(one, kind), getattr(other, kind), strict=True):
            yield from zip(a, b, strict=True)


def _said(error: BaseException) -> str:
    """Return the type of an error, what it says, and where it was raised."""
    trace, where = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/tfckpt/" in code.co_filename or "/tests/" in code.co_filename or (
                "/grappler_ext/" in code.co_filename):
            where = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {where}: {text[-500:]}"
