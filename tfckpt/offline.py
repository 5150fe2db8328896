"""Plans and rewrites graphs in files: what the command line is made of.

    document = read_path("model")                          # a SavedModel, GraphDef, MetaGraphDef
    results = [plan_offline(step, make_options(budget=0.5))
               for step in training_steps(document, batch_size=32)]
    smaller = rewrite(document, results)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from tfckpt.budget import Budget
from tfckpt.capture.devices import device_parts
from tfckpt.capture.files import Document
from tfckpt.capture.steps import Step
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.costgraph import CostGraph
from tfckpt.device_budgets import Budgets
from tfckpt.edits import Edits
from tfckpt.errors import PlanError, RewriteError
from tfckpt.graph import Graph
from tfckpt.pipeline import (
    NOTHING_TO_GAIN,
    Options,
    Part,
    plan_graph,
    report_of,
    single_device,
    smallest_request,
)
from tfckpt.plan.planner import Planned
from tfckpt.report import Report
from tfckpt.rewrite.apply_graphdef import (
    edit_function_def,
    edit_graph_def,
    function_with_inlined,
    with_inlined,
)
from tfckpt.rewrite.passes.manager import Context, PlannedPart
from tfckpt.rewrite.passes.reference_variables import has_references
from tfckpt.rewrite.plain_step import LiveStep
from tfckpt.rewrite.realise import realise

_NO_FUNCTION = "a session optimises a graph for what is fetched from it, which is not known"


@dataclasses.dataclass(frozen=True)
class Result:
    """What was planned for a step: edits (None where nothing is to be changed) and report."""

    step: Step
    cost: CostGraph
    planned: Planned
    edits: Edits | None
    report: Report


def plan_offline(step: Step, options: Options) -> Result:
    """Prices and plans a step, and makes the edits that realise the plan.

    Raises:
      CostError: a tensor's bytes are unknown.
      InfeasibleBudgetError: states the smallest feasible budget in the unit it was given in.
      PlanError: no plan could be made, or devices have different budgets.
    """
    started = time.perf_counter()
    graph = step.graph
    cost = build_cost_graph(graph, options.target.rates)
    # see `tfckpt.rewrite.passes.reference_variables` on why fences then do not await updates
    single = single_device(graph) and not has_references(graph)
    budget = _budget(graph, options.budgets)
    decision = plan_graph(graph, cost, options, budget, single)
    planned = decision.planned
    edits, reason = None, NOTHING_TO_GAIN
    if planned.peak_bytes < planned.baseline_bytes:
        try:
            plain = _NO_FUNCTION if step.live is None else LiveStep(step.live)
            edits = realise(Context(graph, (PlannedPart(decision),), plain,
                                    guard_weights=smallest_request(options.target) > 0)).edits
            reason = ""
        except RewriteError as error:
            edits, reason = None, str(error)
    report = report_of(step.name, graph, [Part("", budget, graph, cost, decision, edits,
                                                reason)],
                       time.perf_counter() - started)
    return Result(step, cost, planned, edits, report)


def _budget(graph: Graph, budgets: Budgets) -> Budget:
    """That of the step: in files it is planned as a whole, however many devices it names."""
    devices = device_parts(graph)
    budgets.check(devices)
    first, *others = dict.fromkeys(budgets.of(device) for device in devices)
    if others:
        raise PlanError(f"plan: {graph.name} runs on several devices and comes from a file, so it "
                        "is planned as a whole; pass one budget for all, or decorate the step")
    return first


def rewrite(document: Document, results: Sequence[Result]) -> Document:
    """The document with every planned step rewritten; the one given is left as it is.

    Raises:
      RewriteError: an edit does not fit the document.
    """
    edited = document.copy()
    for result in results:
        if result.edits is None:
            continue
        definition = edited.graph_defs()[result.step.meta]
        if not result.step.function:
            if result.step.inlining is not None:
                with_inlined(definition, result.step.inlining)
            edit_graph_def(definition, result.edits)
            continue
        library = definition.library.function
        for function in library:
            if function.signature.name == result.step.function:
                if result.step.inlining is not None:
                    function_with_inlined(function, result.step.inlining, library)
                edit_function_def(function, result.edits, library)
    return edited
