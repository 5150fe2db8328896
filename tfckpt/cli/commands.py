"""The commands, each from a parsed request to printed results."""

from __future__ import annotations

import collections
import contextlib
import json
import sys
from collections.abc import Sequence

import tensorflow as tf
from absl import flags

from tfckpt.capture.files import SAVED_MODEL, Document, read_bytes, read_path
from tfckpt.capture.inlining.inline import is_rewritten
from tfckpt.capture.steps import Step, training_steps
from tfckpt.carriers.dumped import replay
from tfckpt.carriers.files import Result, plain_peak, plan_file_step, priced_plain, rewrite
from tfckpt.cli.arguments import Request
from tfckpt.cli.device import Fit, known_device, plan_for
from tfckpt.cli.output import (
    check_target,
    progress,
    staged_file,
    staged_saved_model,
    table,
    write_file,
)
from tfckpt.cli.running import largest_difference, run_step
from tfckpt.cost.storage import unknown_variables
from tfckpt.driving.here import threads
from tfckpt.errors import CaptureError, CostError, PlanError, VerificationError
from tfckpt.ir.graph import REGIONS
from tfckpt.report.pictures import drawn, front_figure, kind_of
from tfckpt.report.report import Report
from tfckpt.report.tensors import tensors_at_peak
from tfckpt.report.values import FrontPoint
from tfckpt.request.budget import format_bytes
from tfckpt.request.options import Options, make_options
from tfckpt.verify.arithmetic.background import wait_for_certificates

_ROWS = 20
"""Plans of a front that are printed, about."""


def run(request: Request) -> int:
    """Run a command; 0 on success.

    Args:
      request: a parsed command line, of a command that loads TensorFlow.

    Returns:
      The exit status of the process.

    Raises:
      flags.Error: an option is malformed.
      TfckptError, OSError: it could not be done.
    """
    for library in request.op_library:
        try:
            tf.load_op_library(library)
        except (tf.errors.OpError, OSError) as error:
            raise CaptureError(f"capture: {library!r} cannot be loaded as an op library: "
                               f"{error}") from error
    return {"inspect": _inspect, "plan": _plan, "rewrite": _rewrite, "replay": _replay,
            "compare": _compare}[request.command](request)


def _read(path: str) -> Document:
    if path != "-":
        return read_path(path)
    if sys.stdin is None:
        raise CaptureError("capture: standard input is closed; name a file or pipe a graph in")
    if sys.stdin.isatty():
        print("tfckpt: reading a graph from the terminal; name a file, or pipe one in",
              file=sys.stderr)
    return read_bytes(sys.stdin.buffer.read(), "standard input")


def _steps(request: Request, document: Document, rewritten: bool = False) -> list[Step]:
    with progress(f"reading {document.source}"):
        return training_steps(document, batch_size=request.batch_size, fetches=request.fetch,
                              rewritten=rewritten)


def _say_unused(request: Request, document: Document, steps: Sequence[Step]) -> None:
    """Say where a batch was given of which nothing is made; after what may fail."""
    if request.batch_size is not None and not any(step.leaves_open for step in steps):
        print(f"tfckpt: --batch_size={request.batch_size} changes nothing: {document.source} "
              "leaves no batch open", file=sys.stderr)


def _options(request: Request) -> Options:
    try:
        return make_options(request.budget, request.solver, request.objective,
                            request.batch_size, request.free_moves, request.fad,
                            exact=request.exact, effort=request.effort,
                            keep=request.keep, recompute=request.recompute)
    except PlanError as error:
        raise flags.Error(str(error)) from error


def _results(request: Request, document: Document) -> list[Result]:
    options = _options(request)
    found, steps = [], _steps(request, document)
    for step in steps:
        with progress(f"planning {step.name}"):
            found.append(plan_file_step(step, options))
    with progress("comparing the arithmetic"):
        wait_for_certificates()
    _say_unused(request, document, steps)
    return found


# inspect


def _inspect(request: Request) -> int:
    document = _read(request.paths[0])
    steps = _steps(request, document, rewritten=True)
    entries = [_description(step, request.top) for step in steps]
    _say_unused(request, document, steps)
    if request.json:
        print(json.dumps({"source": document.source, "kind": document.kind, "steps": entries},
                         indent=2))
        return 0
    print(f"{document.source}: {document.kind}{' as text' if document.text else ''}, "
          f"{len(entries)} training step{'s' * (len(entries) != 1)}")
    for entry in entries:
        regions = ", ".join(f"{count} {region}" for region, count in entry["regions"].items())
        kinds = ", ".join(f"{count} {kind}" for kind, count in list(entry["types"].items())[:8])
        print(f"\n{entry['name']}: {entry['ops']} ops ({regions})"
              f"{', rewritten by tfckpt' * entry['rewritten']}")
        print(f"  most are    {kinds}")
        print(f"  parameters  {_parameters(entry)}")
        peak = "peak      " if entry["rewritten"] else "plain peak"
        if entry["unknown"]:
            print(f"  {peak}  unknown: {entry['unknown']}")
            continue
        print(f"  resident    {format_bytes(entry['resident_bytes'])} with inputs and constants")
        print(f"  {peak}  {format_bytes(entry['baseline_peak_bytes'])} above that")
        if entry["live_at_peak"]:
            print("  live at the peak:")
        for tensor in entry["live_at_peak"]:
            print(f"  {format_bytes(tensor['bytes']):>10}  {tensor['op']}  ({tensor['why']})")
        rest = entry["smaller_at_peak"]
        if rest["tensors"]:
            print(f"  {format_bytes(rest['bytes']):>10}  in {rest['tensors']} smaller ones")
    return 0


