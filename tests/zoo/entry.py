"""What an entry of the zoo is, and how one is trained plain and rewritten."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt.capture import tf_adapter

RECOMPUTES = "recomputes"
LESS = "less"
UNCHANGED = "unchanged"
NO_REPORT = "no report"
NO_GAIN = "no plan is predicted to lower the peak"
"""Why most steps that come back unchanged do: written out, since it is what the user reads."""

XLA_TOLERANCE = 1e-5
NOISE = 1e-2
"""Below this fraction of the largest entry of its kind a tensor holds rounding errors only."""


class Wrap:
    """How the step of an entry is wrapped: by `tf.function` alone, or by tfckpt as well.

    Attributes:
      partial: whether what could go through `fit` does, its last batch smaller than the others.
    """

    partial = False

    def __init__(self, rewrite: bool, solver: str = "auto"):
        self.rewrite, self.solver = rewrite, solver
        self._reports: list[Callable[[], list]] = []

    def function(self, fn: Callable, **options) -> Callable:
        """`tf.function(fn, **options)`."""
        return self.step(tf.function(fn, **options))

    def step(self, fn: Callable) -> Callable:
        """Return a `tf.function`, or a Python function that one calls."""
        if not self.rewrite:
            return fn
        step = tfckpt.checkpoint(fn, budget="min", solver=self.solver)
        self._reports.append(lambda: list(step.reports.values()))
        return step

    def model(self, model):
        """Return a built Keras model."""
        if self.rewrite:
            tfckpt.keras.checkpoint(model, budget="min", solver=self.solver)
            self._reports.append(lambda: [r for r in [tfckpt.keras.report(model)] if r])
        return model

    def reports(self) -> list:
        """One report for each trace."""
        return [report for get in self._reports for report in get()]


@dataclasses.dataclass
class Training:
    """A step to train.

    Attributes:
      step: takes a batch, returns a nest of tensors, arrays or numbers.
      batches: one tuple of arguments for each step.
      state: variables and Python values that must agree after each step.
    """

    step: Callable
    batches: list[tuple]
    state: Callable[[], list]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One training step of the zoo.

    Attributes:
      build: makes models, data and the step; called once for each way to wrap it.
      expect: `RECOMPUTES` (something is computed twice, and less memory planned), `LESS` (less
        memory, be it by order alone), `UNCHANGED` (nothing is changed; `refused` says why),
        `NO_REPORT` (nothing is looked at: no gradient, or no graph).
      refused: what the reports' refusals or reason contain.
      xla: compared within 1e-5 instead of bit for bit, without op determinism.
      alone: in a process of its own.
      large: trained without TensorFlow's memory optimizer, which above some 215 MB has sums add
        in the order of arrival.
      smoke: run every day.
    """

    name: str
    group: str
    build: Callable[[Wrap], Training]
    expect: str = RECOMPUTES
    refused: str = ""
    xla: bool = False
    alone: bool = False
    large: bool = False
    smoke: bool = False


class Group(list):
    """Entries of one kind; `entry` adds the builder below it."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def entry(self, **flags) -> Callable:
        """Decorator: adds a builder under its own name."""
        def add(build: Callable[[Wrap], Training]) -> Callable:
            self.append(Entry(build.__name__, self.name, build, **flags))
            return build
        return add


@dataclasses.dataclass
class Trained:
    """What a training left behind: arrays in a fixed order, after each step."""

    results: list[list[np.ndarray]]
    states: list[list[np.ndarray]]
    reports: list
    training: Training


@contextlib.contextmanager
def conditions(entry: Entry) -> Iterator[None]:
    """The process as an entry needs it, and as it was found afterwards."""
    with contextlib.ExitStack() as stack:
        if entry.xla:
            stack.enter_context(process.without_determinism())
        if entry.large:
            stack.enter_context(tf_adapter.memory_optimizer("NO_MEM_OPT", ""))
        try:
            yield
        finally:
            keras.mixed_precision.set_global_policy("float32")
            keras.backend.set_floatx("float32")


def train(entry: Entry, rewrite: bool, solver: str = "auto") -> Trained:
    """Train an entry from the same seeds, plain or rewritten."""
    process.fresh()
    wrap = Wrap(rewrite, solver)
    return run(entry.build(wrap), wrap)


def run(training: Training, wrap: Wrap) -> Trained:
    """Train on all batches."""
    results, states = [], []
    for batch in training.batches:
        results.append(arrays(training.step(*batch)))
        states.append(arrays(training.state()))
    return Trained(results, states, wrap.reports(), training)


def arrays(nest: Any) -> list[np.ndarray]:
    """Return the leaves of a nest of tensors, composite ones too, as arrays."""
    found = []
    for leaf in tf.nest.flatten(nest, expand_composites=True):
        if leaf is None:
            continue
        value = leaf.numpy() if hasattr(leaf, "numpy") else leaf
        found.append(np.asarray(value))
    return found


def differences(found: Trained, wanted: Trained, xla: bool) -> list[str]:
    """Return what differs, in words; nothing where the trainings agree."""
    texts = []
    for kind in ("results", "states"):
        pairs = zip(getattr(found, kind), getattr(wanted, kind), strict=True)
        for number, (ours, plain) in enumerate(pairs):
            if len(ours) != len(plain):
                texts.append(f"{kind} of step {number}: {len(ours)} arrays, not {len(plain)}")
                continue
            scale = NOISE * max((_largest(b) for b in plain), default=0.0)
            for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
                text = _difference(a, b, scale if xla else None)
                if text:
                    texts.append(f"{kind}[{i}] of step {number}: {text}")
    return texts


def _difference(a: np.ndarray, b: np.ndarray, noise: float | None) -> str:
    """Bit for bit, or where `noise` is given, within the tolerance of XLA."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}"
    if a.tobytes() == b.tobytes() or (a.dtype == object and (a == b).all()):
        return ""
    if a.dtype == object:
        return f"{a!r} is not {b!r}"
    gap = float(np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    if noise is not None and gap <= XLA_TOLERANCE * max(_largest(b), noise, 1e-30):
        return ""
    return f"{b.dtype}{b.shape} by {gap:.3g} of {_largest(b):.3g}"


def _largest(array: np.ndarray) -> float:
    if array.dtype == object or not array.size:
        return 0.0
    return float(np.abs(array.astype(np.float64)).max())
