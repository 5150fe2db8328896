"""Puts small faults into the modules below every planned peak and counts which the tests notice.

    python -m tests.mutation [--all | --sample N] [--seed S] [--module PART] [--pure]

Each mutant (see `tests.support.mutants`) is written into a copy of the package in a temporary
folder, never into this one, and the tests in `TESTS` run on it until the first failure. A mutant
is killed if one fails, or if they take four times as long as without a fault. `NAMED` are always
run. The result is a table, then every survivor; the exit status is 1 if a named one survives.

Tests run in forks of this process, which has imported all but what is tested, so that a mutant
costs a second or two. Hypothesis draws the examples of every other run and does not shrink.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

from tests.support.mutants import Mutant, mutants

ROOT = pathlib.Path(__file__).parents[1]
NEEDS_TENSORFLOW = "tests/tf/"
TESTS = {
    "tfckpt/simulate/liveness.py": ("tests/pure/test_simulate.py", "tests/pure/test_allocator.py"),
    "tfckpt/simulate/simulate.py": ("tests/pure/test_simulate.py",),
    "tfckpt/simulate/executor.py": ("tests/pure/test_executor_order.py",),
    "tfckpt/simulate/allocator.py": ("tests/pure/test_allocator.py",
                                     "tests/pure/test_two_accounts.py"),
    "tfckpt/simulate/best_fit.py": ("tests/pure/test_allocator.py",),
    "tfckpt/simulate/fences.py": ("tests/pure/test_fences.py", "tests/pure/test_waits.py"),
    "tfckpt/simulate/waits.py": ("tests/pure/test_waits.py",),
    "tfckpt/ir/edits.py": ("tests/pure/test_edits.py", "tests/pure/test_random_edits.py"),
    "tfckpt/rewrite/summation_order.py": (
        "tests/pure/test_passes.py", "tests/tf/test_operand_order.py"),
    "tfckpt/rewrite/cube_order.py": ("tests/pure/test_cube_order.py", "tests/pure/test_passes.py"),
    "tfckpt/rewrite/passes/manager.py": ("tests/pure/test_passes.py",),
    "tfckpt/rewrite/passes/state_writes.py": ("tests/pure/test_passes.py",),
    "tfckpt/rewrite/passes/reference_variables.py": ("tests/pure/test_passes.py",),
    "tfckpt/rewrite/summation_starts.py": ("tests/pure/test_summation_order.py",),
}
"""For each module the tests that are to notice faults in it, quickest first."""

NAMED = (
    ("the allocator never merges with the chunk after it", "tfckpt/simulate/best_fit.py",
     "if after is not None and not after.used:", "if False:"),
    ("the allocator splits at 8 times the request, not at 2", "tfckpt/simulate/best_fit.py",
     "found >= 2 * size", "found >= 8 * size"),
    ("fences await nothing", "tfckpt/simulate/fences.py",
     "Fence(start, tuple(awaits), tuple(gates))", "Fence(start, (), tuple(gates))"),
    ("the best heap counts, not the worst", "tfckpt/plan/choosing/finished.py",
     "max(*peaks, floor_of", "min(*peaks, floor_of"),
)
"""(what, module, text that occurs in it once, what it becomes): faults that went unnoticed once."""
NAMED_TESTS = {"tfckpt/plan/choosing/finished.py": ("tests/pure/test_allocator.py",)}

_ANY_ORDER = "what is made of it does not depend on the order"
_BEFORE = "what a step reads was made by an earlier one"
_FASTER = "it only saves time: without it the same is found"
_A_MARK = "any number that is no turn will do"
EQUIVALENT: dict[str, dict[str, str]] = {
    "tfckpt/simulate/liveness.py": {
        **{f": -{old} -> -{new}": _A_MARK for old, new in ((1, 0), (1, 2), (2, 1), (2, 3), (2, 4))},
        "walk: vertex.reuses and freed -> vertex.reuses or freed": _FASTER,
        "walk: vertex.reuses and freed -> vertex.reuses": _FASTER,
        "walk: vertex.reuses and freed -> freed": _FASTER},
    "tfckpt/simulate/fences.py": {
        "awaitable: sorted(set(found)) -> sorted(set(found), reverse=True)": _ANY_ORDER,
        "awaitable: sorted(set(found)) -> list(set(found))": _ANY_ORDER,
        "_entries: start <= resolved.maker[i] < p -> start <= resolved.maker[i] <= p": _BEFORE},
    "tfckpt/simulate/waits.py": {
        ": ROUNDS = 24 -> ROUNDS = 25": "no step is known that needs so many rounds",
        ": ROUNDS = 24 -> ROUNDS = 23": "no step is known that needs so many rounds",
        ": ROUNDS = 24 -> ROUNDS = 48": "no step is known that needs so many rounds",
        "place_waits: break -> pass": "further rounds find what this one found",
        "_Placer.round: grew = False -> grew = True": "further rounds find what this one found",
        "_Placer.__init__: -1 -> -2": "-2 is as little a position as -1",
        "_Placer.__init__: -1 -> -0": "position 0 needs nothing and runs first",
        "_Placer._add: made > turn -> made >= turn": "what has not run has made nothing",
        "_Placer._head: self.resolved.maker[i] > turn -> self.resolved.maker[i] >= turn":
            "what has not run has made nothing",
        "_turns: -1 -> -2": "the last step needs the same when it is looked at twice",
        "_turns: -1 -> -0": "the first step needs nothing",
        "_turns: first[position] < len(turns) -> first[position] <= len(turns)":
            "what nothing reads waits for earlier steps only",
        "_Placer._delay: before > turn -> before >= turn": "what has not run has made nothing",
        "_Placer._add: 0 <= self.last_read[i] < at -> 0 <= self.last_read[i] <= at":
            "the step at the peak has run",
        "_Placer._add: 0 <= self.last_read[i] < at -> 0 < self.last_read[i] < at":
            "the first step reads nothing",
        "_Placer._add: 0 <= self.last_read[i] < at -> 1 <= self.last_read[i] < at":
            "the first step reads nothing",
        "_Placer._add: len(self.waits) > count -> len(self.waits) >= count":
            "further rounds find what this one found"},
    "tfckpt/simulate/best_fit.py": {
        ": 1 << 44 -> 2 << 44": "addresses are only compared",
        ": 1 << 44 -> 1 << 43": "addresses are only compared",
        ": 1 << 44 -> 1 << 45": "addresses are only compared",
        "BestFit.__init__: self._end = 0 -> self._end = -1": "addresses are only compared",
        "BestFit.__init__: self._end = 0 -> self._end = 1": "addresses are only compared"},
    "tfckpt/rewrite/cube_order.py": {
        "_base_comes_first: square.inputs[0] < square.name -> square.inputs[0] <= square.name":
            "a square reads something of another name"},
    "tfckpt/rewrite/summation_order.py": {
        "equal_ops: sorted((found[c] for c in op.controls)) -> "
        "sorted((found[c] for c in op.controls), reverse=True)": _ANY_ORDER},
    "tfckpt/ir/edits.py": {
        "_in_order: op.name not in done and needs -> needs": "what is done needs nothing more"},
    "tfckpt/rewrite/summation_starts.py": {
        "_trees: len(found) > 2 -> len(found) >= 2": "of two terms none is held",
        "_Sum.held: free.index(True) if True in free else 0 -> "
        "free.index(True) if True in free else -1": "the first two commute",
        "_Sum.held: free.index(True) if True in free else 0 -> "
        "free.index(True) if True in free else 1": "the first two commute",
        "_Sum._read_later: seen.add(r) -> pass": _FASTER},
}
"""By module, mutants that no test can notice, and why."""


class Copy:
    """A copy of package and tests, in which one module at a time is changed."""

    def __init__(self, folder: str):
        self.root = pathlib.Path(folder)
        for name in ("tfckpt", "tests", "grappler_ext"):
            shutil.copytree(ROOT / name, self.root / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.root)

    def passes(self, module: str, source: str | None, tests, limit: float) -> bool:
        """Return whether the tests pass within `limit` seconds with `source` as the module."""
        path = self.root / module
        before = path.read_text(encoding="utf-8")
        if source is not None:
            path.write_text(source, encoding="utf-8")
        try:
            return self._run(tests, limit)
        finally:
            path.write_text(before, encoding="utf-8")

    def _run(self, tests, limit: float) -> bool:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os._exit(self._child(tests))
        stop = time.monotonic() + limit
        while time.monotonic() < stop:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) == 0
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False

    def _child(self, tests) -> int:
        try:
            os.setpgid(0, 0)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            os.chdir(self.root)
            for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
                del sys.modules[name]
            sys.path.insert(0, str(self.root))
            import pytest
            return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                                    "--tb=no", *tests]))
        except BaseException:
            return 1


@dataclasses.dataclass
class Result:
    """What became of a module's mutants."""

    module: str
    tried: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = dataclasses.field(default_factory=list)

    def row(self) -> str:
        """Return a line of the table."""
        real = self.tried - self.equivalent
        killed = real - len(self.survivors)
        needs = "TensorFlow" if _needs_tensorflow(self.module) else "pure"
        return (f"{self.module:34} {needs:11} {self.tried:6} {self.equivalent:6} {killed:6} "
                f"{100 * killed / max(real, 1):6.1f} %")


