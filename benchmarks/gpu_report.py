"""Ten minutes on a GPU: what tfckpt saves there, and whether steps stay within their budgets.

    python -m benchmarks.gpu_report | tee report.txt

For users with a GPU and TensorFlow alone: no JAX, no other package. Six networks train with a plain
step and with tfckpt, on TensorFlow's executor and compiled by XLA, each pair in a process of its
own. `plain MB` and `tfckpt MB` are medians of the peaks that TensorFlow's allocator counts above
what a step starts with; `expected` is what tfckpt said beforehand, as a fraction of them; `allowed`
is what the budget says, a fraction of the expected plain peak. `numbers` says how far all variables
are from plain's after the same steps from the same values, relative to what these steps changed,
and after the slash how far plain is from itself when it is run again: kernels of a GPU may add in
another order each time. Where there is no GPU the CPU is measured, with smaller batches. Networks
that have not begun when the time is over are left out and listed. With
`--at_once=12` twelve are planned at a time; when all are, each is measured alone, its steps in
turn. `--policy=mixed_bfloat16` is Keras' mixed precision.

    python -m benchmarks.gpu_report --simulated_for=9.0          (needs no GPU)

prints what is expected on the executor of a GPU of that compute capability and 80 GB, with the
batches that a GPU gets: Grappler is told of it, and nothing runs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names in NETWORKS; default all.")
flags.DEFINE_list("fractions", ["0.5", "min"], "Budgets.")
flags.DEFINE_integer("limit_s", 600, "Seconds after which no other process is begun.")
flags.DEFINE_integer("measured_steps", 8, "Measured steps.", lower_bound=2)
flags.DEFINE_list("runners", ["executor", "xla"], "TensorFlow's executor, XLA, or both.")
flags.DEFINE_string("simulated_for", "", "Compute capability of a GPU that need not be here.")
flags.DEFINE_integer("at_once", 1, "Pairs that are planned at a time.", lower_bound=1)
flags.DEFINE_string("policy", "float32", "Keras' dtype policy.")
flags.DEFINE_string("pair", "", "Measure one network and runner in this process.")
flags.DEFINE_string("turns", "", "A file to lock; of a process that measures one pair.")

COLUMNS = ("network", "runner", "budget", "plain MB", "expected", "tfckpt MB", "expected", "ratio",
           "allowed MB", "of allowed", "time", "planned time", "numbers")
MB = 1e6
NETWORKS = {"mlp": {"batch": 2048}, "vit": {"batch": 8}, "mobilenet": {"batch": 16},
            "resnet50": {"batch": 16}, "unet": {"batch": 4}, "mixer": {"batch": 4}}
"""Names in benchmarks.measured.NETWORKS, and sizes for a CPU; a GPU gets batches `LARGER`."""
LARGER = 8
WARMUP = 3
COMPARED = 3


def measure(name: str, runner: str) -> dict[str, Any]:
    """Measure the plain step and each budget in this process."""
    import keras
    import tensorflow as tf

    import tfckpt
    from benchmarks.measure import take_turns
    from benchmarks.measured import NETWORKS as BUILDERS
    from tfckpt.verify.snapshot import Snapshot

    keras.mixed_precision.set_global_policy(FLAGS.policy)
    gpus = tf.config.list_physical_devices("GPU")
    sizes = {key: value * (LARGER if gpus else 1) for key, value in NETWORKS[name].items()}
    with _turn(fcntl.LOCK_SH):
        body, args = BUILDERS[name](**sizes)
        plain = tf.function(body, jit_compile=runner == "xla")
        state, traced = Snapshot(), plain.get_concrete_function(*args)
        state.add(traced)
        variables = [v for v in traced.variables if v.dtype.is_floating]

        def trained(step: Any) -> list[np.ndarray]:
            state.restore()
            for _ in range(COMPARED):
                step(*args)
            return [v.numpy() for v in variables]

        before = [v.numpy() for v in variables]
        wanted, again = trained(plain), trained(plain)
        found: dict[str, Any] = {"budgets": {}, "again": _difference(wanted, again, before)}
        ours: dict[str, Any] = {}
        for fraction in FLAGS.fractions:
            step = tfckpt.checkpoint(tf.function(body, jit_compile=runner == "xla"),
                                     budget=fraction if fraction == "min" else float(fraction))
            try:
                numbers = _difference(wanted, trained(step), before)
            except tfckpt.InfeasibleBudgetError as error:
                found["budgets"][fraction] = {"refused": error.smallest_bytes}
                continue
            ours[fraction] = step
            expected = step.report.expected_bytes
            found["budgets"][fraction] = {
                "expected": expected[1], "expected_plain": expected[0], "numbers": numbers,
                "allowed": step.report.allowed_bytes, "overhead": step.report.overhead}
    with _turn(fcntl.LOCK_EX):
        rounds = take_turns([(s, args) for s in (plain, *ours.values())],
                            FLAGS.measured_steps, WARMUP)
    for samples, row in zip(zip(*rounds, strict=True),
                            (found.setdefault("plain", {}), *(found["budgets"][f] for f in ours)),
                            strict=True):
        row |= {"peak": statistics.median(s.peak for s in samples),
                "seconds": statistics.median(s.seconds for s in samples)}
    return found


@contextlib.contextmanager
def _turn(kind: int) -> Iterator[None]:
    """Hold the lock of all processes: many share it to plan, one has it to measure."""
    if not FLAGS.turns:
        yield
        return
    with open(FLAGS.turns, encoding="utf-8") as file:
        fcntl.flock(file, kind)
        yield


def simulated(name: str) -> list[str]:
    """Return lines of what is expected of a network's steps on a GPU that need not be here."""
    import keras
    import tensorflow as tf

    from benchmarks.measured import NETWORKS as BUILDERS
    from tfckpt.capture import tf_adapter
    from tfckpt.carriers.checkpointed import CheckpointedStep
    from tfckpt.errors import InfeasibleBudgetError
    from tfckpt.request.devices import find_device
    from tfckpt.request.options import make_options

    keras.mixed_precision.set_global_policy(FLAGS.policy)
    gpu = tf_adapter.described_gpu(FLAGS.simulated_for, 80 << 30)
    tf_adapter.own_gpu = lambda: gpu
    body, args = BUILDERS[name](**{k: LARGER * v for k, v in NETWORKS[name].items()})
    lines = []
    for fraction in FLAGS.fractions:
        step = CheckpointedStep(tf.function(body), make_options(
            fraction if fraction == "min" else float(fraction),
            target=find_device("H100-80GB").target()))
        try:
            step.get_concrete_function(*args)
        except InfeasibleBudgetError as error:
            lines.append(line([name, fraction, "", "refused: at least "
                               f"{error.smallest_bytes / MB:.1f}", "", ""]))
            continue
        plain, ours = step.report.expected_bytes
        lines.append(line([name, fraction, f"{plain / MB:.1f}", f"{ours / MB:.1f}",
                           _ratio(ours, plain), f"{1 + step.report.overhead:.2f}x"]))
    return lines


