"""A step written as HLO: what it takes, and that JAX runs it without TensorFlow."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import jobs, xla_export
from tests.support import process

ROOT = pathlib.Path(__file__).parents[2]
JAX = os.environ.get("TFCKPT_JAX_PYTHON") or (
    sys.executable if importlib.util.find_spec("jax") else None)
SIZES = {"layers": 2, "d": 64, "mlp": 128, "seq": 64, "batch": 16, "dropout": 0.0}

PLUGIN = JAX is not None and not subprocess.run(
    [JAX, "-c", "import jax_plugins.xla_cuda12"], capture_output=True).returncode

_CHILD = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("tensorflow" in sys.modules)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a transformer without dropout, which TensorFlow and XLA draw differently."""
    folder = tmp_path_factory.mktemp("exported")
    with process.without_determinism(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(jobs.SMALL, "transformer", SIZES)
        about = xla_export.export("transformer", "small", "min", folder)
    assert about == json.loads((folder / "about.json").read_text(encoding="utf-8"))
    return folder, about


def test_what_is_written(exported):
    folder, about = exported
    process.fresh()
    job = jobs.transformer(**SIZES)
    with np.load(folder / "inputs.npz") as saved:
        values = [saved[name] for name in saved.files]
    assert values[0].tobytes() == job.x.numpy().tobytes()
    assert values[1].tobytes() == job.y.numpy().tobytes()
    sizes = sorted(value.size for value in values[2:])
    trained = [v.numpy().size for v in job.model.trainable_variables]
    assert sorted(3 * trained) == [s for s in sizes if s > 2]  # weights and Adam's two slots
    assert about["recomputed_ops"] > 0
    modules = {kind: (folder / f"{kind}.hlo").read_bytes() for kind in xla_export.KINDS}
    assert {kind for kind, module in modules.items() if b"-tfckpt1" in module} == {
        "data", "barrier"}
    assert {kind for kind, module in modules.items() if b"opt-barrier" in module} == {"barrier"}


@pytest.mark.skipif(JAX is None, reason="needs JAX: pip install 'tfckpt[xla]'")
def test_jax_runs_it_without_tensorflow(exported):
    folder, about = exported
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [JAX, "-c", _CHILD, str(ROOT / "benchmarks" / "xla_gpu.py"), str(folder), "--steps=1"],
        capture_output=True, text=True, timeout=600,
        env={**environment, "JAX_PLATFORMS": "cpu"})
    assert not done.returncode, done.stderr[-2000:]
    *_, plain, data, barrier, tensorflow = done.stdout.splitlines()
    assert tensorflow == "False"
    before = float(plain.split("|")[3])
    for row in (plain, data, barrier):
        _, _, _, temp, ratio, _, _, loss, wanted, difference, _ = row.split("|")
        assert float(ratio) == pytest.approx(float(temp) / before, abs=0.01)
        assert float(loss) == pytest.approx(about["tensorflow_loss"], rel=1e-5)
        assert float(wanted) == pytest.approx(about["tensorflow_loss"], abs=1e-6)
        assert float(difference) < 1e-4
    assert float(data.split("|")[3]) < 0.8 * before


def compile_for_gpu(folder):
    return subprocess.run(
        [JAX, str(ROOT / "benchmarks" / "xla_gpu.py"), str(folder), "--compile_for=h100"],
        capture_output=True, text=True, timeout=600,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})


@pytest.mark.skipif(not PLUGIN, reason="needs XLA's GPU compiler: pip install 'jax[cuda12]'")
def test_the_gpu_compiler_keeps_recomputation(exported):
    """Needs no GPU: nothing is run."""
    folder, about = exported
    done = compile_for_gpu(folder)
    assert not done.returncode, done.stderr[-2000:]
    rows = [row.split("|")[3:8] for row in done.stdout.splitlines()[-3:]]
    plain, data, barrier = ([float(each) for each in row] for row in rows)
    assert plain[1:4] == [1, 0, 0]
    for temp, _, planned, recomputed, heavy in (data, barrier):
        assert temp < plain[0]
        assert planned == about["recomputed_ops"]
        assert 0.5 * planned < recomputed <= planned
        assert heavy > plain[4]  # some of what is recomputed are products


@pytest.mark.skipif(JAX is None or PLUGIN, reason="needs JAX without a GPU's compiler")
def test_without_a_gpu_compiler_it_says_what_is_missing(exported):
    done = compile_for_gpu(exported[0])
    assert done.returncode == 1
    assert done.stderr.startswith("xla_gpu: --compile_for needs XLA's GPU compiler"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_inputs_that_are_not_its_own_are_refused(exported):
    folder, _ = exported
    module = (folder / "plain.hlo").read_bytes()
    with pytest.raises(ValueError, match="parameters of shapes"):
        xla_export.check_parameters(module, [np.zeros((3, 3))])
