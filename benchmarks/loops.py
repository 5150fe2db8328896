"""Loops recomputed segment by segment, and gradients inside of loops: peak and time of the plain
and of the rewritten step.

    python -m benchmarks.loops [--jobs=lstm,lstm3,lstm8,open3,fit3,ctc,heat,blocks,layers,
        ode,unrolled,accumulate,critic,epoch] [--budgets=min,0.3,0.6] [--compiled] [--tiny]

Each job runs in a process of its own with one inter-op thread, for each budget. Measured are the
peaks of TensorFlow's allocator above what is allocated when the step begins (median of three
calls), and the processor's seconds of a call (minimum of five, plain and rewritten step in turns).
The allocator is the one that GPUs have, which counts tensors of any size. Printed too: over the
measured peak the expected one (the middle of what is simulated) and the planned one (the worst of
it, which a budget counts); how many iterations segments have, those in segments after a stroke, and
how many at the end are in none, or of how many tensors of an iteration the gradient's loop computes
again, or how many sums of the gradients of slices are put side by side; and whether losses and
weights of three steps are the same in every bit.
With `--compiled` XLA compiles the steps, and the bytes are the temporary ones of its buffer
assignment.
"""

from __future__ import annotations

import json
import os
import time

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("jobs", ["lstm", "lstm3", "lstm8", "open3", "fit3", "ctc", "heat", "blocks",
                           "layers", "ode", "unrolled", "accumulate", "critic", "epoch"],
                  "Which to measure.")
flags.DEFINE_list("budgets", ["min"], "Budgets: min, or fractions of the plain peak.")
flags.DEFINE_bool("compiled", False, "Whether XLA compiles the steps.")
flags.DEFINE_bool("tiny", False, "A sixteenth of the iterations, to try this program out.")
flags.DEFINE_string("one", "", "The job that this process measures, for the program itself.")

_COLUMNS = ("job", "budget", "plain MB", "ours MB", "ours / plain", "expected / measured",
            "planned / measured", "time", "segments", "identical")
_CALLS = 5
_OPEN = {"open3": (None, None), "fit3": (None, 64)}
"""Jobs whose trace leaves sizes open: of the batch, and the lengths of sequences."""

_FEATURES = 16


def _recurrent(keras, kind, count: int, units: int, steps: int, batch: int):
    """Return a stack of recurrent layers, trained on the mean square of the last one's output."""
    import numpy as np
    import tensorflow as tf

    known, length = _OPEN.get(FLAGS.one, (batch, steps))
    length = length and steps
    model = keras.Sequential([keras.Input((length, _FEATURES), batch_size=known), *(
        kind(units, return_sequences=n < count - 1, use_cudnn=False) for n in range(count))])
    x = np.random.default_rng(0).standard_normal((batch, steps, _FEATURES), dtype=np.float32)
    return (lambda x: tf.reduce_mean(tf.square(model(x, training=True)))), x, [
        v.value for v in model.trainable_variables]


