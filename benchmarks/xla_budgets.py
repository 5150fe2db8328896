"""Whether budgets mean compiled bytes: XLA on this machine's device, plain against ours.

    python -m benchmarks.xla_budgets [--networks=decoder,unet] [--budgets=min,0.3,0.5,0.8]
                                     [--trials=2] [--precision=mixed_bfloat16]

A row for each network of `benchmarks.networks` and budget: temporary bytes of the compiled plain
step and of ours, as XLA's buffer assignment has them (`tfckpt.verify.compiled`, which asks about
the finished function), their ratio, what was planned relative to what was compiled, the planned
extra time, how many plans XLA was asked about, how long it took to answer (about the plain step,
too) as a multiple of compiling the plain step, and the seconds of planning beside that.
Nothing is trained.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf
from absl import app, flags

import tfckpt
from benchmarks.networks import NETWORKS, Network
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.verify import compiled

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", list(NETWORKS), "Names in benchmarks.networks.NETWORKS.")
flags.DEFINE_list("budgets", ["min", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"], "Budgets.")
flags.DEFINE_integer("trials", 2, "How many plans XLA may be asked about.")
flags.DEFINE_string("precision", "float32", "A policy of keras.mixed_precision.")


def step_of(network: Network) -> Any:
    """Return a training step with Adam, as a `tf.function` for XLA."""
    model, optimizer = network.model, keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
        return value

    return tf.function(step, jit_compile=True)


def batch_of(network: Network) -> list[tf.Tensor]:
    """Return zeros of the batch's and the labels' shapes: only these matter here."""
    return [tf.zeros(shape, dtype) for shape, dtype in (network.x, network.y)]


def rows(name: str, budgets: list[str], trials: int) -> list[str]:
    """Return the lines of one network."""
    keras.backend.clear_session()
    network = NETWORKS[name]()
    batch, step = batch_of(network), step_of(network)
    step.get_concrete_function(*batch)
    started = time.perf_counter()
    plain = compiled(step, *batch)
    compiling = time.perf_counter() - started
    found = []
    for text in budgets:
        budget = text if text == "min" else float(text)
        ours = tfckpt.checkpoint(step_of(network), budget=budget, xla_trials=trials)
        try:
            after = compiled(ours, *batch)
        except InfeasibleBudgetError as error:
            found.append(f"| {name} | {text} | {plain.temp_bytes / 1e6:.1f} | | refused: at least "
                         f"{error.smallest_bytes / plain.temp_bytes:.2f} | | | | | |")
            continue
        report = ours.report
        told = report.compiled
        found.append(
            f"| {name} | {text} | {plain.temp_bytes / 1e6:.1f} | {after.temp_bytes / 1e6:.1f} | "
            f"{after.temp_bytes / plain.temp_bytes:.3f} | "
            f"{report.planned_peak_bytes / after.temp_bytes:.2f} | "
            f"{100 * report.overhead:+.0f} % | {told.trials} | "
            f"{told.seconds / compiling:.1f}x of {compiling:.1f} s | "
            f"{report.plan_seconds - told.seconds:.1f} s |")
    return found


def main(argv: list[str]) -> None:
    """Print the table."""
    keras.mixed_precision.set_dtype_policy(FLAGS.precision)
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {FLAGS.precision}, "
          f"{'GPU' if tf.config.list_physical_devices('GPU') else 'CPU'}\n")
    print("| network | budget | plain MB | ours MB | of plain | planned / compiled | time | plans "
          "tried | asking | planning |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in FLAGS.networks:
        print("\n".join(rows(name, FLAGS.budgets, FLAGS.trials)), flush=True)


if __name__ == "__main__":
    app.run(main)
