"""The search of `auto`: a pool of priced candidates, the same for every budget.

The search is several *runs*, none of which knows what another finds: one from what the planner
always tries (`OWN`), and one for each further solver, from its proposals under both objectives. A
run leads its best start down to less memory (`tfckpt.plan.improve.descend`), then searches
schedule by schedule around what it found (`tfckpt.plan.rescheduling`): less memory, and less time
within budgets between the smallest peak and the plain one. The pool is the union. So another solver
adds plans to it and takes none away; and since no budget enters, a larger budget chooses from the
same plans and never gets a slower one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from tfckpt.common.clock import OutOfTimeError, ended_by, until_time_is_over
from tfckpt.errors import PlanError
from tfckpt.ir.schedule import Moves
from tfckpt.ir.target import HERE, ORDER, Target
from tfckpt.plan.candidates import OWN, Solver, recursive
from tfckpt.plan.coarsen import coarsen
from tfckpt.plan.evaluate import Candidate, Evaluator, Priced, non_dominated, proposed
from tfckpt.plan.improve import descend, speed_up
from tfckpt.plan.pool import Pool, Run, few, pool_of, spread
from tfckpt.plan.rescheduling import neighbourhood
from tfckpt.simulate.order import base_order, deferrable, moves_of_xla, releasable

OBJECTIVES = ("time", "memory")
EVALUATIONS, FEWEST, MOST = 600_000, 60, 600
"""Candidates priced: the first divided by the graph's vertices, within the other two."""
DESCENT, CLIMB, SOLVER = 0.3, 0.3, 0.1
"""Of the evaluations, what leading down the best start of `OWN` may take, what making it faster on
the way back, and what each further solver's best start."""
CHANGES, EACH, FEWEST_CHANGES, MOST_CHANGES = 12_000_000, 50, 10_000, 14_000
"""Changes of single copies tried in `tfckpt.plan.rescheduling`: the first divided by the vertices,
as all else takes longer there; but not more than the second for each vertex (the third where
these are few), and at most the fourth."""
OWN_CHANGES, SOLVER_CHANGES = 0.5, 0.03
"""Of these, what goes to `OWN`, and to each further solver."""
SCHEDULES = 24
"""Schedules of a run that are priced, as `few` counts."""
LARGEST = 2_500
"""Vertices searched one by one; larger graphs are coarsened to about this size."""
REFINED = 14
"""Plans of the coarse graph that are priced on the fine one; fewer where each takes long."""
RUNGS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.13, 0.17, 0.21, 0.26, 0.31, 0.37, 0.43,
         0.5, 0.57, 0.64, 0.71, 0.78, 0.85, 0.92)
"""Budgets at which plans are made faster, from the minimum (0) to the plain peak (1); they are
dense where `min` chooses."""


def explore(evaluator: Evaluator, patterns: Sequence[Candidate], solvers: Sequence[Solver],
            plain_bytes: int, effort: float = 1.0, in_order: bool = True) -> Pool:
    """Return the pool of `auto`.

    Args:
      evaluator: prices candidates of the graph that is planned.
      patterns: what `templates` returned.
      solvers: whose proposals are searched from, besides `OWN`.
      plain_bytes: requested peak of the plain step.
      effort: how much of the default number of evaluations each run may take.
      in_order: whether what runs the step keeps the plan's order; see `reschedule`.

    Graphs of more than `LARGEST` vertices are searched on a coarse graph; the front found there
    is priced on the fine one.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    graph = evaluator.graph
    families = [OWN, *((solve,) for solve in solvers if solve not in OWN)]
    if len(graph.vertices) > LARGEST:
        return _explore_coarse(evaluator, patterns, families, plain_bytes, effort, in_order)
    groups: list[Collection[Priced]] = []
    with until_time_is_over():
        for family in families:
            run = Run(evaluator)
            groups += proposals(run, patterns, family)
            if not run.priced:
                continue
            groups.append(run.priced)
            improve(run, plain_bytes, effort, family is OWN)
            reschedule(run, effort * (OWN_CHANGES if family is OWN else SOLVER_CHANGES), in_order)
        groups.append(recurse(evaluator, patterns, plain_bytes, effort))
    return _whole_pool(evaluator, patterns, groups)


def _whole_pool(evaluator: Evaluator, patterns: Sequence[Candidate],
                groups: Sequence[Collection[Priced]]) -> Pool:
    """Return the pool of a search; where the time limit ended it, all that was priced by then.

    What keeps all competes with itself too, as each solver does: a proposal that keeps as much in
    another order may need the same requested bytes and time, and more in an allocator.
    """
    groups = [*groups, [evaluator.price(pattern) for pattern in patterns]]
    if ended_by():
        groups.append(evaluator.priced)
    return pool_of(evaluator.priced, groups)


def proposals(run: Evaluator, patterns: Sequence[Candidate], solvers: Iterable[Solver]
              ) -> list[Collection[Priced]]:
    """Return what each solver alone would choose from, under each objective.

    Args:
      run: prices the proposals.
      patterns: what `templates` returned.
      solvers: whose proposals are priced; one that refuses the graph is left out.

    Returns:
      Priced candidates, the patterns among them, for each solver and objective.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    found: list[Collection[Priced]] = []
    for solve in solvers:
        for objective in OBJECTIVES:
            try:
                found.append(starts(run, patterns, (solve,), objective))
            except OutOfTimeError:
                raise
            except PlanError:  # it refuses the graph
                continue
    return found