def _needs_tensorflow(module: str) -> bool:
    return any(test.startswith(NEEDS_TENSORFLOW) for test in TESTS.get(module, ()))


def run_module(made: Copy, module: str, sample: int | None, seed: int) -> Result:
    """Try the mutants of a module."""
    source = (made.root / module).read_text(encoding="utf-8")
    started = time.monotonic()
    if not made.passes(module, None, TESTS[module], 600):
        raise SystemExit(f"the tests of {module} fail without any fault")
    limit = 5 + 4 * (time.monotonic() - started)
    chosen = mutants(source)
    known = EQUIVALENT.get(module, {})
    unknown = sorted(set(known) - {m.key for m in chosen})
    if unknown:
        print(f"{module}: listed as equivalent, but no mutant any more: {unknown}")
    if sample is not None and sample < len(chosen):
        chosen = random.Random(f"{seed} {module}").sample(chosen, sample)
    result = Result(module, len(chosen))
    for mutant in sorted(chosen, key=lambda m: m.line):
        if mutant.key in known:
            result.equivalent += 1
        elif made.passes(module, mutant.source, TESTS[module], limit):
            result.survivors.append(mutant)
            print(f"survived: {module}:{mutant.line} {mutant.key}", flush=True)
    return result


def run_named(made: Copy) -> list[str]:
    """Try the mutants with names; return those that survive."""
    survivors = []
    for what, module, old, new in NAMED:
        source = (made.root / module).read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise SystemExit(f"{module} has {old!r} {source.count(old)} times: write NAMED anew")
        tests = NAMED_TESTS.get(module) or TESTS[module]
        survived = made.passes(module, source.replace(old, new), tests, 120)
        print(f"{'SURVIVED' if survived else 'killed'}: {what}", flush=True)
        survivors += [what] if survived else []
    return survivors


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--all", action="store_true", help="try every mutant")
    parser.add_argument("--sample", type=int, default=25, help="mutants a module (25)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", default="", help="only modules whose path has this in it")
    parser.add_argument("--pure", action="store_true", help="leave out what needs TensorFlow")
    options = parser.parse_args(arguments)
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    sys.dont_write_bytecode = True
    chosen = [m for m in TESTS if options.module in m
              and not (options.pure and _needs_tensorflow(m))]
    chosen.sort(key=_needs_tensorflow)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        made = Copy(folder)
        _import_what_tests_use("hypothesis", "networkx", "numpy", "pytest")
        survivors = run_named(made)
        for module in chosen:
            if _needs_tensorflow(module):
                _import_what_tests_use("tensorflow", "keras")
            results.append(run_module(made, module, None if options.all else options.sample,
                                      options.seed))
    print(f"\n{'module':34} {'tests':11} {'tried':>6} {'equal':>6} {'killed':>6}")
    for result in results:
        print(result.row())
    real = sum(r.tried - r.equivalent for r in results)
    left = sum(len(r.survivors) for r in results)
    print(f"{real - left} of {real} killed, {100 * (real - left) / max(real, 1):.1f} %")
    return int(bool(survivors))


def _import_what_tests_use(*names: str) -> None:
    """Import packages before the first fork, so that no mutant has to."""
    for name in names:
        __import__(name)


if __name__ == "__main__":
    sys.exit(main())
