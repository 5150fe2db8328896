"""How long tfckpt takes from a trace to its edits, against TensorFlow's own trace.

    python -m benchmarks.planning_time [--quick | --networks=resnet50,mlp6] [--large]

Each network has a process of its own. It traces the plain step by TensorFlow alone and then once
with tfckpt, without certificates, XLA or plans kept before. All figures are processor seconds of
the process (`time.process_time`): the machine may be busy with other things. Nothing runs. A phase
is counted without those that it calls; of the second ratio Grappler, which is asked what the plain
step is, is no part. `--quick` takes three networks, `--large` adds the chain of
1,000 Dense layers (some 87,000 operations).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags

from benchmarks.rows import head, in_own_process, line

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", [], "Names in `networks()`; the default is ten of them, and mlp6.")
flags.DEFINE_bool("quick", False, "Three networks alone.")
flags.DEFINE_bool("large", False, "The chain of 1,000 Dense layers too.")
flags.DEFINE_string("budget", "min", "Budget handed to tfckpt.checkpoint.")
flags.DEFINE_integer("retraces", 1, "Traces with tfckpt; the last one is reported.", lower_bound=1)
flags.DEFINE_string("one", "", "The network that this process measures, for the program itself.")

QUICK = ("mlp6", "unet", "resnet50")
TEN = ("resnet50", "resnet152", "densenet121", "inception_v3", "mobilenet", "nasnet_mobile",
       "unet", "transformer", "convnext_tiny", "decoder48")
LARGE = ("dense1000",)
PHASES: dict[str, tuple[str, ...]] = {
    "Grappler": ("tfckpt.capture.grappler.question:Question.answer",),
    "its body": ("tfckpt.carriers.traced:optimise_in_place",),
    "capture": ("tfckpt.carriers.traced:Traced.capture",),
    "cost": ("tfckpt.driving.parts:cost_of",),
    "plain peak": ("tfckpt.driving.parts:price_plain",),
    "asked": ("tfckpt.driving.trials:Trials._memory",),
    "search": ("tfckpt.plan.planner:StepPlanner._made",),
    "finalists": ("tfckpt.plan.planner:StepPlanner._finish",),
    "rewrite": ("tfckpt.driving.judges:realise",),
    "apply": ("tfckpt.carriers.traced:Traced.apply",),
    "report": ("tfckpt.driver:report_of",),
    "all": ("tfckpt.carriers.traced:Traced.rewrite_in",),
}
"""Functions (module:name) whose processor seconds are told, by the name of their phase."""
_COLUMNS = ("network", "operations", "trace s", "tfckpt s", "ratio", "without Grappler",
            *(f"{name} s" for name in PHASES if name != "all"), "other s")


class Stopwatch:
    """Processor seconds of phases that call each other, each without what it calls."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what passes in this context."""
        self._turn()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        now = time.process_time()
        if self._running:
            name = self._running[-1]
            self.spent[name] = self.spent.get(name, 0.0) + now - self._since
        self._since = now

    def watch(self, name: str, where: str) -> None:
        """Count a function, found by the name of its module and its own, under a phase."""
        module, _, path = where.partition(":")
        *outer, last = path.split(".")
        holder = functools.reduce(getattr, outer, importlib.import_module(module))
        setattr(holder, last, self._watched(name, getattr(holder, last)))

    def _watched(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)
        return watched


def networks() -> dict[str, Callable[[], tuple[Callable, tuple]]]:
    """Return what makes a Python function that trains one step, and its arguments, by name."""
    from benchmarks import measured

    def job(name: str, **sizes: int):
        from benchmarks import jobs
        made = jobs.JOBS[name](**sizes)
        return made.train_step, (made.x, made.y)

    sized = {"resnet50": {"size": 96}, "resnet152": {"size": 64}, "densenet121": {"size": 64},
             "inception_v3": {"size": 96, "batch": 8}, "unet": {}, "transformer": {"batch": 4}}
    return {**{name: functools.partial(job, name, **sizes) for name, sizes in sized.items()},
            "mobilenet": measured.NETWORKS["mobilenet"],
            "convnext_tiny": measured.NETWORKS["convnext_tiny"],
            "nasnet_mobile": _nasnet_mobile, "decoder48": _decoder48, "recurrent": _recurrent,
            "mlp6": functools.partial(_dense, 6, 256), "dense1000": functools.partial(
                _dense, 1000, 16)}


