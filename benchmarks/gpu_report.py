"""Ten minutes on a GPU: what tfckpt saves there, and whether steps stay within their budgets.

    python -m benchmarks.gpu_report | tee report.txt

For users with a GPU and TensorFlow alone: no JAX, no other package. Six networks train with a plain
step and with tfckpt, on TensorFlow's executor and compiled by XLA, each pair in a process of its
own. `measured` is the median of the peaks that TensorFlow's allocator counts above what a step
starts with; `expected` is what tfckpt said beforehand; `allowed` is what the budget says, a
fraction of the expected plain peak. Where there is no GPU the CPU is measured, with smaller
batches. Networks that have not begun when the time is over are left out and listed.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from typing import Any

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names in NETWORKS; default all.")
flags.DEFINE_list("fractions", ["0.5", "min"], "Budgets.")
flags.DEFINE_integer("limit_s", 600, "Seconds after which no other process is begun.")
flags.DEFINE_integer("measured_steps", 8, "Measured steps.", lower_bound=2)
flags.DEFINE_string("pair", "", "Measure one network and runner in this process.")

COLUMNS = ("network", "runner", "budget", "plain MB", "expected", "tfckpt MB", "expected", "ratio",
           "allowed MB", "of allowed", "time", "planned time")
MB = 1e6
NETWORKS = {"mlp": {"batch": 2048}, "vit": {"batch": 8}, "mobilenet": {"batch": 16},
            "resnet50": {"batch": 16}, "unet": {"batch": 4}, "mixer": {"batch": 4}}
"""Names in benchmarks.measured.NETWORKS, and sizes for a CPU; a GPU gets batches `LARGER`."""
LARGER = 8
WARMUP = 3


def measure(name: str, runner: str) -> dict[str, Any]:
    """Measure the plain step and each budget in this process."""
    import tensorflow as tf

    import tfckpt
    from benchmarks.measured import NETWORKS as BUILDERS

    gpus = tf.config.list_physical_devices("GPU")
    sizes = {key: value * (LARGER if gpus else 1) for key, value in NETWORKS[name].items()}
    body, args = BUILDERS[name](**sizes)
    plain = tf.function(body, jit_compile=runner == "xla")
    found: dict[str, Any] = {"plain": _ran(plain, args), "budgets": {}}
    for fraction in FLAGS.fractions:
        step = tfckpt.checkpoint(tf.function(body, jit_compile=runner == "xla"),
                                 budget=fraction if fraction == "min" else float(fraction))
        try:
            taken = _ran(step, args)
        except tfckpt.InfeasibleBudgetError as error:
            found["budgets"][fraction] = {"refused": error.smallest_bytes}
            continue
        before, after = step.report.expected_bytes
        found["budgets"][fraction] = taken | {
            "expected": after, "expected_plain": before, "allowed": step.report.allowed_bytes,
            "overhead": step.report.overhead, "applied": step.report.applied}
    return found


def _ran(step: Any, args: tuple) -> dict[str, float]:
    from benchmarks.measure import measure_step

    for _ in range(WARMUP):
        step(*args)
    samples = [measure_step(step, *args) for _ in range(FLAGS.measured_steps)]
    return {"peak": statistics.median(s.peak for s in samples),
            "seconds": statistics.median(s.seconds for s in samples)}


def rows(name: str, runner: str, found: dict[str, Any]) -> list[str]:
    """Return a line for each budget."""
    plain, lines = found["plain"], []
    for fraction, ours in found["budgets"].items():
        start = [name, runner, fraction, f"{plain['peak'] / MB:.1f}"]
        if "refused" in ours:
            lines.append(line([*start, "", f"refused: at least {ours['refused'] / MB:.1f}",
                               *[""] * 6]))
            continue
        allowed = ours["allowed"]
        lines.append(line([
            *start, _ratio(ours["expected_plain"], plain["peak"]), f"{ours['peak'] / MB:.1f}",
            _ratio(ours["expected"], ours["peak"]), _ratio(ours["peak"], plain["peak"]),
            "" if allowed is None else f"{allowed / MB:.1f}",
            "" if allowed is None else _ratio(ours["peak"], allowed),
            f"{ours['seconds'] / plain['seconds']:.2f}x", f"{1 + ours['overhead']:.2f}x"]))
    return lines


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "-"


def main(_: list[str]) -> int:
    """Print the table, and what it was measured on."""
    if FLAGS.pair:
        print(json.dumps(measure(*FLAGS.pair.split(","))))
        return 0
    import tensorflow as tf

    began, left_out = time.monotonic(), []
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "a GPU")
             for gpu in tf.config.list_physical_devices("GPU")] or [f"CPU ({platform.machine()})"]
    print(f"{names[0]}, TensorFlow {tf.__version__}\n\n{head(COLUMNS)}", flush=True)
    for runner in ("executor", "xla"):
        for name in FLAGS.only or NETWORKS:
            if time.monotonic() - began > FLAGS.limit_s:
                left_out.append(f"{name} ({runner})")
                continue
            output = in_own_process(f"{name} {runner}", "benchmarks.gpu_report", (
                f"--pair={name},{runner}", f"--fractions={','.join(FLAGS.fractions)}",
                f"--measured_steps={FLAGS.measured_steps}"))
            if output is None:
                left_out.append(f"{name} ({runner}): failed, see above")
            else:
                print(*rows(name, runner, json.loads(output.splitlines()[-1])), sep="\n",
                      flush=True)
    print(f"\n{time.monotonic() - began:.0f} s" + "".join(f"; left out: {w}" for w in left_out))
    return 0


if __name__ == "__main__":
    sys.exit(app.run(main))
