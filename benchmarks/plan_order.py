"""Compares the order of one step's plans by planned time with the order by measured time.

    python -m benchmarks.plan_order
    python -m benchmarks.plan_order --networks=mlp,vit --budgets=min,0.5,0.7,0.9 --rounds=15

Each network has a process of its own. Its plain step and a plan for each budget run in turns, so
that whatever else the machine does slows all of them. For two plans whose measured times differ
(their confidence intervals of 95 % do not overlap) it is counted whether the faster one has the
smaller planned overhead: `tau` is Kendall's over these pairs, 1 if it always has. The last columns
are planned and measured times of the slowest plan as multiples of the plain step's. With
`--profiled` plans are priced with the profiler's seconds of the plain step's ops
(`tfckpt.op_seconds`).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", [], "Names in benchmarks.measured.NETWORKS; default all.")
flags.DEFINE_list("budgets", ["min", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"],
                  "Fractions, or 'min'; those that cannot be met are left out.")
flags.DEFINE_integer("threads", 2, "Operations run at once (inter-op threads).")
flags.DEFINE_integer("rounds", 15, "Measured steps of each plan.", lower_bound=2)
flags.DEFINE_bool("profiled", False, "Price plans with measured times of ops.")
flags.DEFINE_string("network", "", "Measure one network in this process.")

COLUMNS = ("network", "plans", "pairs", "different", "in order", "tau", "planned, slowest",
           "measured, slowest")


def measure(name: str) -> list[dict[str, Any]]:
    """Return planned overhead and measured seconds of the plain step and each plan."""
    import tensorflow as tf

    import tfckpt
    from benchmarks.measured import NETWORKS

    tf.config.threading.set_inter_op_parallelism_threads(FLAGS.threads)
    body, args = NETWORKS[name]()
    found: dict[float, Any] = {0.0: tf.function(body)}
    seconds_of = tfckpt.op_seconds(tf.function(body), *args) if FLAGS.profiled else None
    for budget in FLAGS.budgets:
        step = tfckpt.checkpoint(tf.function(body), op_seconds=seconds_of,
                                 budget=budget if budget == "min" else float(budget))
        try:
            step(*args)
        except tfckpt.InfeasibleBudgetError:
            continue
        if step.report is not None and step.report.applied:
            found.setdefault(step.report.overhead, step)
    seconds: dict[float, list[float]] = {overhead: [] for overhead in found}
    for _ in range(FLAGS.rounds + 2):
        for overhead, step in found.items():
            began = time.perf_counter()
            tf.nest.map_structure(lambda t: t.numpy(), step(*args))
            seconds[overhead].append(time.perf_counter() - began)
    return [{"overhead": overhead, "seconds": taken[2:]} for overhead, taken in seconds.items()]


def compared(plans: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return how many pairs of plans differ by measured time, and how many of these as planned."""
    different = right = 0
    for one, other in itertools.combinations(plans, 2):
        (low, high), (other_low, other_high) = (_interval(one["seconds"]),
                                                _interval(other["seconds"]))
        if high < other_low or other_high < low:
            different += 1
            right += (high < other_low) == (one["overhead"] < other["overhead"])
    return different, right


def _interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the confidence interval of the mean, without the slowest tenth."""
    kept = sorted(seconds)[:max(2, math.ceil(0.9 * len(seconds)))]
    margin = 1.96 * statistics.stdev(kept) / math.sqrt(len(kept))
    return statistics.mean(kept) - margin, statistics.mean(kept) + margin


def main(_: list[str]) -> int:
    """Print a row for each network."""
    if FLAGS.network:
        print(json.dumps(measure(FLAGS.network)))
        return 0
    from benchmarks.measured import NETWORKS

    print(head(COLUMNS))
    differ = agree = 0
    for name in FLAGS.networks or NETWORKS:
        output = in_own_process(name, "benchmarks.plan_order", (
            f"--network={name}", f"--budgets={','.join(FLAGS.budgets)}",
            f"--threads={FLAGS.threads}", f"--rounds={FLAGS.rounds}",
            *(["--profiled"] if FLAGS.profiled else [])))
        if output is None:
            continue
        plans = json.loads(output.splitlines()[-1])
        different, right = compared(plans)
        differ, agree = differ + different, agree + right
        median = [statistics.median(p["seconds"]) for p in plans]
        slowest = max(range(len(plans)), key=lambda n: plans[n]["overhead"])
        print(line([name, str(len(plans)), str(len(plans) * (len(plans) - 1) // 2),
                    str(different), str(right), _tau(different, right),
                    f"{1 + plans[slowest]['overhead']:.2f}",
                    f"{median[slowest] / median[0]:.2f}"]), flush=True)
    print(f"\n{differ} pairs differ, {agree} stand in the planned order: tau {_tau(differ, agree)}")
    return 0


def _tau(different: int, right: int) -> str:
    return f"{(2 * right - different) / different:.2f}" if different else "-"


if __name__ == "__main__":
    sys.exit(app.run(main))
