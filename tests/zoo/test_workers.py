"""Two worker processes over loopback: the same numbers as without us, also when one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.zoo.worker import CALLS

WORKERS, SECONDS = 2, 400
KILLED_AT = 2

pytestmark = pytest.mark.nightly


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _run(*arguments: str) -> list[tuple[int, str, str]]:
    """Exit status, output and messages of each worker, in order."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(WORKERS)]
    workers = [subprocess.Popen(
        [sys.executable, "-m", "tests.zoo.worker", *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": json.dumps({
                "cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}})})
        for i in range(WORKERS)]
    try:
        outputs = [worker.communicate(timeout=SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *said) for worker, said in zip(workers, outputs, strict=True)]


def _train(*arguments: str) -> list[dict]:
    """Return what each worker prints, in order."""
    found = _run(*arguments)
    for status, _, errors in found:
        assert status == 0, errors[-3000:]
    return [json.loads(output.strip().splitlines()[-1]) for _, output, _ in found]


def test_two_workers_train_as_without_us():
    plain, ours = _train("plain"), _train("rewritten")
    assert [w["losses"] for w in ours] == [w["losses"] for w in plain]
    assert [w["state"] for w in ours] == [w["state"] for w in plain]
    assert ours[0]["losses"] == ours[1]["losses"]
    assert all(w["applied"] and w["recomputed"] for w in ours), ours


def test_a_worker_that_is_killed_fails_as_without_us_and_both_resume(tmp_path):
    whole = _train("plain")
    ends = {}
    for kind in ("plain", "rewritten"):
        directory = str(tmp_path / kind)
        left, killed = _run(kind, directory, str(KILLED_AT))
        assert killed[0] == -signal.SIGKILL
        ends[kind] = left[0], json.loads((left[1].strip() or "{}").splitlines()[-1]).get("error")
        resumed = _train(kind, directory)
        for again, worker in zip(resumed, whole, strict=True):
            assert again["first"] == KILLED_AT
            assert again["losses"] == worker["losses"][KILLED_AT:]
            assert len(worker["losses"]) == CALLS and again["state"] == worker["state"]
    assert ends["plain"] == ends["rewritten"] and ends["plain"][0]
