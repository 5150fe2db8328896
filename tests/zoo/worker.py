"""One worker of `test_workers`: trains under MultiWorkerMirroredStrategy, prints what came of it.

    TF_CONFIG=... python -m tests.zoo.worker plain|rewritten [DIRECTORY [KILLED_AT]]

With a directory it saves a checkpoint after each step and goes on from the last one there. The last
worker kills itself as step KILLED_AT begins; the others print the error that they meet.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.zoo import steps

CALLS = 5


class Worker:
    """Model, optimizer and the step of all workers, as this one sees them."""

    def __init__(self, rewrite: bool):
        self.index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        self.strategy = strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            self.model = model = steps.stack(keras.layers.BatchNormalization)
            self.optimizer = optimizer = steps.sgd()
            optimizer.build(model.trainable_variables)
            self.done = tf.Variable(0, dtype=tf.int64)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def replica(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True)) / steps.BATCH
            found = tape.gradient(value, model.trainable_variables)
            optimizer.apply(found, model.trainable_variables)
            return value

        def step(x, y):
            return strategy.reduce("sum", strategy.run(replica, args=(x, y)), axis=None)

        self.step = tf.function(step)
        if rewrite:
            self.step = tfckpt.checkpoint(self.step)

    def batches(self):
        """Return what this worker gets of each batch."""
        rng = np.random.default_rng(0)
        data = tf.data.Dataset.from_tensor_slices((
            rng.standard_normal((CALLS * steps.BATCH, steps.FEATURES), dtype=np.float32),
            rng.integers(0, steps.CLASSES, CALLS * steps.BATCH)))
        return self.strategy.experimental_distribute_dataset(
            data.batch(steps.BATCH, drop_remainder=True))

    def manager(self, directory: str) -> tf.train.CheckpointManager:
        """Restore the last checkpoint there. Each worker has its own: batch statistics differ."""
        variables = [*self.model.variables, *self.optimizer.variables]
        checkpoint = tf.train.Checkpoint(done=self.done, variables=[v.value for v in variables])
        manager = tf.train.CheckpointManager(
            checkpoint, pathlib.Path(directory) / str(self.index), max_to_keep=2)
        if manager.restore_or_initialize():
            assert self.done.numpy() > 0
        return manager

    def state(self) -> str:
        """Return a digest of all variables."""
        return hashlib.sha256(b"".join(v.numpy().tobytes() for v in [
            *self.model.variables, *self.optimizer.variables])).hexdigest()


def main(rewrite: bool, directory: str = "", killed_at: str = "") -> None:
    """Train and print one line of JSON."""
    process.prepare()
    process.seed()
    worker = Worker(rewrite)
    manager = worker.manager(directory) if directory else None
    first, losses, error = int(worker.done.numpy()), [], ""
    try:
        for number, (x, y) in enumerate(worker.batches()):
            if number < first:
                continue
            if str(number) == killed_at and worker.index:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(float(worker.step(x, y)))
            worker.done.assign_add(1)
            if manager:
                manager.save()
    except tf.errors.OpError as raised:
        error = type(raised).__name__
    report = worker.step.report if rewrite else None
    print(json.dumps({
        "worker": worker.index, "first": first, "losses": losses, "error": error,
        "state": "" if error else worker.state(), "applied": bool(report and report.applied),
        "recomputed": report.recomputed_ops if report else 0,
        "reason": report.reason if report else ""}), flush=True)
    if error:
        os._exit(3)  # an orderly end would wait for the one that is gone


if __name__ == "__main__":
    main(sys.argv[1] == "rewritten", *sys.argv[2:])
