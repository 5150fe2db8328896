"""Size: deep chains and many ops are planned without recursion; huge graphs fail clearly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.support import process
from tests.zoo import entry as zoo
from tests.zoo import steps
from tfckpt.capture.files import LARGEST

MEMORY = 12e9
"""Bytes that a process here may have at most."""


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
def test_a_step_of_a_hundred_thousand_ops():
    """With room for 200 frames on the stack. Processor seconds; ours include the trace."""
    found = _large("ops", 4400)
    assert found["ops"] >= 100_000 and found["peak"] < MEMORY
    assert found["applied"] and found["recomputed"] > 0
    assert found["planned"] < 0.2 * found["plain"]
    assert found["ours_seconds"] < 4 * found["trace_seconds"]


def test_a_large_constant_is_resident_and_never_copied():
    """What matters is that no copy and no Python list of it is made."""
    process.fresh()
    table = tf.random.stateless_normal((1 << 18, 16), (1, 2)).numpy()
    ws = steps.weights()

    def forward(x):
        rows = tf.gather(tf.constant(table), tf.cast(1e4 * tf.abs(x[:, 0]), tf.int32))
        return steps.mean_square(steps.chain(x + rows, ws))

    wrap = zoo.Wrap(True)
    training = steps.by_hand(wrap, forward, ws, autograph=False)
    training.step(*training.batches[0])
    report = wrap.reports()[0]
    assert report.applied and report.resident_bytes > table.nbytes
    assert report.planned_peak_bytes < table.nbytes


@pytest.mark.nightly
@pytest.mark.parametrize(("mib", "grappler"), [(1024, ["no_grappler"]), (256, [])])
def test_a_constant_of_a_gigabyte(mib, grappler):
    """At most one copy more than TensorFlow makes; Grappler alone makes a dozen."""
    plain, ours = (_large("constant", mib, how, *grappler) for how in ("plain", "ours"))
    assert ours["losses"] == plain["losses"]
    assert ours["applied"] and ours["recomputed"] > 0 and ours["resident"] > ours["bytes"]
    assert ours["peak"] < plain["peak"] + 1.1 * ours["bytes"]
    assert ours["peak"] < MEMORY


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1 << 30, LARGEST - (1 << 20)])
def test_a_large_file_is_rewritten(tmp_path, size):
    """With at most one copy more than TensorFlow makes to import it."""
    wrote = _large("file", size, tmp_path / "in.pb")
    plain = _large("import", tmp_path / "in.pb")
    found = _large("tool", "rewrite", tmp_path / "in.pb", tmp_path / "out.pb")
    assert found["code"] == 0
    assert 0 < (tmp_path / "out.pb").stat().st_size - wrote["bytes"] < 1 << 20
    assert found["peak"] < plain["peak"] + 1.1 * wrote["constant"]
    assert found["peak"] < MEMORY
    for path in tmp_path.iterdir():  # pytest would keep them
        path.unlink()


@pytest.mark.nightly
def test_a_file_that_would_be_too_large_when_rewritten(tmp_path):
    assert _large("file", LARGEST, tmp_path / "in.pb")["bytes"] > LARGEST - 200
    found = _large("tool", "rewrite", tmp_path / "in.pb", tmp_path / "out.pb")
    assert found["code"] == 1
    said = [line for line in found["stderr"].splitlines() if line.startswith("tfckpt: ")]
    assert len(said) == 1 and "Traceback" not in found["stderr"]
    assert re.search(r"in.pb', rewritten, has 2.00 GiB of graph, .* ends at 2 GiB", said[0])
    assert [path.name for path in tmp_path.iterdir()] == ["in.pb"]
    (tmp_path / "in.pb").unlink()


def _large(*arguments) -> dict:
    """Return what `tests.zoo.large` prints, and its standard error."""
    done = subprocess.run([sys.executable, "-m", "tests.zoo.large", *map(str, arguments)],
                          capture_output=True, text=True, timeout=1200, check=False,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_tracing_a_step_twice_gives_the_same_plan():
    plans = []
    for _ in range(2):
        process.fresh()
        wrap = zoo.Wrap(True)
        training = _chain(wrap, 40)
        training.step(*training.batches[0])
        plans.append(wrap.reports()[0].traced[1][1])
    assert plans[0] == plans[1]
