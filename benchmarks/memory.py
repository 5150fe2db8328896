"""Peak memory and step time of a training job, with and without tfckpt.

One row:          python -m benchmarks.memory --job resnet50 --budget min --threads 1
The whole table:  python -m benchmarks.memory --all

Thread counts and compiled code belong to a process, so `--all` runs every row in a process of
its own, one after the other.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from absl import app, flags

from benchmarks import rows

FLAGS = flags.FLAGS
flags.DEFINE_string("job", "resnet50", "Which network: a name in benchmarks.jobs.JOBS.")
flags.DEFINE_string("budget", "min", "'min', a fraction such as 0.6, bytes, or e.g. '300MiB'.")
flags.DEFINE_string("solver", "auto", "Solver handed to tfckpt.checkpoint.")
flags.DEFINE_integer("threads", 1, "Operations run at once (inter-op threads); 0 = default.")
flags.DEFINE_integer("steps", 8, "Measured pairs of steps.", lower_bound=1)
flags.DEFINE_integer("warmup", 3, "Pairs of steps before measuring.", lower_bound=3)
flags.DEFINE_integer("seed", 0, "Seed of weights and data.")
flags.DEFINE_bool("jit_compile", False, "Compile both steps with XLA.")
flags.DEFINE_bool("tiny", False, "A miniature of the job, to try this program out.")
flags.DEFINE_bool("header", True, "Print the table's header above the row.")
flags.DEFINE_bool("all", False, "Run the whole table, one process per row.")
flags.DEFINE_bool("json", False, "Print the row as one line of JSON instead.")

# The rows of `--all`: (job, budget, solver, threads, jit_compile).
TABLE: tuple[tuple[str, str, str, int, bool], ...] = (
    ("resnet50", "min", "auto", 1, False),
    ("resnet50", "min", "auto", 2, False),
    ("resnet50", "min", "auto", 0, False),
    ("resnet50", "min", "store_all", 1, False),
    ("resnet50", "0.6", "auto", 1, False),
    ("transformer", "min", "auto", 1, False),
    ("transformer", "min", "auto", 0, False),
    ("unet", "min", "auto", 1, False),
    ("unet", "min", "auto", 0, False),
    ("resnet50", "min", "auto", 1, True),
)

MB = 1_000_000
COLUMNS = (
    "job",
    "budget",
    "solver",
    "threads",
    "plain MB",
    "ours MB",
    "memory ratio",
    "time ratio",
    "planned/measured, plain",
    "planned/measured, ours",
    "plan s",
)


@dataclass(frozen=True)
class Row:
    """One measured row; peaks in bytes, `plan_seconds` in seconds, NaN where there is no report."""

    job: str
    budget: str
    solver: str
    threads: int
    jit_compile: bool
    plain_peak: int
    ours_peak: int
    time_ratio: float
    planned_plain: float
    planned_ours: float
    plan_seconds: float

    def cells(self) -> list[str]:
        """Return the row as text, in the order of `COLUMNS`."""
        return [
            self.job + (" (XLA)" if self.jit_compile else ""),
            self.budget,
            self.solver,
            str(self.threads) if self.threads else "default",
            f"{self.plain_peak / MB:.0f}",
            f"{self.ours_peak / MB:.0f}",
            _ratio(self.ours_peak, self.plain_peak),
            f"{self.time_ratio:.2f}",
            _ratio(self.planned_plain, self.plain_peak),
            _ratio(self.planned_ours, self.ours_peak),
            "-" if math.isnan(self.plan_seconds) else f"{self.plan_seconds:.1f}",
        ]


def _ratio(numerator: float, denominator: float) -> str:
    if not denominator or math.isnan(numerator):
        return "-"
    return f"{numerator / denominator:.2f}"


def parse_budget(text: str) -> str | float | int:
    """`"0.6"` is a fraction, `"300000000"` a number of bytes, anything else stays text."""
    if text.isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def measure_row() -> Row:
    """Measure the row that the flags describe, in this process."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(FLAGS.threads)

    import tfckpt
    from benchmarks import jobs, measure

    arguments: dict[str, Any] = jobs.TINY[FLAGS.job] if FLAGS.tiny else {}
    plain_job = jobs.JOBS[FLAGS.job](seed=FLAGS.seed, **arguments)
    ours_job = jobs.JOBS[FLAGS.job](seed=FLAGS.seed, **arguments)
    plain = tf.function(plain_job.train_step, jit_compile=FLAGS.jit_compile or None)
    ours = tfckpt.checkpoint(budget=parse_budget(FLAGS.budget), solver=FLAGS.solver)(
        tf.function(ours_job.train_step, jit_compile=FLAGS.jit_compile or None)
    )
    result = measure.compare(
        plain,
        (plain_job.x, plain_job.y),
        ours,
        (ours_job.x, ours_job.y),
        steps=FLAGS.steps,
        warmup=FLAGS.warmup,
    )
    return _row(result, ours.report)


def _row(result: Any, report: Any) -> Row:
    nothing = float("nan")
    return Row(
        job=FLAGS.job,
        budget=FLAGS.budget,
        solver=FLAGS.solver,
        threads=FLAGS.threads,
        jit_compile=FLAGS.jit_compile,
        plain_peak=result.plain_peak,
        ours_peak=result.ours_peak,
        time_ratio=result.time_ratio,
        planned_plain=report.simulated_bytes[0] if report else nothing,
        planned_ours=report.simulated_bytes[1] if report else nothing,
        plan_seconds=report.plan_seconds if report else nothing,
    )


def _arguments(job: str, budget: str, solver: str, threads: int, jit_compile: bool) -> list[str]:
    return ["--json", f"--job={job}", f"--budget={budget}", f"--solver={solver}",
            f"--threads={threads}", f"--steps={FLAGS.steps}", f"--warmup={FLAGS.warmup}",
            f"--seed={FLAGS.seed}", f"--jit_compile={jit_compile}", f"--tiny={FLAGS.tiny}"]


def parse_row(output: str) -> Row:
    """Find the line of JSON in what a row's process printed.

    Raises:
      ValueError: if there is none.
    """
    names = {field.name for field in fields(Row)}
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            values = json.loads(line)
            if set(values) == names:
                return Row(**values)
    raise ValueError("the process printed no row")


def run_table() -> int:
    """Run every row of `TABLE`; return how many failed."""
    failed = 0
    print(rows.head(COLUMNS), flush=True)
    for row in TABLE:
        output = rows.in_own_process(str(row), "benchmarks.memory", _arguments(*row))
        if output is None:
            failed += 1
        else:
            print(rows.line(parse_row(output).cells()), flush=True)
    return failed


def main(argv: list[str]) -> int:
    """Run one row, or all of them."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.all:
        return 1 if run_table() else 0
    row = measure_row()
    if FLAGS.json:
        print(json.dumps(asdict(row)))
        return 0
    if FLAGS.header:
        print(rows.head(COLUMNS))
    print(rows.line(row.cells()))
    return 0


if __name__ == "__main__":
    app.run(main)
