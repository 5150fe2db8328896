"""Conversion of what was decided for a step to JSON, with indices for names, and back.

What can be computed again is not kept: costs, edits, timelines. What comes back has passed the
checker of plans, and its timeline has the peak that it had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfckpt.capture.loops.repeated import without_loops
from tfckpt.driving.parts import DevicePart, Part, PlainPeak, Proposal, priced, unchanged
from tfckpt.errors import PlanError
from tfckpt.ir.graph import Graph
from tfckpt.ir.hlo import XlaBuffer, XlaMemory
from tfckpt.ir.schedule import Fence, Moves, Plan, Wait, resolve
from tfckpt.plan.choosing.planned import Planned
from tfckpt.plan.forward_ad import Decision, ForwardAdRegion, with_derivatives
from tfckpt.plan.loops.choice import segmented
from tfckpt.plan.loops.segments import Cut
from tfckpt.plan.pool import Point
from tfckpt.report.values import CompiledReport
from tfckpt.simulate.check import check_plan
from tfckpt.simulate.simulate import simulate_order
from tfckpt.store.texts import Texts


@dataclasses.dataclass(frozen=True)
class Decided:
    """The decision for a step, as it is kept in the store.

    Attributes:
      proposals: one for the part of each device, in the order of the parts.
      rejected: why earlier ones were given up, a line each.
      compiled: answers of XLA or Grappler in the report; None where neither was asked.
      answers: all that they answered, in its order.
      made: the day on which it was, where it was kept; "" where it was made just now.
    """

    proposals: tuple[Proposal, ...]
    rejected: tuple[str, ...] = ()
    compiled: CompiledReport | None = None
    answers: tuple[XlaMemory | None, ...] = ()
    made: str = ""


def to_record(decided: Decided, graph: Graph, parts: Sequence[Part]) -> dict[str, Any]:
    """Return what was decided as JSON can write it.

    Args:
      decided: the accepted proposals, one for each part, and what was asked for them.
      graph: the step as it was captured.
      parts: of its devices, as they were priced.
    """
    texts = Texts(graph)
    said, answers = decided.compiled, decided.answers
    return {
        "parts": [_part(proposal, part, texts)
                  for proposal, part in zip(decided.proposals, parts, strict=True)],
        "rejected": [texts.pieces(line) for line in decided.rejected],
        "answers": [None if a is None else _memory(a, texts) for a in answers],
        "compiled": said and {
            "before": _number(said.before, answers), "after": _number(said.after, answers),
            "trials": said.trials, "reason": texts.pieces(said.reason),
            "seconds": said.seconds, "by_xla": said.by_xla}}


def from_record(record: Mapping[str, Any], graph: Graph, wanted: Sequence[DevicePart], made: str
                ) -> Decided:
    """Return what a record says, of a step and the parts of its devices as they are now.

    Args:
      record: what `to_record` returned, read from JSON.
      graph: the step as it is now.
      wanted: the parts of its devices as they are now, in the order of the record.
      made: when the plan was made, a date.

    Returns:
      What was decided, with ops named as they are now.

    Raises:
      Exception: it says nothing that fits.
    """
    texts = Texts(graph)
    answers = tuple(None if a is None else _memory_of(a, texts) for a in record["answers"])
    said = record["compiled"]
    compiled = None if said is None else CompiledReport(
        _answer(said["before"], answers), _answer(said["after"], answers), said["trials"],
        texts.text(said["reason"]), said["seconds"], said["by_xla"])
    plain = answers[0] if answers else None
    proposals = tuple(_proposal(entry, priced(part, PlainPeak(*entry["plain"])).as_asked(plain),
                                texts)
                      for entry, part in zip(record["parts"], wanted, strict=True))
    return Decided(proposals, texts.all(record["rejected"]), compiled, answers, made)


# The part of a device.


def _part(proposal: Proposal, part: Part, texts: Texts) -> dict[str, Any]:
    """Return what was decided for a part, which may have been planned over another graph.

    The plain plan is not kept, but what takes long to know of it.
    """
    here, planned = proposal.part, proposal.decision.planned
    refused = None if here.graph.refused == part.graph.refused else [
        texts.pieces(line) for line in here.graph.refused]
    return {"plain": dataclasses.astuple(PlainPeak(part.plain.peak_bytes, part.target.allocator)),
            "reason": texts.pieces(proposal.reason), "otherwise": here.target.otherwise,
            "updated_late": here.graph is not part.graph,
            "without_loops": refused,
            "decision": None if planned.plan is here.plain.plan else
            _decision(proposal.decision, texts)}


def _proposal(record: Mapping[str, Any], part: Part, texts: Texts) -> Proposal:
    reason = texts.text(record["reason"])
    if record["updated_late"]:
        part = part.updated_late()
    if record["without_loops"] is not None:
        graph = without_loops(part.graph, "")
        if graph is None:
            raise PlanError("plan: what was kept leaves loops alone that are not there")
        part = part.over(dataclasses.replace(graph, refused=texts.all(record["without_loops"])))
    part = dataclasses.replace(part, target=dataclasses.replace(
        part.target, otherwise=record["otherwise"]))
    if record["decision"] is None:
        if not reason:
            raise PlanError("plan: what was kept says neither what to do nor why nothing")
        return unchanged(part, reason)
    return Proposal(part, _decision_of(record["decision"], part, texts), reason)


def _decision(decision: Decision, texts: Texts) -> dict[str, Any]:
    planned = decision.planned
    return {
        "plan": _plan(planned.plan), "requested": planned.timeline.peak_bytes,
        "peak": planned.peak_bytes, "time": planned.time, "bound": planned.bound_bytes,
        "front": [dataclasses.astuple(point) for point in planned.front],
        "others": [dataclasses.astuple(point) for point in planned.others],
        "regions": [[texts.index(r.source), [texts.index(op) for op in r.ops], r.saved_bytes,
                     r.taken, texts.pieces(r.why)] for r in decision.regions],
        "segments": [[texts.index(name), *cut] for name, cut in decision.segments]}


def _decision_of(record: Mapping[str, Any], part: Part, texts: Texts) -> Decision:
    regions = tuple(ForwardAdRegion(texts.name(source), tuple(map(texts.name, ops)), saved, taken,
                                    texts.text(why))
                    for source, ops, saved, taken, why in record["regions"])
    segments = tuple((texts.name(loop), Cut(length, last, tuple(within), tuple(entries), together))
                     for loop, length, last, within, entries, together in record["segments"])
    whole, priced_whole, first = segmented(part.graph, part.cost, dict(segments), part.target)
    graph, cost, edits = with_derivatives(whole, priced_whole, [r.taken for r in regions],
                                          part.target)
    plan = dataclasses.replace(_plan_of(record["plan"]), alternatives=tuple(
        r.source for r in regions if r.taken))
    check_plan(cost, plan)
    timeline = simulate_order(cost, resolve(cost, plan.schedule), plan.order)
    if timeline.peak_bytes != record["requested"]:
        raise PlanError(f"plan: what was kept needed {record['requested']:,} bytes, and needs "
                        f"{timeline.peak_bytes:,} now")
    planned = Planned(plan, timeline, record["peak"], record["time"], part.plain,
                      tuple(Point(*point) for point in record["front"]),
                      tuple(Point(*point) for point in record["others"]), record["bound"])
    return Decision(graph, cost, planned, regions, first.then(edits), segments)


# A plan, without the names of its alternatives.


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "vertices": [v for v, _ in plan.schedule], "copies": [copy for _, copy in plan.schedule],
        "deferred": plan.moves.deferred, "released": plan.moves.released,
        "fences": [[f.position, f.awaits, f.gates] for f in plan.fences],
        "waits": [[*w.waiting, *w.awaited] for w in plan.waits],
        "order": None if plan.order == tuple(range(len(plan.schedule))) else plan.order,
        "await_updates": plan.await_updates, "solver": plan.solver}


def _plan_of(record: Mapping[str, Any]) -> Plan:
    schedule = tuple(zip(record["vertices"], record["copies"], strict=True))
    order = record["order"]
    return Plan(
        schedule, Moves(tuple(record["deferred"]), tuple(record["released"])),
        tuple(Fence(position, tuple(awaits), tuple(gates))
              for position, awaits, gates in record["fences"]),
        tuple(Wait((v, copy), (w, other)) for v, copy, w, other in record["waits"]),
        tuple(range(len(schedule)) if order is None else order), record["await_updates"],
        solver=record["solver"])


# What XLA, or Grappler, answered.


def _memory(memory: XlaMemory, texts: Texts) -> dict[str, Any]:
    return {"temp": memory.temp_bytes, "results": memory.result_bytes, "live": memory.live_bytes,
            "held": [[b.bytes, texts.pieces(b.op), b.opcode] for b in memory.held],
            "in_memory": texts.indices(memory.in_memory), "most": memory.most_bytes}


def _memory_of(record: Mapping[str, Any], texts: Texts) -> XlaMemory:
    return XlaMemory(record["temp"], record["results"], tuple(record["live"]), tuple(
        XlaBuffer(size, texts.text(op), opcode) for size, op, opcode in record["held"]),
        tuple(sorted((texts.name(i), number) for i, number in record["in_memory"])),
        record["most"])


def _number(memory: XlaMemory | None, answers: Sequence[XlaMemory | None]) -> int | None:
    """Return which answer it is."""
    return None if memory is None else next(i for i, a in enumerate(answers) if a is memory)


def _answer(number: int | None, answers: Sequence[XlaMemory | None]) -> XlaMemory | None:
    return None if number is None else answers[number]
