"""Chooses which tests run every day: all that reach a line or a branch that no quicker ones do.

    python -m tests.daily measure FOLDER     # the whole suite under coverage: an hour or two
    python -m tests.daily choose FOLDER [--seconds=600]     # writes tests/nightly.txt
    python -m tests.daily compare FOLDER OTHER     # what one measurement reaches and another not

`measure` runs every test with its own context, in the processes that it starts too; with
`--daily`, only those that `make test` runs. `choose` takes tests until all that was reached is
reached, those first that reach the most in a second, and then the quickest of the rest while there
is time: `--seconds` of processor time, by how long each took. What is left runs at night. The same
seconds are taken for the tests whatever the machine, so a slow one needs more of them.
"""

from __future__ import annotations

import collections
import heapq
import os
import pathlib
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("seconds", 600, "Processor seconds that the tests of every day may take.")
flags.DEFINE_bool("daily", False, "Measure only what runs every day.")

ROOT = pathlib.Path(__file__).parents[1]
NIGHTLY = ROOT / "tests" / "nightly.txt"
PARTS = {"pure": ("worksteal", ["tests/pure"]), "tf": ("loadfile", ["tests/tf", "tests/e2e"]),
         "zoo": ("worksteal", ["tests/zoo"])}
"""How pytest-xdist shares the tests of each part, as in the Makefile."""
ALWAYS = ("tests/e2e/test_recipes.py",)
"""Begins the addresses of tests that run every day, whatever they reach."""
QUICK = 1.0
"""Seconds below which a test is taken that reaches nothing."""
HEAD = """\
# Cases that run at night: what they reach of the package, quicker ones reach every day.
# A line is a test's address, or that of a function or file all of whose cases are meant.
# `python -m tests.daily` chooses them, `tests/conftest.py` reads them.
"""
_RAN = re.compile(r"^\[gw\d+\] +\[ *\d+%\] [A-Z]+ (\S.*?) *$")
_TOOK = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$")

Address = str
Arc = tuple[str, int, int]


