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
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from tfckpt.common import faults
from tfckpt.common.clock import time_limit
from tfckpt.common.collector import collector_paused, older_objects_set_aside
from tfckpt.common.messages import waiting_for
from tfckpt.driving import dump
from tfckpt.driving.answers import GRAPPLER_WORDS, SIMULATED_WORDS, Simulated
from tfckpt.driving.carrier import Captured, Carrier, Outcome
from tfckpt.driving.free_block import leave_free_block
from tfckpt.driving.here import place
from tfckpt.driving.judges import JUDGES, Candidate, Rejected
from tfckpt.driving.parts import DevicePart, Part, Proposal, unchanged
from tfckpt.driving.proposals import (
    LITTLE,
    Search,
    device_parts_of,
    priced_parts,
    searches,
)
from tfckpt.driving.trials import Trials
from tfckpt.errors import CostError, InfeasibleBudgetError, RewriteError, TfckptError
from tfckpt.ir.edits import Edits
from tfckpt.ir.hlo import XlaMemory
from tfckpt.ir.target import Target
from tfckpt.report.of_step import report_of
from tfckpt.report.report import Report
from tfckpt.report.values import CompiledReport
from tfckpt.request.options import Options
from tfckpt.request.policy import with_policy
from tfckpt.rewrite.passes.manager import Context
from tfckpt.rewrite.plain_step import LiveStep
from tfckpt.store.entry import Entry, entry_of
from tfckpt.store.optimised import Answers
from tfckpt.store.pools import pools_of
from tfckpt.store.records import Decided
from tfckpt.verify.arithmetic import background
from tfckpt.verify.arithmetic.same import COMPILED, Certificate

INLINED = "nested functions inlined"
STAGES = ("capture", INLINED, "a part for each device", "prices", "forward AD", "plans", "judges")
"""The stages before the rewrite passes (`tfckpt.rewrite.realise.PASSES`)."""
LAST = ("check of the final edits", "report", "apply")
"""The stages after them."""
OFF = "tfckpt is switched off (TFCKPT=off)"
EXECUTOR_TRIALS = 3
"""Plans that Grappler is asked about, or that are simulated on several threads, of a step that the
executor runs."""
ASKED_FROM = 16 << 20
"""Bytes of a plain peak below which it is not asked: a plan is made in less time than it takes."""
BESIDE = 4
"""Times of a step's peak that may be live beside it: with more, less of the step is little less."""
_INSIDE = ("the gradient is computed inside of a loop, branch or function ({}); put the decorator "
           "on the function that is called there")


def switched_off() -> bool:
    """Return whether `TFCKPT=off` has everything pass through unchanged."""
    return os.environ.get("TFCKPT", "").strip().lower() in ("off", "0", "false")


def run(carrier: Carrier, options: Options, refused: str = "") -> Outcome:
    """Bring a step in, plan and rewrite it, and hand the edits back.

    Args:
      carrier: brings the step in and takes its edits back.
      options: how the step is planned.
      refused: why the step is to be left as it is, priced and reported all the same.

    Raises:
      CaptureError, CostError: the step cannot be read or priced; it is untouched.
      InfeasibleBudgetError: states the smallest feasible budget in the unit it was given in.
      PlanError: a device has no budget, or one that is not there has; a pattern of `keep` or
        `recompute` matches nothing.
    """
    with time_limit(options.time_limit):
        return _run(carrier, options, refused)


def _run(carrier: Carrier, options: Options, refused: str) -> Outcome:
    started = time.perf_counter()
    with collector_paused():
        step = carrier.capture(options)
    if step is None:
        return Outcome()
    if step.graph.has_gradient():
        step = dataclasses.replace(step, graph=with_policy(
            step.graph, options.keep, options.recompute, step.layers))
    target_of = place(options.target, step.compiled, carrier.optimised)
    if not step.graph.has_gradient():
        return _without_gradient(step, options, target_of, refused, started)
    with waiting_for(f"planning {step.name} ({len(step.graph.ops):,} operations)") as done:
        with older_objects_set_aside():
            outcome, report = _planned(carrier, step, options, target_of, refused, started)
        done(report.summary)
    logging.info("%s", report)
    return outcome