def lstm(shrink: int):
    """Return one LSTM layer of 256 units, 256 steps, batch 320."""
    import keras

    return _recurrent(keras, keras.layers.LSTM, 1, 256, 256 // shrink, 320)


def lstm3(shrink: int):
    """Return three LSTM layers of 128 units, 64 steps, batch 512."""
    import keras

    return _recurrent(keras, keras.layers.LSTM, 3, 128, 64 // shrink, 512)


def lstm8(shrink: int):
    """Return eight LSTM layers of 128 units, 64 steps, batch 512."""
    import keras

    return _recurrent(keras, keras.layers.LSTM, 8, 128, 64 // shrink, 512)


def open3(shrink: int):
    """Return the same, traced for batches and sequences of any length."""
    return lstm3(shrink)


def fit3(shrink: int):
    """Return the same, traced for batches of any size, as Keras' `fit` does."""
    return lstm3(shrink)


def ctc(shrink: int):
    """Return two GRU layers of 128 units over 800 frames, batch 512, CTC loss over 32 labels."""
    import keras
    import numpy as np
    import tensorflow as tf

    frames, batch, classes, length = 800 // shrink, 512, 32, 20 // min(shrink, 4)
    model = keras.Sequential([keras.Input((frames, 40), batch_size=batch), *(
        keras.layers.GRU(128, return_sequences=True, use_cudnn=False) for _ in range(2)),
        keras.layers.Dense(classes)])
    random = np.random.default_rng(0)
    x = random.standard_normal((batch, frames, 40), dtype=np.float32)
    labels = tf.constant(random.integers(1, classes, (batch, length)), tf.int32)

    def loss(x):
        return tf.reduce_mean(tf.nn.ctc_loss(
            labels, model(x, training=True), tf.fill([batch], length),
            tf.fill([batch], frames), logits_time_major=False, blank_index=0))

    return loss, x, [v.value for v in model.trainable_variables]


def heat(shrink: int):
    """Return the heat equation on 256 x 256 points, conductivity by temperature: 1,000 steps."""
    import numpy as np
    import tensorflow as tf

    start = tf.Variable(np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32))

    def step(i, u):
        around = sum(tf.roll(u, shift, axis) for shift in (-1, 1) for axis in (0, 1))
        return i + 1, u + 0.1 * tf.sigmoid(u) * (around - 4.0 * u)

    def loss(x):
        end = tf.while_loop(lambda i, u: i < 1000 // shrink, step, (0, start.read_value()),
                            maximum_iterations=1000 // shrink)[1]
        return tf.reduce_mean(tf.square(end - x))

    return loss, np.zeros((256, 256), np.float32), [start]


def blocks(shrink: int):
    """Return a block of a Transformer of 128 units that is run six times, 16 texts of 128 words."""
    import keras
    import numpy as np
    import tensorflow as tf

    units, words = 128, 128 // min(shrink, 4)
    attention = keras.layers.MultiHeadAttention(4, units // 4)
    wide, narrow = keras.layers.Dense(4 * units, activation="gelu"), keras.layers.Dense(units)
    norms = [keras.layers.LayerNormalization() for _ in range(2)]

    def block(x):
        read = norms[0](x)
        x = x + attention(read, read)
        return x + narrow(wide(norms[1](x)))

    def loss(x):
        return tf.reduce_mean(tf.square(tf.while_loop(
            lambda i, h: i < 6, lambda i, h: (i + 1, block(h)), (0, x), maximum_iterations=6)[1]))

    x = np.random.default_rng(0).standard_normal((16, words, units), dtype=np.float32)
    block(tf.constant(x))
    return loss, x, [v.value for layer in (attention, wide, narrow, *norms)
                     for v in layer.trainable_variables]


def layers(shrink: int):
    """Return six such blocks, whose weights a loop takes from those of all."""
    import numpy as np
    import tensorflow as tf

    units, words, count = 128, 128 // min(shrink, 4), 6
    drawn = np.random.default_rng(0)
    weights = [tf.Variable(0.05 * drawn.standard_normal((count, *shape), dtype=np.float32))
               for shape in ((units, 3 * units), (units, units), (units, 4 * units),
                             (4 * units, units))]

    def block(i, h):
        q, k, v = tf.split(h @ weights[0][i], 3, -1)
        h = h + tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.1) @ v @ weights[1][i]
        return i + 1, h + tf.nn.gelu(h @ weights[2][i]) @ weights[3][i]

    def loss(x):
        return tf.reduce_mean(tf.square(tf.while_loop(
            lambda i, h: i < count, block, (0, x), maximum_iterations=count)[1]))

    return loss, drawn.standard_normal((16, words, units), dtype=np.float32), weights


def ode(shrink: int):
    """Return a neural differential equation of 128 units, 100 steps of Runge and Kutta's method."""
    import numpy as np
    import tensorflow as tf

    drawn, steps = np.random.default_rng(0), 100 // shrink
    weight = tf.Variable(0.1 * drawn.standard_normal((128, 128), dtype=np.float32))

    def slope(h):
        return tf.tanh(h @ weight)

    def step(i, h):
        first = slope(h)
        second = slope(h + 0.05 * first)
        third = slope(h + 0.05 * second)
        return i + 1, h + (first + 2.0 * second + 2.0 * third + slope(h + 0.1 * third)) / 60.0

    def loss(x):
        return tf.reduce_mean(tf.square(tf.while_loop(
            lambda i, h: i < steps, step, (0, x), maximum_iterations=steps)[1]))

    return loss, drawn.standard_normal((512, 128), dtype=np.float32), [weight]


def unrolled(shrink: int):
    """Return a recurrent layer of 128 units, unrolled over 64 slices of what it reads."""
    import numpy as np
    import tensorflow as tf

    drawn, steps = np.random.default_rng(0), 64 // shrink
    before, own = (tf.Variable(0.1 * drawn.standard_normal((128, 128), dtype=np.float32))
                   for _ in range(2))

    def loss(x):
        z, h = tf.tanh(x @ before), tf.zeros((64, 128))
        for t in range(steps):
            h = tf.tanh(z[:, t] + h @ own)
        return tf.reduce_mean(tf.square(h))

    return loss, drawn.standard_normal((64, steps, 128), dtype=np.float32), [before, own]


def accumulate(shrink: int):
    """Return eight convolutions, gradients of four parts of 64 images added up in a loop."""
    import keras
    import numpy as np
    import tensorflow as tf

    size = 64 // min(shrink, 4)
    model = keras.Sequential([keras.Input((size, size, 8), batch_size=16), *(
        keras.layers.Conv2D(32, 3, padding="same", activation="swish") for _ in range(8))])
    weights = [v.value for v in model.trainable_variables]

    def train(x):
        total, sums = 0.0, [tf.zeros_like(w) for w in weights]
        for i in tf.range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x[i * 16:(i + 1) * 16], training=True)))
            sums = [s + g for s, g in zip(sums, tape.gradient(loss, weights), strict=True)]
            total += loss
        for w, s in zip(weights, sums, strict=True):
            w.assign_sub(0.01 * s)
        return total

    x = np.random.default_rng(0).standard_normal((64, size, size, 8), dtype=np.float32)
    return train, x, weights


