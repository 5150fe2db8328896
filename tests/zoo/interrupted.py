"""A `fit` with `BackupAndRestore` that is killed in mid-run, and resumed; see `test_interrupted`.

    python -m tests.zoo.interrupted plain|rewritten [DIRECTORY [KILLED_AT]]

The process kills itself as the given batch, counted over all epochs, begins. With a directory it
goes on from the backup there. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys

import keras
import numpy as np

import tfckpt
from tests.support import process
from tests.zoo import steps

EPOCHS = 4


class Killed(keras.callbacks.Callback):
    """Kills the process as a batch begins."""

    def __init__(self, batch: int):
        super().__init__()
        self.left = batch

    def on_train_batch_begin(self, batch, logs=None):
        """Count down."""
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def main(rewrite: bool, directory: str = "", killed_at: str = "") -> None:
    """Train and print what came of it."""
    process.prepare()
    process.seed()
    # no Dropout: with it not even a plain fit resumes with its own numbers
    model = steps.stack(keras.layers.BatchNormalization)
    if rewrite:
        tfckpt.keras.checkpoint(model)
    model.compile(keras.optimizers.Adam(1e-2), steps.crossentropy(), jit_compile=False)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps.STEPS * steps.BATCH, steps.FEATURES), dtype=np.float32)
    y = rng.integers(0, steps.CLASSES, len(x))
    callbacks = [keras.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
                 ] if directory else []
    if killed_at:
        callbacks.append(Killed(int(killed_at)))
    history = model.fit(x, y, batch_size=steps.BATCH, epochs=EPOCHS, shuffle=False, verbose=0,
                        callbacks=callbacks)
    report = tfckpt.keras.report(model) if rewrite else None
    print(json.dumps({
        "epochs": history.epoch, "losses": history.history["loss"],
        "recomputed": report.recomputed_ops if report else 0,
        "state": hashlib.sha256(b"".join(v.numpy().tobytes() for v in [
            *model.variables, *model.optimizer.variables])).hexdigest()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "rewritten", *sys.argv[2:])
