"""Settings that TensorFlow reads when it is imported, and one marker for each folder of tests.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import os
import pathlib

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# the tests say what the CPU's kernels and its allocator do, on every machine
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# its default where the CPU has AVX-512 or AMX instructions for neural networks; off, TensorFlow
# takes other kernels and an allocator without statistics
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# what another run has planned says nothing of this one; tests of the plan store switch it on
os.environ["TFCKPT_CACHE"] = "off"
# tests that look at certificates have them made
os.environ.setdefault("TFCKPT_CERTIFICATES", "off")

_HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark each test with the name of its folder, and as nightly where `nightly.txt` names it."""
    nightly = {line for line in (_HERE / "nightly.txt").read_text().splitlines()
               if line and not line.startswith("#")}
    for item in items:
        if _HERE in item.path.parents and (
                folder := item.path.relative_to(_HERE).parts[0]) in ("pure", "tf", "e2e", "zoo"):
            item.add_marker(folder)
        if nightly & {item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]}:
            item.add_marker("nightly")
    # cases differ with the version of TensorFlow, functions do not
    there = {name for item in items
             for name in (item.nodeid.partition("[")[0], item.nodeid.partition("::")[0])}
    gone = sorted(address for address in nightly if address.partition("[")[0] not in there
                  and address.partition("::")[0] in there)
    some = config.getoption("lf") or any("::" in argument for argument in config.args)
    if gone and not some:
        raise pytest.UsageError(f"tests/nightly.txt names what is no test: {', '.join(gone)}")
