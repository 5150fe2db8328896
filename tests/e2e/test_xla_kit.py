"""A kit for a GPU: what is written is what the network is, and JAX runs it from seeds alone."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from benchmarks import networks, xla_kit, xla_kit_run
from tests.support import process

JAX = os.environ.get("TFCKPT_JAX_PYTHON") or (
    sys.executable if importlib.util.find_spec("jax") else None)
SIZES = {"batch": 4, "side": 16, "channels": 16, "depth": 2}
KINDS = ["plain", "min", "0.5"]
NUMPY_TYPES = {"float32": xla_data_pb2.F32, "int32": xla_data_pb2.S32, "int64": xla_data_pb2.S64}


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """Return a network with batch normalization, whose moving variance must not be negative."""
    folder = tmp_path_factory.mktemp("kit")
    with process.without_determinism():
        xla_kit.write_kit(folder, {"mbconv": SIZES}, "")
    about = json.loads((folder / "mbconv" / "about.json").read_text(encoding="utf-8"))
    return folder, about


def modules(folder):
    return {kind: hlo_pb2.HloModuleProto.FromString(
        gzip.decompress((folder / "mbconv" / f"{kind}.hlo.gz").read_bytes())) for kind in KINDS}


def test_what_is_in_the_folder(kit):
    folder, about = kit
    found = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    assert set(found) == {"kit.json", "xla_gpu.py", "xla_kit_run.py", "gpu_compiler.py",
                          "mbconv/about.json", *(f"mbconv/{kind}.hlo.gz" for kind in KINDS)}
    assert sum(found.values()) < 1_000_000
    assert about["kinds"] == KINDS and not about["refused"]
    assert about["recomputed_ops"]["plain"] == 0 < min(
        about["recomputed_ops"][kind] for kind in KINDS[1:])
    copies = {kind: sum("-tfckpt" in each.metadata.op_name for computation in module.computations
                        for each in computation.instructions)
              for kind, module in modules(folder).items()}
    assert copies["plain"] == 0 < min(copies["min"], copies["0.5"])


def test_modules_take_what_is_described(kit):
    folder, about = kit
    described = [(tuple(each["shape"]), NUMPY_TYPES[each["dtype"]]) for each in about["parameters"]]
    for module in modules(folder).values():
        taken = [(tuple(each.dimensions), each.element_type)
                 for each in module.host_program_shape.parameters]
        assert taken == described


def test_parameters_are_the_batch_and_the_networks_variables(kit):
    _, about = kit
    process.fresh()
    network = networks.mbconv(**SIZES)
    adam = keras.optimizers.Adam(1e-3)
    adam.build(network.model.trainable_variables)
    shapes = sorted(tuple(v.shape) for v in network.model.variables + adam.variables)
    described = about["parameters"]
    assert [tuple(each["shape"]) for each in described[:2]] == [network.x[0], network.y[0]]
    assert sorted(tuple(each["shape"]) for each in described[2:]) == shapes


def test_inputs_are_made_as_training_begins(kit):
    _, about = kit
    made = {each["name"]: xla_kit_run.make_input(each, seed)
            for seed, each in enumerate(about["parameters"]) if "kernel:0" not in each["name"]}
    assert made["x"].std() == pytest.approx(1, abs=0.1)
    assert made["y"].min() >= 0 and made["y"].max() < 16
    assert all((value == 1).all() for name, value in made.items() if "moving_variance" in name)
    slots = [value for name, value in made.items() if "momentum" in name or "velocity" in name]
    assert slots and not any(value.any() for value in slots)
    assert made["adam/learning_rate:0"] == np.float32(1e-3) and made["adam/iteration:0"] == 0
    for seed, each in enumerate(about["parameters"]):
        again = xla_kit_run.make_input(each, seed)
        assert (again.shape, str(again.dtype)) == (tuple(each["shape"]), each["dtype"])
        if each["made"] == "normal" and len(each["shape"]) == 4 and each["shape"][:2] == [1, 1]:
            glorot = math.sqrt(2 / (each["shape"][2] + each["shape"][3]))
            assert again.std() == pytest.approx(glorot, rel=0.1)


def test_what_no_seed_makes_is_refused():
    with pytest.raises(ValueError, match="table: 40 values of int32 cannot come from a seed"):
        xla_kit.of_variable("table", np.arange(40, dtype=np.int32))
    state = xla_kit.of_variable("state", np.array([7, 2**32 - 1], np.uint32))
    assert xla_kit_run.make_input(json.loads(json.dumps(state)), 0).tolist() == [7, 2**32 - 1]


def test_a_kit_that_is_too_large_is_refused(kit, tmp_path):
    folder, _ = kit
    with pytest.raises(SystemExit, match=r"more than 0 MB; most in mbconv/\S+: .* fewer --netw"):
        xla_kit.check_size(folder, limit=1)
    with pytest.raises(SystemExit, match="is not empty"):
        xla_kit.main([str(folder)])
    with pytest.raises(SystemExit):
        xla_kit.main([str(tmp_path), "--networks=none"])


def test_lines_of_the_table_say_what_is_not_known():
    found = {"plain": {"temp": 4_000_000, "inputs": 2_000_000, "error": "out of memory"},
             "min": {"temp": 1_000_000, "inputs": 2_000_000, "peak": 3_000_000, "bound": True,
                     "loss": 0.5, "ms": 2.0}}
    assert xla_kit_run.row("unet", "plain", found) == (
        "| unet | plain | 4.0 | 1.00 | 2.0 | - | - | - | - | - |")
    assert xla_kit_run.row("unet", "min", found) == (
        "| unet | min | 1.0 | 0.25 | 2.0 | <= 3.0 | 2.0 | - | 0.500000 | - |")


def test_networks_that_time_does_not_suffice_for_are_named(kit, capsys):
    missing = xla_kit_run.run_kit(kit[0], steps=1, seconds=0)
    assert missing == ["mbconv: not reached in 0 s"]
    assert "| mbconv" not in capsys.readouterr().out


@pytest.mark.skipif(JAX is None, reason="needs JAX: pip install 'tfckpt[xla]'")
def test_jax_runs_it(kit):
    folder, _ = kit
    done = subprocess.run(
        [JAX, str(folder / "xla_gpu.py"), str(folder), "--steps=2"], capture_output=True,
        text=True, timeout=600, env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
                                     "JAX_PLATFORMS": "cpu"})
    assert not done.returncode, done.stderr[-2000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in done.stdout.splitlines() if line.startswith("| mbconv")]
    assert [cells[1] for cells in rows] == KINDS
    losses = [float(cells[8]) for cells in rows]
    assert math.isfinite(losses[0]) and losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert all(float(cells[9]) < 1e-4 for cells in rows)
    assert all(float(cells[2]) > 0 and float(cells[6]) > 0 for cells in rows)
    assert "Missing" not in done.stdout
