"""How XLA compiles recomputation: guards compared, with and without XLA's flags.

    python -m benchmarks.xla_guards [--jobs=vgg16,transformer] [--flag_sets=none] [--tiny]

Each job's step is compiled plain and with each guard (see `tfckpt.rewrite.xla.guards`): `data`,
which tfckpt uses, XLA's `barrier`, and `control` edges, which XLA ignores. Flags belong to a
process, so each job is compiled in one for each set of flags. Nothing is run. Printed are the bytes
of XLA's temporary buffers, the recomputed ops that were planned, those that the optimized HLO
computes and those that it merged with their originals, and how many matrix products and
convolutions there are more than in the plain step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from absl import app, flags

from benchmarks import rows
from tfckpt.rewrite.xla.guards import CSE_FLAG

FLAGS = flags.FLAGS
flags.DEFINE_list("jobs", ["resnet50", "densenet121", "vgg16", "inception_v3", "unet",
                           "transformer", "lstm"], "Names in benchmarks.jobs.SMALL.")
flags.DEFINE_bool("tiny", False, "Miniatures of the jobs, to try this program out.")
flags.DEFINE_string("alone", None, "For internal use: the set of flags of this process.")

GUARDS = ("data", "barrier", "control")
SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
QUICKLY = "--xla_backend_optimization_level=0"
"""For every process: how well machine code is optimized changes no buffer, but takes time."""
FLAG_SETS = {"none": "", "barriers stay": CSE_FLAG, "memory scheduler": SCHEDULER,
             "both": f"{CSE_FLAG} {SCHEDULER}"}
flags.DEFINE_list("flag_sets", list(FLAG_SETS), "Which sets of XLA's flags.")
COLUMNS = ("job", "XLA's flags", "guard", "temp MB", "ratio", "planned", "computed", "merged",
           "heavy ops more")


def compile_job(name: str, label: str) -> None:
    """Compile one job in this process and print its rows."""
    import keras
    import tensorflow as tf

    from benchmarks import jobs
    from tfckpt.carriers.checkpointed import CheckpointedStep
    from tfckpt.ir.target import Target
    from tfckpt.request.options import make_options
    from tfckpt.verify import compiled

    plain: Any = None
    for guard in (None, *GUARDS):
        keras.backend.clear_session()
        job = jobs.JOBS[name](**(jobs.TINY if FLAGS.tiny else jobs.SMALL)[name])
        step: Any = tf.function(job.train_step, jit_compile=True)
        if guard is not None:
            step = CheckpointedStep(step, make_options(target=Target(guard=guard)))
        found = compiled(step, job.x, job.y)
        plain = plain or found
        print(rows.line([name, label, guard or "plain", f"{found.temp_bytes / 1e6:.1f}",
                         f"{found.temp_bytes / plain.temp_bytes:.2f}", str(found.planned_count),
                         str(found.copy_count), str(found.merged_count),
                         str(found.heavy_count - plain.heavy_count)]), flush=True)


def main(argv: list[str]) -> int:
    """One process for each job and set of flags; 1 where one failed."""
    unknown = [label for label in FLAGS.flag_sets if label not in FLAG_SETS]
    if len(argv) > 1 or unknown:
        raise app.UsageError(f"unexpected: {argv[1:] + unknown}; sets: {', '.join(FLAG_SETS)}")
    if FLAGS.alone is not None:
        for name in FLAGS.jobs:
            compile_job(name, FLAGS.alone)
        return 0
    print(rows.head(COLUMNS), flush=True)
    failed = 0
    for name in FLAGS.jobs:
        for label in FLAGS.flag_sets:
            command = [sys.executable, "-m", "benchmarks.xla_guards", f"--alone={label}",
                       f"--jobs={name}", *(["--tiny"] if FLAGS.tiny else [])]
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ,
                           "XLA_FLAGS": f"{QUICKLY} {FLAG_SETS[label]}"}
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True,
                                  env=environment)
            if done.returncode:
                failed += 1
                print(f"failed: {name}, {label}\n{done.stderr[-2000:]}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    app.run(main)
