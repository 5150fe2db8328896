"""Write training steps as a folder that a machine with JAX alone can run; inputs are from seeds.

    python -m benchmarks.xla_kit DIR [--networks=decoder,unet] [--device=H100-80GB] [--small]

For each network of `benchmarks.networks`, DIR then contains a folder with the plain step and those
rewritten at the budgets "min" and 0.5, as compressed HLO modules before XLA's own passes, and
`about.json`: what each of their parameters is and how it is made from a seed, so that nothing of
the size of a model is carried. Beside them are `kit.json`, which lists the folders, and the
scripts that run them:

    python DIR/xla_gpu.py DIR                             (needs JAX alone)
    python DIR/xla_gpu.py --compile_for=h100 DIR          (needs no GPU)

Plans are made for `--device`; with `--device=` for this machine. The folder has at most 60 MB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.network_steps import batch_of, step_of
from benchmarks.networks import NETWORKS, Network
from benchmarks.xla_export import arguments, check_parameters
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.driving.here import target_of
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.target import Target
from tfckpt.request.devices import find_device
from tfckpt.request.options import make_options
from tfckpt.verify.asking import gpu_compiler

BUDGETS: dict[str, object] = {"plain": None, "min": "min", "0.5": 0.5}
DEFAULT = ("decoder", "encoder", "wavenet", "mbconv", "convnext", "mixer", "unet")
SMALL: dict[str, dict[str, int]] = {
    "decoder": {"batch": 2, "length": 256, "width": 128, "depth": 2, "vocabulary": 2048},
    "encoder": {"batch": 4, "length": 64, "width": 128, "depth": 2},
    "wavenet": {"batch": 2, "length": 2048, "filters": 16, "depth": 4},
    "mbconv": {"batch": 4, "side": 32, "channels": 16, "depth": 2},
    "convnext": {"batch": 4, "side": 32, "channels": 16, "depth": 2},
    "mixer": {"batch": 4, "patches": 64, "width": 96, "depth": 2},
    "unet": {"batch": 2, "side": 64, "filters": 16, "levels": 2},
    "lm_head": {"batch": 2, "length": 64, "width": 64, "depth": 2, "vocabulary": 8192},
}
LIMIT_BYTES = 60_000_000
_HERE = pathlib.Path(__file__).parent
RUNNERS = (_HERE / "xla_gpu.py", _HERE / "xla_kit_run.py", pathlib.Path(gpu_compiler.__file__))
WRITTEN_OUT = 16  # elements of an array whose values stand in about.json


def write_kit(folder: pathlib.Path, sizes: Mapping[str, Mapping[str, int]], device: str) -> None:
    """Write a kit of the networks that `sizes` names, and print a line for each.

    Raises:
      SystemExit: the folder is not empty, or what was written is larger than a kit may be.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"xla_kit: {folder} is not empty")
    target = find_device(device).target() if device else target_of()
    for name, arguments_ in sizes.items():
        about = write_network(name, arguments_, target, folder / name)
        compressed = sum(bytes_of(folder / name).values())
        print(f"{name}: {len(about['parameters'])} parameters, recomputed ops "
              f"{about['recomputed_ops']}, {compressed / 1e6:.2f} MB", flush=True)
    for runner in RUNNERS:
        shutil.copy(runner, folder / runner.name)
    kit = {"networks": list(sizes), "planned_for": device or "the machine that wrote it",
           "tensorflow": tf.__version__, "keras": keras.__version__}
    (folder / "kit.json").write_text(json.dumps(kit, indent=1) + "\n", encoding="utf-8")
    print(f"{folder}: {check_size(folder) / 1e6:.2f} MB")


