"""`check_plan`: whether a plan can be executed as it says."""

from __future__ import annotations

from collections.abc import Sequence

from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import UPDATE, CostGraph
from tfckpt.ir.schedule import Fence, Plan, Step, check_schedule, resolve
from tfckpt.simulate.executor import BREADTH_FIRST, executor_order, needed_before


def check_plan(graph: CostGraph, plan: Plan) -> None:
    """Raise `PlanError` unless fences, waits and order fit the schedule, and it the graph.

    Checked, besides what `check_schedule` says:

    1. one fence stands before each recomputation segment; it awaits earlier steps and gates
       steps of its segment;
    2. waits name steps of the schedule; each follows it, but where the waiting step is merged
       into a later one (see `tfckpt.simulate.waits`);
    3. neither awaits an update where the plan says that it may not;
    4. order is a permutation in which each step comes after what it reads, what its vertex runs
       after, what it waits for and what its fences await. As these are all edges that there
       are, they have no cycle. Only of the schedule's own order this is asked without the waits
       of merged steps; there, the edges are asked for a cycle.

    Args:
      graph: joint graph.
      plan: with its fences, waits and order.

    Raises:
      PlanError: one of these is violated; the message says which, and where.
    """
    check_schedule(graph, plan.schedule, plan.moves.released)
    _check_fences(plan)
    where = {step: p for p, step in enumerate(plan.schedule)}
    _check_waits(graph, plan, where)
    awaited = [*(w.awaited for w in plan.waits),
               *(plan.schedule[p] for fence in plan.fences for p in fence.awaits)]
    for vertex, _ in () if plan.await_updates else awaited:
        if graph.vertices[vertex].region == UPDATE:
            raise PlanError(f"plan: {graph.vertices[vertex].name!r} of the update is awaited, "
                            "and no update may be")
    _check_order(graph, plan, where)


def _check_fences(plan: Plan) -> None:
    schedule = plan.schedule
    starts = [p for p, (_, copy) in enumerate(schedule) if copy and not (p and schedule[p - 1][1])]
    if [fence.position for fence in plan.fences] != starts:
        raise PlanError(f"plan: fences stand at {[f.position for f in plan.fences]}, recomputation "
                        f"segments begin at {starts}")
    for fence in plan.fences:
        stop = next((p for p in range(fence.position, len(schedule)) if not schedule[p][1]),
                    len(schedule))
        if any(not 0 <= p < fence.position for p in fence.awaits):
            raise PlanError(f"plan: the fence at {fence.position} awaits {fence.awaits}, which are "
                            "not all scheduled before it")
        if any(not fence.position <= p < stop for p in fence.gates):
            raise PlanError(f"plan: the fence at {fence.position} gates {fence.gates}, which are "
                            f"not all in its segment, which ends before {stop}")


def _check_waits(graph: CostGraph, plan: Plan, where: dict[Step, int]) -> None:
    for wait in plan.waits:
        for step in (wait.waiting, wait.awaited):
            if step not in where:
                raise PlanError(f"plan: a wait names {step}, which is not scheduled")
        waiting = graph.vertices[wait.waiting[0]]
        if where[wait.awaited] >= where[wait.waiting] and not waiting.fusible:
            raise PlanError(f"plan: {waiting.name!r} waits for "
                            f"{graph.vertices[wait.awaited[0]].name!r}, which is scheduled later")


def _check_order(graph: CostGraph, plan: Plan, where: dict[Step, int]) -> None:
    if sorted(plan.order) != list(range(len(plan.schedule))):
        raise PlanError("plan: the order of execution is no permutation of the schedule")
    resolved = resolve(graph, plan.schedule)
    when = [0] * len(plan.order)
    for turn, position in enumerate(plan.order):
        when[position] = turn
    waits = plan.waits
    if plan.order == tuple(range(len(when))):
        waits = tuple(w for w in waits if where[w.awaited] < where[w.waiting])
        if waits != plan.waits:
            executor_order(graph, resolved, plan.moves.released, plan.waits, plan.fences,
                           BREADTH_FIRST)
    needs = needed_before(graph, resolved, plan.moves.released, waits)
    opened = -1
    for fence in plan.fences:  # a fence opens when the last step has run that it awaits
        opened = max([opened, *(when[p] for p in fence.awaits)])
        _check_gates(graph, plan, fence, when, opened)
    for position, needed in enumerate(needs):
        for other in sorted(needed):
            if when[other] >= when[position]:
                raise PlanError(f"plan: {_name(graph, plan, position)!r} is executed before "
                                f"{_name(graph, plan, other)!r}, which it needs or waits for")


def _check_gates(graph: CostGraph, plan: Plan, fence: Fence, when: Sequence[int],
                 opened: int) -> None:
    for gated in fence.gates:
        if when[gated] <= opened:
            raise PlanError(f"plan: {_name(graph, plan, gated)!r} is executed before what the "
                            f"fence at {fence.position} awaits")


def _name(graph: CostGraph, plan: Plan, position: int) -> str:
    return graph.vertices[plan.schedule[position][0]].name
