"""Compares budgets with compiled bytes: XLA on this machine's device, plain against ours.

    python -m benchmarks.xla_budgets [--networks=decoder,unet] [--budgets=min,0.3,0.5,0.8]
                                     [--trials=2] [--precision=mixed_bfloat16]
                                     [--device=H100-80GB] [--guard=data] [--json=FILE]

With `--device` steps are planned and compiled for a GPU that is described, and not here
(`tfckpt.verify.compiled_for`, by an interpreter with `jax[cuda12]` that TFCKPT_JAX_PYTHON names).

A row for each network of `benchmarks.networks` and budget: temporary bytes of the compiled plain
step and of ours, as XLA's buffer assignment has them (`tfckpt.verify.compiled`, which asks about
the finished function), their ratio, what was planned relative to what was compiled, for the plain
step and for ours, the planned extra time, matrix products and convolutions beside the plain
step's, recomputed ops that are computed and those that are folded into other ops, of those that
were planned (the others were merged with their originals), how many plans XLA was asked about, how
long it took to answer (about the plain step, too) as a multiple of compiling the plain step, and
the seconds of planning beside that. Nothing is trained.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import keras
import tensorflow as tf
from absl import app, flags

from benchmarks.network_steps import batch_of, step_of
from benchmarks.networks import NETWORKS, Network
from tfckpt.carriers.checkpointed import CheckpointedStep
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.target import Target
from tfckpt.request.devices import find_device
from tfckpt.request.options import make_options
from tfckpt.verify import Compiled, compiled, compiled_for

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", list(NETWORKS), "Names in benchmarks.networks.NETWORKS.")
flags.DEFINE_list("budgets", ["min", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"], "Budgets.")
flags.DEFINE_integer("trials", 2, "How many plans XLA may be asked about.")
flags.DEFINE_string("precision", "float32", "A policy of keras.mixed_precision.")
flags.DEFINE_string("device", "", "A described GPU to plan and compile for; see grappler_ext.")
flags.DEFINE_string("guard", "", "What delays copies (tfckpt.ir.target.Target.guard).")
flags.DEFINE_string("json", "", "A file to write the same figures to.")


def target() -> Target | None:
    """Return what the flags ask to be planned for; None for this machine's device."""
    if not FLAGS.device:
        return None
    found = find_device(FLAGS.device).target()
    return dataclasses.replace(found, guard=FLAGS.guard or found.guard)


def look(step: Any, batch: list[tf.Tensor]) -> Compiled:
    """Return what XLA makes of a step, for the device that the flags name."""
    if FLAGS.device:
        return compiled_for(find_device(FLAGS.device).model, step, *batch)
    return compiled(step, *batch)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A network, its plain step as compiled, and the seconds that this took."""

    network: Network
    compiled: Compiled
    seconds: float


def plain_of(name: str) -> Plain:
    """Compile the plain step of a network for the device that the flags name."""
    keras.backend.clear_session()  # forgets the policy as well
    keras.mixed_precision.set_dtype_policy(FLAGS.precision)
    network = NETWORKS[name]()
    batch, step = batch_of(network), step_of(network)
    step.get_concrete_function(*batch)
    started = time.perf_counter()
    return Plain(network, look(step, batch), time.perf_counter() - started)


def ours(plain: Plain, budget: str | float, trials: int) -> dict[str, Any]:
    """Return the figures of the step as rewritten for a budget.

    Where that is refused they are one, `refused`: what is at least needed, of the plain step's.
    """
    step = CheckpointedStep(step_of(plain.network), make_options(
        budget, xla_trials=trials, target=target()))
    try:
        after = look(step, batch_of(plain.network))
    except InfeasibleBudgetError as error:
        return {"refused": error.smallest_bytes / plain.compiled.temp_bytes}
    return figures(plain.compiled, after, step.report, plain.seconds)


def rows(name: str, budgets: list[str], trials: int) -> dict[str, dict[str, Any]]:
    """Print a line for each budget of one network, and return its figures by budget."""
    plain = plain_of(name)
    taken = plain.compiled.temp_bytes
    found: dict[str, dict[str, Any]] = {
        "plain": {"temp_bytes": taken, "heavy": plain.compiled.heavy_count}}
    for text in budgets:
        found[text] = of = ours(plain, text if text == "min" else float(text), trials)
        print(f"| {name} | {text} | {taken / 1e6:.1f} | | refused: at least {of['refused']:.2f} "
              "| | | | | | | |" if "refused" in of else line(name, text, plain.compiled, of),
              flush=True)
    return found


def figures(plain: Compiled, after: Compiled, report: Any, compiling: float) -> dict[str, Any]:
    """Return what is told of one rewritten step."""
    told = report.compiled
    return {"temp_bytes": after.temp_bytes, "heavy": after.heavy_count,
            "planned": report.simulated_bytes[1], "planned_plain": report.simulated_bytes[0],
            "of_plain": after.temp_bytes / plain.temp_bytes, "time": report.overhead,
            "extra_heavy": after.heavy_count - plain.heavy_count,
            "copies": after.copy_count, "folded": after.folded_count,
            "to_copy": after.planned_count, "trials": told.trials,
            "asking": told.seconds / compiling, "compiling": compiling,
            "planning": report.plan_seconds - told.seconds}


def line(name: str, budget: str, plain: Compiled, of: dict[str, Any]) -> str:
    """Return a line of the table."""
    return (f"| {name} | {budget} | {plain.temp_bytes / 1e6:.1f} | {of['temp_bytes'] / 1e6:.1f} | "
            f"{of['of_plain']:.3f} | {of['planned_plain'] / plain.temp_bytes:.2f} | "
            f"{of['planned'] / of['temp_bytes']:.2f} | {100 * of['time']:+.0f} % | "
            f"{of['extra_heavy']:+} | {of['copies']} + {of['folded']} of {of['to_copy']} | "
            f"{of['trials']} | "
            f"{of['asking']:.1f}x of {of['compiling']:.1f} s | {of['planning']:.1f} s |")


def main(argv: list[str]) -> None:
    """Print the table."""
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {FLAGS.precision}, "
          f"{FLAGS.device or ('GPU' if tf.config.list_physical_devices('GPU') else 'CPU')}\n")
    columns = ("network", "budget", "plain MB", "ours MB", "of plain", "plain planned / compiled",
               "planned / compiled", "time", "heavy", "computed + folded",
               "plans tried", "asking", "planning")
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    found = {name: rows(name, FLAGS.budgets, FLAGS.trials) for name in FLAGS.networks}
    if FLAGS.json:
        with open(FLAGS.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    app.run(main)
