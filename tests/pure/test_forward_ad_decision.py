"""Keep, recompute or keep the derivative: `auto` against every choice on small joint graphs.

The oracle takes each subset of the alternatives and finds the best rematerialization of what
results by visiting schedules (`tests.support.best_schedule`, which imports nothing from tfckpt).
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.support import best_schedule
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.storage import roots
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.fad.alternatives import find_alternatives
from tfckpt.fad.transform import take
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, Graph, Op, Tensor
from tfckpt.ir.schedule import Plan
from tfckpt.ir.target import SAFETY, Target
from tfckpt.plan.choosing.planned import Planned, baseline
from tfckpt.plan.choosing.rules import ROOM, WORTH
from tfckpt.plan.forward_ad import decisions_of
from tfckpt.plan.planner import plans_of
from tfckpt.simulate.check import check_plan

pytestmark = pytest.mark.pure
UNIT = 1024


def chain(widths, shared=()):
    """Layers x = product, y = x * tanh(x), with their gradients; widths in units of bytes.

    Args:
      shared: layers whose x another op of the backward reads as well.
    """
    ops: list[Op] = []
    index: dict[str, int] = {}

    def add(name, kind, inputs, region, width):
        shape = (width, UNIT // 4)
        index[name] = len(ops)
        ops.append(Op(name, kind, tuple((index[i], 0) for i in inputs), (),
                      (Tensor("float32", shape, width * UNIT),), region, kind != "Placeholder"))

    add("in", "Placeholder", (), OTHER, 1)
    below = "in"
    for n, width in enumerate(widths):
        add(f"x{n}", "MatMul", (below,), FORWARD, width)
        add(f"t{n}", "Tanh", (f"x{n}",), FORWARD, width)
        add(f"y{n}", "Mul", (f"x{n}", f"t{n}"), FORWARD, width)
        below = f"y{n}"
    add("loss", "Sum", (below,), FORWARD, 1)
    add("seed", "BroadcastTo", ("loss",), BACKWARD, widths[-1])
    above, results = "seed", []
    for n in reversed(range(len(widths))):
        width = widths[n]
        add(f"gt{n}", "Mul", (above, f"t{n}"), BACKWARD, width)
        add(f"gx{n}", "Mul", (above, f"x{n}"), BACKWARD, width)
        add(f"th{n}", "TanhGrad", (f"t{n}", f"gx{n}"), BACKWARD, width)
        add(f"dx{n}", "AddN", (f"gt{n}", f"th{n}"), BACKWARD, width)
        reads = (f"y{n - 1}" if n else "in", f"dx{n}", *((f"x{n}",) if n in shared else ()))
        add(f"dw{n}", "MatMul", reads, BACKWARD, 1)
        results.append((index[f"dw{n}"], 0))
        if n:
            add(f"g{n}", "MatMul", (f"dx{n}",), BACKWARD, widths[n - 1])
            above = f"g{n}"
    return Graph("chain", tuple(ops), tuple(results), ())


def choices(graph):
    """Return the cost graph for every subset of the regions that save bytes, by the subset."""
    offered = [a for a in find_alternatives(graph, roots(graph)).alternatives if a.saves > 0]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(offered, n) for n in range(len(offered) + 1))
    return {tuple(graph.ops[a.region.source[0]].name for a in subset): build_cost_graph(
        take(graph, list(subset))[0]) for subset in subsets}


def taken(decision):
    return tuple(r.source for r in decision.regions if r.taken)


def exact_planner(budget, plain):
    """Return a planner, in place of `plan_step`, that takes the best of all schedules."""
    def plans(cost):
        pairs = best_schedule.front(cost)
        fits = [pair for pair in pairs if budget is None or pair[0] <= budget]
        if not fits:
            raise InfeasibleBudgetError("nothing fits", pairs[-1][0])
        peak, time = fits[-1] if budget is None else fits[0]
        once = sum(v.time for v in cost.vertices)
        schedule = () if time <= once * (1 + 1e-9) else ((0, 0), (0, 1))
        yield Planned(Plan(schedule), plain.timeline, peak, time, plain, ())
    return plans


@pytest.mark.parametrize("widths, shared", [((4,), ()), ((2,), ()), ((4,), (0,))])
def test_with_a_planner_that_knows_every_schedule_no_choice_is_better(widths, shared):
    graph = chain(widths, shared)
    cost = build_cost_graph(graph)
    plain = baseline(cost, Target(allocator=False))
    fronts = {name: best_schedule.front(c) for name, c in choices(graph).items()}
    found = set()
    for budget in sorted({peak for front in fronts.values() for peak, _ in front}):
        times = [t for t in (best_schedule.least_time(f, budget) for f in fronts.values()) if t]
        decision = next(decisions_of(graph, cost, exact_planner(budget, plain), budget=budget,
                                     plain_bytes=plain.peak_bytes))
        assert decision.planned.plan.alternatives == taken(decision)
        if not taken(decision) and not decision.planned.plan.recomputed:
            # it fits as it is: no derivative, since that keeps every bit
            assert budget >= plain.peak_bytes
        else:
            assert decision.planned.time <= min(times) * 1.003  # equals are within 0.2 %
        found.add((bool(taken(decision)), bool(decision.planned.plan.recomputed)))
    assert len(found) > 1  # more than one kind of answer was right
    decision = next(decisions_of(graph, cost, exact_planner(None, plain), objective="memory",
                                 plain_bytes=plain.peak_bytes))
    minimum = min(front[-1][0] for front in fronts.values())
    assert decision.planned.peak_bytes <= minimum + 0.003 * plain.peak_bytes


@pytest.mark.parametrize("widths, shared", [
    ((4, 4), ()), pytest.param((2, 4, 8), (1,), marks=pytest.mark.nightly),
    pytest.param((8, 4, 1), (2,), marks=pytest.mark.nightly)])
def test_no_subset_of_the_regions_gives_a_better_plan(widths, shared):
    """The real planner on every subset, for the minimum peak and for budgets between."""
    graph = chain(widths, shared)
    cost = build_cost_graph(graph)
    plain = baseline(cost, Target(allocator=False))
    subsets = choices(graph)
    for budget in (None, int(0.9 * plain.peak_bytes), int(0.75 * plain.peak_bytes)):
        def planner(c, budget=budget):
            return plans_of(c, budget, target=Target(allocator=False), plain=plain)

        plans = {}
        for names, priced in subsets.items():
            try:
                plans[names] = next(planner(priced))
            except InfeasibleBudgetError:
                continue
        decision = next(decisions_of(graph, cost, planner, budget=budget,
                                     plain_bytes=plain.peak_bytes))
        if budget is None:
            score = [p.peak_bytes / plain.peak_bytes + WORTH * p.time / plain.timeline.time
                     for p in (decision.planned, *plans.values())
                     if p.peak_bytes <= min(q.peak_bytes for q in plans.values())
                     + ROOM * plain.peak_bytes]
        else:
            score = [p.time / plain.timeline.time for p in (decision.planned, *plans.values())]
            if not decision.planned.plan.recomputed and not taken(decision):
                continue  # it fits as it is
            assert decision.planned.peak_bytes <= budget
        assert score[0] <= min(score) + 0.003


def test_what_is_kept_changes_with_the_budget():
    """With room enough nothing; then both derivatives; then one, and the other layer recomputed."""
    graph = chain((4, 4))
    cost = build_cost_graph(graph)
    plain = baseline(cost, Target(allocator=False))

    def kind(fraction):
        budget = int(fraction * plain.peak_bytes)
        decision = next(decisions_of(graph, cost, lambda c: plans_of(
            c, budget, target=Target(allocator=False), plain=plain), budget=budget,
            plain_bytes=plain.peak_bytes))
        return len(taken(decision)), bool(decision.planned.plan.recomputed)

    assert kind(1.0 / SAFETY + 0.01) == (0, False)
    assert kind(0.85) == (2, False)
    assert kind(0.7) == (1, True)


@pytest.mark.parametrize("fad, fraction", [
    (False, 0.85), (True, None), ("auto", None),
    pytest.param("auto", 0.85, marks=pytest.mark.nightly)])
def test_further_decisions_fit_and_differ(fad, fraction):
    graph = chain((4, 4))
    cost = build_cost_graph(graph)
    plain = baseline(cost, Target(allocator=False))
    budget = None if fraction is None else int(fraction * plain.peak_bytes)

    def decisions():
        return decisions_of(
            graph, cost, lambda c: plans_of(
                c, budget, solver="approx_dp", target=Target(allocator=False), plain=plain),
            fad=fad, budget=budget, plain_bytes=plain.peak_bytes)

    found = list(itertools.islice(decisions(), 12))
    assert found == list(itertools.islice(decisions(), 12))
    plans = [dataclasses.replace(d.planned.plan, solver="") for d in found]
    assert len(set(plans)) == len(plans) >= (2 if fad == "auto" else 1)
    for decision in found:
        check_plan(decision.cost, decision.planned.plan)
        assert decision.planned.plan.alternatives == taken(decision)
        assert bool(decision.edits.added) == bool(taken(decision)) == (decision.graph is not graph)
        assert budget is None or decision.planned.peak_bytes <= SAFETY * budget
    if fad == "auto":  # the other graphs that were tried have their turn
        assert len({taken(d) for d in found}) > 1
