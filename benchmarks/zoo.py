"""Trains the entries of the zoo plain and rewritten and prints what became of each.

    python -m benchmarks.zoo [GROUP or GROUP-NAME ...]

A row has the plain and the planned peak (simulated, above what a step starts with), the measured
peaks of the plain and the rewritten step, the time of a rewritten step as a multiple of the plain
one's (median over pairs of neighbouring steps), and whether losses, gradients, variables and
optimizer slots agree in every bit. Measured peaks of very small entries say nothing, and are left
out: TensorFlow counts no tensor below 256 KiB on a CPU. Entries that need a process of their own
get one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from benchmarks.measure import Meter, Sample
from tests.zoo import alone, groups
from tests.zoo import entry as zoo

REPEATS = 5
COUNTED = 256 * 1024


def main(wanted: list[str]) -> None:
    """Print one row for each entry."""
    alone.prepare()
    print("| entry | plain kB | planned kB | planned | measured kB | ours kB | measured | time "
          "| bit-identical |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for entry in groups.ENTRIES:
        name = f"{entry.group}-{entry.name}"
        if not wanted or entry.group in wanted or name in wanted:
            print(_alone(name) if entry.alone and [name] != wanted else _row(name, entry),
                  flush=True)


def _alone(name: str) -> str:
    """Return the row of an entry that is trained in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.zoo", name], capture_output=True,
                          text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {name} |")]
    return rows[0] if rows else f"| {name} | failed: {done.stderr.strip()[-80:]} |"


def _row(name: str, entry: zoo.Entry) -> str:
    try:
        with zoo.conditions(entry):
            trained = [zoo.train(entry, rewrite) for rewrite in (False, True)]
            measured = _measured([t.training for t in trained])
    except Exception as error:  # one row says so, the others are printed all the same
        return f"| {name} | failed: {str(error).splitlines()[0][:80]} |"
    different, reports = alone.outcome(entry, *trained)
    same = "no" if different else ("within 1e-5" if entry.xla else "yes")
    if not reports:
        return f"| {name} | | | not rewritten | {' | '.join(measured)} | {same} |"
    plain = max(r["plain"] for r in reports)
    planned = max(r["planned"] for r in reports)
    return (f"| {name} | {plain / 1e3:.0f} | {planned / 1e3:.0f} | {planned / max(plain, 1):.2f} "
            f"| {' | '.join(measured)} | {same} |")


def _measured(trainings: list[zoo.Training]) -> list[str]:
    """Peaks in kB, their ratio, and the time of ours as a multiple of plain's, as text."""
    samples: list[list[Sample]] = [[], []]
    for _ in range(REPEATS):  # in turns, so that whatever else runs meets both alike
        for training, found in zip(trainings, samples, strict=True):
            meter = Meter()
            meter.start()
            training.step(*training.batches[-1])
            found.append(meter.stop())
    plain, ours = ([s.peak for s in found] for found in samples)
    times = [b.seconds / a.seconds for a, b in zip(*samples, strict=True)]
    counted = ["", "", ""]
    if statistics.median(plain) >= 4 * COUNTED:
        before, after = statistics.median(plain), statistics.median(ours)
        counted = [f"{before / 1e3:.0f}", f"{after / 1e3:.0f}", f"{after / before:.2f}"]
    return [*counted, f"{statistics.median(times):.2f}x"]


if __name__ == "__main__":
    started = time.perf_counter()
    main(sys.argv[1:])
    print(f"\n{time.perf_counter() - started:.0f} s", file=sys.stderr)
