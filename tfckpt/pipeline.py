"""From a captured step to edits: each device's part is priced, planned and turned into edits.

Front ends call this; nothing here touches a live graph.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import tensorflow as tf

from tfckpt.budget import Budget
from tfckpt.capture.devices import device_parts, has_inner_collective
from tfckpt.capture.repeated import without_loops
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.costgraph import CostGraph
from tfckpt.cost.time import SMALL_CPU, Rates
from tfckpt.device_budgets import Budgets, parse_budgets
from tfckpt.edits import Edits
from tfckpt.errors import CostError, InfeasibleBudgetError, PlanError, RewriteError
from tfckpt.graph import Graph
from tfckpt.ops import record
from tfckpt.plan.allocator import CPU_SMALLEST
from tfckpt.plan.forward_ad import Decision, decisions_of
from tfckpt.plan.planner import (
    AUTO,
    Plain,
    Planned,
    baseline,
    check_names,
    plans_of,
)
from tfckpt.report import REFUSALS, DevicePeak, Report, make_report
from tfckpt.rewrite.names import FENCE
from tfckpt.rewrite.passes.manager import Context, PlainStep, PlannedPart
from tfckpt.rewrite.realise import realise

NOTHING_TO_GAIN = "no plan is predicted to lower the peak"
_EXCHANGES = ("replicas exchange something before the update (synchronised statistics); a fence "
              "that waited for another replica could wait for ever")
_WHOLE = "the whole step is asked, not a part of it"


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a step is planned for; by default this machine's.

    Attributes:
      rates: its speed.
      smallest: smallest request, in bytes, that its allocator counts; None asks TensorFlow
        whether there is a GPU here.
    """

    rates: Rates = SMALL_CPU
    smallest: int | None = None


HERE = Target()


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options of one decorated step.

    Attributes:
      budgets: that of each device.
      xla_guard: see `tfckpt.rewrite.build.build_edits`; no front end offers it.
    """

    budgets: Budgets
    solver: str = AUTO
    objective: str = "time"
    batch_size: int | None = None
    free_moves: bool = True
    fad: str | bool = False
    xla_guard: str = "data"
    target: Target = HERE


def make_options(budget: object = "min", solver: str = AUTO, objective: str = "time",
                 batch_size: int | None = None, free_moves: bool = True,
                 fad: str | bool = False, target: Target = HERE) -> Options:
    """Checks options before anything is traced.

    Raises:
      PlanError: an option is malformed; the message says what may be written.
    """
    check_names(solver, objective)
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)
                                   or batch_size <= 0):
        raise PlanError(f"plan: batch_size={batch_size!r} must be a positive int")
    if not isinstance(fad, bool) and fad != AUTO:
        raise PlanError(f"plan: fad={fad!r} must be {AUTO!r}, True or False")
    return Options(parse_budgets(budget), solver, objective, batch_size, free_moves, fad,
                   target=target)


@dataclasses.dataclass(frozen=True)
class Part:
    """What was planned for the part of a step that one device runs.

    Attributes:
      device: as ops spell it; "" where the step names none.
      budget: of the device.
      graph, cost: the part and its price.
      edits: of the part by itself; None where nothing is to be changed: `reason` says why.
      realised: what the edits realise.
    """

    device: str
    budget: Budget
    graph: Graph
    cost: CostGraph
    decision: Decision
    edits: Edits | None
    reason: str = ""
    realised: PlannedPart | None = None


def plan_parts(graph: Graph, options: Options, plain: PlainStep | str) -> list[Part]:
    """Plans every device's part, the fullest device first; replicas get the same plan.

    Args:
      plain: see `tfckpt.rewrite.passes.manager.Context`.

    Raises:
      CostError: the bytes of a tensor are unknown.
      InfeasibleBudgetError: a device's part does not fit its budget.
      PlanError: a device has no budget, or one that is not there has.
    """
    parts: list[Part] = []
    split = device_parts(graph)
    options.budgets.check(split)
    for number, (device, part) in enumerate(split.items()):
        several = len(split) > 1
        context = _context(part, options, _WHOLE if several else plain)
        parts.append(_plan_part(context, options, options.budgets.of(device), parts,
                                device if several else "",
                                f"_{number}" if several else "",
                                _EXCHANGES if several and has_inner_collective(graph) else ""))
    return sorted(parts, key=lambda p: -p.decision.planned.peak_bytes)


def _context(graph: Graph, options: Options, plain: PlainStep | str) -> Context:
    return Context(graph, (), plain, options.xla_guard, smallest_request(options.target) > 0)


def _plan_part(context: Context, options: Options, budget: Budget, before: list[Part],
               device: str, label: str, refused: str) -> Part:
    graph = context.graph
    cost = build_cost_graph(graph, options.target.rates)
    if refused:
        return Part(device, budget, graph, cost, _unplanned(graph, cost, options.target), None,
                    refused)
    reason = ""
    # a step that trains twice may read what an update wrote: no fence can then wait for updates
    singles = (True, False) if not label and single_device(graph) else (False,)
    attempts = list(singles)
    while attempts:
        single = attempts.pop(0)
        try:
            decision = (_as_before(graph, cost, budget, before)
                        or plan_graph(graph, cost, options, budget, single, device))
            if decision.planned.peak_bytes >= decision.planned.baseline_bytes:
                return Part(device, budget, graph, cost, decision, None, NOTHING_TO_GAIN)
            part = PlannedPart(decision, device, label)
            edits = realise(dataclasses.replace(context, graph=graph, parts=(part,))).edits
            return Part(device, budget, graph, cost, decision, edits, realised=part)
        except InfeasibleBudgetError:
            raise
        except (PlanError, RewriteError) as error:  # ours: options were checked before
            reason = str(error)
            kept = without_loops(graph, reason) if not attempts else None
            if kept is not None:
                graph, cost = kept, build_cost_graph(kept, options.target.rates)
                attempts = list(singles)
    return Part(device, budget, graph, cost, _unplanned(graph, cost, options.target), None,
                reason)


def _as_before(graph: Graph, cost: CostGraph, budget: Budget,
               before: list[Part]) -> Decision | None:
    """The decision for a replica that differs by names alone."""
    for part in before:
        if part.budget == budget and part.decision.graph is part.graph and (
                _nameless(part.cost) == _nameless(cost)):
            return dataclasses.replace(part.decision, graph=graph, cost=cost)
    return None


def _nameless(cost: CostGraph) -> tuple:
    return (tuple(dataclasses.replace(v, name="", ops=(), device="") for v in cost.vertices),
            tuple(dataclasses.replace(s, name="", tensor=(-1, -1)) for s in cost.storages))


def unplanned_part(graph: Graph, reason: str) -> Part:
    """A step that is left as it is, priced.

    Raises:
      CostError: the bytes of a tensor are unknown.
    """
    cost = build_cost_graph(graph)
    return Part("", Budget(), graph, cost, _unplanned(graph, cost), None, reason)


def _unplanned(graph: Graph, cost: CostGraph, target: Target = HERE) -> Decision:
    """The plain step as a decision."""
    _, plain = price_plain(graph, cost, target)
    return Decision(graph, cost, Planned(plain.plan, plain.timeline, plain.peak_bytes,
                                         cost.total_time, plain, ()))


def join(graph: Graph, parts: list[Part], options: Options, plain: PlainStep | str
         ) -> Edits | None:
    """The edits of the whole step; None where no part has any.

    Raises:
      RewriteError: together they close a cycle.
    """
    if len(parts) == 1:
        return parts[0].edits
    found = tuple(part.realised for part in parts if part.realised is not None)
    if not found:
        return None
    context = _context(graph, options, plain)
    return realise(dataclasses.replace(context, parts=found)).edits


def single_device(graph: Graph) -> bool:
    """Whether a fence may wait for updates: one device and no collective."""
    devices = {op.device for op in graph.ops if op.device}
    return len(devices) <= 1 and not any(record(op.type).collective for op in graph.ops)


def smallest_request(target: Target) -> int:
    """Smallest request that the target's allocator counts, in bytes; 0 says that it is a GPU."""
    if target.smallest is not None:
        return target.smallest
    return 0 if tf.config.list_logical_devices("GPU") else CPU_SMALLEST


