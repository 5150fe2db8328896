"""Plans settled by `tfckpt.tune`, and what ten steps of the choice take afterwards.

    python -m benchmarks.tuned --networks=mlp,vit --budgets=0.5,0.7

Every row has a process of its own. `of allowed` is the median of ten measured peaks as a share of
what the budget allows (the fraction of the measured plain peak); `time` is that of the choice as a
multiple of the plain step's, as tuning measured it; `state` says whether every variable had the
same bits after tuning as before.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", ["mlp", "vit", "mobilenet", "mixer"],
                  "Names in benchmarks.measured.NETWORKS.")
flags.DEFINE_list("budgets", ["0.5", "0.7"], "Fractions, or 'min'.")
flags.DEFINE_integer("threads", 2, "Operations run at once (inter-op threads).")
flags.DEFINE_string("cell", "", "Tune one network for one budget in this process.")
flags.DEFINE_integer("steps", 10, "Measured steps.", lower_bound=1)

COLUMNS = ("network", "budget", "plain MB", "allowed MB", "measured MB", "of allowed", "time",
           "plans", "tuned in s", "state")
MB = 1e6


def measure(name: str, budget: str) -> dict[str, Any]:
    """Return what one row has come to, in this process."""
    import tensorflow as tf

    import tfckpt
    from benchmarks.measure import measure_step
    from benchmarks.measured import NETWORKS

    tf.config.threading.set_inter_op_parallelism_threads(FLAGS.threads)
    body, args = NETWORKS[name]()
    step = tfckpt.checkpoint(tf.function(body), budget=budget if budget == "min" else float(budget))
    variables = step.plain.get_concrete_function(*args).graph.variables
    before = [v.numpy().tobytes() for v in variables]
    try:
        found = tfckpt.tune(step, *args)
    except tfckpt.InfeasibleBudgetError as error:
        return {"refused": error.smallest_bytes}
    same = before == [v.numpy().tobytes() for v in variables]
    peaks = [measure_step(step, *args).peak for _ in range(FLAGS.steps)]
    return {"plain": found.plain.peak_bytes, "allowed": found.allowed_bytes, "same": same,
            "median": statistics.median(peaks), "plans": len(found.plans),
            "time": found.chosen.seconds / found.plain.seconds, "seconds": found.seconds}


def main(_: list[str]) -> int:
    """Print a row for each network and budget."""
    if FLAGS.cell:
        print(json.dumps(measure(*FLAGS.cell.split(","))))
        return 0
    print(head(COLUMNS))
    for name in FLAGS.networks:
        for budget in FLAGS.budgets:
            output = in_own_process(f"{name} {budget}", "benchmarks.tuned", (
                f"--cell={name},{budget}", f"--threads={FLAGS.threads}", f"--steps={FLAGS.steps}"))
            if output is not None:
                print(_row(name, budget, json.loads(output.splitlines()[-1])), flush=True)
    return 0


def _row(name: str, budget: str, found: dict[str, Any]) -> str:
    if "refused" in found:
        return line([name, budget, "", "", f"refused: at least {found['refused'] / MB:.1f}",
                     *[""] * 5])
    allowed = found["allowed"]
    return line([name, budget, f"{found['plain'] / MB:.1f}",
                 "" if allowed is None else f"{allowed / MB:.1f}", f"{found['median'] / MB:.1f}",
                 "" if allowed is None else f"{found['median'] / allowed:.3f}",
                 f"{found['time']:.2f}x", str(found["plans"]), f"{found['seconds']:.1f}",
                 "same" if found["same"] else "CHANGED"])


if __name__ == "__main__":
    sys.exit(app.run(main))
