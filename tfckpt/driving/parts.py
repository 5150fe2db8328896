"""The part of a step that each device runs, priced, and what might be done to it, as values."""

from __future__ import annotations

import dataclasses

from tfckpt.cost.build import cost_of
from tfckpt.cost.variables import updated_late
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.graph import KEEP, Graph
from tfckpt.ir.hlo import XlaMemory
from tfckpt.ir.target import Target
from tfckpt.plan.choosing.planned import Plain, Planned, baseline
from tfckpt.plan.forward_ad import Decision
from tfckpt.request.budget import Budget
from tfckpt.rewrite.passes.manager import PlannedPart

MINIMUM = -1
"""In place of corrected bytes: the plan that is made where no budget is given."""


@dataclasses.dataclass(frozen=True)
class DevicePart:
    """The part of a step that one device runs.

    Attributes:
      device: as ops spell it; "" where the step names none.
      number: of the part among those of several devices; None where there is one.
      budget: of the device.
      target: what runs the part.
      graph: the part.
    """

    device: str
    number: int | None
    budget: Budget
    target: Target
    graph: Graph


@dataclasses.dataclass(frozen=True)
class Part(DevicePart):
    """The part of a step that one device runs, priced.

    Attributes:
      cost: its price.
      plain: the plain part as planned.
      asked: what the plain part takes as XLA compiles it, or as Grappler leaves it to the executor,
        where they were asked.
      corrected: planned bytes that a plan may need, where compiled plans have told better than
        the budget, or `MINIMUM`.
    """

    cost: CostGraph
    plain: Plain
    asked: XlaMemory | None = None
    corrected: int | None = None

    @property
    def label(self) -> str:
        """Return what tells the names of the part's new ops from those of others."""
        return "" if self.number is None else f"_{self.number}"

    @property
    def plain_bytes(self) -> int:
        """Return what the plain part takes: as asked, where somebody was asked, else as planned."""
        return self.asked.temp_bytes if self.asked else self.plain.peak_bytes

    @property
    def held_bytes(self) -> int:
        """Return what a size counts beside the peak: what is resident, and XLA's results."""
        return self.cost.resident_bytes + (self.asked.result_bytes if self.asked else 0)

    @property
    def allowed(self) -> int | None:
        """Return the bytes that may be taken, as `plain_bytes` counts; None for the minimum."""
        return self.budget.dynamic(self.plain_bytes, self.held_bytes)

    def refusal(self, smallest_bytes: int, resident_bytes: int, note: str, sure_bytes: int = 0,
                overhead: float | None = None) -> InfeasibleBudgetError:
        """Return the error that says that no plan fits, and why loops are as they are.

        Args:
          smallest_bytes: smallest dynamic peak that was found.
          resident_bytes: allocated before the step starts.
          note: what else there is to say, after a space.
          sure_bytes: the most that was simulated of the plan of that peak; 0 for no more.
          overhead: planned extra time of that plan, as a fraction; None where it is not known.
        """
        kept = sum(op.policy == KEEP for op in self.graph.ops)
        if kept:
            note = (f". keep= has {kept} operation{'s' * (kept > 1)} computed once; without it, "
                    f"less may be feasible{note}")
        left = sorted((line for line in self.graph.refused if "the loop is not recomputed" in line),
                      key=lambda line: "in segments" not in line)
        if left:
            more = f", and {len(left) - 1} more lines like this" if len(left) > 1 else ""
            note += f". {left[0]}{more}"
        return self.budget.refusal(
            smallest_bytes, self.plain_bytes, resident_bytes, self.device, note, sure_bytes,
            overhead)

    @property
    def room(self) -> int | None:
        """Return the planned bytes that the peak must not pass; None for the minimum peak."""
        allowed = self.allowed
        if self.corrected is not None or allowed is None:
            return None if self.corrected == MINIMUM else self.corrected
        return allowed if self.asked is None else int(
            allowed * self.plain.peak_bytes / max(self.plain_bytes, 1))

    def as_asked(self, asked: XlaMemory | None) -> Part:
        """Return the part priced by what is known of the plain step; itself where that is None.

        Args:
          asked: what XLA, or Grappler, said of the plain step; None where nobody was asked.
        """
        if asked is None:
            return self
        target = self.target.told(asked.in_memory)
        found = dataclasses.replace(self, target=target) if target.orders_by_control else priced(
            DevicePart(self.device, self.number, self.budget, target, self.graph))
        return dataclasses.replace(found, asked=asked)

    def updated_late(self) -> Part:
        """Return the part with updates after what reads the old values, where edges order it."""
        graph = updated_late(self.graph) if self.target.orders_by_control else self.graph
        if graph == self.graph:
            return self
        cost = cost_of(graph, self.target)
        return dataclasses.replace(self, graph=graph, cost=cost)

    def over(self, graph: Graph) -> Part:
        """Return the part with another graph, priced anew.

        Args:
          graph: that takes the place of the part's own.

        Raises:
          CostError: the bytes of a tensor are unknown.
        """
        return dataclasses.replace(
            priced(DevicePart(self.device, self.number, self.budget, self.target, graph)),
            asked=self.asked, corrected=self.corrected)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What might be done to a part: a plan, or nothing, which `reason` explains."""

    part: Part
    decision: Decision
    reason: str = ""

    @property
    def changes(self) -> bool:
        """Return whether the part would be rewritten."""
        return not self.reason

    @property
    def planned_part(self) -> PlannedPart:
        """Return what the rewrite passes read of it."""
        part = self.part
        return PlannedPart(self.decision, part.device, part.label, part.target)


@dataclasses.dataclass(frozen=True)
class PlainPeak:
    """What takes long to know of a plain part: its peak, and whether an allocator counts it."""

    peak_bytes: int
    allocator: bool


def priced(part: DevicePart, known: PlainPeak | None = None) -> Part:
    """Price a part.

    Args:
      part: what a device runs of the step, with the device's budget and target.
      known: of the same part, where it was priced before.

    Raises:
      CostError: the bytes of a tensor are unknown.
    """
    cost = cost_of(part.graph, part.target)
    if known is None:
        target, plain = price_plain(cost, part.target)
    else:
        target = part.target if known.allocator else dataclasses.replace(
            part.target, allocator=False)
        plain = baseline(cost, target, known.peak_bytes)
    return Part(part.device, part.number, part.budget, target, part.graph, cost, plain)


def price_plain(cost: CostGraph, target: Target) -> tuple[Target, Plain]:
    """Return the plain step's plan and peak, and the target with the bytes that are counted.

    Where the allocator would count hardly any request, requested bytes are counted.

    Args:
      cost: the priced part of one device.
      target: the device, and what runs the step on it.
    """
    plain = baseline(cost, target)
    if target.allocator and 2 * plain.peak_bytes < plain.timeline.peak_bytes:
        target = dataclasses.replace(target, allocator=False)
        plain = baseline(cost, target)
    return target, plain


def unchanged(part: Part, reason: str) -> Proposal:
    """Return the proposal to leave a part as it is.

    Args:
      part: that is left as it is.
      reason: why, for the report.
    """
    plain = part.plain
    return Proposal(part, Decision(part.graph, part.cost, Planned(
        plain.plan, plain.timeline, plain.peak_bytes, part.cost.total_time, plain, ())), reason)
