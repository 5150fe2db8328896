"""Runs other people's tests plain and with a plan forced on every step, and compares.

Test files run in processes of a few files each, first as they are and then under
`tests.support.forced_plans`. Files with a test that comes out otherwise, or leaves other bits in
the variables of a model, are run again both ways: a test that does not repeat itself says nothing.
The result is a table, then every difference and the reasons why steps were left as they are. The
exit status is 1 where a test passes plain and not with plans, or leaves other bits though it is
certified that it leaves the same, and `Suite.expected` does not say why.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SECONDS = 600
"""A file may take."""
ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "",
               "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1", "TFCKPT_CACHE": "off",
               "TFCKPT_CERTIFICATES": "on"}
_REPOSITORY = pathlib.Path(__file__).parents[2]
_ADDRESS = re.compile("0x[0-9a-f]+")
_LEFT = re.compile(r"'[^']*'|[0-9][0-9,.]*")


@dataclasses.dataclass(frozen=True)
class Suite:
    """Other people's tests.

    Attributes:
      program: the module that runs them.
      description: what it says of itself.
      root: pytest's root directory; modules are named from there.
      below: the folder of `root` that the paths of test files start at.
      trains: what a file contains that trains something.
      left_out: files, as patterns, that need what is not here, or train nothing after all.
      expected: tests, as patterns, that come out otherwise or leave other bits, each with the
        reason.
      files: test files that one process runs, all of one folder.
      plugin: another plugin of pytest that they need.
    """

    program: str
    description: str
    root: pathlib.Path
    below: str
    trains: re.Pattern
    left_out: Sequence[str]
    expected: Mapping[str, str]
    files: int
    plugin: str

    def test_files(self, patterns: Sequence[str]) -> list[str]:
        """Return the test files that train something.

        Args:
          patterns: one of which is in a file's path or matches it; all files where there is none.
        """
        folder = self.root / self.below
        found = sorted(
            (path for path in folder.rglob("*_test.py") if self.trains.search(path.read_text())),
            key=lambda path: (path.parent, path.name))
        names = [str(path.relative_to(folder)) for path in found]
        return [path for path in names if not any(fnmatch.fnmatch(path, p) for p in self.left_out)
                and (not patterns or any(p in path or fnmatch.fnmatch(path, p) for p in patterns))]

    def batches(self, files: Sequence[str]) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield each folder, and its files in batches for one process each."""
        for folder, members in itertools.groupby(
                files, lambda path: str(pathlib.Path(path).parent)):
            found = list(members)
            yield folder, [found[n:n + self.files] for n in range(0, len(found), self.files)]

    def outcomes(self, addresses: Sequence[str], way: str = "") -> dict[str, dict[str, Any]]:
        """Run tests in a process of their own.

        Args:
          addresses: files or single tests.
          way: how plans are forced on (`--way`); "" for not at all.

        Returns:
          Each test's line, by address; those of which the process has died or run out of time have
          none.
        """
        with tempfile.TemporaryDirectory() as folder:
            file, settings = pathlib.Path(folder, "outcomes"), pathlib.Path(folder, "pytest.ini")
            settings.write_text("[pytest]\n")
            files = {address.partition("::")[0] for address in addresses}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.forced_plans",
                       "-p", self.plugin, "-p", "no:cacheprovider", "-c", str(settings),
                       "--rootdir", str(self.root), "--import-mode=importlib",
                       f"--timeout={SECONDS}", "--outcomes", str(file),
                       *(["--forced-plans", way] if way else []),
                       *(str(self.root / self.below / a) for a in addresses)]
            try:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, check=False,
                    timeout=SECONDS * len(files), env={
                        **os.environ, **ENVIRONMENT, "PYTHONPATH": str(_REPOSITORY)})
                if done.returncode not in (0, 1, 5):
                    said = done.stdout[-600:]
                    print(f"a process ended with {done.returncode}: {said}", flush=True)
            except subprocess.TimeoutExpired:
                print(f"{', '.join(files)}: stopped after {SECONDS * len(files)} seconds",
                      flush=True)
            lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
            return {_ADDRESS.sub("0x", line["test"]).removeprefix(f"{self.below}/"): line
                    for line in lines}

    def row_of(self, parts: Sequence[list[str]], way: str) -> Row:
        """Run the batches of a folder both ways; again both ways the files of what is different."""
        row = Row(sum(map(len, parts)), {}, {}, set())
        for part in parts:
            row.plain |= self.outcomes(part)
            row.forced |= self.outcomes(part, way)
        different = [test for test in {**row.differences(), **row.numbers()}
                     if not self.reason(test)]
        for file in sorted({test.partition("::")[0] for test in different}):
            plain, forced = self.outcomes([file]), self.outcomes([file], way)
            row.unsteady |= _unlike(row.plain, plain) | _unlike(row.forced, forced)
            row.plain |= plain
            row.forced |= forced
        return row

    def reason(self, test: str) -> str:
        """Return why a test must come out otherwise; "" where it must not."""
        return next((why for pattern, why in self.expected.items()
                     if fnmatch.fnmatch(test, pattern)), "")

    def main(self, arguments: Sequence[str]) -> int:
        """Print the table; return the exit status."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.program}",
                                         description=self.description)
        parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN",
                            help="parts of paths of test files")
        parser.add_argument("--way", choices=("models", "native"), default="models",
                            help="wrap models and functions, or have the native pass rewrite them")
        parser.add_argument("--lines", type=pathlib.Path, metavar="FOLDER",
                            help="where what was noted of each test is kept, plain and forced")
        parser.add_argument("--list", action="store_true", help="name the files and end")
        options = parser.parse_args(arguments)
        files = self.test_files(options.only)
        if options.list:
            print(*files, sep="\n")
            return 0
        print("| folder | files | tests | passed | passed with plans | differences | steps "
              "| rewritten | recompute | loops in segments | certified | not identical "
              "| other bits |\n" + "| --- " * 13 + "|")
        rows = []
        for folder, parts in self.batches(files):
            rows.append(self.row_of(parts, options.way))
            print(text_of(folder, rows[-1]), flush=True)
            for test, how in rows[-1].differences().items():
                print(f"    {test}: {how}", flush=True)
        whole = Row(sum(row.files for row in rows), collections.ChainMap(*(r.plain for r in rows)),
                    collections.ChainMap(*(r.forced for r in rows)),
                    set().union(*(r.unsteady for r in rows)))
        print(text_of("all", whole))
        if options.lines:
            options.lines.mkdir(parents=True, exist_ok=True)
            for name, lines in (("plain", whole.plain), ("forced", whole.forced)):
                options.lines.joinpath(f"{name}.json").write_text(
                    json.dumps(dict(lines), indent=1))
        return self.report(whole)

    def report(self, row: Row) -> int:
        """Print differences and reasons; return the exit status."""
        left = collections.Counter(_LEFT.sub("..", step["reason"]) for step in row.steps
                                   if step["reason"])
        for reason, count in left.most_common():
            print(f"left as they are: {count} steps: {reason}")
        if row.unsteady:
            print("do not repeat themselves:", *sorted(row.unsteady))
        wrong = 0
        for test, how in sorted(row.differences().items()):
            wrong += not self.reason(test) and _outcome(row.plain, test) == "passed"
            print(f"\n{test}: {how}; {self.reason(test) or row.forced.get(test, {}).get('why')}")
        for test, gap in sorted(row.numbers().items()):
            certified = all(step.get("identical") for step in row.forced[test]["steps"])
            wrong += not self.reason(test) and certified
            print(f"\n{test}: other bits, norms by {gap:.1e}; "
                  f"{self.reason(test) or ('certified' if certified else 'not certified')}")
        for test, line in row.forced.items():
            for step in line["steps"]:
                if step.get("identical") is False:
                    print(f"\n{test}: not identical: {step['certificate']}")
                if "internal error" in "".join([step["reason"], *step.get("rejected", ())]):
                    print(f"\n{test}: {step}")
                    wrong += 1
        return 1 if wrong else 0


@dataclasses.dataclass
class Row:
    """What became of the tests of a folder.

    Attributes:
      files: how many.
      plain, forced: each test's line (see `tests.support.forced_plans`), by address.
      unsteady: tests that do not come out the same when they are run again in the same way.
    """

    files: int
    plain: dict[str, dict[str, Any]]
    forced: dict[str, dict[str, Any]]
    unsteady: set[str]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return what came of each step that was traced with plans forced on."""
        return [step for line in self.forced.values() for step in line["steps"]]

    def differences(self) -> dict[str, str]:
        """Return the tests that come out otherwise with plans, and how."""
        outcomes = {test: (_outcome(self.plain, test), _outcome(self.forced, test))
                    for test in {**self.plain, **self.forced}}
        return {test: f"{plain}, then {forced}" for test, (plain, forced) in outcomes.items()
                if plain != forced and test not in self.unsteady}

    def numbers(self) -> dict[str, float]:
        """Return the tests after which a variable has other bits with plans, and by how much.

        Of its norm, relative to the largest in the model; infinite where there are other variables.
        """
        found = {}
        for test, line in self.forced.items():
            pairs = itertools.zip_longest(
                self.plain.get(test, {"numbers": ()})["numbers"], line["numbers"])
            gaps = [_gap(plain, forced) for plain, forced in pairs if plain != forced]
            if gaps and test not in self.unsteady:
                found[test] = max(gaps)
        return found


