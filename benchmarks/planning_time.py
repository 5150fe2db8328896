"""How long tfckpt takes to capture, plan and rewrite a training step.

    python -m benchmarks.planning_time [--jobs=resnet50,resnet152]

The step is run once, because a step is planned when it is first called. Reported are the seconds
that tfckpt says it took (`report.plan_seconds`), the seconds that TensorFlow takes to trace the
same step by itself, and the number of operations in that trace.
"""

from __future__ import annotations

import time

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("jobs", ["resnet50", "resnet152"], "Names in benchmarks.jobs.JOBS.")
flags.DEFINE_string("solver", "auto", "Solver handed to tfckpt.checkpoint.")
flags.DEFINE_bool("tiny", False, "Miniatures of the jobs, to try this program out.")


def measure(name: str) -> tuple[int, float, float]:
    """Returns (operations in the plain trace, tracing seconds, tfckpt's seconds) for one job."""
    import tensorflow as tf

    import tfckpt
    from benchmarks import jobs

    job = jobs.JOBS[name](**(jobs.TINY[name] if FLAGS.tiny else {}))
    began = time.perf_counter()
    graph = tf.function(job.train_step).get_concrete_function(job.x, job.y).graph
    traced = time.perf_counter() - began
    step = tfckpt.checkpoint(budget="min", solver=FLAGS.solver)(tf.function(job.train_step))
    step(job.x, job.y)
    if step.report is None:
        raise RuntimeError(f"tfckpt left {name} as it was and made no report")
    return len(graph.get_operations()), traced, step.report.plan_seconds


def main(argv: list[str]) -> None:
    """Prints one line per job."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    print("| job | operations | TensorFlow's trace s | tfckpt capture + plan + rewrite s |")
    print("| --- | --- | --- | --- |")
    for name in FLAGS.jobs:
        operations, traced, seconds = measure(name)
        print(f"| {name} | {operations} | {traced:.1f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
