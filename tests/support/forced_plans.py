"""A pytest plugin: other people's tests, with every training step that they trace rewritten.

    pytest -p tests.support.forced_plans --outcomes FILE [--forced-plans models|native] ...

With `--forced-plans models` each Keras model is wrapped when it makes its training function, and
each other function with a gradient in it when TensorFlow has traced it; with `native` the native
pass has all of them. The plans are not those a person
would get: whatever of the forward pass may run twice is recomputed, loops in segments, whether that
lowers the peak or not, so that the tiny steps of tests are rewritten as large ones are. What
decides whether a plan is fit to be applied is as ever.

Without it too, each test begins with the same seeds.

Each test adds a line of JSON to FILE: `test`, `outcome` (passed, failed or skipped), `why`,
`numbers` (after each training a digest of the model's variables, and their norms), and `steps`,
each with `ops`, `recomputed`, `segments`, `reason` (of a step that is left as it is) and
`identical`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MODELS, NATIVE = "models", "native"
SEGMENT = 2
"""Iterations of a segment: fewer than any loop of a test has, but one."""
_RANK = {"passed": 0, "skipped": 1, "failed": 2}
_SHOWN = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    parser.addoption("--forced-plans", choices=(MODELS, NATIVE), help="rewrite training steps")
    parser.addoption("--outcomes", type=pathlib.Path, help="file that takes a line for each test")


def pytest_configure(config: pytest.Config) -> None:
    """Put the plugin to work."""
    if config.option.outcomes is not None:
        numbers = _numbers_of_trainings()
        way = config.option.forced_plans
        steps = force(way == NATIVE) if way else []
        config.pluginmanager.register(_Outcomes(config.option.outcomes, steps, numbers))


class _Outcomes:
    """Writes down what became of each test, and of the steps that were traced for it."""

    def __init__(self, path: pathlib.Path, steps: list[Callable[[], dict[str, Any]]],
                 numbers: list[list]) -> None:
        self.path, self.steps, self.numbers = path, steps, numbers
        self.outcome, self.why = "passed", ""

    def pytest_runtest_setup(self) -> None:
        """Set the seeds."""
        import keras

        keras.utils.set_random_seed(3)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a phase of a test; the worst is the test's outcome."""
        if _RANK[report.outcome] > _RANK[self.outcome]:
            self.outcome = report.outcome
            self.why = report.longreprtext[-_SHOWN:]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the line of a test."""
        from tfckpt.verify import wait_for_certificates

        if self.steps:
            wait_for_certificates()
        line = {"test": nodeid, "outcome": self.outcome, "why": self.why,
                "numbers": list(self.numbers), "steps": [step() for step in self.steps]}
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)
        self.steps.clear()
        self.numbers.clear()
        self.outcome, self.why = "passed", ""


def _numbers_of_trainings() -> list[list]:
    """Return a list that takes what each training from now on leaves in the model's variables."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    found: list[list] = []

    def noting(method: Callable) -> Callable:
        @functools.wraps(method)
        def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            found.append(_numbers(self))
            return result
        return trains

    for name in ("fit", "train_on_batch"):
        setattr(TensorFlowTrainer, name, noting(getattr(TensorFlowTrainer, name)))
    return found


def _numbers(model: Any) -> list:
    """Return a digest of the variables of a model and its optimizer, and the norm of each."""
    import numpy as np

    variables = [*model.variables, *getattr(model.optimizer, "variables", ())]
    arrays = [v.value.numpy() for v in variables if str(v.dtype) != "string"]
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    return [digest, [float(np.linalg.norm(a.astype(np.float64).ravel())) for a in arrays]]


