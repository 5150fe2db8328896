"""The command that compares the training steps of two graphs, run or not."""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Sequence

import tensorflow as tf

from tfckpt.capture.files import Document
from tfckpt.capture.steps import Step
from tfckpt.cli.arguments import Request
from tfckpt.cli.inspecting import sizes
from tfckpt.cli.output import progress, table
from tfckpt.cli.reading import read, say_unused, steps_of
from tfckpt.cli.running import largest_difference, run_step
from tfckpt.cost.storage import unknown_variables
from tfckpt.driving.here import threads
from tfckpt.errors import VerificationError
from tfckpt.request.budget import format_bytes


def compare(request: Request) -> int:
    """Print how the training steps of two graphs differ, and what running both shows if asked for.

    Args:
      request: a parsed command line.

    Returns:
      The exit status of the process.

    Raises:
      TfckptError, OSError: one cannot be read or priced.
    """
    if request.run:
        _one_thread()
    documents = [read(path) for path in request.paths]
    steps = [steps_of(request, document, rewritten=True) for document in documents]
    pairs = _pairs(*steps)
    entries = [_comparison(request, documents, pair) for pair in pairs]
    for document, found in zip(documents, steps, strict=True):
        say_unused(request, document, found)
    if request.json:
        print(json.dumps({"a": documents[0].source, "b": documents[1].source, "steps": entries},
                         indent=2))
    else:
        print("\n\n".join(_comparison_text(entry) for entry in entries))
    return 0


def _one_thread() -> None:
    """Have TensorFlow repeat its own numbers: with more threads the order of sums varies."""
    with contextlib.suppress(RuntimeError):  # TensorFlow runs already: so be it
        tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.random.set_seed(0)


def _pairs(first: Sequence[Step], second: Sequence[Step]) -> list[tuple[Step, Step]]:
    """Steps of the same function, else of the same name, else in their order."""
    for key in (lambda s: s.function, lambda s: s.name):
        named = {key(step): step for step in second}
        pairs = [(step, named[key(step)]) for step in first if key(step) in named]
        if pairs and all(key(step) for step in first):
            return pairs
    return list(zip(first, second, strict=False))


def _comparison(request: Request, documents: Sequence[Document],
                pair: tuple[Step, Step]) -> dict:
    counts = [collections.Counter(op.type for op in step.graph.ops) for step in pair]
    kinds = sorted(kind for kind in counts[0].keys() | counts[1].keys()
                   if counts[0][kind] != counts[1][kind])
    entry: dict = {
        "name": pair[0].name,
        "ops": [len(step.graph.ops) for step in pair],
        "types": {kind: [c[kind] for c in counts] for kind in kinds},
        "threads": threads(),
        "simulated_peak_bytes": [sizes(step, 0)["baseline_peak_bytes"] for step in pair],
        "unknown_variables": [len(unknown_variables(step.graph)) for step in pair],
    }
    if request.run:
        entry.update(_measured(request, documents, pair))
    return entry


def _measured(request: Request, documents: Sequence[Document],
              pair: tuple[Step, Step]) -> dict:
    try:
        with progress(f"running {pair[0].name}"):
            first = run_step(documents[0], pair[0], request.batch_size, request.repeats)
            runs = first, run_step(documents[1], pair[1], request.batch_size, request.repeats,
                                   first.start)
    except VerificationError as error:
        return {"not_run": str(error)}
    worst = largest_difference(*runs)
    return {"measured_peak_bytes": [r.peak_bytes for r in runs],
            "seconds": [r.seconds for r in runs],
            "largest_relative_difference": None if worst is None else worst[0],
            "differs_most": None if worst is None else worst[1]}


def _comparison_text(entry: dict) -> str:
    rows = [["ops", *map(str, entry["ops"])],
            *([f"  {kind}", *map(str, counts)] for kind, counts in entry["types"].items()),
            [f"simulated peak, {_threads_said(entry)}",
             *map(_bytes_or_unknown, entry["simulated_peak_bytes"])]]
    if any(entry["unknown_variables"]):
        rows.append(["variables of unknown size", *map(str, entry["unknown_variables"])])
    last = entry.get("not_run", "")
    if "seconds" in entry:
        rows.append(["measured peak", *map(_bytes_or_unknown, entry["measured_peak_bytes"])])
        rows.append(["time", *(f"{1e3 * s:.1f} ms" for s in entry["seconds"])])
        worst = entry["largest_relative_difference"]
        last = ("no results to compare" if worst is None else
                "results and variables after a step agree in every bit" if not worst else
                f"largest relative difference after a step: {worst:.2e} in {entry['differs_most']}")
    return "\n".join([table([entry["name"], "A", "B"], rows), *([last] if last else [])])


def _threads_said(entry: dict) -> str:
    count = entry["threads"]
    return "one thread" if count == 1 else f"{count} threads"


def _bytes_or_unknown(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)
