"""Plans the entries of the zoo twice: behind the decorator, and unchanged under the native pass.

    python -m benchmarks.carriers [GROUP or GROUP-NAME ...]

A row has the peaks that the two planned (simulated, above what a step starts with), the native
one as a multiple of the decorator's, the measured peaks where there is enough to measure, and what
the pass says of the step where it is no better than it was. Entries that XLA compiles do not pass
through Grappler, and those that need a process of their own get none here. The last lines count
what is within 5 %.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import sys

from benchmarks.measure import Meter
from tests.support import process
from tests.zoo import alone, groups
from tests.zoo import entry as zoo

REPEATS = 3
COUNTED = 1 << 20
WITHIN = 1.05


@dataclasses.dataclass(frozen=True)
class Row:
    """One entry: bytes behind the decorator and under the pass; 0 where nothing was planned."""

    name: str
    plain: tuple[int, int]
    planned: tuple[int, int]
    measured: tuple[int, int]
    said: str

    @property
    def ratio(self) -> float:
        """Return what the pass plans as a multiple of what the decorator does."""
        return self.planned[1] / self.planned[0] if all(self.planned) else float("nan")

    def __str__(self) -> str:
        counted = [f"{b / 1e3:.0f}" if min(self.measured) >= COUNTED else "" for b in self.measured]
        return (f"| {self.name} | {self.plain[0] / 1e3:.0f} | {self.planned[0] / 1e3:.0f} | "
                f"{self.plain[1] / 1e3:.0f} | {self.planned[1] / 1e3:.0f} | {self.ratio:.2f} | "
                f"{counted[0]} | {counted[1]} | {self.said} |")


class Messages(logging.Handler):
    """What the pass says of functions that it leaves alone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, entry: logging.LogRecord) -> None:
        """Note one message, without the function's name."""
        _, apart, why = entry.getMessage().partition(" is not rewritten: ")
        if apart:
            self.found.append(why)


def compare(entry: zoo.Entry) -> Row:
    """Train an entry both ways.

    Raises:
      Exception: whatever its training does.
    """
    import grappler_ext

    messages = Messages()
    logging.getLogger("absl").addHandler(messages)
    try:
        with zoo.conditions(entry):
            decorated = zoo.train(entry, rewrite=True)
            ours = _measured(decorated.training)
            with grappler_ext.enabled():
                native = zoo.train(entry, rewrite=False)
                passed = _measured(native.training)
                reports = list(grappler_ext.reports().values())
    finally:
        logging.getLogger("absl").removeHandler(messages)
        process.without_pass()
    found = [max(each, key=lambda r: r.baseline_peak_bytes, default=None)
             for each in (decorated.reports, reports)]
    said = "; ".join(messages.found)
    if not said and found[1] is not None:
        said = found[1].reason
    elif not said and found[0] is not None:
        said = "no function with a gradient passed through Grappler"
    return Row(f"{entry.group}-{entry.name}",
               *(tuple(0 if r is None else getattr(r, field) for r in found)
                 for field in ("baseline_peak_bytes", "planned_peak_bytes")),
               (ours, passed), said)


def _measured(training: zoo.Training) -> int:
    """Return the median peak of a step, in bytes."""
    peaks = []
    for _ in range(REPEATS):
        meter = Meter()
        meter.start()
        training.step(*training.batches[-1])
        peaks.append(meter.stop().peak)
    return int(statistics.median(peaks))


def main(wanted: list[str]) -> None:
    """Prints one row for each entry, and how many are within 5 %."""
    alone.prepare()
    print("| entry | plain kB | decorator kB | plain for the pass kB | pass kB | pass / decorator "
          "| decorator measured kB | pass measured kB | said |")
    print("| --- " * 9 + "|")
    rows = []
    for entry in groups.ENTRIES:
        name = f"{entry.group}-{entry.name}"
        if entry.xla or entry.alone or wanted and not {entry.group, name} & set(wanted):
            continue
        try:
            rows.append(compare(entry))
            print(rows[-1], flush=True)
        except Exception as error:  # one row says so, the others are printed all the same
            print(f"| {name} | failed: {str(error).splitlines()[0][:80]} |", flush=True)
    planned = [row.ratio for row in rows if all(row.planned)]
    print(f"\n{len(planned)} planned both ways, {sum(r <= WITHIN for r in planned)} of them no "
          f"more than 5 % above the decorator; median {statistics.median(planned or [0]):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
