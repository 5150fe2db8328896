"""Forward AD in eager TensorFlow: one experiment for each thing that works, or cannot.

    python -m benchmarks.eager_fad

Prints, for some activations, how many tensors of the activation's size a gradient tape keeps per
layer: plain, with `tfckpt.eager_fad()` and with `tfckpt.nested_forward_ad`, and the time of a step
with either; then each experiment with its result. Needs no GPU and takes some seconds.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("layers", 4, "Dense layers, each with an activation.", lower_bound=1)
flags.DEFINE_integer("size", 512, "Rows and columns of every tensor.", lower_bound=256)
flags.DEFINE_integer("repeats", 5, "Measured steps.", lower_bound=1)

NAMES = ("swish", "mish", "gelu_tanh", "gelu_erf", "keras_gelu", "keras_swish")


def tensors_kept(activation: Callable, fad: bool) -> float:
    """Return the tensors that a tape keeps per layer after the forward."""
    import tensorflow as tf

    import tfckpt

    x, w = tf.ones((FLAGS.size, FLAGS.size)), tf.Variable(tf.eye(FLAGS.size))
    with tf.GradientTape(), (tfckpt.eager_fad() if fad else contextlib.nullcontext()):
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        h = x
        for _ in range(FLAGS.layers):
            h = activation(tf.matmul(h, w))
        now = tf.config.experimental.get_memory_info("CPU:0")["current"]
    return (now - before) / (4 * FLAGS.size * FLAGS.size) / FLAGS.layers


def seconds(activation: Callable, fad: bool) -> float:
    """Return the processor time of one eager step, forward and backward."""
    import tensorflow as tf

    import tfckpt

    x, w = tf.ones((FLAGS.size, FLAGS.size)), tf.Variable(tf.eye(FLAGS.size))
    began = time.process_time()
    with tf.GradientTape() as tape:
        with tfckpt.eager_fad() if fad else contextlib.nullcontext():
            h = x
            for _ in range(FLAGS.layers):
                h = activation(tf.matmul(h, w))
        loss = tf.reduce_sum(h)
    tape.gradient(loss, w).numpy()
    return time.process_time() - began


def replaced_by_a_callback() -> str:
    """Return whether what an op callback returns takes the place of an op's result."""
    import tensorflow as tf

    from tfckpt.capture import tf_adapter

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        return [tf.zeros_like(outputs[0])] if op_type == "Tanh" else None

    tf_adapter.add_op_callback(callback)
    try:
        value = float(tf.tanh(tf.constant(1.0)))
    finally:
        tf_adapter.remove_op_callback(callback)
    return f"a callback that returns 0 for tanh(1): the caller gets {value:.3f}"


def seen_by_dispatch() -> str:
    """Return whether TensorFlow's dispatch by type calls a handler for ordinary tensors."""
    import tensorflow as tf

    calls = []

    @tf.experimental.dispatch_for_unary_elementwise_apis(tf.Tensor)
    def handler(api, x):
        calls.append(api)
        return NotImplemented

    try:
        tf.tanh(tf.constant(1.0))
    finally:
        tf.experimental.unregister_dispatch_for(handler)
    return f"a dispatch handler for tf.Tensor during tanh: {len(calls)} calls"


def states(what: str, activation: Callable) -> str:
    """Return how many sequences the state machine finds in one application."""
    import tensorflow as tf

    import tfckpt

    x = tf.ones((4, 4))
    with tf.GradientTape() as tape, tfckpt.eager_fad() as sequences:
        tape.watch(x)
        activation(x)
    return f"{what}: sequences begun {sequences.counts['NY']}, went on {sequences.counts['YY']}"


def named(swish: Callable) -> str:
    """Return what stays where Python keeps a name for a tensor inside of a sequence."""
    import tensorflow as tf

    kept: list = []

    def hoarding(x):
        s = tf.sigmoid(x)
        kept.append(s)
        return x * s

    return ("swish whose sigmoid the caller keeps a name for: "
            f"{tensors_kept(hoarding, True):.2f} tensors a layer, without the name "
            f"{tensors_kept(swish, True):.2f}")


def main(argv: list[str]) -> None:
    """Print the table and the experiments."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    import tensorflow as tf

    import tfckpt
    from benchmarks.activations import ACTIVATIONS

    print("| activation | tensors a layer, plain | eager_fad | nested_forward_ad "
          "| time, eager_fad | nested_forward_ad |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in NAMES:
        f = ACTIVATIONS[name]
        ways = ((f, False), (f, True), (tfckpt.nested_forward_ad(f), False))
        counts = [tensors_kept(*way) for way in ways]
        times = [[seconds(*way) for way in ways] for _ in range(FLAGS.repeats + 1)][1:]
        ratios = [statistics.median(t[n] / max(t[0], 1e-9) for t in times) for n in (1, 2)]
        print(" | ".join([f"| {name}", *(f"{c:.2f}" for c in counts),
                          *(f"{r:.2f}x" for r in ratios)]) + " |", flush=True)
    swish = ACTIVATIONS["swish"]
    for line in (replaced_by_a_callback(), seen_by_dispatch(), named(swish),
                 states("x * sigmoid(x)", swish),
                 states("the same inside of a tf.function", tf.function(swish)),
                 states("keras silu, a custom gradient", ACTIVATIONS["keras_swish"])):
        print("- " + line)


if __name__ == "__main__":
    app.run(main)
