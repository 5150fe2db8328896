"""Size: deep chains and many ops are planned without recursion; huge graphs fail clearly."""

from __future__ import annotations

import sys

import pytest
import tensorflow as tf

from tests.support import process
from tests.zoo import entry as zoo
from tests.zoo import steps


def _chain(wrap, depth, width=8):
    ws = steps.weights(4, width)

    def forward(x):
        h = x
        for i in range(depth):
            h = tf.tanh(h @ ws[i % 4])
        return steps.mean_square(h)

    return steps.by_hand(wrap, forward, ws, steps.batches((64, width)), autograph=False)


def _compare(depth):
    histories = []
    for rewrite in (False, True):
        process.fresh()
        wrap = zoo.Wrap(rewrite)
        training = _chain(wrap, depth)
        histories.append([
            (training.step(*batch)[0].numpy().tobytes(), [v.numpy().tobytes()
                                                          for v in training.state()])
            for batch in training.batches[:2]])
    assert histories[0] == histories[1]
    return wrap.reports()[0]


@pytest.mark.nightly
def test_a_chain_of_a_thousand_layers():
    limit = sys.getrecursionlimit()
    report = _compare(1000)
    assert sys.getrecursionlimit() == limit
    assert report.applied and report.recomputed_ops > 0
    assert report.planned_peak_bytes < 0.3 * report.baseline_peak_bytes


@pytest.mark.nightly
def test_a_large_constant_is_resident_and_never_copied():
    """64 MiB here: what matters is that no copy and no Python list of it is made."""
    process.fresh()
    table = tf.random.stateless_normal((1 << 20, 16), (1, 2)).numpy()
    ws = steps.weights()

    def forward(x):
        rows = tf.gather(tf.constant(table), tf.range(512))
        return steps.mean_square(steps.chain(x + rows, ws))

    wrap = zoo.Wrap(True)
    training = steps.by_hand(wrap, forward, ws, autograph=False)
    training.step(*training.batches[0])
    report = wrap.reports()[0]
    assert report.applied and report.resident_bytes > table.nbytes
    assert report.planned_peak_bytes < table.nbytes


def test_tracing_a_step_twice_gives_the_same_plan():
    plans = []
    for _ in range(2):
        process.fresh()
        wrap = zoo.Wrap(True)
        training = _chain(wrap, 40)
        training.step(*training.batches[0])
        plans.append(wrap.reports()[0].traced[2])
    assert plans[0] == plans[1]
