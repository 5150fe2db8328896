"""The cost of comparing the arithmetic of a rewritten step with the plain one's.

    python -m benchmarks.certificates [--jobs=resnet50,transformer] [--pairs=3]

A row has the processor seconds that TensorFlow takes to trace the plain step, those of the
comparison that is made while the step trains, and their ratio; the seconds of the first call with
the comparison as a multiple of those without (median over pairs of processes); and the same of the
calls that are made while it is compared and of those after it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("jobs", ["resnet50", "transformer"], "Names in benchmarks.jobs.JOBS.")
flags.DEFINE_integer("pairs", 3, "Pairs of processes for the first call.")
flags.DEFINE_bool("tiny", False, "Miniatures of the jobs, to try this program out.")
flags.DEFINE_string("one", "", "Measure this job in this process, and print it as JSON.")


def measured(name: str) -> dict[str, float]:
    """Return what one process measures of a job."""
    import tensorflow as tf

    import tfckpt
    from benchmarks import jobs
    from tfckpt.verify import wait_for_certificates

    job = jobs.JOBS[name](**(jobs.TINY if FLAGS.tiny else jobs.SMALL)[name])
    began = time.process_time()
    tf.function(job.train_step).get_concrete_function(job.x, job.y)
    found = {"trace": time.process_time() - began}
    step = tfckpt.checkpoint(tf.function(job.train_step))
    began = time.perf_counter()
    step(job.x, job.y)
    found["first"] = time.perf_counter() - began
    assert step.report is not None and step.report.applied, step.report
    began = time.process_time()
    compared = threading.Thread(target=wait_for_certificates)
    compared.start()
    compared.join()
    found["compared"] = time.process_time() - began
    found["after"] = statistics.median(_seconds(step, job) for _ in range(5))
    step.report.certified(None, "")
    if os.environ.get("TFCKPT_CERTIFICATES") != "off":
        found["meanwhile"] = _meanwhile(step, job)
    return {**found, "identical": step.report.identical or 0.0}


def _seconds(step: Any, job: Any) -> float:
    began = time.perf_counter()
    step(job.x, job.y)
    return time.perf_counter() - began


def _meanwhile(step: Any, job: Any) -> float:
    """Return the median of the calls that are made while another trace is compared."""
    import tensorflow as tf

    import tfckpt
    from tfckpt.verify import wait_for_certificates
    from tfckpt.verify.arithmetic import background

    background.DELAY = 0.0
    again = tfckpt.checkpoint(tf.function(job.train_step))
    again.get_concrete_function(job.x, job.y)
    assert again.report is not None
    taken: list[float] = []
    while again.report.identical is None and len(taken) < 200:
        taken.append(_seconds(step, job))
    wait_for_certificates()
    step.report.certified(again.report.identical, again.report.certificate)
    return statistics.median(taken)


def _process(name: str, certificates: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.certificates", f"--one={name}",
         f"--tiny={FLAGS.tiny}"],
        capture_output=True, text=True, check=True,
        env={**os.environ, "TFCKPT_CERTIFICATES": certificates, "TFCKPT_CACHE": "off",
             "CUDA_VISIBLE_DEVICES": ""})
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str) -> str:
    """Return the row of a job."""
    pairs = [(_process(name, "on"), _process(name, "off")) for _ in range(FLAGS.pairs)]
    trace, compared = (statistics.median(on[key] for on, _ in pairs)
                       for key in ("trace", "compared"))
    first = statistics.median(on["first"] / off["first"] for on, off in pairs)
    meanwhile = statistics.median(on["meanwhile"] / on["after"] for on, _ in pairs)
    same = "yes" if all(on["identical"] for on, _ in pairs) else "no"
    return (f"| {name} | {trace:.1f} | {compared:.1f} | {compared / trace:.2f} | {first:.2f} "
            f"| {meanwhile:.2f} | {same} |")


def main(argv: list[str]) -> None:
    """Print a row for each job."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.one:
        print(json.dumps(measured(FLAGS.one)))
        return
    print("| job | trace, processor s | comparison, processor s | ratio | first call | calls "
          "meanwhile | certified |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in FLAGS.jobs:
        print(row(name), flush=True)


if __name__ == "__main__":
    app.run(main)
