"""Trains two networks on real data with and without tfckpt and compares them.

    make demo        (or: python -m examples.demo)

ResNet-50 learns which of two photographs a crop is from, a transformer encoder learns which text
a piece of text is from. Each network exists twice, with equal weights: one is trained by plain
Keras, the other by Keras with tfckpt. The two take turns, batch by batch, in one process, and each
network has its own: where another was trained before, free memory is in pieces, and large tensors
lie in larger chunks. Printed at the end: peak memory, time per step, and whether all losses and all
weights agree in every bit. The picture `demo_memory.png` shows the memory in use over a step,
before and after.

Operations run one at a time (one inter-op thread; each may still use every core). With more,
plain TensorFlow does not repeat its own results bit for bit, since the order in which it adds
three or more gradients depends on which is there first. In a large step (on the CPU above some
215 MB) it adds them in the order of arrival even on one thread, and a plan that reorders the
backward pass may then round differently. The sizes below agree.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import tfckpt
from benchmarks import jobs
from benchmarks.measure import MB, Meter, Sample
from examples import data
from tfckpt.report import pictures
from tfckpt.report.report import Report

PICTURE = "demo_memory.png"
SEED = 7
# The first steps trace, plan and settle; they train, but they are not measured.
UNMEASURED = 2
WHY_NOT_IDENTICAL = (
    "Not identical: in a step of this size TensorFlow adds three or more gradients in the order "
    "in which\nthey arrive, plain or not; see 'What fails' in BUILD_NOTES.md."
)


@dataclass(frozen=True)
class Task:
    """One network of the demo: how to build it (compiled) and the batches it is trained on."""

    title: str
    build: Callable[[], Any]
    batches: Callable[[], Iterator[data.Batch]]


@dataclass
class Run:
    """What was seen while one model was trained."""

    model: Any
    losses: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def peak(self) -> float:
        """Median over the measured steps of the peak, in bytes above the step's start."""
        return statistics.median(sample.peak for sample in self.samples[UNMEASURED:])


def photo_task(steps: int, tiny: bool) -> Task:
    """ResNet-50 on crops of photographs."""
    batch, size = (2, 32) if tiny else (16, 128)
    return Task(
        f"ResNet-50, batch {batch}, {size}x{size}",
        lambda: jobs.resnet50(batch, size, classes=data.PHOTO_CLASSES, seed=SEED).model,
        lambda: data.photo_batches(steps, batch, size, SEED),
    )


def text_task(steps: int, tiny: bool) -> Task:
    """Transformer encoder on pieces of text."""
    sizes = jobs.TINY["transformer"] if tiny else {"layers": 4, "seq": 128, "batch": 8}
    words = {"vocabulary": data.BYTE_VALUES, "classes": data.TEXT_CLASSES, "seed": SEED}
    return Task(
        f"Transformer, batch {sizes['batch']}, {sizes['seq']} tokens",
        lambda: jobs.transformer(**sizes, **words).model,
        lambda: data.text_batches(steps, sizes["batch"], sizes["seq"], SEED),
    )


TASKS = photo_task, text_task


def with_tfckpt(model: Any) -> Any:
    """Return the same model, trained in as little memory as tfckpt can reach."""
    optimizer, loss = model.optimizer, model.loss
    model = tfckpt.keras.checkpoint(model, budget="min")
    # jit_compile=False: as the plain model is trained, where losses agree in every bit
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def train_batch(run: Run, x: np.ndarray, y: np.ndarray) -> None:
    """One Keras training step; notes its loss, its peak memory and its time."""
    run.model.reset_metrics()
    x, y = tf.constant(x), tf.constant(y)
    meter = Meter()
    meter.start()
    loss = run.model.train_on_batch(x, y)
    run.samples.append(meter.stop())
    run.losses.append(float(loss))


def train(task: Task) -> tuple[Run, Run]:
    """Train both copies on the same batches in turns; return (plain, with tfckpt)."""
    plain, ours = Run(task.build()), Run(with_tfckpt(task.build()))
    print(f"\n{task.title} (the first step traces the network and plans)", flush=True)
    for number, (x, y) in enumerate(task.batches(), start=1):
        train_batch(plain, x, y)
        train_batch(ours, x, y)
        print(f"  step {number:2}   plain: {_step(plain)}   tfckpt: {_step(ours)}", flush=True)
    return plain, ours


def _step(run: Run) -> str:
    sample = run.samples[-1]
    return f"loss {run.losses[-1]:.6f} {sample.peak / MB:6.0f} MB {sample.seconds:6.2f} s"


def same_weights(first: Any, second: Any) -> bool:
    """Return whether all variables of two models agree in every bit."""
    pairs = zip(first.get_weights(), second.get_weights(), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def identical(plain: Run, ours: Run) -> bool:
    """Return whether every loss and every weight agrees in every bit."""
    return plain.losses == ours.losses and same_weights(plain.model, ours.model)


def table_row(title: str, plain: Run, ours: Run) -> list[str]:
    """Return the line of the closing table for one network."""
    measured = zip(plain.samples[UNMEASURED:], ours.samples[UNMEASURED:], strict=True)
    slower = statistics.median(o.seconds / p.seconds for p, o in measured)
    return [
        title,
        f"{plain.peak() / MB:.0f}",
        f"{ours.peak() / MB:.0f}",
        f"{ours.peak() / plain.peak():.2f}" if plain.peak() else "-",
        f"{slower:.2f}",
        f"{plain.losses[-1]:.8f}",
        f"{ours.losses[-1]:.8f}",
        "yes" if identical(plain, ours) else "no",
    ]


def print_table(rows: list[list[str]]) -> None:
    """Print rows under a header, columns aligned."""
    header = ["model", "plain MB", "tfckpt MB", "ratio", "time ratio"]
    header += ["loss, plain", "loss, tfckpt", "identical?"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def run(make: Callable[[int, bool], Task], steps: int, tiny: bool
        ) -> tuple[list[str], Report | None]:
    """Train one network; return its line of the closing table and the report."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    task = make(steps, tiny)
    plain, ours = train(task)
    tfckpt.verify.wait_for_certificates()  # which tell whether any bit may change
    report = tfckpt.keras.report(ours.model)
    if report is not None:
        report.measured_peak_bytes = round(ours.peak())
        print(f"\n{report}", flush=True)
    return table_row(task.title, plain, ours), report


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="Train with and without tfckpt and compare.")
    parser.add_argument("--steps", type=int, default=10, help="training steps per network")
    parser.add_argument("--tiny", action="store_true", help="miniature networks, for a quick look")
    options = parser.parse_args()
    if options.steps <= UNMEASURED:
        parser.error(f"--steps must be more than {UNMEASURED}")
    began = time.perf_counter()
    rows, reports = [], {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as own:
        for make in TASKS:
            row, report = own.submit(run, make, options.steps, options.tiny).result()
            rows.append(row)
            if report is not None:
                reports[row[0]] = report
    print()
    print_table(rows)
    print(
        f"\nMB: peak above what was allocated when the step began, median of "
        f"{options.steps - UNMEASURED} steps."
    )
    print(
        "Ratios: tfckpt / plain. Loss: of the last step. "
        "Identical: all losses and all weights, bit for bit,\nas seen here; the row of that name "
        "in a report says what is certain for any data."
    )
    if any(row[-1] == "no" for row in rows):
        print(WHY_NOT_IDENTICAL)
    if reports:
        pictures.save(pictures.step_figure(reports), PICTURE)
        print(f"Memory over the step: {PICTURE}")
    print(f"Done in {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
