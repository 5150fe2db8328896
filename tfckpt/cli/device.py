"""`tfckpt plan --device`: whether a step fits a device that need not be here, and which batch does.

Times of ops and steps are Grappler's for that device, peaks are planned ones. `grappler_ext` is
loaded only by those who ask for a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from tfckpt.capture.files import Document
from tfckpt.capture.steps import Step, step_definition, training_steps
from tfckpt.carriers.files import Result, plan_file_step, priced_plain, rewrite
from tfckpt.cli.output import progress, table
from tfckpt.errors import PlanError
from tfckpt.largest import ENDLESS, largest_batch
from tfckpt.request.budget import format_bytes
from tfckpt.request.device_budgets import Budgets
from tfckpt.request.options import Options

if TYPE_CHECKING:
    from tfckpt.request.devices import Device

FIXED = "the batch is fixed in the graph"
_MINIMUM = Budgets()


@dataclasses.dataclass(frozen=True)
class Needs:
    """The memory and time that one version of a step needs.

    Attributes:
      resident_bytes: variables, inputs and constants.
      peak_bytes: planned, above those.
      seconds: of a step.
      largest_batch: that fits, with the minimum peak; None where the graph fixes the batch.
    """

    resident_bytes: int
    peak_bytes: int
    seconds: float
    largest_batch: int | None

    @property
    def bytes(self) -> int:
        """Return the bytes that the device needs: resident and dynamic."""
        return self.resident_bytes + self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Fit:
    """A step and a device."""

    device: Device
    plain: Needs
    rewritten: Needs

    def described(self) -> dict:
        """As JSON has it."""
        return {"name": self.device.name, "memory_bytes": self.device.memory_bytes,
                "usable_bytes": self.device.usable_bytes,
                **{name: {**dataclasses.asdict(needs), "bytes": needs.bytes,
                          "fits": needs.bytes <= self.device.usable_bytes}
                   for name, needs in (("plain", self.plain), ("rewritten", self.rewritten))}}

    def __str__(self) -> str:
        usable = self.device.usable_bytes
        rows = [[name, format_bytes(n.bytes), format_bytes(n.resident_bytes),
                 format_bytes(n.peak_bytes), f"{1e3 * n.seconds:.3f} ms",
                 "yes" if n.bytes <= usable else "no", _count(n.largest_batch)]
                for name, n in (("plain", self.plain), ("with tfckpt", self.rewritten))]
        head = [f"on {self.device.name}", "needs", "resident", "peak", "time", "fits",
                "largest batch"]
        last = (f"{format_bytes(usable)} of {format_bytes(self.device.memory_bytes)} are a "
                "program's to use; times are Grappler's estimate")
        if self.plain.largest_batch is None:
            last += f"; {FIXED}, so no other was tried"
        return "\n".join([table(head, rows), last])


def _count(batch: int | None) -> str:
    return "-" if batch is None else f"{batch:,}" if batch < ENDLESS else "any"


def known_device(text: str) -> Device:
    """Return the device that a flag names.

    Args:
      text: a preset's name, or figures such as
        "memory=24GB,bandwidth=600GB,clock=1.7GHz,cores=9216".

    Raises:
      flags.Error: there is none; lists the presets.
    """
    from tfckpt.request.devices import find_device

    try:
        return find_device(text)
    except PlanError as error:
        raise flags.Error(str(error)) from error


def plan_for(document: Document, step: Step, options: Options, device: Device,
             fetches: Sequence[str]) -> tuple[Result, Fit]:
    """Plan a step with a device's times, and say what fits there.

    Args:
      document: what the step was read from; not changed.
      step: one of the training steps of the document.
      options: how the step is planned; their target is replaced by the device.
      device: that the step is planned for; it need not be here.
      fetches: what a session runs of a GraphDef: tensors and ops; empty for the default.

    Returns:
      The planned step, and what it needs on the device, plain and rewritten.

    Raises:
      CostError: a tensor's bytes are unknown, or Grappler refuses the graph.
      InfeasibleBudgetError, PlanError: as `plan_file_step`.
    """
    from grappler_ext.estimates import costs_of

    definition = step_definition(document, step, options.batch_size)
    plain = costs_of(definition, step.graph, device)
    options = dataclasses.replace(options, target=device.target(dict(plain.op_seconds)))
    result = plan_file_step(step, options)
    edited = rewrite(document, [result])
    again = _same_step(edited, step, options.batch_size, fetches, rewritten=True)
    after = costs_of(step_definition(edited, again, options.batch_size), again.graph, device)
    search = _Search(document, step, options, fetches, definition, device)
    report = result.report
    largest = [search.largest(rewritten) for rewritten in (False, True)]
    return result, Fit(
        device,
        Needs(plain.resident_bytes, report.baseline_peak_bytes, plain.seconds, largest[0]),
        Needs(plain.resident_bytes, report.planned_peak_bytes, after.seconds, largest[1]))


def _same_step(document: Document, step: Step, batch_size: int | None, fetches: Sequence[str],
               rewritten: bool = False) -> Step:
    found = training_steps(document, batch_size=batch_size, fetches=fetches, rewritten=rewritten)
    return next(s for s in found if (s.meta, s.function) == (step.meta, step.function))


@dataclasses.dataclass(frozen=True)
class _Search:
    """A step at other batch sizes than it was asked for."""

    document: Document
    step: Step
    options: Options
    fetches: Sequence[str]
    definition: object
    device: Device

    def largest(self, rewritten: bool) -> int | None:
        """Return the largest batch that fits; None where the graph fixes it."""
        if self.options.batch_size is None or not self._is_open():
            return None
        return largest_batch(lambda batch: self._bytes(batch, rewritten),
                             self.device.usable_bytes, self.options.batch_size)

    def _is_open(self) -> bool:
        graph = _same_step(self.document, self.step, None, self.fetches).graph
        return any(tensor.bytes is None for op in graph.ops for tensor in op.outputs)

    def _bytes(self, batch: int, rewritten: bool) -> int:
        from grappler_ext.estimates import resident_bytes

        options = dataclasses.replace(self.options, budgets=_MINIMUM, batch_size=batch)
        with progress(f"trying batch {batch}"):
            step = _same_step(self.document, self.step, batch, self.fetches)
            if rewritten:
                peak = plan_file_step(step, options).report.planned_peak_bytes
            else:
                peak = priced_plain(step, options.target).plain.peak_bytes
        return resident_bytes(self.definition, step.graph) + peak
