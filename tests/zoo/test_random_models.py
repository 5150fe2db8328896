"""Random small models: layers, skip connections, shared layers, dropout; every bit as plain.

A few every day; with `-m nightly` as many as fit into a time. The seed is printed; hypothesis
shrinks what fails to a short `Model(...)`, which belongs into `REGRESSIONS`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import re
import time
from collections.abc import Callable

import hypothesis
import keras
import pytest
from hypothesis import strategies as st

from tests.zoo import entry as zoo
from tests.zoo import steps

layers = keras.layers
WIDTH = 24
EVERY_DAY, NIGHTLY = 8, 5000
PARTS = 4
"""Of the nightly search, for several processes; each has seeds, number and minutes of its own."""
SETTINGS = hypothesis.settings(
    max_examples=1000, deadline=None, database=None,
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    suppress_health_check=list(hypothesis.HealthCheck))
"""Of one round of a search. It cannot be stopped: where time is up it goes on drawing models."""
ROUNDS = 10_000
"""More than any search has: each round has a seed of its own."""
SOLVERS = ("auto", "chen", "approx_dp")
"""A model trains twice as fast with the two latter, which keep other tensors."""
MINUTES = float(os.environ.get("TFCKPT_ZOO_MINUTES", "12"))
SEED = int(os.environ.get("TFCKPT_ZOO_SEED", "0"))
OPTIMIZERS = {"sgd": steps.sgd, "adam": keras.optimizers.Adam, "rmsprop": keras.optimizers.RMSprop}


def gelu_by_tanh(x):
    """As in GPT-2."""
    return keras.activations.gelu(x, approximate=True)


ACTIVATIONS = ("tanh", "relu", "gelu", "swish", "elu", "softplus", gelu_by_tanh)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
      kind: of `KINDS`.
      one, other: what it reads, counted back from the layer before it (0); the first layer's
        result stands for what there was before.
      number: which activation; of "shared", which of the dense layers before it is used again.
    """

    kind: str
    one: int = 0
    other: int = 0
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its optimizer and what plans it, by name."""

    layers: tuple[Layer, ...]
    optimizer: str = "sgd"
    solver: str = "auto"


KINDS = ("dense", "shared", "dropout", "normalised", "add", "product", "activation")

REGRESSIONS = (
    # swish's gradient by its beta, which nothing reads, was waited for, and so ran
    Model((Layer("product"), Layer("dense", 1, 0, 4), Layer("dropout", 2), Layer("product"),
           Layer("activation", 2, 0, 1), Layer("dense", 1, 0, 3), Layer("shared", 2, 0, 1),
           Layer("add", 0, 1), Layer("add"), Layer("add", 1, 1)), "rmsprop"),
    # the first two of a sum of three were no longer to be read, and it began with another
    Model((*[Layer("dense")] * 3, Layer("dense", 1), *[Layer("dense")] * 5, Layer("dense", 0, 0, 1),
           Layer("dropout"), Layer("add", 2, 1))),
    # elu(x + b) twice in one sum: the plain step's is not fused with the bias, a copy's was
    Model((Layer("shared", 0, 2, 4), Layer("shared", 0, 1, 4), Layer("add", 0, 0, 2)), "sgd"),
)


def models(largest: int) -> st.SearchStrategy[Model]:
    """Models of one to `largest` layers."""
    layer = st.builds(Layer, st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 2),
                      st.integers(0, len(ACTIVATIONS) - 1))
    return st.builds(Model, st.lists(layer, min_size=1, max_size=largest).map(tuple),
                     st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(SOLVERS))


def keras_model(spec: Model) -> keras.Model:
    """Return the model that a value stands for."""
    features = keras.Input((steps.FEATURES,))
    seen = [layers.Dense(WIDTH)(features)]
    dense: list = []
    for i, layer in enumerate(spec.layers):
        one, other = (seen[max(-1 - back, -len(seen))] for back in (layer.one, layer.other))
        activation = ACTIVATIONS[layer.number]
        if layer.kind == "dense" or (layer.kind == "shared" and not dense):
            dense.append(layers.Dense(WIDTH, activation))
            found = dense[-1](one)
        elif layer.kind == "shared":
            found = dense[layer.number % len(dense)](one)
        elif layer.kind == "dropout":
            found = layers.Dropout(0.3, seed=i)(one)
        elif layer.kind == "normalised":
            found = layers.BatchNormalization()(one)
        elif layer.kind == "add":
            found = layers.Add()([one, other])
        elif layer.kind == "product":
            found = layers.LayerNormalization()(layers.Multiply()([one, other]))
        else:
            found = layers.Activation(activation)(one)
        seen.append(found)
    return keras.Model(features, layers.Dense(steps.CLASSES)(layers.Add()(seen[-2:])))


def build(wrap: zoo.Wrap, spec: Model) -> zoo.Training:
    """Return a training step of a model."""
    return steps.supervised(wrap, keras_model(spec), steps.batches(), OPTIMIZERS[spec.optimizer]())


def failing(spec: Model) -> str:
    """Return what differs from plain TensorFlow; "" where nothing does."""
    entry = zoo.Entry("random", "random", functools.partial(build, spec=spec))
    with zoo.conditions(entry):
        wanted, found = zoo.train(entry, False), zoo.train(entry, True, spec.solver)
    assert found.reports
    assert all(r.planned_peak_bytes <= r.baseline_peak_bytes for r in found.reports)
    return "; ".join(zoo.differences(found, wanted, xla=False)[:3])


def search(seed: int, count: int, largest: int, minutes: float,
           failing: Callable[[Model], str] = failing) -> int:
    """Try up to `count` random models and return how many; the least that fails is raised.

    Until one fails only those of at least half of `largest` layers are tried: hypothesis likes
    short ones. A failure is shrunk whatever the time (hypothesis takes five minutes at most).
    """
    end, tried, failed = time.monotonic() + 60 * minutes, [], []

    def enough() -> bool:
        return len(tried) >= count or time.monotonic() > end

    def trains_as_without_us(spec: Model) -> None:
        if not failed and (enough() or 2 * len(spec.layers) < largest):
            return
        tried.append(spec)
        gc.collect()
        gc.freeze()  # what is left of the model before: collecting takes longer with each otherwise
        text = failing(spec)
        if text:
            failed.append(spec)
        assert not text, f"seed {seed}: {spec!r}: {text}"

    print(f"seed {seed}")
    drawn = SETTINGS(hypothesis.given(models(largest))(trains_as_without_us))
    for number in itertools.count(ROUNDS * seed):
        if enough():
            break
        hypothesis.seed(number)(drawn)()
    print(f"{len(tried)} models")
    return len(tried)


def test_what_fails_is_shrunk():
    """With a judge that wants a dropout somewhere behind a product."""
    def judge(spec: Model) -> str:
        kinds = [layer.kind for layer in spec.layers]
        return "product" in kinds and "dropout" in kinds[kinds.index("product"):] and "so" or ""

    with pytest.raises(AssertionError, match=re.escape(repr(
            Model((Layer("product"), Layer("dropout")), min(OPTIMIZERS), SOLVERS[0])))):
        search(0, 300, 12, 1.0, judge)


def test_some_random_models_train_as_without_us():
    assert search(SEED, EVERY_DAY, 6, MINUTES) > EVERY_DAY / 2


@pytest.mark.nightly
@pytest.mark.timeout(60 * MINUTES + 900)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_models_train_as_without_us(part):
    count = int(os.environ.get("TFCKPT_ZOO_MODELS", str(NIGHTLY)))
    assert search(PARTS * SEED + part + 1, count, 12, MINUTES)


@pytest.mark.parametrize("spec", REGRESSIONS, ids=range(len(REGRESSIONS)))
def test_models_that_failed_once(spec):
    assert not failing(spec)
