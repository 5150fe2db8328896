"""Budgets of steps that the executor runs, against what TensorFlow's allocator counts.

    python -m benchmarks.executor_budgets
    python -m benchmarks.executor_budgets --networks=mlp,vit --budgets=0.5,0.7 --threads=1,2

Every cell has a process of its own, as a user's training has: a step is planned, runs three times,
and is measured in ten more. `of allowed` is the median of the measured peaks above what a step
starts with, as a share of what the budget allows (the fraction of the plain step's expected peak);
`expected / measured` says how well that median was foreseen, of ours and of the plain step, which
has a process of its own too. `next` is what the next larger plan of the front would take of what
is allowed, if it grew in proportion: above 1 there is nothing between, and the front is not dense
there. A refused budget says what could be met.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", [], "Names in benchmarks.measured.NETWORKS; default all.")
flags.DEFINE_list("budgets", ["0.35", "0.5", "0.7", "0.9"], "Fractions, or 'min'.")
flags.DEFINE_list("threads", ["1", "2"], "Operations run at once (inter-op threads).")
flags.DEFINE_string("cell", "", "Measure one network, budget (or 'plain') and number of threads.")
flags.DEFINE_integer("steps", 10, "Measured steps.", lower_bound=1)

COLUMNS = ("network", "threads", "budget", "plain MB", "allowed MB", "measured MB", "of allowed",
           "next", "expected / measured", "plain", "time", "plans", "planned in s")
MB = 1e6
WARMUP = 3


def measure(name: str, budget: str, threads: int) -> dict[str, Any]:
    """Measure one cell of the table in this process."""
    import tensorflow as tf

    import tfckpt
    from benchmarks.measure import measure_step
    from benchmarks.measured import NETWORKS

    tf.config.threading.set_inter_op_parallelism_threads(threads)
    step, args = NETWORKS[name]()
    function = tf.function(step)
    if budget != "plain":
        function = tfckpt.checkpoint(function, budget=budget if budget == "min" else float(budget))
    try:
        for _ in range(WARMUP):
            function(*args)
    except tfckpt.InfeasibleBudgetError as error:
        return {"refused": str(error), "least": error.smallest_bytes}
    peaks = [measure_step(function, *args).peak for _ in range(FLAGS.steps)]
    found: dict[str, Any] = {"median": statistics.median(peaks), "most": max(peaks)}
    if budget != "plain":
        report = function.report
        before, after = report.expected_bytes
        found |= {"plain": before, "expected": after, "allowed": report.allowed_bytes,
                  "time": report.overhead, "seconds": report.plan_seconds,
                  "next": _next_larger(report),
                  "plans": report.compiled.trials if report.compiled else 0}
    return found


def _next_larger(report: Any) -> float | None:
    """Return the share of the allowed bytes that the next larger plan would take; None if unknown.

    The applied plan is counted with its simulated bound, and others are scaled up from it by their
    planned peaks.
    """
    asked = report.compiled
    if not report.applied or asked is None or asked.after is None or not report.allowed_bytes:
        return None
    taken = [p for p in report.front if abs(p[1] - report.overhead) < 1e-9]
    larger = [p[0] for p in report.front if taken and p[0] > taken[0][0]]
    if not larger:
        return None
    return min(larger) / taken[0][0] * asked.after.bound / report.allowed_bytes


def main(_: list[str]) -> int:
    """Print a row for each cell, and how many are met."""
    if FLAGS.cell:
        name, budget, threads = FLAGS.cell.split(",")
        print(json.dumps(measure(name, budget, int(threads))))
        return 0
    from benchmarks.measured import NETWORKS

    print(head(COLUMNS))
    cells = []
    for name in FLAGS.networks or NETWORKS:
        for threads in FLAGS.threads:
            plain = _cell(name, "plain", threads)
            for budget in FLAGS.budgets:
                found = _cell(name, budget, threads)
                if found is None or plain is None:
                    continue
                print(_row(name, budget, threads, plain["median"], found), flush=True)
                cells.append(found)
    _summary([c for c in cells if "refused" not in c and c["allowed"]], len(cells))
    return 0


def _cell(name: str, budget: str, threads: str) -> dict[str, Any] | None:
    output = in_own_process(f"{name} {budget}", "benchmarks.executor_budgets", (
        f"--cell={name},{budget},{threads}", f"--steps={FLAGS.steps}"))
    return None if output is None else json.loads(output.splitlines()[-1])


def _row(name: str, budget: str, threads: str, plain: float, found: dict[str, Any]) -> str:
    start = [name, threads, budget, f"{plain / MB:.1f}"]
    if "refused" in found:
        return line([*start, "", f"refused: at least {found['least'] / MB:.1f}", *[""] * 7])
    allowed, median = found["allowed"], found["median"]
    return line([*start, "" if allowed is None else f"{allowed / MB:.1f}", f"{median / MB:.1f}",
                 "" if allowed is None else f"{median / allowed:.3f}",
                 "" if found["next"] is None else f"{found['next']:.2f}",
                 f"{found['expected'] / median:.2f}", f"{found['plain'] / plain:.2f}",
                 f"{100 * found['time']:+.1f} %", str(found["plans"]),
                 f"{found['seconds']:.1f}"])


def _summary(met: list[dict[str, Any]], cells: int) -> None:
    shares = sorted(c["median"] / c["allowed"] for c in met)
    foreseen = [c["expected"] / c["median"] for c in met]
    if not shares:
        return
    print(f"\n{cells} cells, {cells - len(shares)} of them refused or without a bound; of the "
          f"others {sum(s <= 1 for s in shares)} are at or below what is allowed, "
          f"{sum(s <= 1.03 for s in shares)} within 3 % above; the worst takes {shares[-1]:.3f}, "
          f"the median {statistics.median(shares):.3f}{_dense(met)}. Expected / measured is "
          f"within 5 % in {sum(abs(f - 1) <= .05 for f in foreseen)}, within 10 % in "
          f"{sum(abs(f - 1) <= .1 for f in foreseen)}.")


def _dense(met: list[dict[str, Any]]) -> str:
    shares = [c["median"] / c["allowed"] for c in met if c["next"] is not None and c["next"] <= 1]
    return f", {statistics.median(shares):.3f} in {len(shares)} where the front is dense" if (
        shares) else ""


if __name__ == "__main__":
    sys.exit(app.run(main))
