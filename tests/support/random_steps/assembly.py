"""Random training steps: drawn from a seed, the same whenever they are built.

    spec = draw_spec(7)          # what is drawn, by name
    step = build(spec)           # variables, batches and the function, made anew each time

A spec can be shortened: without some of its pieces it stands for a smaller step, in which the
others are what they were (see `tests.random_steps --shrink`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.random_steps import boxes, dense, images, rows, sequences, sources  # noqa: F401
from tests.support.random_steps.draw import Draw, Needs, chain
from tests.support.random_steps.optimizers import OPTIMIZERS
from tests.support.random_steps.styles import (
    EXECUTOR,
    INSTEAD,
    SHARES,
    STYLES,
    TWICE,
    Model,
    compiled_call,
)

BUDGETS: tuple[object, ...] = ("min", "min", "min", 0.8, 0.6, 0.45, "bytes")
SOLVERS = ("auto", "auto", "auto", "auto", "chen", "approx_dp", "store_all", "acg", "auto")
BATCHES = 3


@dataclasses.dataclass(frozen=True)
class Spec:
    """A step by name.

    Attributes:
      seed: of every number.
      source: of the batches.
      open: "static", "batch" (its size is open in the signature) or "all" (all sizes but the last).
      slots: number and name of each piece; None while they are to be drawn.
      style: how gradients are taken.
      optimizer: what becomes of them.
      compiled: by XLA.
      options: those of `tfckpt.checkpoint`; a budget of "bytes" is the smallest
        number of bytes that a refusal names.
    """

    seed: int
    source: str
    open: str
    style: str
    optimizer: str
    compiled: bool
    options: tuple[tuple[str, Any], ...]
    slots: tuple[tuple[int, str], ...] | None = None

    @property
    def by_xla(self) -> bool:
        """Whether XLA compiles the step, or all that it consists of."""
        return self.compiled or self.style == compiled_call.__name__

    @property
    def needs(self) -> Needs:
        """Return what its pieces must be able to do."""
        return Needs(self.compiled, self.style in TWICE, self.open != "all")


@dataclasses.dataclass
class RandomStep:
    """A step that is ready to train.

    Attributes:
      function: a Python function of a batch.
      signature: for `tf.function`, or None.
      batches: tuples of arguments.
      variables: all that must agree afterwards.
      trail: what was drawn, in words.
    """

    spec: Spec
    function: Callable
    signature: list | None
    batches: list[tuple]
    variables: list[tf.Variable]
    trail: list[str]


def draw_spec(seed: int, style: str | None = None) -> Spec:
    """Draw a step, but for its pieces, which `build` draws; of a style where one is given."""
    spec = _drawn(seed)
    return spec if style is None else dataclasses.replace(
        spec, style=style, compiled=spec.compiled and style not in EXECUTOR)


def _drawn(seed: int) -> Spec:
    made = random.Random(f"step {seed}")
    compiled = made.random() < 0.1
    openness = made.choices(("static", "batch", "all"), (5, 3, 1))[0]
    source = made.choices(*zip(*sources.SHARES.items(), strict=True))[0]
    if compiled:
        source = made.choice(("features", "pictures", "sequences", "tokens"))
        openness = made.choice(("static", "batch"))
    styles = [s for s in STYLES if not (compiled and s in EXECUTOR)
              and (s != "penalty" or source in sources.DIFFERENTIABLE)]
    style = made.choices(styles, [SHARES.get(s, 2) for s in styles])[0]
    later = random.Random(f"style {seed}")
    for instead, share in INSTEAD.items():
        if style == "one_tape" and not compiled and later.random() < share:
            style = instead
    options = {"budget": made.choice(BUDGETS), "solver": made.choice(SOLVERS),
               "free_moves": made.random() < 0.85}
    if options["solver"] == "auto" and made.random() < 0.15:
        options["objective"] = "memory"
    return Spec(seed, source, openness, style, made.choice(sorted(OPTIMIZERS)), compiled,
                tuple(sorted(options.items())))


def build(spec: Spec) -> RandomStep:
    """Make the variables, batches and function of a step; its `spec` names the pieces drawn."""
    draw = Draw(spec.seed, spec.needs)
    draw.restart("source")
    source = sources.SOURCES[spec.source](draw)
    parts, slots, shape = [source.apply], [], source.shape
    for number, name in _slots(spec, draw):
        draw.restart(number)
        name = name or draw.random.choice(draw.applicable(shape)).name
        draw.restart(f"{number} {name}")
        draw.trail.append(f"{number}:")
        found = draw.piece(shape, name)
        if found is not None:
            slots.append((number, name))
            parts.append(found[0])
            shape = found[1]
    draw.restart("head")
    loss = sources.head(draw, shape, source.labels)
    model = Model(chain(parts), loss, draw.trainable)
    draw.restart("update")
    update = OPTIMIZERS[spec.optimizer](draw, draw.trainable)
    draw.restart("style")
    step = STYLES[spec.style](draw, model, update)
    batches = [source.batch(np.random.default_rng(spec.seed * 10 + i), _rows(spec, source, i))
               for i in range(BATCHES)]
    return RandomStep(dataclasses.replace(spec, slots=tuple(slots)), step,
                      _signature(spec, batches[0]), batches,
                      [*draw.trainable, *draw.state], draw.trail)


def _slots(spec: Spec, draw: Draw) -> list[tuple[int, str]]:
    if spec.slots is not None:
        return list(spec.slots)
    draw.restart("slots")
    return [(number, "") for number in range(draw.random.randint(2, 7))]


def _rows(spec: Spec, source, number: int) -> int:
    """Return the rows of a batch: where they are open, the last one is smaller."""
    return source.rows // 2 if spec.open != "static" and number == BATCHES - 1 else source.rows


def _signature(spec: Spec, batch: tuple) -> list | None:
    if spec.open == "static":
        return None

    def opened(t):
        if isinstance(t, tf.RaggedTensor | tf.SparseTensor):
            return _open_composite(t)
        shape = t.shape.as_list()
        inner = shape[1:-1] if spec.open == "batch" else [None] * len(shape[1:-1])
        return tf.TensorSpec([None, *inner, *shape[1:][-1:]], t.dtype)
    return [tf.nest.map_structure(opened, part) for part in batch]


def _open_composite(t):
    if isinstance(t, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, *t.shape[1:]], t.dtype, t.ragged_rank)
    return tf.SparseTensorSpec([None, *t.shape[1:]], t.dtype)
