"""The native pass beside the decorator: peaks, time and numbers of the same step in one process.

    python -m benchmarks.native_pass [--jobs=resnet50,transformer] [--steps=3]
    python -m benchmarks.native_pass --skip

Needs a C++ compiler. Peaks are the allocator's, above what is allocated when the step starts;
medians. Numbers are compared over losses and variables after the measured steps, with one
inter-op thread and op determinism. With `--skip`: what the pass costs graphs without gradients.
"""

from __future__ import annotations

import statistics
import time

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("jobs", ["resnet50", "transformer"], "Names in benchmarks.jobs.JOBS.")
flags.DEFINE_integer("steps", 3, "Measured steps of each kind.", lower_bound=1)
flags.DEFINE_string("budget", "min", "'min' or a fraction such as 0.6.")
flags.DEFINE_bool("skip", False, "Measure graphs without gradients instead.")
REPEATS = 9


def measure(name: str, kind: str, budget: object) -> tuple[float, float, list[bytes]]:
    """Median peak in bytes, median seconds of a step, losses and variables."""
    import keras
    import tensorflow as tf

    import grappler_ext
    import tfckpt
    from benchmarks import jobs
    from tfckpt.verify.memory import default_device, memory_info

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    job = jobs.JOBS[name]()
    step = tf.function(job.train_step)
    if kind == "decorator":
        step = tfckpt.checkpoint(step, budget=budget)
    if kind == "pass":
        grappler_ext.enable(budget=budget)
    peaks, seconds, numbers = [], [], []
    for turn in range(FLAGS.steps + 1):
        before = memory_info(default_device(), reset=True)["current"]
        started = time.perf_counter()
        numbers.append(step(job.x, job.y).numpy().tobytes())
        if turn:  # the first call traces and plans
            seconds.append(time.perf_counter() - started)
            peaks.append(memory_info(default_device())["peak"] - before)
    grappler_ext.disable()
    numbers += [v.numpy().tobytes() for v in job.model.variables]
    return statistics.median(peaks), statistics.median(seconds), numbers


def measure_skips() -> None:
    """Print what the pass takes to leave dataset maps, initialisers and forward passes alone."""
    import tensorflow as tf

    import grappler_ext

    def chain(length):
        def body(x):
            for _ in range(length):
                x = tf.tanh(x) * 1.5
            return x
        return body

    def dataset_map(length):
        body = chain(length)
        list(tf.data.Dataset.from_tensors(tf.ones((2, 2))).map(body))

    def initialiser(length):
        variables = [tf.Variable(tf.zeros((8, 8))) for _ in range(length)]
        tf.function(lambda: [v.assign(tf.random.stateless_normal((8, 8), (1, i)))
                             for i, v in enumerate(variables)])()

    def forward(length):
        tf.function(chain(length))(tf.ones((2, 2)))

    print("| graph | length | graphs skipped | median microseconds | largest |")
    print("| --- " * 5 + "|")
    with grappler_ext.enabled():
        for kind in (dataset_map, initialiser, forward):
            for length in (5, 50, 500):
                before, found = grappler_ext.skipped()[0], []
                for _ in range(REPEATS):
                    kind(length)
                    found.append(1e6 * grappler_ext.skipped()[1])
                count = grappler_ext.skipped()[0] - before
                # TensorFlow may not ask the pass at all, as for the functions of datasets
                said = f"{statistics.median(found):.1f} | {max(found):.1f}" if count else "- | -"
                print(f"| {kind.__name__} | {length} | {count} | {said} |", flush=True)


def main(argv: list[str]) -> None:
    """Print one line for each job."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.skip:
        measure_skips()
        return
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    budget = FLAGS.budget if FLAGS.budget == "min" else float(FLAGS.budget)
    print("| job | plain MB | decorator MB | pass MB | pass / decorator | time, decorator | "
          "time, pass | same numbers, decorator | same numbers, pass |")
    print("| --- " * 9 + "|")
    for name in FLAGS.jobs:
        (plain, alone, wanted), (ours, slow, found), (native, late, other) = (
            measure(name, kind, budget) for kind in ("plain", "decorator", "pass"))
        print(f"| {name} | {plain / 1e6:.0f} | {ours / 1e6:.0f} | {native / 1e6:.0f} | "
              f"{native / ours:.2f} | {slow / alone:.2f}x | {late / alone:.2f}x | "
              f"{found == wanted} | {other == wanted} |", flush=True)


if __name__ == "__main__":
    app.run(main)
