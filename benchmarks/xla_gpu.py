"""Runs what `benchmarks.xla_export` or `xla_kit` wrote, with JAX alone, on a GPU or a CPU.

    python benchmarks/xla_gpu.py DIR [DIR ...]          (JAX_PLATFORMS=cpu keeps off the GPU)
    python benchmarks/xla_gpu.py --compile_for=h100 DIR [DIR ...]         (needs no GPU)

Copy the folder, this file and `tfckpt/verify/asking/gpu_compiler.py` beside it to the machine with
the GPU; `pip install jax` (or `jax[cuda12]`) is all that they need. Printed are device and
versions, then for the plain step and the rewritten one with each guard the temporary bytes of XLA's
buffer assignment, the time of a step (they take turns; medians), the loss, and how far all outputs
are from those of the plain step. TensorFlow's executor computes the same loss up to rounding,
except where dropout is drawn: XLA has a generator of its own.

With `--compile_for` XLA's GPU compiler compiles for a GPU that is described, not present, and
nothing is run: `pip install 'jax[cuda12]'`, no driver. Autotuning of kernels is impossible then:
matrix products and convolutions are calls into cuBLAS, with its workspace, and cuDNN, without one.
Printed are the temporary bytes, the ops that were to be recomputed, those that are computed in
addition to their originals, and the matrix products and convolutions.

A folder of `benchmarks.xla_kit`, which has this file in it, is handed to `xla_kit_run.py` there, or
compiled only.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gzip
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jaxlib
import numpy as np
from jaxlib import xla_client

# a file of its own, which lies beside this one in a kit
sys.path.append(str(
    pathlib.Path(__file__).resolve().parents[1] / "tfckpt" / "verify" / "asking"))
from gpu_compiler import TARGETS, WITHOUT_TRIALS, described, executable, stablehlo  # noqa: E402

__all__ = ["TARGETS", "WITHOUT_TRIALS", "Program", "described", "difference", "heavy"]

KINDS = ("plain", "data", "barrier")

_NAME = re.compile(r'op_name="([^"]*)"')
_COPY = re.compile(r"-tfckpt\d+$")
_HEAVY = re.compile(r' (?:dot|convolution)\(|custom_call_target="__cu(?:blas|dnn)\$')


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A module that was compiled for a GPU that need not be present.

    Attributes:
      temp_bytes: temporary bytes of XLA's buffer assignment.
      copies: recomputed ops that are computed besides their originals. An op that became part of a
        call into a library has no name any more and is not counted.
      heavy: matrix products and convolutions.
    """

    temp_bytes: int
    copies: int
    heavy: int


def compiled(module: bytes, device: Any) -> Compiled:
    """Compile a serialized HLO module for a device that `described` returned."""
    made = executable(stablehlo(module), device)
    text = made.hlo_modules()[0].to_string()
    names = set(_NAME.findall(text))
    return Compiled(made.get_compiled_memory_stats().temp_size_in_bytes,
                    sum(_COPY.sub("", name) in names for name in names if _COPY.search(name)),
                    heavy(text))


def heavy(text: str) -> int:
    """Return how many matrix products and convolutions the text of a compiled module has."""
    return len(_HEAVY.findall(text))


def compile_job(folder: pathlib.Path, device: Any) -> str:
    """Return the lines of one exported job that is compiled, not run."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    kinds, planned = about.get("kinds", KINDS), about["recomputed_ops"]
    if not isinstance(planned, dict):
        planned = {kind: 0 if kind == "plain" else planned for kind in kinds}
    found = [compiled(read_module(folder, kind), device) for kind in kinds]
    return "\n".join(
        f"| {about['job']} ({about['size']}) | {kind} | {each.temp_bytes / 1e6:.1f} | "
        f"{each.temp_bytes / found[0].temp_bytes:.2f} | {planned[kind]} | {each.copies} | "
        f"{each.heavy} |" for kind, each in zip(kinds, found, strict=True))


def read_module(folder: pathlib.Path, kind: str) -> bytes:
    """Return the serialized HLO module of one kind of an exported job, compressed or not."""
    packed = folder / f"{kind}.hlo.gz"
    if packed.exists():
        return gzip.decompress(packed.read_bytes())
    return (folder / f"{kind}.hlo").read_bytes()


def networks_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of a kit's networks; none of a folder that is no kit."""
    kit = folder / "kit.json"
    names = json.loads(kit.read_text(encoding="utf-8"))["networks"] if kit.exists() else []
    return [folder / name for name in names]


