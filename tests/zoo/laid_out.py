"""Steps whose variables lie elsewhere: on DTensor's devices, on a parameter server.

`python -m tests.zoo.laid_out NAME` trains one plain and rewritten, in a process of its own, and
prints as JSON whether all bits agree, the planned peaks, and what is known of the arithmetic.
"""

from __future__ import annotations

import json
import os
import socket
import sys

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfckpt
from tests.support.gelu_steps import gelu_loss
from tests.zoo import alone

WIDTH, DEPTH, ROWS, STEPS = 128, 8, 2048, 3


def start(layer: int) -> tf.Tensor:
    """Return the first weights of a layer."""
    return tf.random.stateless_normal((WIDTH, WIDTH), (layer, 1)) / 11.0


def body(weights):
    """Return a step of gradient descent on them."""
    def step(x):
        with tf.GradientTape() as tape:
            loss = gelu_loss(weights, x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss
    return step


def with_dtensor(rewrite: bool):
    """Train on a mesh of two CPUs, each with half of the batch."""
    mesh = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])
    everywhere = dtensor.Layout.replicated(mesh, rank=2)
    weights = [dtensor.DVariable(dtensor.copy_to_mesh(start(i), everywhere))
               for i in range(DEPTH)]
    halves = [tf.random.stateless_normal((ROWS // 2, WIDTH), (i, 7)) for i in range(2)]
    x = dtensor.pack(halves, dtensor.Layout.batch_sharded(mesh, "batch", rank=2))
    step = tf.function(body(weights))
    step = tfckpt.checkpoint(step, budget="min") if rewrite else step
    found = [dtensor.unpack(step(x))[0].numpy() for _ in range(STEPS)]
    found += [dtensor.unpack(weight.read_value())[0].numpy() for weight in weights]
    return found, tfckpt.report_of(step) if rewrite else None


def with_a_parameter_server(rewrite: bool):
    """Train as a worker, the variables on a server; the coordinator takes `tf.function`s alone."""
    strategy, coordinator = cluster()
    with strategy.scope():
        weights = [tf.Variable(start(i)) for i in range(DEPTH)]
    replica = body(weights)

    def run(x):
        return strategy.run(replica, args=(x,))

    step = tf.function(tfckpt.checkpoint(run, budget="min") if rewrite else run)
    found = []
    for _ in range(STEPS):
        result = coordinator.schedule(step, args=(tf.random.stateless_normal(
            (ROWS, WIDTH), (1, 7)),))
        coordinator.join()
        found.append(np.asarray(result.fetch()))
    return (found + [weight.numpy() for weight in weights],
            tfckpt.report_of(step) if rewrite else None)


_cluster: list = []


def cluster():
    """Return a strategy and its coordinator, with a worker and a server in this process."""
    if not _cluster:
        spec = tf.train.ClusterSpec({job: [f"localhost:{_free_port()}"]
                                     for job in ("worker", "ps")})
        _cluster.extend(tf.distribute.Server(spec, job_name=job, task_index=0, protocol="grpc")
                        for job in ("worker", "ps"))
        strategy = tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc"))
        _cluster.append((strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)))
    return _cluster[-1]


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("localhost", 0))
        return made.getsockname()[1]


WAYS = {"dtensor": with_dtensor, "parameter_server": with_a_parameter_server}


def main(name: str) -> None:
    """Print what comes of one way."""
    alone.prepare()
    wanted, _ = WAYS[name](False)
    found, report = WAYS[name](True)
    tfckpt.verify.wait_for_certificates()
    print(json.dumps({
        "alike": [a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True)],
        "plain": report.baseline_peak_bytes, "planned": report.planned_peak_bytes,
        "identical": report.identical, "certificate": report.certificate}), flush=True)
    os._exit(0)  # servers of a cluster end with their process


if __name__ == "__main__":
    main(sys.argv[1])