def _planned(carrier: Carrier, step: Captured, options: Options,
             target_of: Callable[[str], Target], refused: str,
             started: float) -> tuple[Outcome, Report]:
    """Plan a step that trains, and hand the edits back."""
    definition = dump.definition_of(step.name, step.live) if dump.folder() else b""
    context = Context(step.graph, plain=_plain(step), target=target_of(""))
    doubt = step.doubt() if options.exact and not refused else ""
    refused = f"exact=True: {doubt}" if doubt else refused
    with collector_paused():
        wanted = device_parts_of(step.graph, options, target_of)
        entry = None if refused else _entry(step, wanted, options)
        found = None if entry is None else _kept(carrier, step, context, entry, options, started)
        parts = () if found else priced_parts(step.graph, wanted)
    if parts and step.beside_bytes > BESIDE * max(part.plain.peak_bytes for part in parts):
        refused = refused or LITTLE
    if found is None:
        found = _searched(carrier, step, context, parts, options, refused, started)
        if entry is not None:
            entry.write(found[2], parts)
    outcome, report, decided = found
    if definition:
        _dump(step, definition, dataclasses.replace(options, target=context.target), outcome,
              report, carrier.optimised, decided)
    return outcome, report


def _entry(step: Captured, parts: Sequence[DevicePart], options: Options) -> Entry | None:
    """Return the place of the step's plan in the plan store, if it may have one."""
    asks = step.compiled and step.compiler is not None and options.xla_trials
    return entry_of(step.name, step.graph, parts, options,
                    step.live if asks else None) if step.stored else None


def _kept(carrier: Carrier, step: Captured, context: Context, entry: Entry, options: Options,
          started: float) -> tuple[Outcome, Report, Decided] | None:
    """Apply what was decided for the step before; return None where it is not kept, or not apt.

    It passes the judges but the one that asks XLA, whose answers are kept as well.
    """
    try:
        decided = entry.read()
        if decided is None:
            return None
        candidate = Candidate(decided.proposals, _asked(context, decided.answers))
        for judge in JUDGES:
            judge(candidate)
        return _applied(carrier, step, candidate, decided, options, started)
    except Exception as error:
        entry.drop(error)
        return None


def _searched(carrier: Carrier, step: Captured, context: Context, parts: Sequence[Part],
              options: Options, refused: str, started: float) -> tuple[Outcome, Report, Decided]:
    """Decide what to do, and apply it."""
    trials = _trials(step, parts, options, refused)
    found = searches(step.graph, [part.as_asked(trials.plain) for part in parts], options, refused,
                     pools_of(step.name) if step.stored else None)
    return _accepted(carrier, step, _asked(context, trials.answers), found, trials, options,
                     started)


def _trials(step: Captured, parts: Sequence[Part], options: Options, refused: str) -> Trials:
    """Return what asks about the step; nothing is asked about one that is left as it is anyway."""
    if step.compiled:
        return Trials(step.name, None if refused else step.compiler, options.xla_trials,
                      objective=options.objective)
    asks = (not refused and step.grappler is not None and len(parts) == 1
            and parts[0].plain.peak_bytes >= ASKED_FROM)
    if asks and parts[0].target.optimised and not parts[0].target.starts_in_turn:
        return Trials(step.name, Simulated(parts[0]), EXECUTOR_TRIALS, SIMULATED_WORDS,
                      options.objective)
    return Trials(step.name, step.grappler(parts[0].target) if asks and step.grappler else None,
                  EXECUTOR_TRIALS, GRAPPLER_WORDS, options.objective)


def _asked(context: Context, answers: Sequence[XlaMemory | None]) -> Context:
    """Return the context of a step about which XLA was asked first as it is."""
    plain = answers[0] if answers else None
    return context if plain is None else dataclasses.replace(
        context, target=context.target.told(plain.in_memory))


