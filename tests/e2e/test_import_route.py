"""Without a trace hook: steps are imported, and train with the same numbers in less memory.

The hook is taken out of TensorFlow itself, in a process of its own, before tfckpt is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import unhooked

SAID = {unhooked.MISSING: "has no trace hook",
        unhooked.UNKNOWN: "2.99.0 is not one that was tested"}


@pytest.mark.parametrize("what", [
    unhooked.MISSING, pytest.param(unhooked.UNKNOWN, marks=pytest.mark.nightly)])
def test_trains_the_same_in_less_memory(what):
    done = subprocess.run([sys.executable, "-m", "tests.e2e.without_hook", what],
                          capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for kind in ("function", "keras", "recurrent", "replicas", "tape"):
        plain, ours = found[kind]
        assert ours["results"] == plain["results"], kind
        assert ours.get("state") == plain.get("state"), kind
    plain, ours = found["function"]
    assert ours["applied"] and ours["copies"] > 0
    assert ours["peak"] < 0.7 * plain["peak"]
    assert ours["signatures"] == ["step(float32[4096, 64], 2.0)"]
    plain, ours = found["recurrent"]
    assert ours["copies"] > plain["copies"] == 0
    plain, ours = found["keras"]
    assert ours["applied"] and ours["peak"] < 0.9 * plain["peak"]
    assert not found["replicas"][1]["applied"]
    route, *refused = found["warnings"]
    assert SAID[what] in route and "traced by themselves and imported" in route
    assert [text for text in refused if "in a replica of tf.distribute" in text] == refused[:-1]
    assert len(refused) > 1 and "a tape around the step" in refused[-1]
