"""tfckpt beside its alternatives: peak, time and numbers of one training step, done by each.

    python -m benchmarks.peers [--jobs=vgg16,unet] [--peers=tfckpt] [--steps=3] [--tiny]

A process for each job; in it each peer's step takes turns with a plain one. Both begin with equal
weights and data. Peaks are the allocator's, above what is allocated when a step starts; times are
relative to the plain step's; medians. *Numbers* are losses and all variables, optimizer slots
included, after two steps: identical in every bit, or the norm of the difference relative to the
norm; of compiled steps rewritten by tfckpt against compiled plain ones, else against the plain
step. *State differs* where integers do: seeds or counters that were advanced more often. What a
peer fails with is printed in its place; one that ends the process is left out of a second one.

The peers: TensorFlow's own recomputation in Grappler, by three modes (for MANUAL the whole forward
carries the hint); `keras.RematScope`, by four modes (larger_than counts elements; the list has all
layers without weights); `tf.recompute_grad` placed by hand (`benchmarks.by_hand`); XLA; tfckpt.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from absl import app, flags

from benchmarks import rows

FLAGS = flags.FLAGS
flags.DEFINE_list("jobs", ["resnet50", "densenet121", "vgg16", "inception_v3", "unet",
                           "transformer", "lstm"], "Names in benchmarks.jobs.SMALL.")
flags.DEFINE_list("peers", [], "Which peers; all where none is named.")
flags.DEFINE_integer("steps", 3, "Measured steps of each.", lower_bound=1)
flags.DEFINE_bool("accumulate", True, "Whether TensorFlow's memory optimizer runs, which has sums "
                  "of large steps add in the order of arrival.")
flags.DEFINE_bool("tiny", False, "Miniatures of the jobs, to try this program out.")
flags.DEFINE_bool("alone", False, "For internal use: the one job of this process.")

TRAINED = 2  # steps after which numbers are compared
LARGER_THAN = 1 << 16  # elements: 256 KiB, the smallest that the allocator counts on a CPU
COLUMNS = ("job", "peer", "peak MB", "ratio", "time", "numbers")

Call = Callable[..., Any]


def build(job: str, scope: Any = None) -> Any:
    """Return a fresh job, its layers made in a scope."""
    import keras

    from benchmarks import jobs

    keras.backend.clear_session()
    with scope or contextlib.nullcontext():
        return jobs.JOBS[job](**(jobs.TINY if FLAGS.tiny else jobs.SMALL)[job])


def plain(name: str) -> tuple[Any, Call]:
    """Return the step as it is."""
    import tensorflow as tf

    job = build(name)
    return job, tf.function(job.train_step)


def grappler(mode: str) -> Call:
    """TensorFlow's own recomputation."""
    def make(name: str) -> tuple[Any, Call]:
        import tensorflow as tf

        import grappler_ext
        from benchmarks import jobs

        job = build(name)

        def hinted(x):
            with grappler_ext.recompute_hint():
                return job.model(x, training=True)

        step = tf.function(jobs.make_train_step(job.model, hinted) if mode == "MANUAL"
                           else job.train_step)

        def call(x, y):
            with grappler_ext.builtin_recomputation(mode):
                return step(x, y)

        return job, call
    return make


def remat(mode: str) -> Call:
    """Keras' scope around the making of the layers."""
    def make(name: str) -> tuple[Any, Call]:
        import keras
        import tensorflow as tf

        options: dict[str, Any] = {}
        if mode == "larger_than":
            options = {"output_size_threshold": LARGER_THAN}
        if mode == "list_of_layers":  # names are the same in every fresh session
            options = {"layer_names": [layer.name for layer in build(name).model.layers
                                       if not layer.weights]}
        job = build(name, keras.RematScope(mode=mode, **options))
        return job, tf.function(job.train_step)
    return make


def by_hand(name: str) -> tuple[Any, Call]:
    """`tf.recompute_grad` around the parts of the network."""
    import tensorflow as tf

    from benchmarks import jobs
    from benchmarks.by_hand import recomputing

    job = build(name)
    return job, tf.function(jobs.make_train_step(job.model, recomputing(name, job.model)))


def ours(jit_compile: bool = False) -> Call:
    """tfckpt, with the minimum memory for a budget."""
    def make(name: str) -> tuple[Any, Call]:
        import tensorflow as tf

        import tfckpt

        job = build(name)
        return job, tfckpt.checkpoint(tf.function(job.train_step, jit_compile=jit_compile or None))
    return make


def compiled(name: str) -> tuple[Any, Call]:
    """Return the plain step, compiled by XLA."""
    import tensorflow as tf

    job = build(name)
    return job, tf.function(job.train_step, jit_compile=True)


PEERS: dict[str, Call] = {
    "plain again": plain,
    **{f"Grappler {mode}": grappler(mode)
       for mode in ("RECOMPUTATION_HEURISTICS", "HEURISTICS", "MANUAL")},
    **{f"RematScope {mode}": remat(mode)
       for mode in ("full", "activations", "larger_than", "list_of_layers")},
    "recompute_grad by hand": by_hand,
    "XLA": compiled,
    "XLA + tfckpt": ours(jit_compile=True),
    "tfckpt": ours(),
}