def _explore_coarse(evaluator: Evaluator, patterns: Sequence[Candidate],
                    families: Sequence[Sequence[Solver]], plain_bytes: int,
                    effort: float, in_order: bool) -> Pool:
    """Return the pool of a graph that is searched on a coarse one."""
    graph, pattern = evaluator.graph, patterns[-1]
    coarse = coarsen(graph, base_order(graph, pattern.moves),
                     -(-2 * len(graph.vertices) // LARGEST))
    rough = Evaluator(coarse.graph)
    rough_patterns = templates(rough, False)
    groups: list[Collection[Priced]] = []
    with until_time_is_over():
        for family in families:
            search, run = Run(rough), Run(evaluator)
            with until_time_is_over():
                proposals(search, rough_patterns, family)
                if search.priced:
                    improve(search, plain_bytes, effort, family is OWN)
            if not search.priced:
                continue
            groups.append(run.priced)
            for untouched in patterns:
                run.take(untouched)
            count = few(graph, REFINED) if family is OWN else max(2, few(graph, REFINED) // 4)
            for p in spread(non_dominated(search.priced), count):
                run.take(dataclasses.replace(
                    pattern, keep=coarse.fine(p.candidate.keep),
                    again=coarse.fine(p.candidate.again), source=p.candidate.source))
            if family is OWN:
                climb(run, min(p.peak for p in run.priced), plain_bytes,
                      int(effort * EVALUATIONS / len(graph.vertices)))
            reschedule(run, effort * (OWN_CHANGES if family is OWN else SOLVER_CHANGES), in_order)
        groups.append(recurse(evaluator, patterns, plain_bytes, effort))
    return _whole_pool(evaluator, patterns, groups)


def recurse(evaluator: Evaluator, patterns: Sequence[Candidate], plain_bytes: int,
            effort: float) -> Collection[Priced]:
    """Return what a run prices that checkpoints within what lies between checkpoints.

    On the graph itself, however large: such plans have their own stages.

    Args:
      evaluator: prices candidates of the graph that is planned.
      patterns: what `templates` returned.
      plain_bytes: requested peak of the plain step.
      effort: see `explore`.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    run = Run(evaluator)
    starts(run, patterns, (recursive,), OBJECTIVES[0])
    vertices = max(len(run.graph.vertices), 1)
    climb(run, min(p.peak for p in run.priced), plain_bytes,
          int(effort * CLIMB * max(FEWEST, min(MOST, EVALUATIONS // vertices))))
    return run.priced


def templates(evaluator: Evaluator, free_moves: bool, target: Target = HERE) -> list[Candidate]:
    """Return everything kept, under each combination of free moves; the most moves last.

    Under XLA the moves are its own; the backward is reordered where XLA can be made to follow.

    Args:
      evaluator: gives the joint graph; nothing is priced here.
      free_moves: whether defer and release may be used; of no effect under XLA.
      target: what the step is planned for.

    Returns:
      Candidates that keep all, not priced yet; at least one.
    """
    plain = Candidate(evaluator.everything(), source="store_all")
    if not target.orders_by_control:
        moved = dataclasses.replace(plain, moves=moves_of_xla(evaluator.graph))
        branchwise = dataclasses.replace(moved, reordered=True)
        return [moved, branchwise] if target.hold == ORDER else [moved]
    if not free_moves:
        return [plain]
    graph = evaluator.graph
    joins = releasable(graph)
    found = [plain, dataclasses.replace(plain, moves=Moves(deferrable(graph)))]
    if joins:
        found.append(dataclasses.replace(plain, moves=Moves(deferrable(graph, joins), joins)))
    found += [dataclasses.replace(t, reordered=True) for t in found[1:]]
    late, early = found[-1], dataclasses.replace(found[-1], early=True)
    if evaluator.order(early) == evaluator.order(late):
        return found
    if evaluator.price(early).peak < evaluator.price(late).peak:
        return [*found, early]
    return [*found[:-1], early, late]


def starts(evaluator: Evaluator, patterns: Sequence[Candidate], solvers: Iterable[Solver],
           objective: str) -> list[Priced]:
    """Return the solvers' proposals, priced under the last pattern's moves, and the patterns.

    Args:
      evaluator: prices the proposals and the patterns.
      patterns: what `templates` returned; at least one.
      solvers: whose proposals are priced; may be empty.
      objective: "time" or "memory": what solvers search for.

    Raises:
      PlanError: a solver refuses the graph.
      OutOfTimeError: planning has a time limit, which is over.
    """
    found = [evaluator.price(proposed(patterns[-1], proposal, solve.__name__))
             for solve in solvers for proposal in solve(evaluator, objective)]
    return found + [evaluator.price(p) for p in patterns]


def improve(run: Evaluator, plain_bytes: int, effort: float, whole: bool) -> None:
    """Lead the best of what a run has priced down to less memory.

    Args:
      run: has priced a candidate at least, and prices what is found.
      plain_bytes: requested peak of the plain step.
      effort: see `explore`.
      whole: whether it is made faster as well, on the way back up.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    vertices = max(len(run.graph.vertices), 1)
    evaluations = effort * max(FEWEST, min(MOST, EVALUATIONS // vertices))
    start = min(run.priced, key=lambda p: (p.peak, p.time))
    lowest = descend(run, start, 0, int(evaluations * (DESCENT if whole else SOLVER)))
    if whole:
        climb(run, lowest.peak, plain_bytes, int(evaluations * CLIMB))


def climb(evaluator: Evaluator, lowest: int, plain_bytes: int, evaluations: int) -> None:
    """Make plans faster on every rung between the minimum and the plain peak, in bytes.

    Args:
      evaluator: has priced a candidate within `lowest` at least, and prices what is found.
      lowest: requested peak in bytes that the lowest rung starts from.
      plain_bytes: requested peak of the plain step.
      evaluations: candidates that may be priced, shared evenly among the rungs.

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    each = evaluations // len(RUNGS)
    for rung in RUNGS if each else ():
        limit = lowest + int(rung * max(plain_bytes - lowest, 0))
        fitting = [p for p in evaluator.priced if p.peak <= limit]
        speed_up(evaluator, min(fitting, key=lambda p: (p.time, p.peak)), limit, each)


def reschedule(run: Evaluator, share: float, in_order: bool) -> None:
    """Price the front that a search over schedules finds around what a run has priced.

    It keeps the order of originals that the plan of the smallest peak has, and starts from the
    plans of that order.

    Args:
      run: has priced a candidate at least, and prices what is found.
      share: of `CHANGES`.
      in_order: whether inputs of copies may be made ahead of these. That pays where the step runs
        in the plan's order. XLA has an order of its own, and kept such inputs for longer: a sixth
        more of a recurrent network with a CTC loss (`benchmarks.loops --compiled --jobs=ctc`).

    Raises:
      OutOfTimeError: planning has a time limit, which is over.
    """
    graph, vertices = run.graph, len(run.graph.vertices)
    if not vertices:
        return
    changes = int(share * min(
        max(FEWEST_CHANGES, EACH * vertices), MOST_CHANGES, CHANGES // vertices))
    lowest = min(run.priced, key=lambda p: (p.peak, p.time))
    order = _originals(lowest)
    known = [p.schedule for p in non_dominated(run.priced) if _originals(p) == order]
    plain = tuple((v, 0) for v in order)
    found = neighbourhood.front(graph, [plain, *known], RUNGS, changes, in_order)
    count = few(graph, SCHEDULES)
    for i in sorted({n * (len(found) - 1) // max(count - 1, 1) for n in range(count)}):
        run.price(dataclasses.replace(lowest.candidate, schedule=found[i],
                                      source=f"{lowest.candidate.source}, rescheduled"))


def _originals(priced: Priced) -> list[int]:
    return [v for v, copy in priced.schedule if not copy]