def price_plain(graph: Graph, cost: CostGraph,
                target: Target = HERE) -> tuple[int | None, Plain]:
    """The smallest request that is counted in bytes, and what `baseline` says of the step."""
    smallest: int | None = smallest_request(target)
    plain = baseline(cost, in_xla=graph.in_xla, smallest=smallest)
    if 2 * plain.peak_bytes < plain.timeline.peak_bytes:  # hardly any request would be counted
        smallest = None
        plain = baseline(cost, in_xla=graph.in_xla, smallest=None)
    return smallest, plain


def plan_graph(graph: Graph, cost: CostGraph, options: Options, budget: Budget, single: bool,
               device: str = "") -> Decision:
    """Plans one graph.

    Args:
      budget: of the device that runs it.
      single: whether fences may wait for updates (see `single_device`).
      device: which of several it is, for messages.

    Raises:
      InfeasibleBudgetError: in the unit of the budget that was asked for.
      PlanError: no plan could be made.
    """
    smallest, plain = price_plain(graph, cost, options.target)
    room = budget.dynamic(plain.peak_bytes, cost.resident_bytes)

    def plans(graph_cost: CostGraph) -> Iterator[Planned]:
        return plans_of(graph_cost, room, solver=options.solver, objective=options.objective,
                        free_moves=options.free_moves, await_updates=single,
                        in_xla=graph.in_xla, smallest=smallest, plain=plain)

    fad = options.fad if options.solver == AUTO or options.fad is True else False
    try:
        try:
            return next(decisions_of(
                graph, cost, plans, fad=fad, budget=room, objective=options.objective,
                plain_bytes=plain.peak_bytes, rates=options.target.rates))
        except CostError as error:  # of forward AD: the graph itself was priced before
            warnings.warn(f"tfckpt: no derivatives are kept: {error}", stacklevel=2)
            return Decision(graph, cost, next(plans(cost)))
    except InfeasibleBudgetError as error:
        raise budget.explain(error, plain.peak_bytes, cost.resident_bytes, device) from None


def report_of(name: str, graph: Graph, parts: list[Part], seconds: float) -> Report:
    """The report of a step: that of its fullest device, with the peaks of the others."""
    first = parts[0]
    added = [op for p in parts if p.edits is not None for op in p.edits.added]
    report = make_report(
        name, graph, first.cost, first.decision, applied=first.edits is not None,
        reason=first.reason, fence_count=sum(op.name.startswith(FENCE) for op in added),
        seconds=seconds)
    report.refused = tuple(dict.fromkeys(
        (*report.refused, *(line for p in parts for line in p.graph.refused))))[:REFUSALS]
    if len(parts) > 1:
        report.devices = tuple(
            DevicePeak(p.device, p.decision.planned.baseline_bytes,
                       (p.decision.planned.baseline_bytes if p.edits is None
                        else p.decision.planned.peak_bytes), p.reason,
                       p.cost.resident_bytes, str(p.budget)) for p in parts)
    return report