def _difference(wanted: list, found: list, before: list) -> float:
    """Return the norm of a difference, relative to that of what the wanted steps changed."""
    changed = sum(float(np.sum((w - b) ** 2.0)) for w, b in zip(wanted, before, strict=True))
    error = sum(float(np.sum((w - f) ** 2.0)) for w, f in zip(wanted, found, strict=True))
    return (error / changed) ** 0.5


def rows(name: str, runner: str, found: dict[str, Any]) -> list[str]:
    """Return a line for each budget."""
    plain, lines = found["plain"], []
    for fraction, ours in found["budgets"].items():
        start = [name, runner, fraction, f"{plain['peak'] / MB:.1f}"]
        if "refused" in ours:
            lines.append(line([*start, "", f"refused: at least {ours['refused'] / MB:.1f}",
                               *[""] * 7]))
            continue
        allowed = ours["allowed"]
        lines.append(line([
            *start, _ratio(ours["expected_plain"], plain["peak"]), f"{ours['peak'] / MB:.1f}",
            _ratio(ours["expected"], ours["peak"]), _ratio(ours["peak"], plain["peak"]),
            "" if allowed is None else f"{allowed / MB:.1f}",
            "" if allowed is None else _ratio(ours["peak"], allowed),
            f"{ours['seconds'] / plain['seconds']:.2f}x", f"{1 + ours['overhead']:.2f}x",
            f"{ours['numbers']:.0e} / {found['again']:.0e}"]))
    return lines


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "-"


def main(_: list[str]) -> int:
    """Print the table, and what it was measured on."""
    if FLAGS.pair:
        print(json.dumps(measure(*FLAGS.pair.split(","))))
        return 0
    if FLAGS.simulated_for:
        print(head(("network", "budget", "plain MB, expected", "tfckpt MB, expected", "ratio",
                    "planned time")))
        for name in FLAGS.only or NETWORKS:
            print(*simulated(name), sep="\n", flush=True)
        return 0
    import tensorflow as tf

    from benchmarks.measure import device_name

    began, left_out = time.monotonic(), []
    name = device_name(f"CPU ({platform.machine()})")
    print(f"{name}, TensorFlow {tf.__version__}, {FLAGS.policy}\n\n{head(COLUMNS)}", flush=True)
    if FLAGS.at_once > 1:  # else each process takes all of a GPU's memory
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

    def ask(runner: str, name: str) -> str | None:
        if time.monotonic() - began > FLAGS.limit_s:
            left_out.append(f"{name} ({runner})")
            return None
        output = in_own_process(f"{name} {runner}", "benchmarks.gpu_report", (
            f"--pair={name},{runner}", f"--fractions={','.join(FLAGS.fractions)}",
            f"--measured_steps={FLAGS.measured_steps}", f"--policy={FLAGS.policy}",
            f"--turns={turns.name}"))
        if output is None:
            left_out.append(f"{name} ({runner}): failed, see above")
            return None
        return "\n".join(rows(name, runner, json.loads(output.splitlines()[-1])))

    pairs = [(runner, name) for runner in FLAGS.runners for name in FLAGS.only or NETWORKS]
    with (tempfile.NamedTemporaryFile() as turns,
          concurrent.futures.ThreadPoolExecutor(FLAGS.at_once) as pool):
        for found in pool.map(lambda pair: ask(*pair), pairs):
            if found is not None:
                print(found, flush=True)
    print(f"\n{time.monotonic() - began:.0f} s" + "".join(f"; left out: {w}" for w in left_out))
    return 0


if __name__ == "__main__":
    sys.exit(app.run(main))
