"""Trains the entries of the zoo plain and rewritten and prints what became of each.

    python -m benchmarks.zoo [GROUP or GROUP-NAME ...]

A row has the plain and the planned peak (simulated, above what a step starts with), the measured
peak of the rewritten step as a fraction of the plain one's, the time of the steps after the
first as a fraction, and whether losses, gradients, variables and optimizer slots agree in every
bit. Measured peaks of very small entries say nothing, and are left out: TensorFlow counts no
tensor below 256 KiB on a CPU. Entries that need a process of their own are trained in one, and
neither measured nor timed.
"""

from __future__ import annotations

import statistics
import sys
import time

from benchmarks.measure import Meter
from tests.zoo import alone, groups
from tests.zoo import entry as zoo

REPEATS = 5
COUNTED = 256 * 1024


def main(wanted: list[str]) -> None:
    """Prints one row for each entry."""
    alone.prepare()
    print("| entry | plain kB | planned kB | planned | measured | time | bit-identical |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for entry in groups.ENTRIES:
        name = f"{entry.group}-{entry.name}"
        if not wanted or entry.group in wanted or name in wanted:
            print(_row(name, entry), flush=True)


def _row(name: str, entry: zoo.Entry) -> str:
    try:
        different, reports = (alone.compare_alone if entry.alone else alone.compare)(entry)
        measured = ["", ""] if entry.alone else _measured(entry)
    except Exception as error:  # one row says so, the others are printed all the same
        return f"| {name} | failed: {str(error).splitlines()[0][:80]} |"
    same = "no" if different else ("within 1e-5" if entry.xla else "yes")
    if not reports:
        return f"| {name} | | | not rewritten | {' | '.join(measured)} | {same} |"
    plain = max(r["plain"] for r in reports)
    planned = max(r["planned"] for r in reports)
    return (f"| {name} | {plain / 1e3:.0f} | {planned / 1e3:.0f} | {planned / max(plain, 1):.2f} "
            f"| {' | '.join(measured)} | {same} |")


def _measured(entry: zoo.Entry) -> list[str]:
    """Peak and time of the rewritten step as fractions of the plain one's, as text."""
    peaks, seconds = [], []
    with zoo.conditions(entry):
        for rewrite in (False, True):
            zoo.process.fresh()
            training = entry.build(zoo.Wrap(rewrite))
            training.step(*training.batches[0])
            samples = []
            for _ in range(REPEATS):
                meter = Meter()
                meter.start()
                training.step(*training.batches[-1])
                samples.append(meter.stop())
            peaks.append(statistics.median(s.peak for s in samples))
            seconds.append(statistics.median(s.seconds for s in samples))
    peak = f"{peaks[1] / peaks[0]:.2f}" if peaks[0] >= 4 * COUNTED else ""
    return [peak, f"{seconds[1] / seconds[0]:.2f}x"]


if __name__ == "__main__":
    started = time.perf_counter()
    main(sys.argv[1:])
    print(f"\n{time.perf_counter() - started:.0f} s", file=sys.stderr)
