"""DTensor and parameter servers: trained as without tfckpt, in less memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.zoo import alone


@pytest.mark.parametrize("name, identical", [
    ("dtensor", None), pytest.param("parameter_server", True, marks=pytest.mark.nightly)])
def test_trains_as_plain_in_less_memory(name, identical):
    done = subprocess.run([sys.executable, "-m", "tests.zoo.laid_out", name], capture_output=True,
                          text=True, timeout=300, check=False, env={
                              **os.environ, **alone.ENVIRONMENT, "TFCKPT_CERTIFICATES": "on"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(found["alike"])
    assert found["planned"] < 0.5 * found["plain"]
    assert found["identical"] is identical, found["certificate"]
