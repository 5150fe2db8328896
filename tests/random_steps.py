"""Trains random steps plain and rewritten; prints a line for each, and how many failed.

    python -m tests.random_steps [--count N] [--seed S] [--native] [--verbose] [--limit SECONDS]
    python -m tests.random_steps --style over_dataset
    python -m tests.random_steps --shrink SEED [--native]

Steps are raw `tf.function`s that `tests.support.random_steps` draws from a seed: step number i of
a run has seed S + i, and is the same in every run. Each is trained in a process apart, which goes
on to the next one; a step that crashes it or takes longer than the limit is counted, and a fresh
process takes over. The exit status is 1 if any failed. Ctrl-C ends with the counts so far.

`--shrink` looks for a smaller step that fails in the same way, and prints it: `--spec` trains it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time

LIMIT = 240.0
"""Seconds for a step; most take two or three, on a busy machine ten."""
FRESH_AFTER = 60
"""Steps that one process trains: TensorFlow frees little of what it traced."""
MARK, PLAIN_RAN = "RESULT ", "PLAIN RAN"
CRASHES = "TensorFlow crashes without tfckpt"
FAILURES = ("exception", "hang", "crash", "differs", "internal", "bad step")


class Worker:
    """A process that trains steps, one after the other."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.random_steps", "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "",
                 "TFCKPT_CERTIFICATES": "on"})
        self.trained = 0

    def run(self, task: dict, limit: float) -> dict:
        """Return what became of a step; the process has ended if its kind is hang or crash."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write((json.dumps({**task, "limit": limit}) + "\n").encode())
        self._process.stdin.flush()
        self.trained += 1
        stop, line = time.monotonic() + limit + 30 * (self.trained == 1), b""
        plain_ran = False
        while not line.startswith(MARK.encode()):
            plain_ran |= line.strip() == PLAIN_RAN.encode()
            left = stop - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return self._ended("hang")
            line = self._process.stdout.readline()
            if not line:
                return self._ended("crash" if plain_ran else CRASHES)
        return json.loads(line[len(MARK):])

    def _ended(self, kind: str) -> dict:
        self.close()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        frames = [line.strip() for line in said if "/tfckpt/" in line or "/grappler_ext/" in line]
        return {"kind": kind, "text": " | ".join(frames[-6:] or said[-3:])[-900:], "plain": 0,
                "planned": 0, "seconds": 0.0, "trail": "", "spec": ""}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Workers:
    """Steps trained by one process at a time, made anew when it has ended or has trained many."""

    def __init__(self, limit: float):
        self.limit = limit
        self._worker: Worker | None = None

    def run(self, task: dict) -> dict:
        """Return what became of a step."""
        if self._worker is None:
            self._worker = Worker()
        found = self._worker.run(task, self.limit)
        lost = found["kind"] in ("hang", "crash", CRASHES)
        if lost or self._worker.trained >= FRESH_AFTER:
            self.close()
        if lost and "describe" not in task:
            described = self.run({**task, "describe": True})
            found |= {"trail": described["trail"], "spec": described["spec"]}
        return found

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def work() -> None:
    """Train the steps named on standard input; a line of JSON for each."""
    import faulthandler

    from tests.support import process
    from tests.support.random_steps import draw_spec, trial

    process.prepare()
    for line in sys.stdin:
        task = json.loads(line)
        faulthandler.dump_traceback_later(task["limit"] - 2, exit=False)
        spec = read_spec(task["spec"]) if "spec" in task else None
        if "describe" in task:
            found = trial.describe(spec or draw_spec(task["seed"]))
        elif spec is not None:
            found = trial.try_spec(spec, task["native"])
        else:
            found = trial.try_seed(task["seed"], task["native"], task["style"])
        faulthandler.cancel_dump_traceback_later()
        print(f"\n{MARK}{json.dumps(dataclasses.asdict(found))}", flush=True)


def read_spec(text: str):
    """Return a spec that was printed."""
    from tests.support.random_steps import Spec

    return eval(text, {"Spec": Spec})  # what this program has printed


def line_of(seed: int, found: dict, verbose: bool) -> str:
    """Return the line that is printed for a step."""
    peaks = f"{found['plain'] / 1e6:.1f} -> {found['planned'] / 1e6:.1f} MB" if found[
        "plain"] else ""
    text = f"  {found['text']}" if found["text"] else ""
    if found.get("identical") == "False":
        text += f"  certificate: {found['certificate']}"
    more = f"\n    {found['trail']}\n    {found['spec']}" if (
        verbose or found["kind"] in FAILURES) else ""
    return f"{seed}: {found['kind']}  {peaks}  {found['seconds']:.1f} s{text}{more}"


def run(count: int, seed: int, native: bool = False, verbose: bool = False,
        limit: float = LIMIT, style: str | None = None) -> int:
    """Train steps in turn, of one style where it is given; return how many failed."""
    workers, kinds, said = Workers(limit), collections.Counter(), collections.Counter()
    started, saved = time.monotonic(), []
    for number in range(seed, seed + count):
        try:
            found = workers.run({"seed": number, "native": native, "style": style})
        except KeyboardInterrupt:
            break
        kinds[found["kind"]] += 1
        said[found.get("identical", "")] += 1
        if found["planned"] and found["planned"] < found["plain"]:
            saved.append(found["planned"] / found["plain"])
        print(line_of(number, found, verbose), flush=True)
    workers.close()
    failed = sum(kinds[kind] for kind in FAILURES)
    words = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    middle = sorted(saved)[len(saved) // 2] if saved else 1.0
    print(f"\n{sum(kinds.values())} steps in {time.monotonic() - started:.0f} s: {words}; "
          f"{failed} failed; {len(saved)} with less memory planned, the middle one "
          f"{middle:.2f} of plain")
    print(f"rewritten steps whose arithmetic is certified: {said['True']}, said to be another: "
          f"{said['False']}, not known: {said['None']}")
    return failed


SIMPLER = (("style", "one_tape"), ("optimizer", "sgd"), ("open", "static"), ("compiled", False))
PLAIN_OPTIONS = (("solver", "auto"), ("budget", "min"), ("free_moves", True), ("objective", "time"))


def simpler(spec):
    """Yield specs that are simpler by one thing."""
    for i in range(len(spec.slots)):
        yield dataclasses.replace(spec, slots=spec.slots[:i] + spec.slots[i + 1:])
    for name, value in SIMPLER:
        if getattr(spec, name) != value:
            yield dataclasses.replace(spec, **{name: value})
    options = dict(spec.options)
    for name, value in PLAIN_OPTIONS:
        if options.get(name, value) != value:
            yield dataclasses.replace(spec, options=tuple(sorted({**options, name: value}.items())))


def shrink(text: str | int, native: bool, limit: float) -> None:
    """Print the smallest step found that fails as one does."""
    workers = Workers(limit)
    task = {"seed": text, "style": None} if isinstance(text, int) else {"spec": text}
    best = workers.run({**task, "native": native})
    print(line_of(0, best, True), flush=True)
    key, grew = _key(best), True
    while grew:
        grew = False
        for spec in list(simpler(read_spec(best["spec"]))):
            found = workers.run({"spec": repr(spec), "native": native})
            if _key(found) == key:
                best, grew = {**found, "spec": repr(spec)}, True
                print(f"smaller: {spec!r}", flush=True)
                break
    print(line_of(0, best, True))
    workers.close()


def _key(found: dict) -> tuple[str, str]:
    """Return what two failures have in common if they are the same."""
    if found["kind"] == "differs":
        return found["kind"], ""
    return found["kind"], re.sub(r"['\"].*?['\"]|[0-9]+|\S*/\S*", "", found["text"])[:60]


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_steps")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--native", action="store_true", help="by the native pass")
    parser.add_argument("--verbose", action="store_true", help="say what was drawn")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds a step ({LIMIT:g})")
    parser.add_argument("--style", default=None,
                        help="how all take their gradients (`tests.support.random_steps.styles`)")
    parser.add_argument("--shrink", default=None, help="a seed or a spec that fails")
    parser.add_argument("--spec", default=None, help="train this step only")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return 0
    if options.shrink is not None:
        what = int(options.shrink) if options.shrink.isdigit() else options.shrink
        shrink(what, options.native, options.limit)
        return 0
    if options.spec is not None:
        workers = Workers(options.limit)
        found = workers.run({"spec": options.spec, "native": options.native})
        workers.close()
        print(line_of(0, found, True))
        return int(found["kind"] in FAILURES)
    return int(bool(run(options.count, options.seed, options.native, options.verbose,
                        options.limit, options.style)))


if __name__ == "__main__":
    sys.exit(main())
