"""`Report`: what was planned for a step, what was applied, and where its memory goes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.layers import UNKNOWN, LayerNames
from tfckpt.ir.schedule import Plan
from tfckpt.plan.forward_ad import ForwardAdRegion
from tfckpt.report.tensors import xla_curve
from tfckpt.report.values import (
    RECOMPUTED,
    Asked,
    CompiledReport,
    Curve,
    DevicePeak,
    Fate,
    Front,
    LiveTensor,
)
from tfckpt.request.budget import format_bytes
from tfckpt.simulate.simulate import Timeline
from tfckpt.simulate.timeline import Ran, ran

_NAMED = 3
"""Sums that are named, of more."""
_NOTHING = 0.0005
"""Times what is allowed, up to which a measured peak above it is not said to be."""
_SHOWN, _WIDEST = 12, 48
"""Tensors that are listed, and letters of a column of names."""


@dataclasses.dataclass
class Report:
    """A summary of what tfckpt did to one traced step.

    Peaks are dynamic: above what the step starts with.

    Attributes:
      name: traced function.
      simulated_bytes: peaks of the plain and the planned step as the planner simulates them; what
        runs the step knows better (`baseline_peak_bytes`, `planned_peak_bytes`).
      resident_bytes: variables, inputs and constants, allocated before the step starts.
      overhead: planned extra time as a fraction of the plain step.
      recomputed_ops: ops executed a second time (or more).
      kept_bytes: forward tensors kept for the backward.
      applied: whether the graph was changed; `reason` says why not.
      solver: which proposal the plan came from.
      deferred_ops, released_joins: ops moved to where they are used, joins that are bypassed.
      fences, pins: control barriers and single wait edges that were added.
      plan_seconds: capture, planning and rewriting, in seconds.
      stored: the day on which the plan was made, where it was taken from the plan store; else "".
      ended_by: what ended the search before its evaluations were spent; "" where nothing did.
      planned_for: the sizes that were planned for, where the trace leaves them open: shapes, or a
        batch.
      op_count: ops of the captured step that run, and its arguments.
      front: the plans that no other beats in both peak and time (see `Front`).
      fates: what becomes of each forward tensor that the backward reads, largest first.
      asked: what `keep=` and `recompute=` name.
      names: the step's layers: `layer`, `op` and all other names here are as people know them.
      traced: before and after, the cost graph and the plan of it, for pictures.
      forward_ad_regions: each element-wise region: its ops, the bytes that keeping its
        derivative saves, whether it is kept, and why; empty with `fad=False`.
      segments: loops that are recomputed segment by segment in the backward, how many iterations
        a segment has, how many at the end are in none and run once, and the lengths of segments in
        segments, of those in them, and so on.
      again: loops of which the backward computes a part of each iteration again, and how many of
        the tensors that an iteration would keep it computes so.
      side_by_side: sums of the gradients of slices of one tensor, which are put side by side
        instead: each would be as large as the tensor.
      inside: functions of loops and branches that compute gradients themselves, and what each is
        planned to take while it runs. Plain, in this report, is the step with that.
      inlined: nested functions whose bodies were planned and rewritten with the step.
      refused: what is left as it is, or not counted, with the reason: calls that the rewriter does
        not look into, and loops.
      rejected: plans that were given up before the one that was taken, with the reason.
      devices: where the step runs on several, peaks and budget of each, the fullest first; all
        else here is of that one.
      unknown_variables: how many variables have an unknown size and are not in `resident_bytes`.
      compiled: the answer of XLA, or Grappler, about the step; None where neither was asked.
      bound_bytes: live bytes that no plan stays below: what the largest op needs by itself.
      budget: what was asked for, in words.
      allowed_bytes: what the budget allows above what the step starts with; None for the minimum.
      measured_baseline_bytes, measured_peak_bytes: None until something measured them.
      observed_calls: calls in which something looked at the peak.
      missed: whether the peak was above what is allowed, and a warning was logged.
      identical: whether the step computes every result and every write as the plain one does, in
        the same arithmetic; None where that is not known, or not yet: it is compared some seconds
        after the trace (`tfckpt.verify.wait_for_certificates`), with `exact=True` before a plan is
        applied. `certificate` says it in words.
    """

    name: str
    simulated_bytes: tuple[int, int]
    resident_bytes: int
    overhead: float
    recomputed_ops: int
    kept_bytes: int
    applied: bool
    reason: str
    solver: str
    deferred_ops: int
    released_joins: int
    fences: int
    pins: int
    plan_seconds: float
    op_count: int
    front: Front
    timeline_before: Timeline
    timeline_after: Timeline
    at_peak_before: tuple[LiveTensor, ...]
    at_peak_after: tuple[LiveTensor, ...]
    fates: tuple[Fate, ...] = ()
    asked: tuple[Asked, ...] = ()
    names: LayerNames = dataclasses.field(default=UNKNOWN, repr=False)
    segments: tuple[tuple[str, int, int, tuple[int, ...]], ...] = ()
    again: tuple[tuple[str, int], ...] = ()
    side_by_side: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    inlined: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    forward_ad_regions: tuple[ForwardAdRegion, ...] = ()
    devices: tuple[DevicePeak, ...] = ()
    planned_for: str = ""
    unknown_variables: int = 0
    compiled: CompiledReport | None = None
    stored: str = ""
    ended_by: str = ""
    bound_bytes: int = 0
    budget: str = ""
    allowed_bytes: int | None = None
    measured_baseline_bytes: int | None = None
    measured_peak_bytes: int | None = None
    observed_calls: int = 0
    missed: bool = False
    identical: bool | None = None
    certificate: str = ""
    traced: tuple[tuple[CostGraph, Plan], tuple[CostGraph, Plan]] | None = dataclasses.field(
        default=None, repr=False)

    @functools.cached_property
    def steps_before(self) -> tuple[Ran, ...]:
        """Return the steps of `timeline_before`, in its order."""
        return () if self.traced is None else ran(*self.traced[0], self.names.shown)

    @functools.cached_property
    def steps_after(self) -> tuple[Ran, ...]:
        """Return the steps of `timeline_after`, in its order."""
        if self.traced is None or not self.applied:
            return self.steps_before
        return ran(*self.traced[1], self.names.shown)

    def __repr__(self) -> str:
        return str(self)  # a dict of reports can be printed

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return what the report says, as pairs of a name and what there is to say of it."""
        plain, planned = self.expected_bytes
        rows = [
            *([("planned for", self.planned_for)] if self.planned_for else []),
            ("plain peak", format_bytes(plain)),
            ("planned peak", self._planned),
            *([("slack", f"{format_bytes(self.slack_bytes)} of it: chunks larger than tensors, "
                         "gaps between them, threads")] if self.slack_bytes else []),
            *([("lower bound", f"{format_bytes(self.bound_bytes)}, by the largest op; the planned "
                f"peak is {planned / self.bound_bytes:.2f} times that")]
              if 0 < self.bound_bytes <= planned else []),  # small ones may not count as it runs
            *([(self.compiled.label, str(self.compiled))] if self.compiled else []),
            *([("budget", self._budget)] if self.budget else []),
            ("measured peak", self._measured),
            ("resident", f"{format_bytes(self.resident_bytes)} of variables, inputs and constants"
             + (f", and {self.unknown_variables} variables of unknown size"
                if self.unknown_variables else "")),
            ("planned overhead", f"{100 * self.overhead:+.1f} % time"),
            ("kept for backward", format_bytes(self.kept_bytes)),
            ("recomputed ops", f"{self.recomputed_ops} of {self.op_count}"),
            *[(f"{asked.policy} asked", self._as_asked(asked)) for asked in self.asked],
            *[("in segments", f"{loop}, of {length} iteration{'s' * (length > 1)} each"
               + "".join(f", these in segments of {short}" for short in within)
               + (f"; the last {last} run once" if last else ""))
              for loop, length, last, within in self.segments],
            *[("again in loops", f"{loop}: {count} tensor{'s' * (count > 1)} of each iteration")
              for loop, count in self.again],
            *([("side by side", self._side_by_side)] if self.side_by_side else []),
            *([("run later", f"{self.deferred_ops} ops, just before something reads them")]
              if self.deferred_ops else []),
            *([("taken apart", f"{self.released_joins} join{'s' * (self.released_joins > 1)} of "
                "results, which are freed one by one")] if self.released_joins else []),
            *([("forward AD", self._forward_ad())] if self.forward_ad_regions else []),
            ("plan", (f"proposed by {self.solver}, " if self.applied else "")
             + f"{self._origin} in {self.plan_seconds:.1f} s"
             + (f"; {self.ended_by} ended the search: the best found by then"
                if self.ended_by else "")),
            ("applied", "yes" if self.applied else f"no: {self.reason}"),
            *([("identical", self.certificate)] if self.certificate else []),
        ]
        rows += [(d.device.rpartition("device:")[2], str(d)) for d in self.devices]
        rows += [("inside", text) for text in self.inside]
        rows += [("inlined", text) for text in self.inlined]
        rows += [("refused", text) for text in self.refused]
        return rows + [("given up", text) for text in self.rejected]

    def __str__(self) -> str:
        rows = self.rows
        width = max(len(label) for label, _ in rows)
        lines = [f"tfckpt report for {self.name}"]
        return "\n".join(lines + [f"  {label:<{width}}  {value}" for label, value in rows])

    def certified(self, identical: bool | None, certificate: str) -> None:
        """Note what is known of the step's arithmetic, and in words.

        Args:
          identical: whether it is that of the plain step; None where that is not known.
          certificate: the same in words, for the report's text.
        """
        self.identical, self.certificate = identical, certificate

    @property
    def _planned(self) -> str:
        """Return the planned peak, as what runs the step takes it, and the most it may be."""
        plain, planned = self.expected_bytes
        most = self.most_bytes
        return (f"{format_bytes(planned)} ({planned / max(plain, 1):.2f} of plain)"
                + (f", at most {format_bytes(most)}" if most > planned else ""))

    @property
    def _side_by_side(self) -> str:
        count, more = len(self.side_by_side), len(self.side_by_side) - _NAMED
        return (f"{', '.join(self.side_by_side[:_NAMED])}"
                + (f" and {more} more" if more > 0 else "")
                + f": sum{'s' * (count > 1)} of the gradients of slices, which are not added up")

    @property
    def _budget(self) -> str:
        if self.allowed_bytes is None:
            return self.budget
        most = self.most_bytes
        return (f"{self.budget}: {format_bytes(self.allowed_bytes)} above what the step starts with"
                + (f"; no plan is sure to meet it, of this one {format_bytes(most)} are simulated "
                   "at most" if self.applied and most > self.allowed_bytes else ""))

    @property
    def _measured(self) -> str:
        """Return the measured peak, with what it is compared to."""
        measured, plain, allowed = (
            self.measured_peak_bytes, self.measured_baseline_bytes, self.allowed_bytes)
        if measured is None:
            return "not measured"
        text = format_bytes(measured)
        if plain:
            text += f" ({measured / plain:.2f} of plain, measured too: {format_bytes(plain)})"
        if allowed is not None:
            over = measured / max(allowed, 1) - 1.0
            text += ", within the budget" if over < _NOTHING else (
                f", {100 * over:.1f} % above what the budget allows")
        return text

    @property
    def _origin(self) -> str:
        return f"taken from the plan store (made {self.stored})" if self.stored else "made"

    def _as_asked(self, asked: Asked) -> str:
        """Return what became of the tensors that a person has named."""
        sizes: dict[str, list[int]] = {"kept": [], RECOMPUTED: []}
        for fate in self.fates:
            if fate.asked == asked.policy:
                sizes[RECOMPUTED if fate.fate == RECOMPUTED else "kept"].append(fate.bytes)
        return ", ".join(f"{len(found)} tensor{'s' * (len(found) > 1)} of "
                         f"{format_bytes(sum(found))} {word}"
                         for word, found in sizes.items() if found) + f" of {asked}" if any(
            sizes.values()) else f"the backward reads no tensor of {asked}"

    def _forward_ad(self) -> str:
        regions = self.forward_ad_regions
        taken = [r for r in regions if r.taken]
        saved = sum(r.saved_bytes or 0 for r in taken)
        return (f"{len(taken)} of {len(regions)} regions keep their derivative"
                + (f", {format_bytes(saved)} less" if taken else ""))

    @property
    def slack_bytes(self) -> int:
        """Return what the planned peak is above the live peak of the planned order."""
        if self.compiled and self.compiled.by_xla:  # which orders the step by itself
            return 0
        return max(0, self.expected_bytes[1] - self.timeline_after.peak_bytes)

    @property
    def summary(self) -> str:
        """Return what was done, in a line."""
        if not self.applied:
            return f"{self.name} is left as it is: {self.reason}"
        before, after = self.expected_bytes
        return (f"{self.name}: {format_bytes(after)} of {format_bytes(before)} plain, "
                f"{100 * self.overhead:+.0f} % "
                f"time, planned in {self.plan_seconds:.0f} s")

    @property
    def baseline_peak_bytes(self) -> int:
        """Return the plain peak: bytes that the step is expected to take as it was."""
        return self.expected_bytes[0]

    def note_inside(self, reports: Sequence[Report], refused: str) -> None:
        """Note what became of functions of loops and branches, before the step was planned.

        Args:
          reports: one of each function; what XLA says of the plain step is theirs.
          refused: why they were left as they are; "" where they were not.
        """
        lines = [f"loops and branches are left as they are: {refused}"] if refused else []
        for report in reports:
            plain, planned = map(format_bytes, report.expected_bytes)
            lines.append(f"{report.name.partition(', ')[2]}: {planned} instead of {plain} while "
                         "it runs")
        self.inside = tuple(lines)
        told = reports[0].compiled if reports else None
        if told is not None and told.before is not None and self.compiled is not None and (
                told.by_xla and self.compiled.before is not None):
            self.compiled = dataclasses.replace(self.compiled, before=told.before)

    @property
    def planned_peak_bytes(self) -> int:
        """Return the planned peak: bytes that the step is expected to take as it is applied."""
        return self.expected_bytes[1]

    @property
    def expected_bytes(self) -> tuple[int, int]:
        """Return the plain and the planned peak, in bytes.

        What XLA, or Grappler, was asked about them; else what the planner simulates.
        """
        return (self.compiled and self.compiled.peaks) or self.simulated_bytes

    @property
    def most_bytes(self) -> int:
        """Return the most that the applied step is simulated to take; budgets are compared with it.

        Where nobody was asked that is the planned peak.
        """
        told = self.compiled
        return max(self.expected_bytes[1], told.after.most_bytes if told and told.after else 0)

    @property
    def curves(self) -> tuple[Curve, Curve]:
        """Live bytes over the plain and the applied step: XLA's own, where it was asked."""
        told = self.compiled
        if told is not None and told.before is not None and told.after is not None and (
                told.before.live_bytes and told.after.live_bytes):
            return xla_curve(told.before, self.names), xla_curve(told.after, self.names)
        before, after = self.expected_bytes
        return (Curve(self.timeline_before.live_bytes, self.at_peak_before, before,
                      self.steps_before),
                Curve(self.timeline_after.live_bytes, self.at_peak_after, after, self.steps_after))

    def explain(self, top: int = _SHOWN) -> str:
        """Return what is live at the plain and the planned peak: bytes, layer, op, why it is kept.

        Of a step that XLA was asked about: its buffers at the peak of its own schedule.

        Args:
          top: how many tensors are listed of each peak, the largest first.

        Returns:
          Text of several lines.
        """
        parts = []
        for title, curve in zip(("plain", "planned"), self.curves, strict=True):
            tensors = curve.at_peak
            rest = sum(h.bytes for h in tensors[top:])
            live = sum(h.bytes for h in tensors)
            what = "buffers of XLA" if curve.by_xla else "tensors"
            # what runs may have another order, in which less is live
            order = ", in the planner's order" if live > 1.01 * curve.peak_bytes else ""
            parts.append(f"live at the {title} peak of {format_bytes(curve.peak_bytes)}: "
                         f"{format_bytes(live)} in {len(tensors)} {what}{order}")
            layers = _column([h.layer for h in tensors[:top]])
            ops = _column([h.op.rpartition("/")[2] for h in tensors[:top]])
            parts += [f"  {format_bytes(h.bytes):>10}  {layer}  {op}  {h.why}"
                      for h, layer, op in zip(tensors, layers, ops, strict=False)]
            if rest:
                parts.append(f"  {format_bytes(rest):>10}  in {len(tensors) - top} smaller ones")
        return "\n".join(parts)

    def plot(self, path: str) -> None:
        """Draw the live bytes over the step, before and after, into a file (png, svg, pdf).

        Forward and backward are shaded; the peak is labelled with the largest of what is live.

        Args:
          path: of the file; its ending chooses the format.

        Raises:
          TfckptError: matplotlib is not installed, or the ending is of no format that it writes.
          OSError: the file cannot be written.
        """
        from tfckpt.report import pictures

        pictures.save(pictures.step_figure({"": self}), path)

    def html(self, path: str) -> None:
        """Write one self-contained page: pictures, tensors by layer, the graph by segment.

        Args:
          path: of the HTML file; one that is there is replaced.

        Raises:
          TfckptError: matplotlib is not installed.
          OSError: the file cannot be written.
        """
        from tfckpt.report import html_page

        html_page.write(self, path)


def _column(texts: Sequence[str]) -> list[str]:
    """Return texts in one width; of what is longer than the widest column the end is left."""
    width = min(_WIDEST, max(map(len, texts), default=0))
    return [text.ljust(width) if len(text) <= width else f"…{text[1 - width:]}" for text in texts]
