"""The report of a step, made of what was decided for each of its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfckpt.common.clock import ended_by
from tfckpt.driving.parts import Proposal
from tfckpt.ir.edits import Edits
from tfckpt.ir.graph import KEEP, RECOMPUTE, Graph
from tfckpt.ir.layers import UNKNOWN, LayerNames
from tfckpt.plan.choosing.planned import Planned
from tfckpt.report.report import Report
from tfckpt.report.tensors import fates_of, tensors_at_peak
from tfckpt.report.values import (
    RECOMPUTED,
    Asked,
    CompiledReport,
    DevicePeak,
    Front,
    FrontPoint,
)
from tfckpt.rewrite.names import FENCE

REFUSALS = 8
"""Reasons why something is left as it is, of which a report names so many at most."""


def report_of(name: str, graph: Graph, proposals: Sequence[Proposal], edits: Edits | None,
              rejected: tuple[str, ...], seconds: float, planned_for: str = "",
              compiled: CompiledReport | None = None, stored: str = "",
              names: LayerNames = UNKNOWN) -> Report:
    """Return the report of a step: that of its fullest device, with the peaks of the others.

    Args:
      name: of the step.
      graph: the step as captured.
      proposals: what was accepted for each device's part, the fullest device first.
      edits: of the whole step; None where nothing was changed.
      rejected: a line for each plan that was given up.
      seconds: what capture, planning and rewriting took.
      planned_for: what open sizes were taken to be.
      compiled: what XLA said of the step.
      stored: when the plan was made, where it was taken from the plan store.
      names: the step's layers, where they are known.

    Returns:
      A report without measured bytes.
    """
    report = _report_of_part(name, graph, proposals[0], edits, seconds, names)
    report.rejected, report.planned_for, report.compiled = rejected, planned_for, compiled
    report.stored, report.allowed_bytes = stored, proposals[0].part.allowed
    report.budget = str(proposals[0].part.budget)
    report.ended_by = ended_by()
    report.refused = tuple(dict.fromkeys(
        (*report.refused, *(line for p in proposals for line in p.part.graph.refused))))[:REFUSALS]
    if len(proposals) > 1:
        report.devices = tuple(map(_device_peak, proposals))
    return report


def _device_peak(proposal: Proposal) -> DevicePeak:
    planned, part = proposal.decision.planned, proposal.part
    return DevicePeak(part.device, planned.baseline_bytes,
                      planned.peak_bytes if proposal.changes else planned.baseline_bytes,
                      proposal.reason, part.cost.resident_bytes, str(part.budget))


def _report_of_part(name: str, graph: Graph, proposal: Proposal, edits: Edits | None,
                    seconds: float, names: LayerNames) -> Report:
    """Return the report of a planned part (of the plain part where nothing was applied)."""
    part, decision, applied = proposal.part, proposal.decision, proposal.changes
    cost, planned = part.cost, decision.planned
    added = edits.added if edits is not None else ()
    ours = decision.cost if applied else cost
    regions = decision.regions if applied else tuple(
        dataclasses.replace(r, taken=False, why="the plan was not applied") if r.taken else r
        for r in decision.regions)
    after = planned.timeline if applied else planned.baseline
    time = planned.time if applied else cost.total_time
    plan = planned.plan
    total = max(cost.total_time, 1e-12)
    fates = fates_of(decision.graph if applied else part.graph, ours,
                     (plan if applied else planned.plain.plan).schedule, names)
    return Report(
        name=name, simulated_bytes=(
            planned.baseline_bytes, planned.peak_bytes if applied else planned.baseline_bytes),
        resident_bytes=cost.resident_bytes, unknown_variables=cost.unknown_variables,
        overhead=time / total - 1.0,
        recomputed_ops=(sum(len(ours.vertices[v].ops) or 1 for v, _ in plan.recomputed)
                        if applied else 0),
        kept_bytes=sum(fate.bytes for fate in fates if fate.fate != RECOMPUTED),
        applied=applied, reason=proposal.reason, solver=plan.solver,
        # what XLA fuses into the update is its own doing
        deferred_ops=len(plan.moves.deferred) if (
            applied and part.target.orders_by_control) else 0,
        released_joins=len(plan.moves.released) if applied else 0,
        fences=sum(op.name.startswith(FENCE) for op in added) if applied else 0,
        pins=len(plan.waits) if applied else 0,
        plan_seconds=seconds, op_count=len(graph.ops), bound_bytes=planned.bound_bytes,
        front=_front(name, planned, total, applied), fates=fates, names=names,
        asked=_asked(part.graph, names),
        timeline_before=planned.baseline, timeline_after=after,
        at_peak_before=tensors_at_peak(cost, planned.baseline, names),
        at_peak_after=tensors_at_peak(ours, after, names),
        inlined=graph.inlined if applied else (), refused=graph.refused[:REFUSALS],
        segments=tuple((names.shown(loop), cut.length, cut.last, cut.within)
                       for loop, cut in decision.segments if applied and cut.length),
        again=tuple((names.shown(loop), len(cut.entries))
                    for loop, cut in decision.segments if applied and cut.entries),
        side_by_side=tuple(names.shown(name) for name, cut in decision.segments
                           if applied and cut.together),
        forward_ad_regions=regions, traced=((cost, planned.plain.plan), (ours, plan)))


def _asked(graph: Graph, names: LayerNames) -> tuple[Asked, ...]:
    """Return what is asked to be kept and to be recomputed."""
    ops: dict[str, list[str]] = {KEEP: [], RECOMPUTE: []}
    for op in graph.ops:
        if op.policy:
            ops[op.policy].append(op.name)
    return tuple(Asked(policy, len(found), tuple(dict.fromkeys(map(names.layer, found))))
                 for policy, found in ops.items() if found)


def _front(name: str, planned: Planned, total: float, applied: bool) -> Front:
    points, others = ([FrontPoint(p.peak_bytes, p.time / total - 1.0, p.solver) for p in found]
                      for found in (planned.front, planned.others))
    chosen = None
    if applied:
        # with what is live once its waits are placed, as everywhere in the report
        chosen = FrontPoint(planned.timeline.peak_bytes, planned.time / total - 1.0,
                            planned.plan.solver)
        points = [chosen if p.solver == chosen.solver
                  and abs(p.overhead - chosen.overhead) < 1e-9 else p for p in points]
        if any(map(chosen.is_beaten_by, points)):
            points = [p for p in points if p != chosen]
    return Front.of(points, chosen, name, planned.baseline_bytes, others)
