"""The only place that runs the stages in order, for every way in which a step comes in.

A carrier brings a step in, says what it knows of it, and takes the edits back. Between the two,
whatever the carrier: the parts of the step's devices, prices, forward AD, plans, judges, rewrite
passes, checks, and a report. `docs/architecture.md` shows stages and carriers as a table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from absl import logging

from tfckpt import dump
from tfckpt.carriers.here import place
from tfckpt.clock import time_limit
from tfckpt.edits import Edits
from tfckpt.errors import CostError, RewriteError
from tfckpt.graph import Graph
from tfckpt.judges import JUDGES, Candidate, Rejected
from tfckpt.options import Options
from tfckpt.parts import Proposal, unchanged
from tfckpt.plan.schedule import Plan
from tfckpt.proposals import NOTHING_TO_GAIN, PLAIN_FITS, Search, parts_of, searches
from tfckpt.report import Report, report_of
from tfckpt.rewrite.passes.manager import Context
from tfckpt.rewrite.passes.manager import Outcome as PassOutcome
from tfckpt.rewrite.plain_step import LiveStep
from tfckpt.say import waiting_for

INLINED = "nested functions inlined"
STAGES = ("capture", INLINED, "a part for each device", "prices", "forward AD", "plans", "judges")
"""What runs before the rewrite passes (`tfckpt.rewrite.realise.PASSES`)."""
LAST = ("check of the final edits", "apply", "report")
"""What runs after them."""
OFF = "tfckpt is switched off (TFCKPT=off)"
_INSIDE = ("the gradient is computed inside of a loop, branch or function ({}); put the decorator "
           "on the function that is called there")


@dataclasses.dataclass(frozen=True)
class Captured:
    """A step as a carrier brings it in, and what the carrier knows of it.

    Attributes:
      name: as a person calls it.
      graph: the step as plain data.
      live: TensorFlow's graph that it was read from, not edited.
      compiled: whether XLA compiles the step.
      planned_for: where the trace leaves sizes open, what they are taken to be, in words.
      gradient_inside: names the op inside which a gradient is computed, where the graph has none;
        "" where none is.
    """

    name: str
    graph: Graph
    live: Any
    compiled: bool = False
    planned_for: str = ""
    gradient_inside: Callable[[], str] = str


class Carrier(Protocol):
    """How a step comes in and how its edits go back; nothing else.

    Attributes:
      kind: what it is called in the table of `docs/architecture.md`.
      leaves_out: stages that it needs not, with the reason.
    """

    kind: ClassVar[str]
    leaves_out: ClassVar[Mapping[str, str]]

    @property
    def optimised(self) -> bool:
        """Return whether Grappler has seen its steps already and will not change them again."""

    def capture(self, options: Options) -> Captured | None:
        """Return the step; None where nothing trains."""

    def apply(self, edits: Edits) -> None:
        """Take the edits of the step back.

        Raises:
          RewriteError: they cannot be applied; the step is as it was.
        """


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
      report: None where nothing trains.
      edits: what was handed to the carrier; None where the step is as it was.
      proposals: those that were accepted, of the fullest device first.
      passes: what became of each rewrite pass.
    """

    report: Report | None = None
    edits: Edits | None = None
    proposals: tuple[Proposal, ...] = ()
    passes: tuple[PassOutcome, ...] = ()

    @property
    def plans(self) -> tuple[tuple[str, Plan], ...]:
        """Return the plan of each device's part that is rewritten."""
        return tuple((p.part.device, p.decision.planned.plan)
                     for p in self.proposals if p.changes)

    @property
    def unwanted(self) -> str:
        """Return why the step is as it was, where that is no choice of the planner."""
        if self.report is None:
            return ""
        return next((p.reason for p in self.proposals
                     if not p.changes and p.reason not in (NOTHING_TO_GAIN, PLAIN_FITS)), "")


def switched_off() -> bool:
    """Return whether `TFCKPT=off` has everything pass through unchanged."""
    return os.environ.get("TFCKPT", "").strip().lower() in ("off", "0", "false")


def run(carrier: Carrier, options: Options, refused: str = "") -> Outcome:
    """Bring a step in, plan and rewrite it, and hand the edits back.

    Args:
      refused: why the step is to be left as it is, priced and reported all the same.

    Raises:
      CaptureError, CostError: the step cannot be read or priced; it is untouched.
      InfeasibleBudgetError: states the smallest feasible budget in the unit it was given in.
      PlanError: a device has no budget, or one that is not there has; or the time limit is over
        before the step is priced (later, the report says so).
    """
    with time_limit(options.time_limit):
        return _run(carrier, options, refused)