def failed(name: str, live: Any, error: Exception) -> Outcome:
    """Return the outcome for a step that could not be read or priced; dump it for a fault of ours.

    Args:
      name: of the step.
      live: TensorFlow's graph, as it was.
      error: why it could not.
    """
    if isinstance(error, TfckptError):
        return Outcome(failure=str(error))
    failure = faults.said(error, f"{name} is left as it is")
    if dump.folder():
        dump.write_or_say(name, {
            "fault.txt": "".join(traceback.format_exception(error)).encode(),
            "versions.json": json.dumps(dump.versions(), indent=1).encode(),
            "graph.pb": dump.definition_of(name, live)})
    return Outcome(failure=failure)


def _dump(step: Captured, definition: bytes, options: Options, outcome: Outcome,
          report: Report, optimised: bool, decided: Decided) -> None:
    """Write down what was decided for a step."""
    about = {"name": step.name, "compiled": step.compiled, "optimised": optimised}
    try:
        files = {
            "step.json": json.dumps(about).encode(), "graph.json": dump.to_json(step.graph),
            "options.json": dump.to_json(options), "plans.json": dump.to_json(outcome.plans),
            "edits.json": dump.to_json(outcome.edits),
            "compiled.json": dump.to_json(decided.answers),
            "versions.json": json.dumps(dump.versions(), indent=1).encode(),
            "report.txt": f"{report}\n\n{report.explain()}\n".encode(),
            "graph.pb": definition}
    except Exception as error:  # the step is rewritten by then
        faults.said(error, f"{step.name} is not dumped")
    else:
        dump.write_or_say(step.name, files)


def _plain(step: Captured) -> LiveStep | None:
    """Return the step as TensorFlow can be asked about it."""
    ops = step.graph.ops
    running = (*(i for i, _ in step.graph.fetches), *step.graph.sinks)
    return None if step.live is None else LiveStep(
        step.live, tuple(dict.fromkeys(ops[i].name for i in running)),
        Answers(step.name, step.graph, step.stored))


def _accepted(carrier: Carrier, step: Captured, context: Context, found: Sequence[Search],
              trials: Trials, options: Options, started: float
              ) -> tuple[Outcome, Report, Decided]:
    """Return the first candidate that every judge and the carrier accept; its edits are applied.

    To change nothing is the last candidate, and is accepted always. What cannot be reported is not
    applied.
    """
    while True:
        candidate = Candidate(tuple(search.proposal for search in found), context)
        changing = [search for search in found if search.proposal.changes]
        judged = False
        try:
            for judge in (*JUDGES, trials.judge):
                judge(candidate)
            judged = True
            return _applied(carrier, step, candidate, _decided(step, candidate, found, trials),
                            options, started)
        except Rejected as error:
            if judged:
                trials.dismiss(candidate, str(error))
            blamed = [search for search in changing if search.part.device == error.device]
            instead = [] if error.instead is None else [  # of the plain step, which does not fit
                search for search in found if search.part.device == error.instead.part.device]
            for search in blamed or changing or instead:
                search.reject(str(error), error.room, error.instead, error.segments, error.loops)
        except InfeasibleBudgetError:
            raise
        except Exception as error:
            if not changing:
                raise
            reason = str(error) if isinstance(error, RewriteError) else faults.said(
                error, f"a plan of {step.name} is given up")
            for search in changing:
                search.reject(reason)


def _decided(step: Captured, candidate: Candidate, found: Sequence[Search], trials: Trials
             ) -> Decided:
    proposals = candidate.proposals
    return Decided(proposals, tuple(line for search in found for line in search.given_up()),
                   _compiled(step, _fullest_first(proposals)[0], trials), tuple(trials.answers))


