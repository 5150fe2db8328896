"""Tensors that a step really keeps for each activation, without and with their derivatives.

Measured, not read off a graph: two stacks of dense layers with the activation between them, one
deeper than the other, differ in peak by what each further layer keeps, the next layer's input
included. Weights are small beside activations.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.support.forward_ad import COMPOSED, KERAS, tower, with_forward_ad
from tfckpt.verify.memory import measure_peak

ROWS, WIDTH = 4096, 64
UNIT = ROWS * WIDTH * 4  # 1 MiB
SHALLOW, DEEP = 4, 24
INSTANTIATIONS = 6


def kept(activation, fad: bool) -> tuple[float, int]:
    """Return the tensors that one more layer keeps, and how many of the regions were taken.

    Each instantiation of a function keeps its own order and heap, and the allocator's slack only
    ever adds: the minimum of several peaks is what the step needs.
    """
    smallest, taken = [], 0
    for layers in (SHALLOW, DEEP):
        step, x = tower(activation, layers, rows=ROWS, width=WIDTH,
                        end=lambda h, weights: tf.matmul(h, weights[0]))
        peaks = []
        for _ in range(INSTANTIATIONS):
            if fad:
                function, seen = with_forward_ad(step, choose=lambda a: a.saves > 0)
            else:
                function = tf.function(step, autograph=False)
            peaks.append(measure_peak(function, x) / UNIT)
        smallest.append(min(peaks))
        taken = len(seen.taken) if fad else 0
    return (smallest[1] - smallest[0]) / (DEEP - SHALLOW), taken


# Gelu by erf, celu and squareplus divide by a constant. The gradient for that constant would read
# one tensor more; nothing reads that gradient, so TensorFlow leaves it out and keeps one less.
COUNTS = {
    "swish": (COMPOSED["swish"], 3), "mish": (COMPOSED["mish"], 3),
    "gelu_tanh": (COMPOSED["gelu_tanh"], 5), "gelu_erf": (COMPOSED["gelu_erf"], 4),
    "keras_mish": (KERAS["mish"], 3), "keras_gelu": (KERAS["gelu"], 4),
    "keras_gelu_approximate": (KERAS["gelu_approximate"], 5),
    "keras_hard_silu": (KERAS["hard_silu"], 4), "keras_celu": (KERAS["celu"], 3),
    "keras_squareplus": (KERAS["squareplus"], 3),
}
RUN_EARLY = {"keras_celu": 2.5}
"""Minimum that plain keeps: celu's backward compares x with zero twice and takes an exponential, of
no gradient. Where TensorFlow runs these in the forward, it keeps two masks, a quarter each, and the
exponential instead of what they read."""
NO_GAIN = {
    "keras_silu": 2, "keras_relu": 1, "keras_elu": 1, "keras_selu": 1, "keras_softplus": 2,
    "keras_softsign": 2, "keras_log_sigmoid": 2,
}
CLOSE = 0.45
"""The allocator counts a reused chunk whole, up to twice what was asked for."""
EVERY_DAY = {"mish", "gelu_tanh", "keras_gelu", "keras_relu"}


def chosen(names):
    return [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.nightly) for n in names]


@pytest.mark.parametrize("name", chosen(COUNTS))
def test_plain_keeps_several_and_the_derivative_leaves_two(name):
    activation, plain = COUNTS[name]
    assert RUN_EARLY.get(name, plain) - CLOSE <= kept(activation, False)[0] <= plain + CLOSE
    count, taken = kept(activation, True)
    assert taken == DEEP
    assert count == pytest.approx(2, abs=CLOSE)


@pytest.mark.parametrize("name", chosen(NO_GAIN))
def test_where_nothing_is_gained_nothing_is_taken(name):
    activation = KERAS[name.removeprefix("keras_")]
    assert kept(activation, False)[0] == pytest.approx(NO_GAIN[name], abs=CLOSE)
    assert kept(activation, True)[1] == 0
