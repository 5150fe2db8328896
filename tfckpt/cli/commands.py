"""The commands, each from a parsed request to printed results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import tensorflow as tf
from absl import flags

from tfckpt.capture.files import SAVED_MODEL, Document
from tfckpt.carriers.dumped import replay
from tfckpt.carriers.files import Result, plan_file_step, rewrite
from tfckpt.cli.arguments import Request
from tfckpt.cli.comparing import compare
from tfckpt.cli.device import Fit, known_device, plan_for
from tfckpt.cli.inspecting import inspect, of_unknown_size
from tfckpt.cli.output import (
    check_target,
    progress,
    staged_file,
    staged_saved_model,
    table,
    write_file,
)
from tfckpt.cli.reading import read, say_unused, steps_of
from tfckpt.errors import CaptureError, PlanError
from tfckpt.report.pictures import drawn, front_figure, kind_of
from tfckpt.report.report import Report
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
    return {"inspect": inspect, "plan": _plan, "rewrite": _rewrite, "replay": _replay,
            "compare": compare}[request.command](request)


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
    found, steps = [], steps_of(request, document)
    for step in steps:
        with progress(f"planning {step.name}"):
            found.append(plan_file_step(step, options))
    with progress("comparing the arithmetic"):
        wait_for_certificates()
    say_unused(request, document, steps)
    return found


# plan


def _plan(request: Request) -> int:
    document = read(request.paths[0])
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
    steps = steps_of(request, document)
    for step in steps:
        with progress(f"planning {step.name} for {device.name}"):
            result, fit = plan_for(document, step, options, device, request.fetch)
        results.append(result)
        fits.append(fit)
    say_unused(request, document, steps)
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
    return [f"not counted: {of_unknown_size(report.unknown_variables)}"] * bool(
        report.unknown_variables)


# rewrite


def _rewrite(request: Request) -> int:
    source, target = request.paths
    if target == "-":
        raise flags.Error("OUT must be a path: standard output says what was done")
    document = read(source)
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