def _with_adam(model: Any, x: Any, y: Any) -> tuple[Callable, tuple]:
    from benchmarks.network_steps import adam_step
    return adam_step(model), (x, y)


def _dense(depth: int, width: int) -> tuple[Callable, tuple]:
    """Dense layers with gelu, one after the other, and Adam."""
    import keras
    import tensorflow as tf
    inputs = h = keras.Input((width,))
    for _ in range(depth):
        h = keras.layers.Dense(width, "gelu")(h)
    return _with_adam(keras.Model(inputs, keras.layers.Dense(10)(h)),
                      tf.zeros((4096, width)), tf.zeros((4096,), tf.int32))


def _recurrent() -> tuple[Callable, tuple]:
    """Return a bidirectional GRU layer and an LSTM layer: three loops of 50 iterations."""
    import keras
    import tensorflow as tf
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((50, 16)),
        layers.Bidirectional(layers.GRU(64, return_sequences=True, use_cudnn=False)),
        layers.LSTM(64, use_cudnn=False), layers.Dense(10)])
    return _with_adam(model, tf.zeros((32, 50, 16)), tf.zeros((32,), tf.int32))


def _nasnet_mobile() -> tuple[Callable, tuple]:
    import keras
    import tensorflow as tf
    model = keras.applications.NASNetMobile((96, 96, 3), weights=None, classes=10)
    return _with_adam(model, tf.zeros((8, 96, 96, 3)), tf.zeros((8,), tf.int32))


def _decoder48() -> tuple[Callable, tuple]:
    """Return a decoder of 48 layers."""
    import tensorflow as tf

    from benchmarks import networks as kinds
    made = kinds.decoder(batch=1, length=256, width=128, depth=48)
    return _with_adam(made.model, *(tf.zeros(shape, kind) for shape, kind in (made.x, made.y)))


def _warm_up() -> None:
    """Trace a small step both ways, so that first imports are not counted."""
    import tensorflow as tf

    import tfckpt
    body, arguments = _dense(2, 64)
    tf.function(body).get_concrete_function(*arguments)
    tfckpt.checkpoint(budget=FLAGS.budget)(tf.function(body)).get_concrete_function(*arguments)


def measure(name: str) -> dict:
    """Return operations, processor seconds of the trace, and of each phase."""
    os.environ.update(TFCKPT_CACHE="off", TFCKPT_CERTIFICATES="off")
    import tensorflow as tf

    import tfckpt
    _warm_up()
    body, arguments = networks()[name]()
    began = time.process_time()
    graph = tf.function(body).get_concrete_function(*arguments).graph
    traced = time.process_time() - began
    watch = Stopwatch()
    for phase, functions in PHASES.items():
        for function in functions:
            watch.watch(phase, function)
    for _ in range(FLAGS.retraces):
        watch.spent.clear()
        step = tfckpt.checkpoint(budget=FLAGS.budget)(tf.function(body))
        step.get_concrete_function(*arguments)
    if step.report is None:
        raise RuntimeError(f"tfckpt left {name} as it was and made no report")
    return {"operations": len(graph.get_operations()), "trace": traced, "spent": watch.spent,
            "summary": step.report.summary}


def row(name: str) -> str:
    """Return the line of one network."""
    found = in_own_process(name, "benchmarks.planning_time", [
        f"--one={name}", f"--budget={FLAGS.budget}", f"--retraces={FLAGS.retraces}"])
    if not found:
        return line([name, *["failed"] * (len(_COLUMNS) - 1)])
    entry = json.loads(found.splitlines()[-1])
    spent, ours = entry["spent"], sum(entry["spent"].values())
    return line([name, f"{entry['operations']:,}", f"{entry['trace']:.2f}", f"{ours:.2f}",
                 f"{ours / entry['trace']:.2f}",
                 f"{(ours - spent.get('Grappler', 0.0)) / entry['trace']:.2f}",
                 *(f"{spent.get(phase, 0.0):.2f}" for phase in PHASES if phase != "all"),
                 f"{spent['all']:.2f}"])


def main(argv: list[str]) -> None:
    """Print the table, or what one process has measured."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.one:
        print(json.dumps(measure(FLAGS.one)))
        return
    print(head(_COLUMNS))
    chosen = FLAGS.networks or (QUICK if FLAGS.quick else ("mlp6", *TEN))
    for name in (*chosen, *(LARGE if FLAGS.large else ())):
        print(row(name), flush=True)


if __name__ == "__main__":
    app.run(main)
