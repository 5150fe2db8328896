"""Two worker processes over loopback: the same numbers as without us, on both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

WORKERS, SECONDS = 2, 400


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _train(kind: str) -> list[dict]:
    """What each worker prints, in order."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(WORKERS)]
    workers = [subprocess.Popen(
        [sys.executable, "-m", "tests.zoo.worker", kind], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": json.dumps({
                "cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}})})
        for i in range(WORKERS)]
    try:
        outputs = [worker.communicate(timeout=SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


@pytest.mark.nightly
def test_two_workers_train_as_without_us():
    plain, ours = _train("plain"), _train("rewritten")
    assert [w["losses"] for w in ours] == [w["losses"] for w in plain]
    assert [w["state"] for w in ours] == [w["state"] for w in plain]
    assert ours[0]["losses"] == ours[1]["losses"]
    assert all(w["applied"] and w["recomputed"] for w in ours), ours
