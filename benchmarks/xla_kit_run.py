"""Run a kit of `benchmarks.xla_kit` on the GPU of a machine with JAX alone, or on a CPU.

    python DIR/xla_kit_run.py DIR [--seconds=480] [--steps=10]   (JAX_PLATFORMS=cpu: not on the GPU)

Printed is a table for docs/xla.md: of each step temporary bytes of XLA's buffer assignment, the
peak of JAX's allocator, time of a step, loss, and how far all outputs are from the plain step's.
What the limit of time left out is named below it.

Each network has a process of its own, as the allocator's peak cannot be reset. In it the steps are
compiled first and then run in the order of their temporary bytes, so that a peak that is higher
than the one before is that step's own; one that is not is printed as a bound (<=). Only then they
take turns and are timed. Inputs are made by NumPy from seeds, the same for all steps of a network.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

COLUMNS = ("network", "step", "temp MB", "ratio", "inputs MB", "peak MB", "step ms", "of plain",
           "loss", "difference of outputs")
_REST = 0.8  # of a network's time, after which no further round begins


def make_input(spec: dict[str, Any], seed: int) -> np.ndarray:
    """Return the value of a parameter that `about.json` describes.

    Raises:
      ValueError: the kit is of another version: nothing is known that is made so.
    """
    shape, dtype = tuple(spec["shape"]), np.dtype(spec["dtype"])
    draw = np.random.default_rng(seed)
    if spec["made"] == "normal":
        return (spec["std"] * draw.standard_normal(shape, np.float32)).astype(dtype)
    if spec["made"] == "integers":
        return draw.integers(spec["below"], size=shape).astype(dtype)
    if spec["made"] == "constant":
        return np.full(shape, spec["value"], dtype)
    if spec["made"] == "values":
        return np.array(spec["values"], dtype).reshape(shape)
    raise ValueError(f"{spec['name']}: made from {spec['made']!r}")


def tell(**what: Any) -> None:
    """Hand something to the process that prints the table."""
    print(json.dumps(what), flush=True)


def run_network(folder: pathlib.Path, steps: int, seconds: float) -> None:
    """Compile, run and time the steps of one network, and tell what was found."""
    import jax
    from xla_gpu import Program, difference, read_module

    until = time.monotonic() + _REST * seconds
    jax.config.update("jax_enable_x64", True)  # seeds and counters are 64-bit integers
    device = jax.devices()[0]
    tell(device=said_of(device))
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    inputs = [make_input(spec, seed) for seed, spec in enumerate(about["parameters"])]
    programs = {}
    for kind in about["kinds"]:
        started = time.monotonic()
        try:
            programs[kind] = Program(read_module(folder, kind), device)
        except jax.errors.JaxRuntimeError as error:
            tell(kind=kind, error=str(error).splitlines()[0])
            continue
        tell(kind=kind, temp=programs[kind].temp_bytes, inputs=sum(each.nbytes for each in inputs),
             compile_seconds=round(time.monotonic() - started, 1))
    outputs: dict[str, list[np.ndarray]] = {}
    for kind in sorted(programs, key=lambda kind: programs[kind].temp_bytes):
        before = peak_of(device)
        try:
            outputs[kind] = [np.asarray(each) for each in programs[kind](inputs)[0]]
        except jax.errors.JaxRuntimeError as error:
            tell(kind=kind, error=str(error).splitlines()[0])
            continue
        peak = peak_of(device)
        tell(kind=kind, loss=float(outputs[kind][0]), peak=peak, bound=peak == before)
    for kind in outputs:
        if "plain" in outputs:
            tell(kind=kind, difference=difference(outputs["plain"], outputs[kind]))
    rounds: list[dict[str, float]] = []
    while len(rounds) < steps and (time.monotonic() < until or len(rounds) < 2):
        rounds.append({kind: programs[kind](inputs)[1] for kind in outputs})
    for kind in outputs:
        tell(kind=kind, rounds=len(rounds), ms=1e3 * statistics.median(r[kind] for r in rounds),
             time=statistics.median(r[kind] / r["plain"] for r in rounds)
             if "plain" in outputs else None)


def peak_of(device: Any) -> int | None:
    """Return the most bytes that a device's allocator had in use; None if it does not count."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def said_of(device: Any) -> str:
    """Name a device, its driver and the versions."""
    import jax
    import jaxlib

    driver = ""
    if device.platform == "gpu" and shutil.which("nvidia-smi"):
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True).stdout.partition("\n")[0]
    platform = ", ".join(device.client.platform_version.split("\n"))
    return (f"{device.device_kind} ({device.platform}), {platform}, "
            f"{f'driver {driver}, ' if driver else ''}jax {jax.__version__}, "
            f"jaxlib {jaxlib.__version__}")


