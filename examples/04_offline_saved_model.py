"""A SavedModel that trains is rewritten on the command line and needs no tfckpt afterwards.

    python -m examples.04_offline_saved_model [--small]

1. A module with a training function is saved.
2. `python -m tfckpt inspect` shows what it holds, `rewrite` writes a second SavedModel beside it.
3. A fresh process, in which tfckpt is never imported, loads each with plain `tf.saved_model.load`,
   trains it on scikit-learn's digits, and says what it measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf

from examples import data, saving

LAYERS = 12
TRAIN = """
import json, sys
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
arrays, *models = sys.argv[1:]
arrays = np.load(arrays)
x, y = tf.constant(arrays["x"]), tf.constant(arrays["y"])
for path in models:
    model = tf.saved_model.load(path)
    losses = [float(model.train(x, y)) for _ in range(4)]
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    losses.append(float(model.train(x, y)))
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
    print(json.dumps({"peak": peak, "losses": losses}))
assert "tfckpt" not in sys.modules
"""


class Trainer(tf.Module):
    """Layers of tanh on digits; `train` is one step of gradient descent."""

    def __init__(self, width: int):
        super().__init__()
        tf.random.set_seed(7)
        sizes = [64] + [width] * LAYERS + [10]
        self.weights = [tf.Variable(tf.random.normal((m, n)) / m**0.5)
                        for m, n in zip(sizes[:-1], sizes[1:], strict=True)]

    # jit_compile=False: a compiled step is rewritten as well, but agrees to rounding only
    @tf.function(input_signature=[tf.TensorSpec((None, 64)), tf.TensorSpec((None,), tf.int32)],
                 jit_compile=False)
    def train(self, x, y):
        """One step on pixels (batch, 64) and digits (batch,); the loss before it."""
        with tf.GradientTape() as tape:
            for weight in self.weights[:-1]:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                y, x @ self.weights[-1]))
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss


def run(*command: str) -> str:
    """Return what a command prints to standard output; what it says besides is shown if it fails.
    """
    print("$", *("TRAIN" if part is TRAIN else part for part in command), flush=True)
    done = subprocess.run(command, capture_output=True, text=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def train(arrays: str, *models: str) -> list[saving.Run]:
    """Load SavedModels in a process of its own and train them, one after the other."""
    printed = run(sys.executable, "-c", TRAIN, arrays, *models).splitlines()
    found = [json.loads(line) for line in printed if line.startswith("{")]
    return [saving.Run(one["peak"], tuple(one["losses"])) for one in found]


def main() -> None:
    """Save, rewrite, train both."""
    small = saving.small(__doc__)
    images, labels = data.digits(1024 if small else None)
    with tempfile.TemporaryDirectory() as folder:
        plain, smaller = os.path.join(folder, "plain"), os.path.join(folder, "smaller")
        tf.saved_model.save(Trainer(128 if small else 256), plain)
        arrays = os.path.join(folder, "digits.npz")
        np.savez(arrays, x=images.reshape(-1, 64), y=labels)
        tfckpt, batch = (sys.executable, "-m", "tfckpt"), f"--batch_size={len(labels)}"
        print(run(*tfckpt, "inspect", plain, batch, "--top=4"))
        print(run(*tfckpt, "rewrite", plain, smaller, batch, "--budget=min"))
        saving.show(*train(arrays, plain, smaller))


if __name__ == "__main__":
    main()
