"""The largest batch that trains on a GPU of a size, plain and with tfckpt: a stock Keras `fit`.

    python -m benchmarks.largest_batch --gb=15

Each attempt is a process of its own, in which TensorFlow may take no more than `--gb` gigabytes of
the GPU, and trains `--steps` batches with `budget="device"`: what is left there is the budget. It
fits, or TensorFlow's allocator refuses, or tfckpt says beforehand that no plan fits. Batches grow
by half of a power of two until none does. `items/s` are images or sequences, by the median step
but the first; with `--at_once=4` four attempts share the GPU, and they mean little.
"""

from __future__ import annotations

import concurrent.futures
import json
import statistics
import sys
import time
from typing import Any

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_float("gb", 15.0, "Gigabytes that TensorFlow may take.")
flags.DEFINE_list("only", [], "Names in SMALLEST; default all.")
flags.DEFINE_list("runners", ["xla", "executor"], "Keras' default on a GPU, and jit_compile=False.")
flags.DEFINE_integer("steps", 6, "Batches to train.", lower_bound=3)
flags.DEFINE_integer("at_once", 1, "Attempts at a time.", lower_bound=1)
flags.DEFINE_integer("doublings", 3, "Most doublings of the smallest batch.", lower_bound=1)
flags.DEFINE_string("policy", "float32", "Keras' dtype policy.")
flags.DEFINE_string("attempt", "", "One attempt in this process.")

SMALLEST = {"resnet50": 128, "bert_small": 96}
"""Networks, and the first batch that is tried."""
LENGTH, WORDS = 256, 8000


def build(name: str) -> tuple[Any, tuple[int, ...], int, str]:
    """Return a model, the shape of an input, how many values or classes there are, and a dtype."""
    import keras

    if name == "resnet50":
        model = keras.applications.ResNet50(weights=None, classes=100)
        return model, (224, 224, 3), 100, "float32"
    tokens = keras.Input((LENGTH,), dtype="int32")
    h = keras.layers.Embedding(WORDS, 512)(tokens)
    for _ in range(6):
        a = keras.layers.MultiHeadAttention(8, 64, dropout=0.1)(h, h)
        h = keras.layers.LayerNormalization()(h + keras.layers.Dropout(0.1)(a))
        a = keras.layers.Dense(512)(keras.layers.Dense(2048, "gelu")(h))
        h = keras.layers.LayerNormalization()(h + keras.layers.Dropout(0.1)(a))
    h = keras.layers.Dense(100)(keras.layers.GlobalAveragePooling1D()(h))
    return (keras.Model(tokens, keras.layers.Activation("softmax", dtype="float32")(h)),
            (LENGTH,), WORDS, "int32")


def attempt(name: str, runner: str, who: str, batch: int) -> dict[str, Any]:
    """Train in this process; say how it went."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfckpt

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.set_logical_device_configuration(
            gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=round(FLAGS.gb * 1e9) >> 20)])
    keras.mixed_precision.set_global_policy(FLAGS.policy)
    keras.utils.set_random_seed(0)
    model, shape, values, dtype = build(name)
    if who == "tfckpt":
        tfckpt.keras.checkpoint(model, budget="device")
    model.compile("adam", "sparse_categorical_crossentropy",
                  jit_compile="auto" if runner == "xla" else False)
    random = np.random.default_rng(0)
    x = (random.integers(0, values, (batch, *shape)) if dtype == "int32"
         else random.random((batch, *shape), np.float32)).astype(dtype)
    data = tf.data.Dataset.from_tensors((x, np.arange(batch) % 100)).repeat(FLAGS.steps)
    ends: list[float] = []
    try:
        model.fit(data, verbose=0, callbacks=[keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: ends.append(time.perf_counter()))])
    except tf.errors.ResourceExhaustedError:
        return {"said": "out of memory"}
    except tf.errors.InternalError as error:  # XLA's and cuDNN's own words
        if "memory" not in str(error).lower():
            raise
        return {"said": "out of memory"}
    except tfckpt.InfeasibleBudgetError as error:
        return {"said": f"refused: {error.smallest_bytes / 1e9:.2f} GB needed above what it holds"}
    taken = statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))
    said = {"said": "fits", "rate": batch / taken}
    if who == "tfckpt":
        report = tfckpt.keras.report(model)
        assert report is not None
        said |= {"expected": report.expected_bytes, "overhead": report.overhead}
    return said | {"peak": tf.config.experimental.get_memory_info("GPU:0")["peak"]}


def main(_: list[str]) -> int:
    """Print a row for each attempt."""
    if FLAGS.attempt:
        name, runner, who, batch = FLAGS.attempt.split(",")
        print(json.dumps(attempt(name, runner, who, int(batch))))
        return 0
    began = time.monotonic()
    print(head(("network", "runner", "with", "batch", "", "peak GB", "expected GB",
                "items/s", "planned time")), flush=True)

    def ladder(row: tuple[str, str, str]) -> None:
        name, runner, who = row
        for halves in range(2 * FLAGS.doublings + 1):
            batch = round(SMALLEST[name] * 2 ** (halves / 2) / 8) * 8
            output = in_own_process(f"{row} {batch}", "benchmarks.largest_batch", (
                f"--attempt={name},{runner},{who},{batch}", f"--gb={FLAGS.gb}",
                f"--steps={FLAGS.steps}", f"--policy={FLAGS.policy}"))
            found = json.loads(output.splitlines()[-1]) if output else {"said": "failed"}
            fits = found["said"] == "fits"
            expected = found.get("expected")
            print(line([
                name, runner, who, str(batch), found["said"],
                f"{found['peak'] / 1e9:.2f}" if fits else "",
                f"{expected[1] / 1e9:.2f} of {expected[0] / 1e9:.2f}" if expected else "",
                f"{found['rate']:.0f}" if fits else "",
                f"{1 + found['overhead']:.2f}x" if expected else ""]), flush=True)
            if not fits:
                break

    everything = [(name, runner, who) for runner in FLAGS.runners for name in FLAGS.only or SMALLEST
                  for who in ("plain", "tfckpt")]
    with concurrent.futures.ThreadPoolExecutor(FLAGS.at_once) as pool:
        list(pool.map(ladder, everything))
    print(f"\n{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(app.run(main))
