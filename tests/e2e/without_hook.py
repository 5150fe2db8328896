"""Trains with and without tfckpt in a TensorFlow without a trace hook; see `test_import_route`.

    python -m tests.e2e.without_hook missing|unknown

Prints one line of JSON: by kind of training, the results of the plain and of the rewritten one.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings

from tests.support import unhooked

LAYERS, WIDTH, BATCH, STEPS = 12, 64, 4096, 3


def digest(values) -> str:
    """Of the bytes of tensors or variables."""
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()


def by_hand(tf, np):
    """Return a chain of layers, its `tf.function`, and its variables."""
    rng = np.random.default_rng(0)
    weights = [tf.Variable((rng.standard_normal((WIDTH, WIDTH)) * 0.2).astype("float32"))
               for _ in range(LAYERS)]
    counter = tf.Variable(0)

    @tf.function
    def step(batch, scale=1.0):
        counter.assign_add(1)
        with tf.GradientTape() as tape:
            h = batch["x"]
            for w in weights:
                h = tf.tanh(h @ w)
            if tf.reduce_sum(h) > 1e9:  # needs autograph
                h = h * 0.0
            loss = tf.reduce_mean(tf.square(h)) * scale
        gradients = tape.gradient(loss, weights)
        for w, g in zip(weights, gradients, strict=True):
            w.assign_sub(0.1 * g)
        return {"loss": loss, "gradients": tuple(gradients), "none": None}

    return step, [*weights, counter]


def train_by_hand(rewrite: bool) -> dict:
    """Calls of a decorated `tf.function`, measured."""
    import numpy as np
    import tensorflow as tf

    import tfckpt
    from tfckpt.verify import executed

    step, variables = by_hand(tf, np)
    if rewrite:
        step = tfckpt.checkpoint(step)
    batch = {"x": tf.constant(np.random.default_rng(1).standard_normal(
        (BATCH, WIDTH), dtype=np.float32))}
    results, peaks = [], []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        found = step(batch, scale=2.0)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
        results.append(digest([found["loss"], *found["gradients"]]))
        assert found["none"] is None
        del found
    return {"results": results, "state": digest(variables), "peak": peaks[-1],
            "copies": executed(step, batch, scale=2.0).copy_count,
            "applied": rewrite and step.report.applied,
            "signatures": sorted(step.reports) if rewrite else []}


def train_keras(rewrite: bool, strategy=None) -> dict:
    """`fit` of a stock model with dropout, batch normalisation and a ragged last batch."""
    import contextlib

    import keras
    import numpy as np

    import tfckpt
    from tests.support import process

    process.fresh()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((WIDTH,)), *(layer for _ in range(4) for layer in (
            keras.layers.Dense(WIDTH, "gelu"), keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2)))])
        model.compile("adam", "mse", jit_compile=False, metrics=["mae"])
    if rewrite:
        tfckpt.keras.checkpoint(model)
    x = np.random.default_rng(2).standard_normal((STEPS * BATCH - 100, WIDTH), dtype=np.float32)
    history = model.fit(x, x, batch_size=BATCH, verbose=0, shuffle=False,
                        callbacks=[tfckpt.keras.PeakMemory()]).history
    peak = history.pop("peak_memory_mib")[-1]
    report = tfckpt.keras.report(model) if rewrite else None
    return {"results": [history["loss"], history["mae"]], "peak": peak,
            "state": digest([*model.variables, *model.optimizer.variables]),
            "applied": bool(report and report.applied)}


def train_recurrent(rewrite: bool) -> dict:
    """LSTM layers on top of each other; `copies` counts products in copies of their loops."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfckpt
    from tests.support import process
    from tfckpt.verify import executed

    process.fresh()
    model = keras.Sequential([keras.Input((8, 16), batch_size=64),
                              *(keras.layers.LSTM(16, return_sequences=True) for _ in range(3))])
    weights = [v.value for v in model.trainable_variables]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    if rewrite:
        step = tfckpt.checkpoint(step)
    x = tf.constant(np.random.default_rng(2).standard_normal((64, 8, 16), dtype=np.float32))
    return {"results": [digest([step(x)]) for _ in range(STEPS)], "state": digest(weights),
            "copies": sum("while-tfckpt" in node.name and "MatMul" in node.op
                          for node in executed(step, x).nodes)}


def train_under_tape(rewrite: bool) -> dict:
    """Return a step inside of a function whose own tape looks through it."""
    import tensorflow as tf

    import tfckpt

    x = tf.Variable([2.0])

    def inner(y):
        with tf.GradientTape() as tape:
            tape.watch(y)
            cube = y * y * y
        return tape.gradient(cube, y)

    step = tfckpt.checkpoint(inner) if rewrite else inner

    @tf.function
    def outer():
        with tf.GradientTape() as tape:
            slope = step(x + 0.0)
        return tape.gradient(slope, x)

    return {"results": outer().numpy().tolist()}


def main(what: str) -> None:
    """Train everything twice."""
    unhooked.take_away(what)
    import tensorflow as tf

    from tests.support import process

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    process.prepare()
    found = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process.seed()
        found["function"] = [train_by_hand(False), train_by_hand(True)]
        found["keras"] = [train_keras(False), train_keras(True)]
        found["recurrent"] = [train_recurrent(False), train_recurrent(True)]
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        found["replicas"] = [train_keras(False, strategy), train_keras(True, strategy)]
        found["tape"] = [train_under_tape(False), train_under_tape(True)]
    found["warnings"] = [str(w.message) for w in caught if str(w.message).startswith("tfckpt:")]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