def _gap(plain: list | None, forced: list | None) -> float:
    if plain is None or forced is None or len(plain[1]) != len(forced[1]):
        return float("inf")
    return max((abs(a - b) for a, b in zip(plain[1], forced[1], strict=True)), default=0.0) / max(
        plain[1], default=1.0)


def _outcome(lines: dict[str, dict[str, Any]], test: str) -> str:
    return lines[test]["outcome"] if test in lines else "not run"


def _unlike(first: dict[str, dict[str, Any]], second: dict[str, dict[str, Any]]) -> set[str]:
    """Return the tests that come out otherwise when they are run again in the same way."""
    return {test for test, line in second.items() if test in first and any(
        line[part] != first[test][part] for part in ("outcome", "numbers"))}


def text_of(folder: str, row: Row) -> str:
    """Return a row of the table."""
    rewritten = [step for step in row.steps if not step["reason"]]
    passed = [sum(line["outcome"] == "passed" for line in lines.values())
              for lines in (row.plain, row.forced)]
    cells = [folder, row.files, len(row.plain), *passed, len(row.differences()), len(row.steps),
             len(rewritten), sum(step["recomputed"] > 0 for step in rewritten),
             sum(step["segments"] > 0 for step in rewritten),
             sum(step["identical"] is True for step in rewritten),
             sum(step["identical"] is False for step in rewritten), len(row.numbers())]
    return f"| {' | '.join(map(str, cells))} |"