def ask(folder: pathlib.Path, steps: int, share: float, limit: float
        ) -> tuple[str, dict[str, dict[str, Any]], str]:
    """Run one network in a process; return device, what is known of each step, and what failed."""
    failed = ""
    try:
        done = subprocess.run(
            [sys.executable, __file__, str(folder), "--one", f"--steps={steps}",
             f"--seconds={share}"], capture_output=True, timeout=limit)
        said = done.stdout
        if done.returncode:
            failed = (done.stderr.decode(errors="replace").strip().splitlines() or ["died"])[-1]
    except subprocess.TimeoutExpired as error:
        said, failed = error.stdout or b"", f"cut off after {limit:.0f} s"
    device, found = "", {}
    for line in said.decode(errors="replace").splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue  # of a library, or cut off
        device = told.get("device", device)
        if "kind" in told:
            found.setdefault(told["kind"], {}).update(told)
    return device, found, failed


def row(name: str, kind: str, found: dict[str, dict[str, Any]]) -> str:
    """Return a step's line of the table; a dash stands for what is not known."""
    it, plain = found[kind], found.get("plain", {})

    def shown(key: str, form: str, unit: float = 1.0) -> str:
        value = it.get(key)
        return "-" if value is None else format(value / unit, form)

    known = plain.get("temp") and "temp" in it
    ratio = f"{it['temp'] / plain['temp']:.2f}" if known else "-"
    bound = "<= " if it.get("bound") and it.get("peak") is not None else ""
    return " | ".join((
        f"| {name}", kind, shown("temp", ".1f", 1e6), ratio, shown("inputs", ".1f", 1e6),
        bound + shown("peak", ".1f", 1e6), shown("ms", ".1f"), shown("time", ".2f"),
        shown("loss", ".6f"), shown("difference", ".1e"))) + " |"


def run_kit(folder: pathlib.Path, steps: int, seconds: float) -> list[str]:
    """Run all networks of a kit and print the table; return what is missing in it."""
    started = time.monotonic()
    kit = json.loads((folder / "kit.json").read_text(encoding="utf-8"))
    missing, headed = [], False
    for number, name in enumerate(kit["networks"]):
        left = seconds - (time.monotonic() - started)
        if left < min(10, seconds / 10):
            missing.append(f"{name}: not reached in {seconds:.0f} s")
            continue
        others = len(kit["networks"]) - number - 1
        about = json.loads((folder / name / "about.json").read_text(encoding="utf-8"))
        device, found, failed = ask(folder / name, steps, left / (1 + others),
                                    left / 2 if others else left)  # one that hangs leaves half
        if device and not headed:
            headed = True
            print(f"{datetime.date.today()}: {device}. Planned for {kit['planned_for']}, exported "
                  f"by TensorFlow {kit['tensorflow']}.\n")
            print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|")
        for kind in found:
            print(row(name, kind, found), flush=True)
        missing += [f"{name}, {kind}: {text}" for kind, text in about["refused"].items()]
        missing += [f"{name}, {kind}: {each['error']}" for kind, each in found.items()
                    if "error" in each]
        if failed:
            missing.append(f"{name}: {failed}")
    print(f"\n{time.monotonic() - started:.0f} s in all.")
    return missing


def main() -> None:
    """Run the kit, or as a process of it one network."""
    parser = argparse.ArgumentParser(description="Runs a kit of training steps with JAX.")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each kind")
    parser.add_argument("--seconds", type=float, default=480, help="limit over all networks")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.one:
        run_network(said.folder, said.steps, said.seconds)
        return
    if missing := run_kit(said.folder, said.steps, said.seconds):
        print("\nMissing:\n" + "\n".join(f"- {each}" for each in missing))


if __name__ == "__main__":
    main()
