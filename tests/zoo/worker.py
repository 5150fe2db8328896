"""One worker of `test_workers`: trains under MultiWorkerMirroredStrategy, prints digests.

    TF_CONFIG=... python -m tests.zoo.worker plain|rewritten
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.zoo import steps

CALLS = 3


def main(rewrite: bool) -> None:
    """Trains and prints one line of JSON."""
    process.prepare()
    process.seed()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = steps.stack(keras.layers.BatchNormalization)
        optimizer = steps.sgd()
        optimizer.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / steps.BATCH
        found = tape.gradient(value, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return value

    def step(x, y):
        return strategy.reduce("sum", strategy.run(replica, args=(x, y)), axis=None)

    function = tf.function(step)
    if rewrite:
        function = tfckpt.checkpoint(function)
    rng = np.random.default_rng(0)
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((
        rng.standard_normal((CALLS * steps.BATCH, steps.FEATURES), dtype=np.float32),
        rng.integers(0, steps.CLASSES, CALLS * steps.BATCH))).batch(
            steps.BATCH, drop_remainder=True))
    losses = [float(function(x, y)) for x, y in data]
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in [
        *model.variables, *optimizer.variables])).hexdigest()
    report = function.report if rewrite else None
    print(json.dumps({
        "worker": json.loads(os.environ["TF_CONFIG"])["task"]["index"], "losses": losses,
        "state": digest, "applied": bool(report and report.applied),
        "recomputed": report.recomputed_ops if report else 0,
        "reason": report.reason if report else ""}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "rewritten")
