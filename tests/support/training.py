"""Trains a step and writes down everything it produced, bit for bit."""

from __future__ import annotations

import collections
import dataclasses
import re

import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class History:
    """The results of some steps of training, as arrays in a fixed order."""

    losses: list[np.ndarray]
    gradients: list[list[np.ndarray]]
    variables: list[list[np.ndarray]]
    names: list[str]


def train(step, trial) -> History:
    """Run the step on each of the trial's batches; note variables after every step."""
    history = History([], [], [], [getattr(v, "path", v.name) for v in trial.variables()])
    for x, y in trial.batches:
        loss, gradients = step(x, y)
        history.losses.append(loss.numpy())
        history.gradients.append([np.asarray(tf.convert_to_tensor(g)) for g in gradients])
        history.variables.append([v.numpy() for v in trial.variables()])
    return history


def assert_same_bits(found: History, wanted: History) -> None:
    """Losses, gradients and variables agree in every bit, after every step, and are finite."""
    assert found.names == wanted.names
    for i, (f, w) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert np.isfinite(w).all()
        assert f.tobytes() == w.tobytes(), f"loss of step {i}: {f!r} is not {w!r}"
    for kind in ("gradients", "variables"):
        for i, (f, w) in enumerate(zip(getattr(found, kind), getattr(wanted, kind), strict=True)):
            different = [(n, float(np.abs(a.astype(np.float64) - b).max()))
                         for n, (a, b) in enumerate(zip(f, w, strict=True))
                         if a.tobytes() != b.tobytes()]
            assert not different, f"{kind} of step {i} differ: (index, by) {different[:5]}"


NOISE = 1e-2
"""Below this fraction of the largest entry of its kind a tensor has rounding errors only (the
gradient of an attention key's bias is zero in exact arithmetic)."""


def relative_difference(found: History, wanted: History) -> float:
    """Largest difference of losses, gradients and variables, relative to each tensor's largest."""
    losses = zip(found.losses, wanted.losses, strict=True)
    worst = max(abs(float(f) - float(w)) / abs(float(w)) for f, w in losses)
    for kind in ("gradients", "variables"):
        for f, w in zip(getattr(found, kind), getattr(wanted, kind), strict=True):
            pairs = [(a.astype(np.float64), b.astype(np.float64))
                     for a, b in zip(f, w, strict=True) if b.size]
            noise = NOISE * max((np.abs(b).max() for _, b in pairs), default=0.0)
            worst = max([worst, *(np.abs(a - b).max() / max(np.abs(b).max(), noise, 1e-30)
                                  for a, b in pairs)])
    return float(worst)


_FAMILIES = {
    "Conv2D": re.compile(r"^_?(Mkl)?(Native)?(Fused|Pad)*Conv2D(WithBias)?$"),
    "Conv2DBackpropInput": re.compile(r"^_?(Mkl)?(Native)?Conv2DBackpropInput$"),
    "MatMul": re.compile(r"^_?(Mkl)?(Native)?(Fused)?MatMul$"),
    "BatchMatMul": re.compile(r"^_?(Mkl)?(Native)?(Fused)?BatchMatMul(V2|V3)?$"),
    "Einsum": re.compile(r"^Einsum$"),
}


def heavy(types) -> collections.Counter:
    """Count convolutions and matrix products, also those that TensorFlow fused with others."""
    counts: collections.Counter = collections.Counter()
    for op_type in types:
        for family, pattern in _FAMILIES.items():
            if pattern.match(op_type):
                counts[family] += 1
    return counts


COPY = re.compile(r"-tfckpt\d+$")


def copies_in(graph) -> list:
    """Return the recomputations in a traced FuncGraph, by name (attributes may be lost in fusions).
    """
    return [op for op in graph.get_operations() if COPY.search(op.name)]