def _fullest_first(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    return tuple(sorted(proposals, key=lambda p: -p.decision.planned.peak_bytes))


def _check_loops(step: Captured, edits: Edits | None) -> None:
    """Accept edits whose loops in segments compute in the arithmetic of the plain loops.

    Where XLA compiles the step that is not looked into.

    Raises:
      Rejected: that is not so, or not known.
    """
    if edits is None or not edits.replaced:
        return
    why, differs = step.doubt(), False
    if why == COMPILED:
        return
    if not why and step.arithmetic is not None:
        found = step.arithmetic.loops(edits)
        if found.same:
            return
        differs = found.same is False
        why = found.reason or ", ".join(found.differences[:3])
    raise Rejected("loops recomputed in segments are not known to compute in the same arithmetic: "
                   f"{why or 'the two cannot be compared'}", segments=True, loops=not differs)


def _certificate(step: Captured, edits: Edits | None, options: Options) -> Certificate | None:
    """Return what is known of the arithmetic of a step with edits; None where it is not asked for.

    Raises:
      Rejected: it is asked for, and not known to be the same.
    """
    if not options.exact or edits is None or step.arithmetic is None:
        return None
    found = step.arithmetic.before(edits)
    if not found.same:
        raise Rejected(f"exact=True: {found}", segments=bool(edits.replaced),
                       loops=bool(edits.replaced) and found.same is None)
    return found


def _applied(carrier: Carrier, step: Captured, candidate: Candidate, decided: Decided,
             options: Options, started: float) -> tuple[Outcome, Report, Decided]:
    """Report what was decided, and hand the edits back.

    Raises:
      Rejected: exact=True, and a bit may change.
    """
    _check_loops(step, candidate.edits)
    certificate = _certificate(step, candidate.edits, options)
    proposals = _fullest_first(decided.proposals)
    report = report_of(step.name, step.graph, proposals, candidate.edits, decided.rejected,
                       time.perf_counter() - started, step.planned_for, decided.compiled,
                       decided.made, step.layers)
    if certificate is not None:
        report.certified(certificate.same, str(certificate))
    passes = () if candidate.realised is None else candidate.realised.outcomes
    told = decided.compiled
    if options.target is None and told is not None and told.after is not None:
        leave_free_block(proposals[0].part.target, told.after.temp_bytes)
    if candidate.edits is not None:
        carrier.apply(candidate.edits)
        if certificate is None:
            _certify_later(step, report)
    return Outcome(report, candidate.edits, proposals, passes), report, decided


def _certify_later(step: Captured, report: Report) -> None:
    """Have the arithmetic of a rewritten step compared while it trains."""
    if not background.wanted():
        return
    if doubt := step.doubt():
        report.certified(None, doubt)
    elif step.arithmetic is not None:
        background.certify(report, step.arithmetic.after)


def _compiled(step: Captured, proposal: Proposal, trials: Trials) -> CompiledReport | None:
    """Return what the report says of who was asked; None where the executor has a small step."""
    if not step.compiled and trials.plain is None:
        return None
    return CompiledReport(trials.plain, trials.memory_of(proposal), len(trials.tried),
                          trials.reason, trials.seconds, step.compiled)


_warned: set[str] = set()


def _without_gradient(step: Captured, options: Options, target_of: Callable[[str], Target],
                      refused: str, started: float) -> Outcome:
    """Return the outcome for a step that computes no gradient, or not where it can be seen."""
    inside = step.gradient_inside()
    if not inside:
        if step.name not in _warned:
            _warned.add(step.name)
            logging.warning("tfckpt: %s computes no gradient; it is left as it is. Decorate the "
                            "function in which the tape asks for it", step.name)
        return Outcome()
    try:
        part, *_ = priced_parts(step.graph, device_parts_of(step.graph, options, target_of))
    except CostError:  # of a step that is not looked into anyway
        return Outcome()
    proposal = unchanged(part, refused or _INSIDE.format(inside))
    return Outcome(report_of(step.name, step.graph, (proposal,), None, (),
                             time.perf_counter() - started, step.planned_for), None, (proposal,))
