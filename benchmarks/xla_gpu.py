"""Runs what `benchmarks.xla_export` wrote, with JAX and without TensorFlow, on a GPU or a CPU.

    python benchmarks/xla_gpu.py DIR [DIR ...]          (JAX_PLATFORMS=cpu keeps off the GPU)

Copy the folder and this file to the machine with the GPU; `pip install jax` (or `jax[cuda12]`) is
all it needs. Printed are device and versions, then for the plain step and the rewritten one with
each guard the bytes that XLA's buffer assignment holds temporarily, the time of a step (they take
turns; medians), the loss, and how far all outputs are from those of the plain step. TensorFlow's
executor computes the same loss to rounding, except where dropout is drawn: XLA has a generator of
its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import statistics
import time
from typing import Any

import jax
import jaxlib
import numpy as np
from jaxlib import xla_client

KINDS = ("plain", "data", "barrier")


class Program:
    """One compiled module on one device.

    Private interfaces of jaxlib: there is no public way from HLO. Tried with 0.10.
    """

    def __init__(self, module: bytes, device: Any):
        private = xla_client._xla
        self._executable = device.client.compile_and_load(
            private.mlir.hlo_to_stablehlo(module), private.DeviceList((device,)),
            xla_client.CompileOptions())
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
    """The lines of one exported job."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    with np.load(folder / "inputs.npz") as saved:
        inputs = [saved[name] for name in saved.files]
    programs = [Program((folder / f"{kind}.hlo").read_bytes(), device) for kind in KINDS]
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
    return math.sqrt(error / norm)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Runs exported training steps with JAX.")
    parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each kind")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # seeds and counters are 64-bit integers
    device = jax.devices()[0]
    print(f"{datetime.date.today()}: {device.device_kind} ({device.platform}), "
          f"{device.client.platform_version.splitlines()[0]}, jax {jax.__version__}, "
          f"jaxlib {jaxlib.__version__}\n")
    columns = ("job", "step", "temp MB", "ratio", "step ms", "time", "loss", "TensorFlow's loss",
               "difference of outputs")
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    for folder in arguments.folders:
        print(measure(folder, device, arguments.steps), flush=True)


if __name__ == "__main__":
    main()
