"""The seconds that the plan store saves: one training step planned by several processes in turn.

    python -m benchmarks.plan_store [--jobs=resnet50,transformer,densenet121] [--xla=transformer]

Each process makes the network and traces the step twice by TensorFlow alone and once with tfckpt.
The first process plans and stores, the next ones (`--again`) load what it has stored. Reported are
seconds: the quicker of TensorFlow's traces, all of tfckpt (capture, planning, rewriting) in the
first process and the median of the later ones; and the ratios of the latter to TensorFlow's trace
in the same process (its median too) and to the first. Of jobs under `--xla` the step is compiled,
so that the first process asks XLA, and a later one does not. The store is a folder made for this
benchmark.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("jobs", ["resnet50", "transformer", "densenet121", "unet"],
                  "Names in benchmarks.jobs.JOBS.")
flags.DEFINE_list("xla", ["unet"], "Jobs whose step is compiled by XLA too.")
flags.DEFINE_string("budget", "min", "Budget handed to tfckpt.checkpoint.")
flags.DEFINE_integer("again", 3, "Processes after the first.", lower_bound=1)
flags.DEFINE_bool("tiny", False, "Miniatures of the jobs, to try this program out.")
flags.DEFINE_string("one", "", "The job that this process measures, for the program itself.")
flags.DEFINE_string("folder", "", "Where this process keeps plans.")
flags.DEFINE_bool("compiled", False, "Whether XLA compiles the step of this process.")

_COLUMNS = ("network", "operations", "TensorFlow's trace s", "tfckpt, first process s",
            "later process s", "later / trace", "later / first")


def measure() -> dict:
    """Return operations, seconds of TensorFlow's trace and of tfckpt, and whether it was kept."""
    os.environ["TFCKPT_CACHE"] = FLAGS.folder
    import tensorflow as tf

    import tfckpt
    from benchmarks import jobs

    job = jobs.JOBS[FLAGS.one](**(jobs.TINY[FLAGS.one] if FLAGS.tiny else {}))
    traces = []
    for _ in range(2):
        began = time.perf_counter()
        plain = tf.function(job.train_step, jit_compile=FLAGS.compiled)
        graph = plain.get_concrete_function(job.x, job.y).graph
        traces.append(time.perf_counter() - began)
    step = tfckpt.checkpoint(budget=FLAGS.budget)(
        tf.function(job.train_step, jit_compile=FLAGS.compiled))
    step.get_concrete_function(job.x, job.y)
    if step.report is None:
        raise RuntimeError(f"tfckpt left {FLAGS.one} as it was and made no report")
    return {"operations": len(graph.get_operations()), "trace": min(traces),
            "ours": step.report.plan_seconds, "kept": bool(step.report.stored)}


def row(name: str, compiled: bool) -> str:
    """Return the line of one job."""
    title = f"{name}, compiled by XLA" if compiled else name
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--one={name}", f"--folder={folder}", f"--compiled={compiled}",
                     f"--budget={FLAGS.budget}", f"--tiny={FLAGS.tiny}"]
        first, *later = (json.loads((in_own_process(title, "benchmarks.plan_store", arguments)
                                     or "null").splitlines()[-1]) for _ in range(1 + FLAGS.again))
    if first is None or None in later:
        return line([title, *["failed"] * 6])
    if first["kept"] or not all(entry["kept"] for entry in later):
        raise RuntimeError(f"{title}: the first process must plan, and the others must not")
    ours = statistics.median(entry["ours"] for entry in later)
    trace = statistics.median(entry["trace"] for entry in later)
    return line([title, f"{first['operations']:,}", f"{trace:.2f}", f"{first['ours']:.2f}",
                 f"{ours:.2f}", f"{ours / trace:.2f}", f"{ours / first['ours']:.3f}"])


def main(argv: list[str]) -> None:
    """Print the table, or what one process has measured."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.one:
        print(json.dumps(measure()))
        return
    print(head(_COLUMNS))
    for name, compiled in [*((n, False) for n in FLAGS.jobs), *((n, True) for n in FLAGS.xla)]:
        print(row(name, compiled), flush=True)


if __name__ == "__main__":
    app.run(main)
