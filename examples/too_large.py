"""The tutorial's example: trains a network on a device that is too small for it.

    python -m examples.too_large [--small]

A CPU has all the memory of the machine, so the device is made small: TensorFlow's best-fit
allocator, the one of its GPUs, is switched on for the CPU with a limit
(`TF_CPU_BFC_MEM_LIMIT_IN_MB`) and refuses what goes beyond, as at the end of a GPU's memory. Each
attempt is a process of its own, since TensorFlow reads the settings when it starts. The plain one
ends in TensorFlow's own `ResourceExhaustedError`; with a budget below the limit tfckpt trains, and
a budget that no plan reaches is refused before anything runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import keras
import tensorflow as tf

import tfckpt
from examples import data, saving

MB = 10**6
BLOCKS, WIDTH, LENGTH = 6, 64, 128


def build() -> keras.Model:
    """Residual layers on pieces of text, position by position."""
    saving.seed()
    layer = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    h = layer.Embedding(data.BYTE_VALUES, WIDTH)(tokens)
    for _ in range(BLOCKS):
        m = layer.Dense(4 * WIDTH, activation="gelu")(layer.LayerNormalization()(h))
        h = layer.Add()([h, layer.Dense(WIDTH)(m)])
    return keras.Model(tokens, layer.Dense(data.TEXT_CLASSES)(layer.GlobalAveragePooling1D()(h)))


def train(budget: str | None, batch: int) -> None:
    """Three steps under whatever limit the process has; prints how they went."""
    saving.repeatable()
    model = build()
    if budget is not None:
        tfckpt.keras.checkpoint(model, budget=budget)
    # jit_compile=False: the limit is one of TensorFlow's allocator, and what it holds is shown
    model.compile(keras.optimizers.Adam(1e-3),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    try:
        for number, (x, y) in enumerate(data.text_batches(3, batch, LENGTH, seed=7), start=1):
            print(f"  step {number}: loss {model.train_on_batch(x, y):.6f}", flush=True)
    except tf.errors.ResourceExhaustedError as error:
        reason = next(line for line in str(error).splitlines() if "OOM" in line)
        print(f"  does not fit: {reason.strip()}")
        return
    except tfckpt.InfeasibleBudgetError as error:
        print(f"  refused: {error}")
        return
    if budget is not None:
        print("\n".join(str(tfckpt.keras.report(model)).splitlines()[1:6]))
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    print(f"  peak of the device {peak / MB:.0f} MB")


def attempt(title: str, limit_mib: int | None, *flags: str) -> None:
    """Run `train` in a process whose device has `limit_mib` MiB; None for no limit."""
    print(f"\n{title}", flush=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0",
                   "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    if limit_mib is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mib)
    subprocess.run([sys.executable, "-m", "examples.too_large", *flags], check=True,
                   env=environment)


def main() -> None:
    """Three attempts, or one of them where `--budget` says which."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="smaller sizes, for a quick look")
    parser.add_argument("--budget", help='one attempt in this process: "plain" or a budget')
    options = parser.parse_args()
    batch, limit, budget, tight = (24, 80, 70, 10) if options.small else (96, 300, 270, 60)
    if options.budget:
        return train(None if options.budget == "plain" else options.budget, batch)
    small = ["--small"] if options.small else []
    attempt("plain, no limit", None, "--budget=plain", *small)
    attempt(f"plain, limit {limit} MiB", limit, "--budget=plain", *small)
    for size in (budget, tight):
        attempt(f"tfckpt, budget={size}MiB, limit {limit} MiB", limit, f"--budget={size}MiB",
                *small)


if __name__ == "__main__":
    main()
