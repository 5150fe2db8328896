"""The command that tells what training steps need as they are."""

from __future__ import annotations

import collections
import json

from tfckpt.capture.inlining.inline import is_rewritten
from tfckpt.capture.steps import Step
from tfckpt.carriers.files import plain_peak, priced_plain
from tfckpt.cli.arguments import Request
from tfckpt.cli.output import progress
from tfckpt.cli.reading import read, say_unused, steps_of
from tfckpt.cost.storage import unknown_variables
from tfckpt.errors import CostError
from tfckpt.ir.graph import REGIONS
from tfckpt.report.tensors import tensors_at_peak
from tfckpt.request.budget import format_bytes


def inspect(request: Request) -> int:
    """Print what the training steps of a graph consist of and need.

    Args:
      request: a parsed command line.

    Returns:
      The exit status of the process.

    Raises:
      TfckptError, OSError: it cannot be read or priced.
    """
    document = read(request.paths[0])
    steps = steps_of(request, document, rewritten=True)
    entries = [_description(step, request.top) for step in steps]
    say_unused(request, document, steps)
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
    return " and ".join(said + [of_unknown_size(unknown)] * bool(unknown))


def of_unknown_size(count: int) -> str:
    """Return in words how many variables are not counted.

    Args:
      count: how many.
    """
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
    } | sizes(step, top)


def sizes(step: Step, top: int) -> dict:
    """Return what a step needs; None for what is unknown since variables have no shape.

    Args:
      step: as it was read.
      top: how many of the largest tensors at the peak are listed.

    Raises:
      CostError: a size is not known though all variables have a shape.
    """
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
