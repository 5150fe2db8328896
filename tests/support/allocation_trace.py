"""Prints, as JSON, what a small training step asks of TensorFlow's best-fit allocator.

    python -m tests.support.allocation_trace

In a process of its own: the allocator is chosen when TensorFlow starts, and the profiler must see
its first request. Each line of the list is [event, address, bytes requested, bytes of the chunk,
bytes in use, peak], in the order in which the allocator served them.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

EVENTS = ("MemoryAllocation", "MemoryDeallocation")
FIELDS = ("addr", "requested_bytes", "allocation_bytes", "bytes_allocated", "peak_bytes_in_use")


def recorded() -> list[list]:
    """Run this module in another process and return what it prints."""
    environment = os.environ | {"TF_CPU_ALLOCATOR_USE_BFC": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", __name__], env=environment, capture_output=True,
                          text=True, check=False, cwd=pathlib.Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run three steps under the profiler and print the allocator's events."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
        tf.profiler.experimental.start(folder, options=options)
        _train(tf)
        tf.profiler.experimental.stop()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        print(json.dumps(_events(path.read_bytes())))


def _train(tf) -> None:
    sizes = (300, 500, 200, 700, 1)
    weights = [tf.Variable(tf.random.stateless_normal(shape, (1, i)))
               for i, shape in enumerate(zip(sizes, sizes[1:], strict=False))]
    slots = [tf.Variable(tf.zeros_like(w)) for w in weights]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights[:-1]:
                h = tf.nn.gelu(h @ w) + tf.reduce_mean(h)
            loss = tf.reduce_mean(tf.square(h @ weights[-1]))
        for w, slot, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * slot.assign(0.9 * slot + gradient))
        return loss

    for batch in (600, 600, 450):
        step(tf.random.stateless_normal((batch, sizes[0]), (2, batch)))


def _events(data: bytes) -> list[list]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(data)
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name in EVENTS:
                    stats = {plane.stat_metadata[s.metadata_id].name:
                             getattr(s, s.WhichOneof("value")) for s in event.stats}
                    when = line.timestamp_ns * 1000 + event.offset_ps
                    found.append((when, len(found), name, *(stats[field] for field in FIELDS)))
    return [list(entry[2:]) for entry in sorted(found)]


if __name__ == "__main__":
    main()