def _parameters(entry: dict) -> str:
    unknown = entry["unknown_variables"]
    known = entry["variables"] - unknown
    said = [f"{known} variables, {format_bytes(entry['variable_bytes'])}"] if (
        known or not unknown) else []
    return " and ".join(said + [_of_unknown_size(unknown)] * bool(unknown))


def _of_unknown_size(count: int) -> str:
    return f"{count} variable{'s' * (count != 1)} of unknown size"


def _description(step: Step, top: int) -> dict:
    graph = step.graph
    types = collections.Counter(op.type for op in graph.ops)
    count = collections.Counter(op.region for op in graph.ops)
    return {
        "name": step.name, "function": step.function, "ops": len(graph.ops),
        "rewritten": any(is_rewritten(op.name) for op in graph.ops),
        "types": dict(sorted(types.items(), key=lambda entry: (-entry[1], entry[0]))),
        "regions": {region: count[region] for region in REGIONS if count[region]},
    } | _sizes(step, top)


def _sizes(step: Step, top: int) -> dict:
    """Return what a step needs; None for what is unknown since variables have no shape."""
    variables = unknown_variables(step.graph)
    try:
        with progress(f"pricing {step.name}"):
            part = priced_plain(step)
    except CostError as error:
        if not variables:
            raise
        return {"variables": len(variables), "unknown_variables": len(variables),
                "variable_bytes": None, "resident_bytes": None, "baseline_peak_bytes": None,
                "unknown": str(error).partition(": ")[2], "live_at_peak": [],
                "smaller_at_peak": {"tensors": 0, "bytes": 0}}
    cost = part.cost
    held = tensors_at_peak(cost, part.plain.timeline, step.names)
    return {
        "variables": len(cost.variable_bytes) + len(variables),
        "unknown_variables": len(variables), "variable_bytes": sum(cost.variable_bytes),
        "resident_bytes": cost.resident_bytes, "baseline_peak_bytes": plain_peak(step, part),
        "unknown": "",
        "live_at_peak": [
            {"bytes": h.bytes, "op": h.op, "layer": h.layer, "why": h.why}
            for h in held[:top]],
        "smaller_at_peak": {"tensors": len(held[top:]), "bytes": sum(h.bytes for h in held[top:])},
    }


# plan


def _plan(request: Request) -> int:
    document = _read(request.paths[0])
    if request.plot:
        kind = kind_of(request.plot)
        check_target(request.plot, directory=False, force=request.force)
    fits: list[Fit] = []
    if request.device is None:
        results = _results(request, document)
    else:
        results, fits = _results_for_device(request, document)
    if request.plot:
        write_file(request.plot, drawn(front_figure(results[0].report.front), kind),
                   force=request.force)
        if len(results) > 1:
            print(f"tfckpt: {request.plot} shows {results[0].step.name} only", file=sys.stderr)
    if request.json:
        print(json.dumps({"source": document.source, "kind": document.kind,
                          "steps": [_planned(r) | ({"device": fits[i].described()} if fits else {})
                                    for i, r in enumerate(results)]}, indent=2))
    else:
        print("\n\n".join("\n\n".join([_front_table(r), *map(str, fits[i:i + 1])])
                          for i, r in enumerate(results)))
    return 0


def _results_for_device(request: Request, document: Document) -> tuple[list[Result], list[Fit]]:
    device, options = known_device(request.device), _options(request)
    results, fits = [], []
    steps = _steps(request, document)
    for step in steps:
        with progress(f"planning {step.name} for {device.name}"):
            result, fit = plan_for(document, step, options, device, request.fetch)
        results.append(result)
        fits.append(fit)
    _say_unused(request, document, steps)
    return results, fits


def _planned(result: Result) -> dict:
    report = result.report
    plain, planned = report.expected_bytes
    return {
        "name": report.name, "baseline_peak_bytes": plain, "planned_peak_bytes": planned,
        "resident_bytes": report.resident_bytes,
        "unknown_variables": report.unknown_variables,
        "overhead": report.overhead, "recomputed_ops": report.recomputed_ops,
        "kept_derivatives": sum(region.taken for region in report.forward_ad_regions),
        "solver": report.solver, "applied": report.applied, "reason": report.reason,
        "identical": report.identical, "certificate": report.certificate,
        "front": [{"live_peak_bytes": p.live_peak_bytes, "overhead": p.overhead, "solver": p.solver}
                  for p in report.front.points],
    }


