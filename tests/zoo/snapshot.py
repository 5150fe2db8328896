"""Compares what tfckpt makes of many training steps with what it made of them before.

    python -m tests.zoo.snapshot [--quick] [--record] [NAME or GROUP ...]

Of every entry of the zoo and of 200 random models the rewritten graphs and the planned peaks are
hashed and compared with `snapshot.json`: a change of structure must reproduce them. `--quick` takes
every eighth, `--record` writes them anew (an intended change of plans, which its commit explains).
Exit code 1 where anything differs. `make snapshot` runs it whole.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

import tfckpt
from tests.support import process
from tests.zoo import alone, distribution, groups
from tests.zoo import entry as zoo
from tests.zoo import test_random_models as models
from tfckpt.capture import tf_adapter

FILE = pathlib.Path(__file__).with_name("snapshot.json")
RANDOM = 200
QUICK = 8
COUNTED = ("architectures-graph_convolution", "optimizers-sparse_gradients_adagrad_fit",
           "precision-float16_fit", "randomness-augmentation_zoom_and_brightness",
           "randomness-dropout_fit", "tapes-forward_accumulator")
"""Steps whose new ops stand behind captures without a name. TensorFlow names these by a counter of
the process, so that each such step is described in a process of its own."""
OURS = "tfckpt"
_NUMBERED = re.compile(r"_\d+(?=_|\b)")
BUDGETS: tuple[object, ...] = ("min", "min", 0.8, 0.6, 0.45)


class Rewritten:
    """Hashes of the rewritten graphs among those that TensorFlow has traced."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        step = tfckpt.checkpoint(tf.function(tf.identity))
        step(tf.zeros(()))  # so that this hook is called after the one that rewrites
        tf_adapter.install_trace_hook(self.on_trace)

    def on_trace(self, graph) -> None:
        """Hash a traced graph if tfckpt has changed it."""
        changed = sorted(filter(None, map(_described, graph.get_operations())))
        if changed:
            self.hashes.append(hashlib.sha256("\n".join(changed).encode()).hexdigest()[:16])

    def take(self) -> list[str]:
        """Return the hashes since the last call, sorted."""
        found, self.hashes = sorted(self.hashes), []
        return found


def _described(op: tf.Operation) -> str:
    """Describe an op that tfckpt made or changed; "" for others."""
    inputs = [t.name for t in op.inputs]
    controls = sorted(c.name for c in op.control_inputs)
    if OURS not in " ".join([op.name, *inputs, *controls]):
        return ""
    attrs = {}
    if OURS in op.name:
        attrs = {key: _NUMBERED.sub("", str(value)) for key, value in sorted(
            tf_adapter.node_attrs(op).items()) if key != "_output_shapes"}
    return repr((op.name, op.type, inputs, controls, op.device, attrs))


class Options(zoo.Wrap):
    """Wraps steps with a budget and forward AD as given."""

    def __init__(self, solver: str = "auto", budget: object = "min", fad: object = False):
        super().__init__(True, solver)
        self.budget, self.fad = budget, fad

    def step(self, fn: Callable) -> Callable:
        """Wrap a step; a budget that cannot be met is a result like any other."""
        step = tfckpt.checkpoint(fn, budget=self.budget, solver=self.solver, fad=self.fad)
        self._reports.append(lambda: list(step.reports.values()))
        return step


def _layer(draw: random.Random) -> models.Layer:
    return models.Layer(draw.choice(models.KINDS), draw.randint(0, 2), draw.randint(0, 2),
                        draw.randrange(len(models.ACTIVATIONS)))


def random_entry(number: int) -> tuple[zoo.Entry, Options]:
    """Return a random model and the options that it is planned with."""
    draw = random.Random(number)
    spec = models.Model(tuple(_layer(draw) for _ in range(draw.randint(2, 12))),
                        draw.choice(sorted(models.OPTIMIZERS)), draw.choice(models.SOLVERS))
    options = Options(spec.solver, draw.choice(BUDGETS), draw.choice((False, False, False, True)))
    compiled = number % 10 == 0
    build = functools.partial(models.build, spec=spec)
    if compiled:
        build = functools.partial(_compiled, spec=spec)
    return zoo.Entry(f"{number}", "random", build, xla=compiled), options


