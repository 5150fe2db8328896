"""Large steps and files, each in a process of its own, which prints a line of JSON.

    python -m tests.zoo.large ops LAYERS              # 23 ops a layer
    python -m tests.zoo.large constant MIB plain|ours [no_grappler]
    python -m tests.zoo.large file BYTES PATH         # writes a GraphDef of about so many bytes
    python -m tests.zoo.large import PATH             # what TensorFlow itself needs to import it
    python -m tests.zoo.large tool ARGUMENTS          # of the command line
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

import tfckpt
from tests.support import process
from tfckpt import cli

WIDTH, ROWS = 16, 4096
LENGTHS = 24
"""Bytes more, at most, that lengths in a message take when what they count grows."""


def peak() -> int:
    """Most bytes that this process has had in memory.

    Not `ru_maxrss`, which counts the process that started this one as well.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
               ) * 1024


def weights(count: int = 8) -> list[tf.Variable]:
    """Square matrices."""
    rng = np.random.default_rng(2)
    return [tf.Variable((rng.standard_normal((WIDTH, WIDTH)) * 0.25).astype(np.float32))
            for _ in range(count)]


def descend(forward, ws, x) -> tf.Tensor:
    """Return a step of gradient descent."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(forward(x)))
    for w, g in zip(ws, tape.gradient(loss, ws), strict=True):
        w.assign_sub(0.1 * g)
    return loss


def many_ops(layers: int) -> dict:
    """Processor seconds that TensorFlow takes to trace a deep chain, and that we take."""
    ws, x = weights(), tf.random.stateless_normal((512, WIDTH), (0, 3))

    def forward(h):
        for i in range(layers):
            h = h + 0.01 * tf.tanh(tf.nn.softplus(h @ ws[i % len(ws)]))
            h = tf.tanh(1.01 * h)
        return h

    def step(x):
        return descend(forward, ws, x)

    limit = sys.getrecursionlimit()
    started = time.process_time()
    plain = tf.function(step, autograph=False).get_concrete_function(x)
    traced = time.process_time() - started
    ops = len(plain.graph.get_operations())
    del plain
    sys.setrecursionlimit(_depth() + 200)
    ours = tfckpt.checkpoint(tf.function(step, autograph=False))
    started = time.process_time()
    ours.get_concrete_function(x)
    seconds = time.process_time() - started
    sys.setrecursionlimit(limit)
    report = ours.report
    return {"ops": ops, "trace_seconds": traced, "ours_seconds": seconds,
            "applied": report.applied, "recomputed": report.recomputed_ops,
            "plain": report.baseline_peak_bytes, "planned": report.planned_peak_bytes,
            "peak": peak()}


def _depth() -> int:
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def table(mib: int) -> np.ndarray:
    """Numbers of so many MiB."""
    few = np.random.default_rng(0).standard_normal((64, WIDTH), dtype=np.float32)
    return np.tile(few, ((mib << 20) // few.nbytes, 1))


def constant(mib: int, how: str, grappler: str = "") -> dict:
    """Train two steps that read a constant."""
    if grappler == "no_grappler":
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    ws, x, numbers = weights(), tf.random.stateless_normal((ROWS, WIDTH), (0, 3)), table(mib)

    def forward(h):
        h = h + tf.gather(tf.constant(numbers), tf.range(ROWS))
        for w in ws:
            h = tf.tanh(h @ w)
        return h

    step = tf.function(lambda x: descend(forward, ws, x), autograph=False)
    if how != "plain":
        step = tfckpt.checkpoint(step)
    losses = [step(x).numpy().tobytes().hex() for _ in range(2)]
    report = getattr(step, "report", None)
    return {"losses": losses, "bytes": numbers.nbytes, "peak": peak(),
            **({"applied": report.applied, "recomputed": report.recomputed_ops,
                "resident": report.resident_bytes} if report else {})}


def write(size: int, path: str) -> dict:
    """Return a GraphDef of `size` bytes, or at most 100 less, that trains and reads a constant."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (ROWS, WIDTH), name="x")
        w = tf.compat.v1.placeholder(tf.float32, (WIDTH, WIDTH), name="w")
        h = x + tf.gather(tf.constant(table(1), name="table"), tf.range(ROWS))
        for _ in range(8):
            h = tf.tanh(h @ w)
        tf.identity(tf.gradients(tf.reduce_mean(tf.square(h)), [w])[0], name="gradient")
    definition = graph.as_graph_def()
    tensor = next(n for n in definition.node if n.name == "table").attr["value"].tensor
    around = definition.ByteSize() - len(tensor.tensor_content) + LENGTHS
    rows = (size - around) // (4 * WIDTH)
    tensor.tensor_shape.dim[0].size = rows
    tensor.tensor_content = bytes(4 * WIDTH * rows)
    data = definition.SerializeToString()
    pathlib.Path(path).write_bytes(data)
    return {"bytes": len(data), "constant": 4 * WIDTH * rows}


def imported(path: str) -> dict:
    """Import a GraphDef as TensorFlow's users do."""
    definition = tf.compat.v1.GraphDef()
    definition.ParseFromString(pathlib.Path(path).read_bytes())
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return {"peak": peak()}


def main(what: str, *arguments: str) -> None:
    """Print what one of the above returns."""
    process.prepare()
    process.seed()
    run = {"ops": lambda n: many_ops(int(n)),
           "constant": lambda mib, *how: constant(int(mib), *how),
           "file": lambda size, path: write(int(size), path),
           "import": imported, "tool": lambda *a: {"code": cli.main(a), "peak": peak()}}[what]
    print(json.dumps(run(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