class Program:
    """One compiled module on one device.

    Private interfaces of jaxlib: there is no public way from HLO. Tried with 0.10.2 and 0.11.2.
    """

    def __init__(self, module: bytes, device: Any):
        private = xla_client._xla
        self._executable = device.client.compile_and_load(
            stablehlo(module), private.DeviceList((device,)), xla_client.CompileOptions())
        self._device = device
        self.temp_bytes = self._executable.get_compiled_memory_stats().temp_size_in_bytes

    def __call__(self, inputs: list[np.ndarray]) -> tuple[list[jax.Array], float]:
        """Outputs of one run, and its seconds without the transfer of the inputs.

        The module writes new values of variables over the old ones: each run needs its own.
        """
        taken = jax.block_until_ready([jax.device_put(each, self._device) for each in inputs])
        started = time.perf_counter()
        found = self._executable.execute_sharded(taken)
        outputs = [each for (each,) in found.disassemble_into_single_device_arrays()]
        return jax.block_until_ready(outputs), time.perf_counter() - started


def measure(folder: pathlib.Path, device: Any, steps: int) -> str:
    """Return the lines of one exported job."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    with np.load(folder / "inputs.npz") as saved:
        inputs = [saved[name] for name in saved.files]
    programs = [Program(read_module(folder, kind), device) for kind in KINDS]
    outputs = [program(inputs)[0] for program in programs]  # also the warm-up
    rounds = [[program(inputs)[1] for program in programs] for _ in range(steps)]
    lines = []
    for i, (kind, program) in enumerate(zip(KINDS, programs, strict=True)):
        ratio = statistics.median(times[i] / times[0] for times in rounds)
        lines.append(
            f"| {about['job']} ({about['size']}) | {kind} | {program.temp_bytes / 1e6:.1f} | "
            f"{program.temp_bytes / programs[0].temp_bytes:.2f} | "
            f"{statistics.median(times[i] for times in rounds) * 1e3:.1f} | {ratio:.2f}x | "
            f"{float(outputs[i][0]):.6f} | {about['tensorflow_loss']:.6f} | "
            f"{difference(outputs[0], outputs[i]):.1e} |")
    return "\n".join(lines)


def difference(wanted: list[jax.Array], found: list[jax.Array]) -> float:
    """Norm of the difference of two steps' float outputs, relative to the norm of the first's.

    Infinite where integers (counters, seeds) differ.
    """
    error = norm = 0.0
    for one, other in zip(wanted, found, strict=True):
        a, b = np.asarray(one), np.asarray(other)
        if not jax.numpy.issubdtype(a.dtype, np.floating):
            if not np.array_equal(a, b):
                return float("inf")
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        error += float(np.sum((a - b) ** 2))
        norm += float(np.sum(a**2))
    return math.sqrt(error / norm) if error else 0.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Runs exported training steps with JAX.")
    parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each kind")
    parser.add_argument("--compile_for", choices=sorted(TARGETS), help="compile only, for this GPU")
    parser.add_argument("--seconds", type=float, default=480, help="limit of a run of a kit")
    arguments = parser.parse_args()
    kits = [folder for folder in arguments.folders if networks_of(folder)]
    if kits and not arguments.compile_for:  # its processes want the GPU to themselves
        if len(arguments.folders) > 1:
            parser.error("name one kit alone")
        raise SystemExit(subprocess.run([
            sys.executable, str(pathlib.Path(__file__).with_name("xla_kit_run.py")), str(kits[0]),
            f"--steps={arguments.steps}", f"--seconds={arguments.seconds}"]).returncode)
    jax.config.update("jax_enable_x64", True)  # seeds and counters are 64-bit integers
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    if arguments.compile_for:
        try:
            device = described(arguments.compile_for)
        except RuntimeError as error:
            raise SystemExit(f"xla_gpu: --compile_for: {error}") from error
        print(f"{datetime.date.today()}: compiled for {device.device_kind}, not run, {versions}\n")
        columns: tuple[str, ...] = ("job", "step", "temp MB", "ratio", "to recompute",
                                    "recomputed", "products and convolutions")
    else:
        device = jax.devices()[0]
        print(f"{datetime.date.today()}: {device.device_kind} ({device.platform}), "
              f"{device.client.platform_version.splitlines()[0]}, {versions}\n")
        columns = ("job", "step", "temp MB", "ratio", "step ms", "time", "loss",
                   "TensorFlow's loss", "difference of outputs")
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    for folder in [each for named in arguments.folders for each in networks_of(named) or [named]]:
        print(compile_job(folder, device) if arguments.compile_for
              else measure(folder, device, arguments.steps), flush=True)


if __name__ == "__main__":
    main()