def force(natively: bool) -> list[Callable[[], dict[str, Any]]]:
    """Have every training step of this process rewritten from now on.

    Args:
      natively: whether the native pass does it.

    Returns:
      A list that takes, for each step that tfckpt has looked at since, what says what came of it.
    """
    import grappler_ext
    from grappler_ext import bridge
    from tfckpt import driver
    from tfckpt.capture import tf_adapter
    from tfckpt.carriers import trace_hook, traced
    from tfckpt.cost import build
    from tfckpt.driving import decisions, proposals
    from tfckpt.driving.parts import Proposal

    build.SMALL_BYTES = 1
    driver.ASKED_FROM = 1 << 62  # whoever is asked turns down what saves nothing
    driver.with_policy = _recomputing_all
    proposals.Search._proposal = lambda self, part, decision: Proposal(part, decision)
    decisions.with_loops_in_segments = _in_segments(decisions.with_loops_in_segments)
    steps: list[Callable[[], dict[str, Any]]] = []
    traced.Traced.rewrite = _watched(traced.Traced.rewrite, steps)
    if natively:
        bridge.run = _watched(bridge.run, steps)
        grappler_ext.enable(xla_trials=0)
    else:
        tf_adapter.install_trace_hook(_mark)
        tf_adapter.install_trace_hook(trace_hook._on_trace)
        _wrap_models()
    return steps


def _recomputing_all(graph: Any, *_: object) -> Any:
    """Have all of the forward pass recomputed; in place of `with_policy`."""
    from tfckpt.ir.graph import FORWARD, RECOMPUTE
    from tfckpt.ops import record

    return dataclasses.replace(graph, ops=tuple(
        dataclasses.replace(op, policy=RECOMPUTE)
        if op.region == FORWARD and record(op.type).source is None else op for op in graph.ops))


def _in_segments(choose: Callable) -> Callable:
    """Have all loops recomputed in segments that can be; in place of `with_loops_in_segments`."""
    from tfckpt.plan.loops import choice
    from tfckpt.plan.loops.segments import Cut, segmentable

    def decisions(graph: Any, cost: Any, plans: Callable, *, target: Any,
                  allowed: Callable[[], bool], **options: Any) -> Iterator:
        cuts = {op.name: Cut(SEGMENT) for op in segmentable(graph)}
        if cuts and allowed():
            yield from choice._decisions(graph, cost, cuts, plans=plans, target=target)
        yield from choose(graph, cost, plans, target=target, allowed=lambda: False, **options)

    return decisions


def _mark(func_graph: Any) -> None:
    """Mark the graph of a function called eagerly that computes a gradient, and is not marked."""
    from tfckpt.capture.inlining.inline import is_rewritten
    from tfckpt.capture.regions import is_gradient_scope
    from tfckpt.carriers import records, trace_hook
    from tfckpt.request.options import make_options

    if func_graph.outer_graph is not None and func_graph.outer_graph.building_function:
        return  # a function that is called in another
    if type(func_graph).__name__ != "FuncGraph":
        return  # a body of a loop or branch, which nobody can wrap
    names = [op.name for op in func_graph.get_operations()]
    if hasattr(func_graph, trace_hook._MARK) or not any(map(is_gradient_scope, names)) or any(
            map(is_rewritten, names)):
        return
    setattr(func_graph, trace_hook._MARK, records.Mark(
        make_options(xla_trials=0), records.Records(), func_graph.name))


def _wrap_models() -> None:
    """Have Keras models wrapped before they make a training function."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    import tfckpt

    original = TensorFlowTrainer.make_train_function

    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.run_eagerly or tfckpt.keras.wrapping.records_of(self) is not None:
            return original(self, force)
        made = self.train_function
        tfckpt.keras.checkpoint(self, budget="min", xla_trials=0)
        self.train_function = made
        return self.make_train_function(force)

    TensorFlowTrainer.make_train_function = make_train_function


def _watched(rewrite: Callable, steps: list[Callable[[], dict[str, Any]]]) -> Callable:
    """Return what rewrites a step, and notes in a list what came of it."""
    @functools.wraps(rewrite)
    def watched(*args: Any) -> Any:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                outcome = rewrite(*args)
            except Exception as error:
                steps.append(lambda reason=f"raised {error!r}": {"reason": reason})
                raise
        words = "; ".join(str(w.message) for w in said)
        steps.append(lambda: _said(outcome, words))
        return outcome

    return watched


def _said(outcome: Any, words: str) -> dict[str, Any]:
    """Return what came of a step, as plain data."""
    report = outcome.report
    if report is None:
        return {"reason": outcome.failure or words or "no gradient"}
    reason = "" if outcome.edits is not None else report.reason or words or "?"
    return {"ops": report.op_count, "recomputed": report.recomputed_ops, "reason": reason,
            "segments": len(report.segments), "identical": report.identical,
            "certificate": report.certificate, "rejected": list(report.rejected)}