def measure(folder: pathlib.Path, daily: bool) -> None:
    """Run the suite under coverage.

    Args:
      folder: takes the data, and what pytest printed, which has how long each test took.
      daily: whether to leave out what runs at night.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings"
    settings.write_text(
        f"[run]\nbranch = True\nparallel = True\ndata_file = {folder / 'data'}\n"
        "source = tfckpt,grappler_ext\ncontext = ${COVERED_TEST-}\nsigterm = True\n"
        "disable_warnings = no-data-collected,module-not-imported,module-not-measured\n")
    start = folder / "start"
    start.mkdir(exist_ok=True)
    (start / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "COVERED_TEST": "",
                   "PYTHONPATH": f"{start}{os.pathsep}{ROOT}"}
    for part, (share, tests) in PARTS.items():
        with (folder / f"{part}.log").open("w") as log:
            subprocess.run(
                [sys.executable, "-m", "pytest", "-p", "tests.support.covered", "-vv",
                 "--durations=0", "--timeout=3600", "--numprocesses=2", f"--dist={share}",
                 *([] if daily else ["-m", "nightly or not nightly"]), *tests],
                cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
            print(part, *log_tail(folder / f"{part}.log"))
    subprocess.run([sys.executable, "-m", "coverage", "combine", "--quiet",
                    f"--rcfile={settings}"], cwd=folder, env=os.environ, check=True)


def log_tail(path: pathlib.Path) -> list[str]:
    """Return the last line of what pytest printed."""
    return path.read_text().splitlines()[-1:]


def seconds_of(folder: pathlib.Path) -> dict[Address, float]:
    """Return how long each test took, with its fixtures, in seconds."""
    found: dict[Address, float] = collections.defaultdict(float)
    for part in PARTS:
        for line in (folder / f"{part}.log").read_text().splitlines():
            if ran := _RAN.match(line):
                found[ran[1]] += 0.0
            elif took := _TOOK.match(line):
                found[took[2].strip()] += float(took[1])
    return found


def reached_by(folder: pathlib.Path) -> dict[Address, set[Arc]]:
    """Return which arcs (from a line to the next) each test reached; "" is what no test did."""
    with sqlite3.connect(folder / "data") as data:
        names = {number: os.path.relpath(path, ROOT) for number, path in data.execute(
            "select id, path from file")}
        tests = dict(data.execute("select id, context from context"))
        found: dict[Address, set[Arc]] = collections.defaultdict(set)
        for file, context, begin, end in data.execute(
                "select file_id, context_id, fromno, tono from arc"):
            found[tests[context]].add((names[file], begin, end))
    return found


def chosen(reached: Mapping[Address, set[Arc]], seconds: Mapping[Address, float],
           most: float) -> list[Address]:
    """Return the tests of every day: those that are needed, then the quickest.

    One that reaches nothing looks at something else than what runs, such as pages or sources, or
    runs it where coverage does not see it; no other test stands for it, and if it is quick it is
    taken.

    Args:
      reached: which arcs each test reaches; those of "" are reached anyway.
      seconds: how long each test takes.
      most: seconds for all.
    """
    found = needed(reached, seconds)
    found += sorted(test for test in seconds.keys() - set(found) if test.startswith(ALWAYS) or (
        test not in reached and seconds[test] < QUICK))
    room = most - sum(seconds[test] for test in found)
    print(f"{len(found)} tests of {sum(seconds[t] for t in found):.0f} s are needed")
    for test in sorted(seconds.keys() - set(found), key=lambda t: (seconds[t], t)):
        if seconds[test] <= room:
            room -= seconds[test]
            found.append(test)
    return found


def needed(reached: Mapping[Address, set[Arc]], seconds: Mapping[Address, float]
           ) -> list[Address]:
    """Return tests that reach all that is reached: the best value first, then less what is spare.

    Args:
      reached: which arcs each test reaches.
      seconds: how long each test takes.
    """
    left = set().union(*reached.values()) - reached.get("", set())

    def worth(test: Address) -> float:
        return len(reached[test] & left) / (seconds[test] + 0.01)

    queue = [(-worth(test), test) for test in reached if test in seconds]
    heapq.heapify(queue)
    found: list[Address] = []
    while left and queue:
        _, test = heapq.heappop(queue)
        value = -worth(test)
        if value and (not queue or value <= queue[0][0]):
            found.append(test)
            left -= reached[test]
        elif value:
            heapq.heappush(queue, (value, test))
    times = collections.Counter(arc for test in [*found, ""] for arc in reached.get(test, ()))
    for test in sorted(found, key=lambda t: -seconds[t]):
        if all(times[arc] > 1 for arc in reached[test]):
            times.subtract(reached[test])
            found.remove(test)
    return found


def lines(nightly: Iterable[Address], every: Iterable[Address]) -> list[str]:
    """Return addresses, those of functions and files where all of their cases are meant."""
    wanted, whole = set(nightly), set(every)
    for shorten in (lambda test: test.partition("[")[0], lambda test: test.partition("::")[0]):
        groups: dict[str, set[Address]] = collections.defaultdict(set)
        for test in whole:
            groups[shorten(test)].add(test)
        for name, tests in groups.items():
            if len(tests) > 1 and tests <= wanted:
                wanted, whole = wanted - tests | {name}, whole - tests | {name}
    return sorted(wanted)


def choose(folder: pathlib.Path, most: float) -> None:
    """Write `tests/nightly.txt`."""
    reached = reached_by(folder)
    seconds = {test: 0.0 for test in reached if test} | seconds_of(folder)
    daily = chosen(reached, seconds, most)
    nightly = seconds.keys() - set(daily)
    print(f"{len(daily)} tests of {sum(seconds[t] for t in daily):.0f} s every day, "
          f"{len(nightly)} of {sum(seconds[t] for t in nightly):.0f} s at night")
    NIGHTLY.write_text(HEAD + "".join(f"{line}\n" for line in lines(nightly, seconds)))


def compare(folder: pathlib.Path, other: pathlib.Path) -> None:
    """Print what of the package one measurement reaches and another does not."""
    first, second = (set().union(*reached_by(f).values()) for f in (folder, other))
    print(f"{len({a[:2] for a in first})} lines and {len(first)} branches, "
          f"{len({a[:2] for a in second})} and {len(second)}")
    for name, begin, end in sorted(first - second):
        print(f"{name}:{begin} to {end}")


def main(arguments: list[str]) -> None:
    """Do what is asked for."""
    command, *folders = arguments[1:] or [""]
    paths = [pathlib.Path(folder).absolute() for folder in folders]
    if command == "measure" and len(paths) == 1:
        measure(paths[0], FLAGS.daily)
    elif command == "choose" and len(paths) == 1:
        choose(paths[0], FLAGS.seconds)
    elif command == "compare" and len(paths) == 2:
        compare(*paths)
    else:
        raise app.UsageError("one of: measure FOLDER, choose FOLDER, compare FOLDER OTHER")


if __name__ == "__main__":
    app.run(main)