def critic(shrink: int):
    """Return a network trained three times in a loop, then another through it: 8,192 rows."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    first, second = ([tf.Variable(random.standard_normal((256, 256), dtype=np.float32) * 0.06)
                      for _ in range(count)] for count in (8, 6))

    def loss(x, weights):
        for w in weights:
            x = tf.nn.gelu(x @ w)
        return tf.reduce_mean(tf.square(x))

    def descend(x, weights, wanted):
        with tf.GradientTape() as tape:
            value = loss(x, weights)
        for w, g in zip(wanted, tape.gradient(value, wanted), strict=True):
            w.assign_sub(0.01 * g)
        return value

    def train(x):
        for _ in tf.range(3):
            descend(x, first, first)
        return descend(x, [*second, *first], second)

    x = random.standard_normal((8192 // shrink, 256), dtype=np.float32)
    return train, x, [*first, *second]


def epoch(shrink: int):
    """Return eight dense layers trained on each batch of a dataset: four of 4,096 rows."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    weights = [tf.Variable(random.standard_normal((256, 256), dtype=np.float32) * 0.06)
               for _ in range(8)]

    def train(x):
        total = 0.0
        for part in tf.data.Dataset.from_tensor_slices(x).batch(4096 // shrink, True):
            with tf.GradientTape() as tape:
                h = part
                for w in weights:
                    h = tf.nn.gelu(h @ w)
                loss = tf.reduce_mean(tf.square(h))
            for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
                w.assign_sub(0.01 * g)
            total += loss
        return total

    return train, random.standard_normal((16384 // shrink, 256), dtype=np.float32), weights


_WHOLE = ("accumulate", "critic", "epoch")
"""Jobs that are a step; others are a loss."""


def measure() -> dict:
    """Return peaks in bytes, seconds, and what the report says."""
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    import tensorflow as tf

    import tfckpt

    tf.config.threading.set_inter_op_parallelism_threads(1)
    made, x, weights = globals()[FLAGS.one](16 if FLAGS.tiny else 1)

    def descend(x):
        with tf.GradientTape() as tape:
            value = made(x)
        for weight, gradient in zip(weights, tape.gradient(value, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return value

    train = made if FLAGS.one in _WHOLE else descend
    x = tf.constant(x)
    batch, length = _OPEN.get(FLAGS.one, x.shape[:2])
    signature = [tf.TensorSpec((batch, length and x.shape[1], _FEATURES))] if (
        FLAGS.one in _OPEN) else None
    (budget,) = FLAGS.budgets
    plain, ours = (wrap(tf.function(train, signature, jit_compile=FLAGS.compiled))
                   for wrap in (lambda f: f, tfckpt.checkpoint(
                       budget=budget if budget == "min" else float(budget))))
    start = [w.numpy() for w in weights]
    found = []
    for step in (plain, ours):
        for weight, value in zip(weights, start, strict=True):
            weight.assign(value)
        found.append([step(x).numpy().tobytes() for _ in range(3)]
                     + [w.numpy().tobytes() for w in weights])
    report = ours.report
    peaks = [tfckpt.verify.compiled(step, x).temp_bytes if FLAGS.compiled else
             tfckpt.verify.measure_peak(step, x, repeats=3) for step in (plain, ours)]
    taken: list[list[float]] = [[], []]
    for _ in range(_CALLS):
        for step, seconds in zip((plain, ours), taken, strict=True):
            began = time.process_time()
            step(x).numpy()
            seconds.append(time.process_time() - began)
    return {"peaks": peaks, "seconds": [min(seconds) for seconds in taken],
            "planned": report.simulated_bytes[1],
            "expected": report.planned_peak_bytes, "refused": report.refused,
            "segments": report.segments, "again": report.again,
            "together": len(report.side_by_side), "identical": found[0] == found[1]}


def row(name: str, budget: str) -> str:
    """Return the line of one job and budget."""
    said = in_own_process(name, "benchmarks.loops", [
        f"--one={name}", f"--budgets={budget}", f"--tiny={FLAGS.tiny}",
        f"--compiled={FLAGS.compiled}"])
    if not said:
        return line([name, budget, *["failed"] * (len(_COLUMNS) - 2)])
    found = json.loads(said.splitlines()[-1])
    before, after = found["peaks"]
    plain, ours = found["seconds"]
    return line([name, budget, f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", f"{after / before:.2f}",
                 f"{found['expected'] / after:.2f}", f"{found['planned'] / after:.2f}",
                 f"{ours / plain:.2f}x",
                 ", ".join([*("/".join(map(str, (length, *within)))
                              + (f" (last {last})" if last else "")
                              for _, length, last, within in found["segments"]),
                            *(f"{count} again" for _, count in found["again"]),
                            *([f"{found['together']} side by side"] if found["together"] else [])
                            ]) or "none",
                 "yes" if found["identical"] else "no"])


def main(argv: list[str]) -> None:
    """Print the table."""
    if FLAGS.one:
        print(json.dumps(measure()))
        return
    print(head(_COLUMNS))
    for name in FLAGS.jobs:
        for budget in FLAGS.budgets:
            print(row(name, budget), flush=True)


if __name__ == "__main__":
    app.run(main)
