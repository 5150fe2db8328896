"""Draws of random steps: numbers, variables, and the table of pieces.

A piece is a function `(draw, shape) -> (apply, shape)`: it draws its choices and makes its
variables at once, and returns what is traced, `apply(h) -> h`, and the shape of the result. Shapes
are those of the first batch; `apply` must take other sizes where the step leaves dimensions open.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Shape = tuple[int, ...]
Apply = Callable[[tf.Tensor], tf.Tensor]
ACTIVATIONS: dict[str, Callable] = {
    "tanh": tf.tanh, "relu": tf.nn.relu, "gelu": tf.nn.gelu, "swish": tf.nn.swish,
    "elu": tf.nn.elu, "softplus": tf.nn.softplus, "sigmoid": tf.sigmoid, "selu": tf.nn.selu,
    "leaky": tf.nn.leaky_relu, "relu6": tf.nn.relu6, "softsign": tf.nn.softsign, "sin": tf.sin,
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True),
    "mish": lambda x: x * tf.tanh(tf.nn.softplus(x)),
    "cube": lambda x: x + 0.1 * tf.pow(x, 3) / (1.0 + tf.square(x)),
    "hard": lambda x: x * tf.clip_by_value(x / 6.0 + 0.5, 0.0, 1.0),
    "erf": lambda x: x * 0.5 * (1.0 + tf.math.erf(x)),
    "quick": lambda x: x * tf.sigmoid(1.702 * x),
    "log": lambda x: tf.sign(x) * tf.math.log1p(tf.abs(x)),
    "atan": tf.atan, "snake": lambda x: x + tf.square(tf.sin(x)), "asinh": tf.asinh,
}
ONCE = ("softsign",)
"""Activations that cannot be differentiated twice."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a step.

    Attributes:
      make: draws it.
      ranks: ranks that it takes.
      keeps: whether it returns the shape that it takes, if asked to.
      xla: whether it may be compiled, and then rounds without jumps.
      twice: whether it can be differentiated twice.
      fixed: whether it needs all sizes but that of the batch when traced.
      rare: drawn seldom.
    """

    name: str
    make: Callable[..., tuple[Apply, Shape]]
    ranks: tuple[int, ...]
    keeps: bool = True
    xla: bool = True
    twice: bool = True
    fixed: bool = False
    rare: bool = False


PIECES: dict[str, Piece] = {}


def piece(*ranks: int, **flags: bool) -> Callable:
    """Decorator: enters a piece into the table under its own name; no rank: every one."""
    def enter(make: Callable) -> Callable:
        PIECES[make.__name__] = Piece(make.__name__, make, ranks or (2, 3, 4, 5), **flags)
        return make
    return enter


@dataclasses.dataclass(frozen=True)
class Needs:
    """The interface of every piece of a step (see `Piece`)."""

    xla: bool = False
    twice: bool = False
    fixed: bool = True


class Draw:
    """Draws one step.

    Attributes:
      trainable: variables that have gradients.
      state: other variables.
      keeping: whether pieces must keep the shape.
      depth: how many pieces the present one is inside of.
    """

    def __init__(self, seed: int, needs: Needs):
        self.seed, self.needs = seed, needs
        self.trainable: list[tf.Variable] = []
        self.state: list[tf.Variable] = []
        self.keeping, self.depth = False, 0
        self.trail: list[str] = []
        self.restart("")

    def restart(self, what: object) -> None:
        """Begin a part whose numbers do not depend on what was drawn before it."""
        self.random = random.Random(f"{self.seed} {what}")
        self.numbers = np.random.default_rng(self.random.getrandbits(32))

    def chance(self, share: float) -> bool:
        """Return True in a share of the cases."""
        return self.random.random() < share

    def choice(self, options: Iterable) -> Any:
        """Return one of some options."""
        return self._noted(self.random.choice(list(options)))

    def integer(self, lowest: int, most: int) -> int:
        """Return an integer, both ends included."""
        return self._noted(self.random.randint(lowest, most))

    def _noted(self, drawn: Any) -> Any:
        self.trail += [str(drawn)] if isinstance(drawn, int | float | str) else []
        return drawn

    def activation(self) -> Callable:
        """Return an activation."""
        return ACTIVATIONS[self.choice(
            [n for n in ACTIVATIONS if not (self.needs.twice and n in ONCE)])]

    def array(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Return normal float32 numbers."""
        return (self.numbers.standard_normal(shape) * scale).astype(np.float32)

    def weight(self, *shape: int, scale: float | None = None) -> tf.Variable:
        """Return a trainable variable, scaled by its fan-in."""
        fan = max(int(np.prod(shape[:-1])), 1) if len(shape) > 1 else 4
        made = tf.Variable(self.array(*shape, scale=scale or fan ** -0.5))
        self.trainable.append(made)
        return made

    def constant_weight(self, value: float, *shape: int) -> tf.Variable:
        """Return a trainable variable of one number."""
        made = tf.Variable(np.full(shape, value, np.float32))
        self.trainable.append(made)
        return made

    def variable(self, value: Any, dtype: str = "float32") -> tf.Variable:
        """Return a variable that is state."""
        made = tf.Variable(np.asarray(value, dtype), trainable=False)
        self.state.append(made)
        return made

    def width(self, shape: Shape) -> int:
        """Return how many features a layer makes."""
        if self.keeping or self.chance(0.6):
            return shape[-1]
        return self.choice([w for w in (16, 24, 32, 64, 96) if w <= 4 * shape[-1]])

    def applicable(self, shape: Shape) -> list[Piece]:
        """Return the pieces that take a shape, in a fixed order; rare ones once, others often."""
        found = []
        for name in sorted(PIECES):
            p = PIECES[name]
            if self._fits(p, shape):
                found += [p] * (1 if p.rare else 5)
        return found

    def _fits(self, p: Piece, shape: Shape) -> bool:
        needs = self.needs
        return (len(shape) in p.ranks and (p.keeps or not self.keeping)
                and (p.xla or not needs.xla) and (p.twice or not needs.twice)
                and (not p.fixed or needs.fixed))

    def piece(self, shape: Shape, name: str) -> tuple[Apply, Shape] | None:
        """Make a piece; None where it does not take the shape."""
        chosen = PIECES[name]
        if not self._fits(chosen, shape):
            return None
        self.trail.append(chosen.name)
        return chosen.make(self, shape)

    def inner(self, shape: Shape, count: int = 1) -> Apply:
        """Draw pieces that keep a shape, to be put into something."""
        before, self.keeping = self.keeping, True
        self.depth += 1
        made = []
        self.trail.append("(")
        for _ in range(count):
            names = [p.name for p in self.applicable(shape)]
            if self.depth > 2:  # no more boxes in boxes
                names = [n for n in names if n not in BOXES]
            found = self.piece(shape, self.random.choice(names))
            assert found is not None and found[1] == shape, (self.trail, found)
            made.append(found[0])
        self.trail.append(")")
        self.depth -= 1
        self.keeping = before
        return chain(made)


BOXES: set[str] = set()
"""Pieces that others are put into."""


def chain(parts: Sequence[Apply]) -> Apply:
    """Return one application of several, in turn."""
    def apply(h: tf.Tensor) -> tf.Tensor:
        for part in parts:
            h = part(h)
        return h
    return apply


def sizes(h: tf.Tensor) -> list:
    """Return the sizes of a tensor: ints where known, tensors where open."""
    known, given = h.shape.as_list(), None
    for i, size in enumerate(known):
        if size is None:
            given = tf.shape(h) if given is None else given
            known[i] = given[i]
    return known


def rows(h: tf.Tensor) -> tf.Tensor:
    """Return the number of rows as a tensor or an int."""
    return sizes(h)[0]