def _front_table(result: Result) -> str:
    report = result.report
    plain, planned = report.expected_bytes
    chosen = report.front.chosen
    plain_live = max(report.timeline_before.peak_bytes, 1)
    points = sorted(dict.fromkeys((*report.front.points, *([chosen] if chosen else []))),
                    key=lambda p: (-p.live_peak_bytes, p.overhead))
    shown = _some(points, chosen)
    rows = [[format_bytes(p.live_peak_bytes), f"{100 * p.live_peak_bytes / plain_live:.0f} %",
             f"{100 * p.overhead:+.1f} %", p.solver + (" *" if p == chosen else "  ")]
            for p in shown]
    live = report.timeline_after.peak_bytes if chosen is None else chosen.live_peak_bytes
    lines = [f"{report.name}: plain peak {format_bytes(plain)} (live {format_bytes(plain_live)}), "
             f"planned peak {format_bytes(planned)} (live {format_bytes(live)}, "
             f"{100 * report.overhead:+.1f} % time)"]
    if plain_live > plain or live > planned:
        lines.append("live bytes are those of the planner's order; on this device ops run in "
                     "another")
    if rows:
        lines.append(table(["live peak", "of live", "time", "solver  "], rows))
    if chosen and any(map(chosen.is_beaten_by, points)):
        lines.append("one that is better in both than what was chosen takes more of the allocator, "
                     "or could not be applied")
    if len(shown) < len(points):
        lines.append(f"{len(points) - len(shown)} plans between these are left out; "
                     "--json prints all")
    lines.append("* chosen. The table has the bytes of live tensors, the line above what the "
                 "allocator takes for them" if report.applied else f"not applied: {report.reason}")
    return "\n".join([*lines, *_not_counted(report)])


def _some(points: Sequence[FrontPoint], chosen: FrontPoint | None) -> list[FrontPoint]:
    """Return about as many points as a screen shows, both ends and the chosen among them."""
    step = max(1, -(-len(points) // _ROWS))
    return [p for n, p in enumerate(points)
            if n % step == 0 or n == len(points) - 1 or p == chosen]


def _not_counted(report: Report) -> list[str]:
    """Return a line on variables of unknown size."""
    return [f"not counted: {_of_unknown_size(report.unknown_variables)}"] * bool(
        report.unknown_variables)


# rewrite


def _rewrite(request: Request) -> int:
    source, target = request.paths
    if target == "-":
        raise flags.Error("OUT must be a path: standard output says what was done")
    document = _read(source)
    note = f"{target.rstrip('/')}.report.txt"
    is_directory = document.kind == SAVED_MODEL
    check_target(target, directory=is_directory, force=request.force)
    check_target(note, directory=False, force=request.force)
    results = _results(request, document)
    data = rewrite(document, results).serialized()
    text = "\n\n".join(f"{r.report}\n\n{r.report.explain()}" for r in results)
    force = request.force
    staged = (staged_saved_model(target, source, data, force=force) if is_directory
              else staged_file(target, data, force=force))
    with staged as graph_in_place, staged_file(note, f"{text}\n".encode(),
                                               force=force) as report_in_place:
        graph_in_place()
        report_in_place()
    for result in results:
        report = result.report
        if report.applied:
            plain, planned = report.expected_bytes
            print(f"{report.name}: {format_bytes(plain)} -> {format_bytes(planned)} planned, "
                  f"{100 * report.overhead:+.1f} % time")
            if report.identical is not True:
                print(f"  bits may change: {report.certificate or 'that was not looked into'}; "
                      "--exact takes no such plan")
        else:
            print(f"{report.name}: unchanged, {report.reason}")
        for line in _not_counted(report):
            print(line)
    print(f"wrote {target} and {note}", file=sys.stderr)
    return 0


# replay


def _replay(request: Request) -> int:
    with progress(f"planning {request.paths[0]}"):
        outcome, different = replay(request.paths[0])
    print(outcome.report)
    print(f"differs from the dump: {', '.join(different)}" if different else
          "plans and edits are those of the dump")
    return 1 if different else 0


# compare


def _compare(request: Request) -> int:
    if request.run:
        _one_thread()
    documents = [_read(path) for path in request.paths]
    steps = [_steps(request, document, rewritten=True) for document in documents]
    pairs = _pairs(*steps)
    entries = [_comparison(request, documents, pair) for pair in pairs]
    for document, found in zip(documents, steps, strict=True):
        _say_unused(request, document, found)
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
        "simulated_peak_bytes": [_sizes(step, 0)["baseline_peak_bytes"] for step in pair],
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