def write_network(name: str, sizes: Mapping[str, int], target: Target,
                  folder: pathlib.Path) -> dict[str, Any]:
    """Write one network's modules; return the content of its `about.json`.

    A budget that no plan meets is left out and named there.

    Raises:
      ValueError: a module's parameters are not the step's inputs and variables in order, or those
        of two modules differ.
    """
    folder.mkdir(parents=True)
    about: dict[str, Any] = {
        "job": name, "size": "small" if sizes else "default", "sizes": dict(sizes), "kinds": [],
        "recomputed_ops": {}, "refused": {}, "parameters": []}
    for kind, budget in BUDGETS.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)  # weights of the same names and deviations each time
        network = NETWORKS[name](**sizes)
        step: Any = step_of(network)
        if budget is not None:
            step = CheckpointedStep(step, make_options(budget, target=target))
        try:
            found = parameters_of(step, network)
        except InfeasibleBudgetError as error:
            about["refused"][kind] = str(error)
            continue
        module = step.experimental_get_compiler_ir(*batch_of(network))(stage="hlo_serialized")
        check_parameters(module, [np.empty(each["shape"]) for each in found])
        if about["kinds"] and found != about["parameters"]:
            raise ValueError(f"{name}: {kind} takes other parameters than {about['kinds'][0]}")
        (folder / f"{kind}.hlo.gz").write_bytes(gzip.compress(module, mtime=0))
        about["kinds"].append(kind)
        about["recomputed_ops"][kind] = 0 if budget is None else step.report.recomputed_ops
        about["parameters"] = found
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def parameters_of(step: Any, network: Network) -> list[dict[str, Any]]:
    """Say of each parameter of a traced step what it is and how it is made."""
    batch = batch_of(network)
    values = arguments(step, tuple(batch))
    concrete = step.get_concrete_function(*batch)
    names = {id(variable.handle): variable.name for variable in concrete.graph.variables}
    made = [of_batch("x", values[0], network.classes), of_batch("y", values[1], network.classes)]
    return made + [
        of_variable(names.get(id(tensor), "a captured tensor"), value)
        for tensor, value in zip(concrete.captured_inputs, values[len(batch):], strict=True)]


def of_batch(name: str, value: np.ndarray, classes: int) -> dict[str, Any]:
    """Say how a batch is made: normal numbers, or integers below `classes`."""
    how = ({"made": "normal", "std": 1.0} if np.issubdtype(value.dtype, np.floating)
           else {"made": "integers", "below": classes})
    return {"name": name, "dtype": str(value.dtype), "shape": list(value.shape), **how}


def of_variable(name: str, value: np.ndarray) -> dict[str, Any]:
    """Say how a variable is made from the value that it has before training.

    Weights that their initializer has drawn, scaled by their fans, become normal numbers of the
    same deviation; what is the same everywhere (biases, scales, an optimizer's slots and learning
    rate) and the few values of a generator's state stay what they are.

    Raises:
      ValueError: these are many integers, which no distribution stands for.
    """
    spec = {"name": name, "dtype": str(value.dtype), "shape": list(value.shape)}
    if value.size and (value == value.flat[0]).all():
        return {**spec, "made": "constant", "value": value.flat[0].item()}
    if value.size <= WRITTEN_OUT:
        return {**spec, "made": "values", "values": value.tolist()}
    if not np.issubdtype(value.dtype, np.floating):
        raise ValueError(f"{name}: {value.size} values of {value.dtype} cannot come from a seed")
    return {**spec, "made": "normal", "std": float(value.std())}


def bytes_of(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """Return the sizes of all files below a folder."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def check_size(folder: pathlib.Path, limit: int = LIMIT_BYTES) -> int:
    """Return the bytes of a kit.

    Raises:
      SystemExit: they are more than the limit; the message names the largest file.
    """
    sizes = bytes_of(folder)
    total = sum(sizes.values())
    if total > limit:
        path, largest = max(sizes.items(), key=lambda each: each[1])
        raise SystemExit(
            f"xla_kit: {folder} has {total / 1e6:.1f} MB, more than {limit / 1e6:.0f} MB; most "
            f"in {path.relative_to(folder)}: {largest / 1e6:.1f} MB. Name fewer --networks.")
    return total


def main(argv: Sequence[str] | None = None) -> None:
    """Write the kit that the command line asks for."""
    parser = argparse.ArgumentParser(description="Writes a kit of training steps for a GPU.")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--networks", default=",".join(DEFAULT),
                        help="names in benchmarks.networks.NETWORKS")
    parser.add_argument("--device", default="H100-80GB",
                        help="what to plan for, see grappler_ext.PRESETS; empty: this machine")
    parser.add_argument("--small", action="store_true", help="small networks, to try a kit out")
    said = parser.parse_args(argv)
    names = said.networks.split(",")
    if unknown := [name for name in names if name not in NETWORKS]:
        parser.error(f"no network is called {unknown[0]!r}: there are {', '.join(NETWORKS)}")
    write_kit(said.folder, {name: SMALL[name] if said.small else {} for name in names}, said.device)


if __name__ == "__main__":
    main()