def train(job: Any, step: Call) -> list[Any]:
    """Losses and variables of the first steps."""
    losses = [step(job.x, job.y).numpy() for _ in range(TRAINED)]
    variables = [*job.model.variables, *job.model.optimizer.variables]
    return [*losses, *(variable.numpy() for variable in variables)]


def compare(wanted: list[Any], found: list[Any]) -> str:
    """Return how far two histories are apart, in words."""
    import numpy as np

    pairs = list(zip(wanted, found, strict=True))
    if all(a.tobytes() == b.tobytes() for a, b in pairs):
        return "identical"
    floats = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs
              if np.issubdtype(a.dtype, np.floating)]
    error = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in floats))
    norm = np.sqrt(sum(np.sum(a**2) for a, _ in floats))
    state = any(a.tobytes() != b.tobytes() for a, b in pairs
                if not np.issubdtype(a.dtype, np.floating))
    return f"differ by {error / norm:.0e}" + (", state differs" if state else "")


def measure_job(name: str) -> None:
    """Measure the peers of one job in this process, and print a line of JSON for each."""
    import tensorflow as tf

    from benchmarks.measure import take_turns
    from tfckpt.capture import tf_adapter

    tf.config.threading.set_inter_op_parallelism_threads(1)
    with (contextlib.nullcontext() if FLAGS.accumulate
          else tf_adapter.memory_optimizer("NO_MEM_OPT", "")):
        _measure(name, take_turns)


def _measure(name: str, take_turns: Call) -> None:
    job, step = plain(name)
    numbers = {"plain": train(job, step)}
    plain_peaks: list[int] = []  # of all turns: they depend on what the allocator has at hand
    for peer in FLAGS.peers:
        try:
            other, candidate = PEERS[peer](name)
            numbers[peer] = train(other, candidate)
            against = "XLA" if peer == "XLA + tfckpt" and "XLA" in numbers else "plain"
            rounds = take_turns([(step, (job.x, job.y)), (candidate, (other.x, other.y))],
                                FLAGS.steps, 1)
            plain_peaks += [before.peak for before, _ in rounds]
            before = statistics.median(plain_peaks)
            after = statistics.median(r[1].peak for r in rounds)
            time = statistics.median(r[1].seconds / r[0].seconds for r in rounds)
            cells = [f"{after / 1e6:.0f}", f"{after / before:.2f}" if before else "-",
                     f"{time:.2f}x", compare(numbers[against], numbers[peer])]
        except Exception as error:
            cells = [failure(f"{type(error).__name__}: {error}")]
        print(json.dumps([peer, cells]), flush=True)


def failure(text: str) -> str:
    """Return what went wrong, on one line that fits a table.

    Keras wraps messages in others; its own are set in bold.
    """
    bold = re.search(r"\x1b\[1m(.+?)\x1b\[0m", text, re.DOTALL)
    errors = re.findall(r"^\s*(\w+Error: .+)$", text, re.MULTILINE)
    said = bold.group(1) if bold else errors[-1] if errors else text
    return "failed: " + " ".join(said.replace("|", "/").split())[:160]


def run_job(name: str, peers: list[str]) -> None:
    """Print the lines of one job; a peer that ends its process is named, the rest begin anew."""
    while peers:
        command = [sys.executable, "-m", "benchmarks.peers", "--alone", f"--jobs={name}",
                   f"--peers={','.join(peers)}", f"--steps={FLAGS.steps}",
                   f"--accumulate={FLAGS.accumulate}", *(["--tiny"] if FLAGS.tiny else [])]
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}) as child:
            assert child.stdout
            done = []
            for line in child.stdout:
                if line.startswith("["):
                    peer, cells = json.loads(line)
                    done.append(peer)
                    print_line([name, peer, *cells])
            peers = peers[len(done):]
            if peers:
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:]
                print_line([name, peers[0], failure("\n".join(
                    [f"the process ended with {child.wait()}", *last]))])
                peers = peers[1:]


def print_line(cells: Any) -> None:
    """One line of a markdown table, filled up."""
    print(rows.line([*cells, *[""] * (len(COLUMNS) - len(cells))]), flush=True)


def main(argv: list[str]) -> None:
    """Print the table."""
    unknown = [peer for peer in FLAGS.peers if peer not in PEERS]
    if len(argv) > 1 or unknown:
        raise app.UsageError(f"unexpected: {argv[1:] + unknown}; peers: {', '.join(PEERS)}")
    if FLAGS.alone:
        measure_job(FLAGS.jobs[0])
        return
    print(rows.head(COLUMNS), flush=True)
    for name in FLAGS.jobs:
        run_job(name, FLAGS.peers or list(PEERS))


if __name__ == "__main__":
    app.run(main)
