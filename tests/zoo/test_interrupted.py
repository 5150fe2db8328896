"""A `fit` that is killed in mid-run resumes from `BackupAndRestore` with the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.zoo.interrupted import EPOCHS
from tests.zoo.steps import STEPS

WHOLE_EPOCHS = 2
KILLED_AT = WHOLE_EPOCHS * STEPS + 1

pytestmark = pytest.mark.nightly


def _run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tests.zoo.interrupted", *arguments], capture_output=True, text=True,
        timeout=400, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def _train(*arguments: str) -> dict:
    done = _run(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_killed_fit_resumes_with_the_numbers_of_an_uninterrupted_plain_one(tmp_path):
    whole = _train("plain")
    assert whole["epochs"] == list(range(EPOCHS))
    for kind in ("plain", "rewritten"):
        directory = str(tmp_path / kind)
        assert _run(kind, directory, str(KILLED_AT)).returncode == -signal.SIGKILL
        resumed = _train(kind, directory)
        assert resumed["epochs"] == whole["epochs"][WHOLE_EPOCHS:]
        assert resumed["losses"] == whole["losses"][WHOLE_EPOCHS:]
        assert resumed["state"] == whole["state"]
        assert (resumed["recomputed"] > 0) is (kind == "rewritten")
