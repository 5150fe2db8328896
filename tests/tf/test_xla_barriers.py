"""A guard of barriers: XLA takes operands out of a barrier, but not the trigger of a guard."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from tfckpt.rewrite.xla.guards import CSE_FLAG
from tfckpt.verify.asking import elsewhere, gpu_compiler

JAX = os.environ.get(elsewhere.PYTHON) or (
    sys.executable if importlib.util.find_spec("jax_plugins") else None)
CASES = {"unread", "read"}
DUMPED = """
import pathlib, sys
import jax
from gpu_compiler import described, executable, stablehlo
jax.config.update("jax_enable_x64", True)
folder, name = sys.argv[1:]
options = [("xla_dump_to", folder + "/" + name),
           ("xla_dump_hlo_pass_re", "latency-hiding-scheduler")]
executable(stablehlo(pathlib.Path(folder, name + ".hlo").read_bytes()), described("h100"), options)
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Return the folder of the cases' modules, and how many operands their barriers have on a CPU.
    """
    folder = tmp_path_factory.mktemp("barriers")
    done = subprocess.run([sys.executable, "-m", "tests.support.barriers", str(folder)], text=True,
                          capture_output=True, env={**os.environ, "XLA_FLAGS": CSE_FLAG})
    assert not done.returncode, done.stderr[-2000:]
    return folder, json.loads(done.stdout)


def test_the_trigger_is_an_operand_of_every_barrier(modules):
    _, found = modules
    assert found == {case: [2, 2] for case in CASES}


@pytest.mark.skipif(not JAX, reason="jax[cuda12] is not here")
@pytest.mark.parametrize("case", sorted(CASES))
def test_so_it_is_on_gpus_until_everything_is_scheduled(modules, case):
    folder, _ = modules
    here = os.path.dirname(gpu_compiler.__file__)
    subprocess.run([JAX, "-c", DUMPED, str(folder), case], check=True, capture_output=True,
                   env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": here})
    last = sorted((folder / case).glob("*.latency-hiding-scheduler.*"))[-1].read_text()
    assert "is_scheduled=true" in last
    shapes = re.findall(r"= \((.*)\) opt-barrier\(", last)
    assert [shape.count("f32[256,256]") for shape in shapes] == [2, 2]
