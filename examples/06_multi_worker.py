"""Two workers that train one model together: `MultiWorkerMirroredStrategy` over loopback.

    python -m examples.06_multi_worker [--small]

Two real processes, each with a CPU of its own as TensorFlow sees it, train on their halves of
every batch and sum their gradients over the network. Each worker rewrites its own step. The
workers are started twice, plainly and with tfckpt; each measures its own device.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import keras
import tensorflow as tf

import tfckpt
from examples import data, saving

WORKERS = 2
LIMIT = 600
"""Seconds that the workers may take."""


def build(layers: int) -> keras.Model:
    """Convolutions with normalization."""
    keras.utils.set_random_seed(7)
    image = keras.Input((8, 8, 1))
    h = image
    for _ in range(layers):
        h = keras.layers.Conv2D(32, 3, padding="same", use_bias=False)(h)
        h = keras.layers.ReLU()(keras.layers.LayerNormalization()(h))
    return keras.Model(image, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(h)))


def make_step(strategy: tf.distribute.Strategy, layers: int, batch: int):
    """Return a step of all workers; `batch` is that of all together."""
    with strategy.scope():
        model = build(layers)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def on_replica(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(
                labels, model(images, training=True), from_logits=True)) / batch
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function(jit_compile=False)  # under XLA losses would agree to rounding, not in every bit
    def step(images, labels):
        return strategy.reduce(tf.distribute.ReduceOp.SUM,
                               strategy.run(on_replica, (images, labels)), axis=None)

    return step


def work(with_tfckpt: bool, small: bool) -> None:
    """Return what each worker does; prints one line of JSON at the end."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    batch = 512 if small else 1024
    step = make_step(strategy, 4 if small else 8, batch)
    if with_tfckpt:
        step = tfckpt.checkpoint(step, budget="min")
    batches = list(strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data.digits(batch)).batch(batch)))
    losses = [float(step(*batches[0])) for _ in range(4)]
    peak = tfckpt.verify.measure_peak(step, *batches[0], repeats=3)
    print(json.dumps({"peak": peak, "losses": losses,
                      "report": str(getattr(step, "report", ""))}))


def start(mode: str, small: bool) -> list[dict]:
    """Start both workers in one mode and return what each printed."""
    addresses = [f"127.0.0.1:{_free_port()}" for _ in range(WORKERS)]
    command = [sys.executable, "-m", "examples.06_multi_worker", *(["--small"] if small else [])]
    workers = []
    for index in range(WORKERS):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(cluster), "TFCKPT_EXAMPLE": mode}
        workers.append(subprocess.Popen(command, env=environment, text=True,
                                        stdout=subprocess.PIPE))
    try:
        printed = [worker.communicate(timeout=LIMIT)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # one that fails leaves the other waiting for it
    return [json.loads(text.splitlines()[-1]) for text in printed]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Start the workers, plain ones first."""
    small = saving.small(__doc__)
    mode = os.environ.get("TFCKPT_EXAMPLE")
    if mode:
        return work(mode == "tfckpt", small)
    plain, ours = start("plain", small), start("tfckpt", small)
    print(ours[0]["report"])
    for index in range(WORKERS):
        print(f"\nworker {index}", end="")
        saving.show(*(saving.Run(round(runs[index]["peak"]), tuple(runs[index]["losses"]))
                      for runs in (plain, ours)))


if __name__ == "__main__":
    main()
