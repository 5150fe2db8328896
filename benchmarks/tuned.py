"""Plans settled by `tfckpt.tune`, and what ten steps of the choice take afterwards.

    python -m benchmarks.tuned --networks=mlp,vit --budgets=0.5,0.7

Every row has a process of its own. `of allowed` is the median of ten measured peaks as a share of
what the budget allows (the fraction of the measured plain peak); `time` is that of the choice as a
multiple of the plain step's, as tuning measured it; `state` says whether every variable had the
same bits after tuning as before. `best` is the time of the choice as a multiple of the best that
was found otherwise: plans for shares of the budget (`--shares`) and the plain step run in turns
with it (`--rounds`), and the fastest counts whose measured peak fits.
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

flags.DEFINE_list("shares", ["0.85", "0.93", "1", "1.1"],
                  "Of the budget: plans that the choice is compared with; none compares nothing.")
flags.DEFINE_integer("rounds", 8, "Turns of that comparison.", lower_bound=2)
flags.DEFINE_bool("xla", False, "Whether XLA is tried too.")

COLUMNS = ("network", "budget", "plain MB", "allowed MB", "measured MB", "of allowed", "time",
           "best", "plans", "tuned in s", "state")
MB = 1e6


def measure(name: str, budget: str) -> dict[str, Any]:
    """Measure one row in this process."""
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
        found = tfckpt.tune(step, *args, xla=FLAGS.xla)
    except tfckpt.InfeasibleBudgetError as error:
        return {"refused": error.smallest_bytes}
    same = before == [v.numpy().tobytes() for v in variables]
    peaks = [measure_step(step, *args).peak for _ in range(FLAGS.steps)]
    return {"plain": found.plain.peak_bytes, "allowed": found.allowed_bytes, "same": same,
            "median": statistics.median(peaks), "plans": len(found.plans),
            "best": _against_others(body, args, step, budget, found.allowed_bytes),
            "time": found.chosen.seconds / found.plain.seconds, "seconds": found.seconds}


def _against_others(body: Any, args: Any, step: Any, budget: str, allowed: int | None
                    ) -> float | None:
    """Return the time of a step as a multiple of that of the fastest other that fits."""
    import tensorflow as tf

    import tfckpt
    from benchmarks.measure import measure_step

    if allowed is None or not FLAGS.shares:
        return None
    every: list[Any] = [step, tf.function(body)]
    for share in FLAGS.shares:
        other = tfckpt.checkpoint(tf.function(body), budget=min(1.0, float(share) * float(budget)))
        try:
            other(*args)
        except tfckpt.InfeasibleBudgetError:
            continue
        every.append(other)
    for function in every:  # both have run once then
        function(*args)
    rows = [[measure_step(function, *args) for function in every] for _ in range(FLAGS.rounds)]
    seconds = [statistics.median(row[i].seconds for row in rows) for i in range(len(every))]
    peaks = [statistics.median(row[i].peak for row in rows) for i in range(len(every))]
    fitting = [s for s, peak in zip(seconds[1:], peaks[1:], strict=True) if peak <= allowed]
    return seconds[0] / min(fitting) if fitting else None


def main(_: list[str]) -> int:
    """Print a row for each network and budget."""
    if FLAGS.cell:
        print(json.dumps(measure(*FLAGS.cell.split(","))))
        return 0
    print(head(COLUMNS))
    for name in FLAGS.networks:
        for budget in FLAGS.budgets:
            output = in_own_process(f"{name} {budget}", "benchmarks.tuned", (
                f"--cell={name},{budget}", f"--threads={FLAGS.threads}", f"--steps={FLAGS.steps}",
                f"--shares={','.join(FLAGS.shares)}", f"--rounds={FLAGS.rounds}",
                *(["--xla"] if FLAGS.xla else [])))
            if output is not None:
                print(_row(name, budget, json.loads(output.splitlines()[-1])), flush=True)
    return 0


def _row(name: str, budget: str, found: dict[str, Any]) -> str:
    if "refused" in found:
        return line([name, budget, "", "", f"refused: at least {found['refused'] / MB:.1f}",
                     *[""] * 6])
    allowed = found["allowed"]
    return line([name, budget, f"{found['plain'] / MB:.1f}",
                 "" if allowed is None else f"{allowed / MB:.1f}", f"{found['median'] / MB:.1f}",
                 "" if allowed is None else f"{found['median'] / allowed:.3f}",
                 f"{found['time']:.2f}x", "" if found["best"] is None else f"{found['best']:.2f}x",
                 str(found["plans"]), f"{found['seconds']:.1f}",
                 "same" if found["same"] else "CHANGED"])


if __name__ == "__main__":
    sys.exit(app.run(main))
