"""The parts of `benchmarks.peers`: recomputation placed by hand, and how numbers are compared."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import by_hand, jobs, peers
from tests.support import process
from tfckpt.verify import executed


@pytest.mark.parametrize("name, again", [
    ("unet", 10), pytest.param("vgg16", 13, marks=pytest.mark.nightly)])
def test_by_hand_the_forward_runs_twice_up_to_the_last_part(name, again):
    """Each of the convolutions (before the U-Net's last one) is computed once more."""
    process.fresh()
    job = jobs.JOBS[name](**jobs.TINY[name])
    forward = by_hand.recomputing(name, job.model)
    assert forward(job.x).numpy().tobytes() == job.model(job.x, training=True).numpy().tobytes()
    counts = [sum(n for op, n in executed(tf.function(step), job.x, job.y).ops.items()
                  if op.endswith("Conv2D"))
              for step in (job.train_step, jobs.make_train_step(job.model, forward))]
    assert counts[1] - counts[0] == again


@pytest.mark.parametrize("name, count", [("transformer", 2), ("inception_v3", 11), ("lstm", 2)])
def test_parts_by_hand(name, count):
    process.fresh()
    job = jobs.JOBS[name](**jobs.TINY[name])
    assert len(by_hand.last_layers(name, job.model)) == count


def test_numbers_in_words():
    weights, seed = np.array([3.0, 4.0], np.float32), np.array([7], np.int64)
    same = [weights.copy(), seed.copy()]
    assert peers.compare([weights, seed], same) == "identical"
    assert peers.compare([weights, seed], [np.array([3.0, 4.5], np.float32), seed]) == (
        "differ by 1e-01")
    assert peers.compare([weights, seed], [weights, seed + 1]) == (
        "differ by 0e+00, state differs")


def test_failures_in_a_line():
    wrapped = ("ValueError: in user code:\n\n    File \"a.py\", line 1, in call\n\n"
               "    ValueError: Exception encountered when calling A.call().\n    \n"
               "    \x1b[1mOnly one | may\nbe here\x1b[0m\n    \n    Arguments:\n      * x")
    assert peers.failure(wrapped) == "failed: Only one / may be here"
    assert peers.failure("ValueError: in user code:\n\n  TypeError: no such thing\n") == (
        "failed: TypeError: no such thing")
    assert peers.failure("the process ended with -11\nSegmentation fault") == (
        "failed: the process ended with -11 Segmentation fault")


def table(*arguments: str) -> list[list[str]]:
    """Return the rows that a benchmark prints, as lists of cells."""
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True,
                          cwd=pathlib.Path(peers.__file__).parents[1], timeout=800)
    assert not done.returncode, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.nightly
def test_a_table_of_peers():
    rows = table("benchmarks.peers", "--tiny", "--jobs=lstm", "--steps=1",
                 "--peers=plain again,RematScope full,tfckpt")
    assert [row[:2] for row in rows] == [["lstm", "plain again"], ["lstm", "RematScope full"],
                                         ["lstm", "tfckpt"]]
    assert rows[0][-1] == rows[2][-1] == "identical"
    assert rows[1][2].startswith("failed: ") and "in user code" not in rows[1][2]