def _compiled(wrap: zoo.Wrap, spec: models.Model) -> zoo.Training:
    steps = models.steps
    return steps.supervised(wrap, models.keras_model(spec), steps.batches(),
                            models.OPTIMIZERS[spec.optimizer](), jit_compile=True)


def everything() -> Iterator[tuple[str, zoo.Entry, Callable[[], zoo.Wrap]]]:
    """Yield the name, the entry and what makes its options, of each step."""
    for entry in groups.ENTRIES:
        yield f"{entry.group}-{entry.name}", entry, functools.partial(zoo.Wrap, True)
    for number in range(RANDOM):
        entry, options = random_entry(number)
        yield f"random-{number}", entry, functools.partial(
            Options, options.solver, options.budget, options.fad)


def describe(entry: zoo.Entry, wrap: zoo.Wrap, seen: Rewritten) -> dict:
    """Train an entry for one batch; return hashes, peaks and reasons."""
    with zoo.conditions(entry):
        process.fresh()
        seen.take()
        refusal = ""
        try:
            training = entry.build(wrap)
            training.step(*training.batches[0])
        except tfckpt.InfeasibleBudgetError as error:
            refusal = str(error)
        peaks = [[r.baseline_peak_bytes, r.planned_peak_bytes, r.applied]
                 for r in wrap.reports()]
        return {"graphs": seen.take(), "peaks": peaks, **({"refusal": refusal} if refusal else {})}


def _apart(name: str) -> dict:
    """Describe an entry in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "tests.zoo.snapshot", "--print", name],
                          capture_output=True, text=True, check=False,
                          env={**os.environ, **alone.ENVIRONMENT})
    if done.returncode:
        return {"failed": done.stderr.strip()[-300:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def collect(wanted: Callable[[int, str, zoo.Entry], bool], here: bool = False) -> dict[str, dict]:
    """Return what becomes of the wanted entries, by name."""
    alone.prepare()
    seen, found = Rewritten(), {}
    started = time.monotonic()
    for number, (name, entry, options) in enumerate(everything()):
        if not wanted(number, name, entry):
            continue
        apart = not here and (entry.alone or name in COUNTED or
                              entry.group == "distribution" and not distribution.available())
        try:
            found[name] = _apart(name) if apart else describe(entry, options(), seen)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        keras.backend.clear_session()
        if sys.stderr.isatty():
            print(f"\r{len(found)} {name} {time.monotonic() - started:.0f} s\033[K", end="",
                  file=sys.stderr, flush=True)
    return found


def summary(known: dict[str, dict], found: dict[str, dict]) -> str:
    """Return what became of planned peaks, and of which steps are rewritten."""
    pairs = [(name, before, after) for name, entry in found.items()
             for before, after in zip(known.get(name, {}).get("peaks", ()),
                                      entry.get("peaks", ()), strict=False)]
    ratios = [(after[1] / after[0]) / (before[1] / before[0]) for _, before, after in pairs
              if before[0] and after[0] and before[1] and after[1]]
    lost = [name for name, before, after in pairs if before[2] and not after[2]]
    won = [name for name, before, after in pairs if after[2] and not before[2]]
    mean = statistics.geometric_mean(ratios) if ratios else 1.0
    return (f"planned / plain peak, as a multiple of what is recorded: geometric mean {mean:.3f} "
            f"of {len(ratios)}, {min(ratios, default=1):.2f} to {max(ratios, default=1):.2f}\n"
            f"rewritten then and not now: {len(lost)} {lost}\n"
            f"rewritten now and not then: {len(won)} {won}")


def main(arguments: Sequence[str]) -> int:
    """Compare, record or print; return the exit code."""
    flags = {a for a in arguments if a.startswith("--")}
    names = [a for a in arguments if not a.startswith("--")]

    def wanted(number: int, name: str, entry: zoo.Entry) -> bool:
        if names:
            return name in names or entry.group in names
        return "--quick" not in flags or number % QUICK == 0 and not entry.alone

    found = collect(wanted, here="--print" in flags)
    if "--print" in flags:
        print(json.dumps(found[names[0]]))
        return 0
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    different = [name for name in found if found[name] != known.get(name)]
    for name in different:
        print(f"{name}: {known.get(name)} -> {found[name]}")
    print(f"{len(found) - len(different)} of {len(found)} steps as recorded")
    print(summary(known, found))
    if "--record" in flags:
        FILE.write_text(json.dumps(dict(sorted({**known, **found}.items())), indent=0) + "\n")
        return 0
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
