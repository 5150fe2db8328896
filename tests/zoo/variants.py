"""Entries of the zoo as other people would write them: each in variants of its own.

* `OPEN`: the sizes of the batch are open in the signature;
* `FRESH`: the optimizer is not built beforehand, so that the first trace makes its slots;
* `PARTIAL`: through `compile` and `fit`, the last batch smaller than the others;
* `NATIVE`: nothing is decorated, the native pass rewrites.

Where an entry cannot have a variant (no optimizer, no batch), it takes the next.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

import grappler_ext
from tests.support import process
from tests.zoo import entry as zoo
from tfckpt.driving.proposals import NOTHING_TO_GAIN

OPEN, FRESH, PARTIAL, NATIVE = "open", "fresh", "partial", "native"
VARIANTS = (OPEN, FRESH, PARTIAL, NATIVE)
_INSIDE = "the gradient is computed inside of"


class OpenStep:
    """A step whose signature is made of its first call, leading sizes left open."""

    def __init__(self, fn: Callable, wrap: zoo.Wrap, options: dict):
        self._fn, self._wrap, self._options = fn, wrap, options
        self._step: Callable | None = None

    def __call__(self, *args):
        if self._step is None:
            signature = [tf.nest.map_structure(_opened, arg) for arg in args]
            self._step = self._wrap.step(tf.function(
                self._fn, input_signature=signature, **self._options))
        return self._step(*args)


def _opened(tensor) -> tf.TypeSpec:
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.TensorSpec):
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec
    return spec


REFUSED_NATIVELY = (
    "computed inside of a loop that TensorFlow has lowered",
    "has the unknown shape",  # that of the call, of which a pass sees nothing
    "_FusedConv2D")  # in bfloat16: TensorFlow does not import what it has made itself
"""Why the native pass leaves steps as they are."""


class Varied(zoo.Wrap):
    """Wraps the steps of a variant.

    Attributes:
      varied: whether the entry has the variant.
    """

    def __init__(self, rewrite: bool, variant: str):
        super().__init__(rewrite and variant != NATIVE)
        self.variant, self.varied = variant, variant == NATIVE

    @property
    def partial(self) -> bool:
        """Return whether to train through `fit` with a smaller last batch."""
        self.varied = self.varied or self.variant == PARTIAL
        return self.variant == PARTIAL

    def function(self, fn: Callable, **options) -> Callable:
        """`tf.function(fn, **options)`, with an open signature if that is the variant."""
        if self.variant != OPEN or "input_signature" in options:
            return super().function(fn, **options)
        self.varied = True
        return OpenStep(fn, self, options)


@contextlib.contextmanager
def _unbuilt(wrap: Varied) -> Iterator[None]:
    """Have optimizers stay unbuilt until a step uses them."""
    def later(optimizer, variables):
        wrap.varied = True

    kinds = [keras.optimizers.Optimizer, *_subclasses(keras.optimizers.Optimizer)]
    builds = {kind: kind.__dict__["build"] for kind in kinds if "build" in kind.__dict__}
    for kind in builds:
        kind.build = later
    try:
        yield
    finally:
        for kind, build in builds.items():
            kind.build = build


def _subclasses(kind: type) -> list[type]:
    return [c for direct in kind.__subclasses__() for c in (direct, *_subclasses(direct))]


def _built(entry: zoo.Entry, wrap: Varied) -> zoo.Training:
    process.fresh()
    with _unbuilt(wrap) if wrap.variant == FRESH else contextlib.nullcontext():
        return entry.build(wrap)


def has(entry: zoo.Entry, variant: str) -> bool:
    """Return whether an entry has a variant."""
    if variant == NATIVE:
        return not (entry.xla or entry.alone)
    wrap = Varied(False, variant)
    with zoo.conditions(entry):
        training = _built(entry, wrap)
        return wrap.varied and (
            _trains(training, wrap, tf.errors.InvalidArgumentError)  # slots made by replicas
            if variant == FRESH and entry.group == "distribution" else
            variant != OPEN or _opens(training, wrap))


def _opens(training: zoo.Training, wrap: Varied) -> bool:
    """Return whether TensorFlow itself trains a step whose leading sizes are open."""
    leaves = tf.nest.flatten(training.batches[0])
    return bool(leaves) and all(map(tf.is_tensor, leaves)) and _trains(
        training, wrap, TypeError, ValueError)  # unlike batches; a size that the step must know


def _trains(training: zoo.Training, wrap: Varied, *refusals: type[Exception]) -> bool:
    try:
        zoo.run(training, wrap)
    except refusals:
        return False
    return True


def chosen(entry: zoo.Entry, number: int) -> str:
    """Return the variant of an entry: the first that it has, from one that its number gives."""
    return next(v for v in itertools.islice(itertools.cycle(VARIANTS), number % len(VARIANTS), None)
                if has(entry, v))


def faults(entry: zoo.Entry, variant: str) -> list[str]:
    """Train a variant plain and rewritten; return what differs, and reasons that are faults."""
    with zoo.conditions(entry), process.refusals_of_the_pass() as said:
        wanted = _trained(entry, Varied(False, variant))
        with grappler_ext.enabled() if variant == NATIVE else contextlib.nullcontext():
            found = _trained(entry, Varied(True, variant))
            if variant == NATIVE:
                found.reports = list(grappler_ext.reports().values())
        process.without_pass()
    said += [r.reason for r in found.reports if not r.applied]
    said += [line for r in found.reports for line in r.rejected if "internal error" in line]
    fine = (NOTHING_TO_GAIN, _INSIDE, *REFUSED_NATIVELY,
            *([entry.refused] if entry.refused else []))
    return [*zoo.differences(found, wanted, entry.xla),
            *(text for text in said if not any(known in text for known in fine))]


def _trained(entry: zoo.Entry, wrap: Varied) -> zoo.Trained:
    training = _built(entry, wrap)
    return zoo.run(training, wrap)
