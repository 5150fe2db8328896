"""Runs Keras' own tests, which come in its wheel, plain and with a plan forced on every step.

    python -m tests.keras_layer_tests [--only PATTERN ...] [--way models|native] [--list]

Of the installed Keras those test files that train something, in processes of a few files each,
first as they are and then under `tests.support.forced_plans`. Files with a test that comes out
otherwise, or leaves other bits in the variables of a model, are run again both ways: a test that
does not repeat itself says nothing. The result is a table, then every difference and the reasons
why steps were left as they are. The exit status is 1 where a test passes plain and not with plans,
or leaves other bits though it is certified that it leaves the same, and `EXPECTED` does not say
why.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

FILES = 6
"""Test files that one process runs, all of one folder."""
SECONDS = 600
"""A file may take."""
TRAINS = re.compile(r"run_layer_test|\.fit\(|train_on_batch|train_step|GradientTape")
LEFT_OUT = ("backend/jax/*", "backend/torch/*", "ops/*", "callbacks/orbax_checkpoint_test.py",
            "callbacks/tensorboard_test.py", "trainers/data_adapters/*", "utils/jax_layer_test.py",
            "utils/torch_utils_test.py")
"""Files, as patterns, that need packages that are not here, or train nothing after all."""
_FAILING = ("the step that finds no more data fails halfway. Plain, it has counted an iteration "
            "more by then; where tensors of any size are planned, that waits for the data")
EXPECTED = {
    "models/model_test.py::*test_functional_optional_inputs_generator_*": _FAILING,
    "trainers/trainer_test.py::*test_steps_per_execution_steps_*_unknown_data*_non_jit": _FAILING,
}
"""Tests, as patterns, that come out otherwise or leave other bits, each with the reason."""
ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "",
               "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1", "TFCKPT_CACHE": "off",
               "TFCKPT_CERTIFICATES": "on"}
_REPOSITORY = pathlib.Path(__file__).parents[1]
_ADDRESS = re.compile("0x[0-9a-f]+")
_LEFT = re.compile(r"'[^']*'|[0-9][0-9,.]*")


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


def root() -> pathlib.Path:
    """Return the folder that Keras is installed in."""
    spec = importlib.util.find_spec("keras")
    assert spec is not None and spec.origin is not None
    return pathlib.Path(spec.origin).parents[1]


def test_files(patterns: Sequence[str]) -> list[str]:
    """Return the test files that train something, below `keras/src`.

    Args:
      patterns: one of which is in a file's path or matches it; all files where there is none.
    """
    folder = root() / "keras" / "src"
    found = sorted((path for path in folder.rglob("*_test.py") if TRAINS.search(path.read_text())),
                   key=lambda path: (path.parent, path.name))
    names = [str(path.relative_to(folder)) for path in found]
    return [path for path in names if not any(fnmatch.fnmatch(path, p) for p in LEFT_OUT)
            and (not patterns or any(p in path or fnmatch.fnmatch(path, p) for p in patterns))]


def batches(files: Sequence[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each folder, and its files in batches for one process each."""
    for folder, members in itertools.groupby(files, lambda path: str(pathlib.Path(path).parent)):
        found = list(members)
        yield folder, [found[n:n + FILES] for n in range(0, len(found), FILES)]


def outcomes(addresses: Sequence[str], way: str = "") -> dict[str, dict[str, Any]]:
    """Run tests in a process of their own.

    Args:
      addresses: files or single tests, below `keras/src`.
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
                   "-p", "no:cacheprovider", "-c", str(settings), "--rootdir", str(root()),
                   "--import-mode=importlib", f"--timeout={SECONDS}", "--outcomes", str(file),
                   *(["--forced-plans", way] if way else []),
                   *(str(root() / "keras" / "src" / a) for a in addresses)]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False,
                timeout=SECONDS * len(files), env={
                    **os.environ, **ENVIRONMENT, "PYTHONPATH": str(_REPOSITORY)})
            if done.returncode not in (0, 1, 5):
                said = done.stdout[-600:]
                print(f"a process ended with {done.returncode}: {said}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{', '.join(files)}: stopped after {SECONDS * len(files)} seconds", flush=True)
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        return {_ADDRESS.sub("0x", line["test"]).removeprefix("keras/src/"): line
                for line in lines}


def row_of(parts: Sequence[list[str]], way: str) -> Row:
    """Run the batches of a folder both ways; again both ways the files of what is different."""
    row = Row(sum(map(len, parts)), {}, {}, set())
    for part in parts:
        row.plain |= outcomes(part)
        row.forced |= outcomes(part, way)
    different = [test for test in {**row.differences(), **row.numbers()} if not expected(test)]
    if different:
        files = sorted({test.partition("::")[0] for test in different})
        plain, forced = outcomes(files), outcomes(files, way)
        row.unsteady = _unlike(row.plain, plain) | _unlike(row.forced, forced)
        row.plain |= plain
        row.forced |= forced
    return row


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


def expected(test: str) -> str:
    """Return why a test must come out otherwise; "" where it must not."""
    return next((why for pattern, why in EXPECTED.items() if fnmatch.fnmatch(test, pattern)), "")


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.keras_layer_tests",
                                     description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN",
                        help="parts of paths below keras/src, such as layers/rnn")
    parser.add_argument("--way", choices=("models", "native"), default="models",
                        help="wrap models, or have the native pass rewrite what they trace")
    parser.add_argument("--lines", type=pathlib.Path, metavar="FOLDER",
                        help="where what was noted of each test is kept, plain and forced")
    parser.add_argument("--list", action="store_true", help="name the files and end")
    options = parser.parse_args(arguments)
    files = test_files(options.only)
    if options.list:
        print(*files, sep="\n")
        return 0
    print("| folder | files | tests | passed | passed with plans | differences | steps | rewritten "
          "| recompute | loops in segments | certified | not identical | other bits |\n"
          + "| --- " * 13 + "|")
    rows = []
    for folder, parts in batches(files):
        rows.append(row_of(parts, options.way))
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
            options.lines.joinpath(f"{name}.json").write_text(json.dumps(dict(lines), indent=1))
    return report(whole)


def report(row: Row) -> int:
    """Print differences and reasons; return the exit status."""
    left = collections.Counter(_LEFT.sub("..", step["reason"]) for step in row.steps
                               if step["reason"])
    for reason, count in left.most_common():
        print(f"left as they are: {count} steps: {reason}")
    if row.unsteady:
        print("do not repeat themselves:", *sorted(row.unsteady))
    wrong = 0
    for test, how in sorted(row.differences().items()):
        wrong += not expected(test) and _outcome(row.plain, test) == "passed"
        print(f"\n{test}: {how}; {expected(test) or row.forced.get(test, {}).get('why')}")
    for test, gap in sorted(row.numbers().items()):
        certified = all(step.get("identical") for step in row.forced[test]["steps"])
        wrong += not expected(test) and certified
        print(f"\n{test}: other bits, norms by {gap:.1e}; "
              f"{expected(test) or ('certified' if certified else 'not certified')}")
    for test, line in row.forced.items():
        for step in line["steps"]:
            if step.get("identical") is False:
                print(f"\n{test}: not identical: {step['certificate']}")
            if "internal error" in "".join([step["reason"], *step.get("rejected", ())]):
                print(f"\n{test}: {step}")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
