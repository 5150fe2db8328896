"""What the numbered examples share: their flag, settings, and the lines that say what was saved.

Losses are compared bit for bit, so operations run one at a time (one inter-op thread; each may
still use every core): with more, plain TensorFlow does not repeat its own sums.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfckpt.request.budget import format_bytes


@dataclass(frozen=True)
class Run:
    """One training: its `losses`, and its measured `peak` in bytes."""

    peak: int
    losses: tuple[float, ...]


def small(about: str | None) -> bool:
    """Return whether `--small` was passed: sizes for a quick look. Its help shows `about`."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="smaller sizes, for a quick look")
    return parser.parse_args().small


def repeatable() -> None:
    """Have TensorFlow repeat its own numbers; to be called before its first operation."""
    tf.config.threading.set_inter_op_parallelism_threads(1)


def seed() -> None:
    """Have the next model start from the same weights, names and random numbers as the last."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


def show(plain: Run, ours: Run) -> None:
    """Print what was saved."""
    print()
    for name, run in (("plain", plain), ("tfckpt", ours)):
        print(f"{name:<7} {format_bytes(run.peak):>9} measured peak, last loss "
              f"{run.losses[-1]:.6f}")
    ratio = ours.peak / plain.peak
    print(f"saved   {100 * (1 - ratio):.0f} % of the peak (ratio {ratio:.2f}); "
          f"{agreement(plain.losses, ours.losses)}")


def agreement(plain: Sequence[float], ours: Sequence[float]) -> str:
    """In words: whether two lists of losses are the same."""
    if tuple(plain) == tuple(ours):
        return f"all {len(plain)} losses agree in every bit"
    worst = max(abs(a - b) / abs(a) for a, b in zip(plain, ours, strict=True))
    return f"losses differ by at most {worst:.1e} of their value"