def _run(carrier: Carrier, options: Options, refused: str) -> Outcome:
    started = time.perf_counter()
    step = carrier.capture(options)
    if step is None:
        return Outcome()
    target_of = place(options.target, step.compiled, carrier.optimised)
    if not step.graph.has_gradient():
        return _without_gradient(step, options, target_of, started)
    with waiting_for(f"planning {step.name} ({len(step.graph.ops):,} operations)") as done:
        outcome, report = _planned(carrier, step, options, target_of, refused, started)
        done(report.summary)
    logging.info("%s", report)
    return outcome


def _planned(carrier: Carrier, step: Captured, options: Options, target_of, refused: str,
             started: float) -> tuple[Outcome, Report]:
    """Plan a step that trains, and hand the edits back."""
    definition = _definition(step) if dump.folder() else b""
    found = searches(step.graph, options, target_of, refused)
    context = Context(step.graph, plain=_plain(step), target=target_of(""))
    candidate = _accepted(carrier, context, found)
    proposals = tuple(sorted(candidate.proposals, key=lambda p: -p.decision.planned.peak_bytes))
    report = report_of(step.name, step.graph, proposals, candidate.edits,
                       tuple(line for search in found for line in search.rejected),
                       time.perf_counter() - started, step.planned_for)
    outcome = Outcome(report, candidate.edits, proposals,
                      () if candidate.realised is None else candidate.realised.outcomes)
    if definition:
        _dump(step, definition, dataclasses.replace(options, target=target_of("")), outcome,
              report, carrier.optimised)
    return outcome, report


def _definition(step: Captured) -> bytes:
    """Return TensorFlow's graph of a step, before it is edited; empty where none can be written."""
    try:
        return b"" if step.live is None else step.live.as_graph_def().SerializeToString()
    except ValueError as error:  # more than a protobuf message can have
        logging.warning("tfckpt: %s is not dumped: %s", step.name, error)
        return b""


def _dump(step: Captured, definition: bytes, options: Options, outcome: Outcome,
          report: Report, optimised: bool) -> None:
    """Write down what was decided for a step; a full disk does not end the training."""
    about = {"name": step.name, "compiled": step.compiled, "optimised": optimised}
    try:
        where = dump.write(step.name, {
            "step.json": json.dumps(about).encode(), "graph.json": dump.to_json(step.graph),
            "options.json": dump.to_json(options), "plans.json": dump.to_json(outcome.plans),
            "edits.json": dump.to_json(outcome.edits),
            "versions.json": json.dumps(dump.versions(), indent=1).encode(),
            "report.txt": f"{report}\n\n{report.explain()}\n".encode(),
            "graph.pb": definition})
    except OSError as error:
        logging.warning("tfckpt: %s is not dumped: %s", step.name, error)
    else:
        logging.info("tfckpt: %s is dumped to %s", step.name, where)


def _plain(step: Captured) -> LiveStep | None:
    """Return the step as TensorFlow can be asked about it."""
    ops = step.graph.ops
    running = (*(i for i, _ in step.graph.fetches), *step.graph.sinks)
    return None if step.live is None else LiveStep(
        step.live, tuple(dict.fromkeys(ops[i].name for i in running)))


def _accepted(carrier: Carrier, context: Context, found: Sequence[Search]) -> Candidate:
    """Return the first candidate that every judge and the carrier accept; its edits are applied.

    To change nothing is the last candidate, and is accepted always.
    """
    while True:
        candidate = Candidate(tuple(search.proposal for search in found), context)
        changing = [search for search in found if search.proposal.changes]
        try:
            for judge in JUDGES:
                judge(candidate)
            if candidate.edits is not None:
                carrier.apply(candidate.edits)
            return candidate
        except Rejected as error:
            blamed = [search for search in changing if search.part.device == error.device]
            for search in blamed or changing:
                search.reject(str(error))
        except RewriteError as error:  # the names of what TensorFlow has made by then are taken
            for search in changing:
                search.give_up(str(error))


_warned: set[str] = set()


def _without_gradient(step: Captured, options: Options, target_of, started: float) -> Outcome:
    """Return the outcome for a step that computes no gradient, or not where it can be seen."""
    inside = step.gradient_inside()
    if not inside:
        if step.name not in _warned:
            _warned.add(step.name)
            logging.warning("tfckpt: %s computes no gradient; it is left as it is", step.name)
        return Outcome()
    try:
        part, *_ = parts_of(step.graph, options, target_of)
    except CostError:  # of a step that is not looked into anyway
        return Outcome()
    proposal = unchanged(part, _INSIDE.format(inside))
    return Outcome(report_of(step.name, step.graph, (proposal,), None, (),
                             time.perf_counter() - started, step.planned_for), None, (proposal,))
