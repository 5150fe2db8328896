"""What no plan of a graph stays below, and which graphs of a step are therefore not planned."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from tests.support import families
from tests.support.graphs import random_joint_graph, random_schedule
from tfckpt.errors import InfeasibleBudgetError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, CostGraph, Storage, Vertex
from tfckpt.ir.schedule import Plan
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.choosing.planned import Plain, Planned, baseline
from tfckpt.plan.choosing.rules import best_of
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops.bounds import Bounds
from tfckpt.plan.loops.decided import Decisions
from tfckpt.plan.planner import plans_of
from tfckpt.simulate.simulate import Timeline, simulate

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_stays_below_the_bounds(seed):
    graph = random_joint_graph(seed, 18, nested=seed % 2 == 1)
    bounds = Bounds(graph)
    for again in range(8):
        found = simulate(graph, random_schedule(graph, again, repeats=again))
        assert bounds.time <= found.time and bounds.peak <= found.peak_bytes
        assert bounds.time_within(found.peak_bytes) <= found.time
        for price in (0.0, 0.1, 1.0, 10.0):
            assert bounds.weighed(price) <= found.peak_bytes + price * found.time


@pytest.mark.parametrize("make", [families.unet, families.attention, families.densenet])
@pytest.mark.parametrize("target", [Target(allocator=False), Target(), Target(device=GPU)])
def test_no_plan_stays_below_the_bounds(make, target):
    graph = make(3)
    bounds = Bounds(graph, target.smallest_counted or 0)
    for objective, fraction in itertools.product(("time", "memory"), (None, 0.9, 0.7)):
        budget = fraction and int(fraction * baseline(graph, target).peak_bytes)
        try:
            for planned in plans_of(graph, budget, solver="approx_dp", objective=objective,
                                    target=target):
                assert bounds.peak <= planned.peak_bytes
                assert bounds.time_within(budget or planned.peak_bytes) <= planned.time
        except InfeasibleBudgetError as error:
            assert bounds.peak <= error.smallest_bytes


def _kept(*, pure: bool) -> CostGraph:
    """Return three operations; the second of the backward reads what the first one made."""
    def vertex(name, region, time, reads, writes, **more):
        return Vertex(name, region, time, reads=reads, writes=writes, **more)

    return CostGraph((
        vertex("first", FORWARD, 3.0, (), (0,), recomputable=pure),
        vertex("second", FORWARD, 1.0, (0,), (1,)),
        vertex("third", BACKWARD, 1.0, (1,), (2,)),
        vertex("fourth", BACKWARD, 1.0, (0, 2), (3,))), tuple(
            Storage(f"s{n}", size, n) for n, size in enumerate((1000, 10, 10, 10))))


def test_what_is_read_later_is_kept_or_made_again():
    assert Bounds(_kept(pure=False)).peak == pytest.approx(1020)
    pure = Bounds(_kept(pure=True))
    assert pure.peak == pytest.approx(1020)  # at the fourth, which reads it
    tall = dataclasses.replace(_kept(pure=True), vertices=tuple(
        dataclasses.replace(v, workspace=500) if v.name == "third" else v
        for v in _kept(pure=True).vertices))
    bounds = Bounds(tall)
    assert bounds.peak == pytest.approx(1020)
    assert bounds.time_within(1520) == pytest.approx(6.0)
    assert 7.4 < bounds.time_within(1020) <= 7.5  # half of it: the first one may run once more
    assert bounds.time_within(1000) == math.inf
    assert bounds.weighed(1000.0) == pytest.approx(6000 + 1520)
    assert bounds.weighed(0.1) == pytest.approx(0.6 + 1020)


PLAIN_BYTES, PLAIN_TIME = 1000, 10.0


def _plain() -> Plain:
    return Plain(Plan((), ()), Timeline((), PLAIN_BYTES, 0, (), PLAIN_TIME), PLAIN_BYTES)


class _Made:
    """Graphs whose plans are made up: those that would be found, and bounds of them."""

    def __init__(self, seed: int, count: int, budget: int | None) -> None:
        made = random.Random(seed)
        self.budget, self.planned = budget, list[int]()
        self.points = [[(made.randrange(80, 1000), made.choice((10.0, 10.5, made.uniform(10, 20))))
                        for _ in range(made.randrange(1, 4))] for _ in range(count)]
        self.slack = [made.choice((1.0, 0.98, 0.8)) for _ in range(count)]

    def decisions(self, cuts, share):
        number = cuts["loop"]
        if not share:
            return
        self.planned.append(number)
        fitting = [p for p in self.points[number] if self.budget is None or p[0] <= self.budget]
        if not fitting:
            raise InfeasibleBudgetError("none", min(self.points[number])[0])
        for peak, time in fitting:
            yield Decision(None, None, Planned(
                Plan((), ()), Timeline((), peak, 0, (), time), peak, time, _plain(), ()),
                segments=tuple(cuts.items()))

    def bounds(self, cuts):
        points, slack = self.points[cuts["loop"]], self.slack[cuts["loop"]]

        class _Bounds:
            time = slack * min(time for _, time in points)
            peak = slack * min(peak for peak, _ in points)

            def weighed(self, price):
                return slack * min(peak + price * time for peak, time in points)

            def time_within(self, budget):
                return slack * min((time for peak, time in points if peak <= budget),
                                   default=math.inf)
        return _Bounds()


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("budget", [None, 500, 150])
def test_the_best_decision_is_that_of_all_graphs(budget, objective):
    """Of made up graphs, most of which are not planned."""
    asked = count = 0
    for seed in range(300):
        made, every = (_Made(seed, 8, budget) for _ in range(2))
        first, named = [], []
        for of, plain in ((made, _plain()), (every, None)):
            found = Decisions(of.decisions, of.bounds, plain, budget, objective, budget or 0)
            for number in range(8):
                found.announce({"loop": number}, 1.0)
            try:
                first.append(next(found.best_first(lambda cuts: True)).segments)
            except InfeasibleBudgetError as error:
                first.append(())
                named.append(error.smallest_bytes)
        assert first[0] == first[1] and len(set(named)) < 2, seed
        asked, count = asked + len(made.planned), count + len(every.planned)
    assert count == 300 * 8 and asked < 0.6 * count


@pytest.mark.parametrize("budget", [None, 600])
def test_further_decisions_are_those_of_all_graphs(budget):
    """Where some are refused: the best of what is left each time."""
    for seed in range(100):
        made, every = (_Made(seed, 6, budget) for _ in range(2))
        lists = []
        for of, plain in ((made, _plain()), (every, None)):
            found = Decisions(of.decisions, of.bounds, plain, budget, "time", budget or 0)
            for number in range(6):
                found.announce({"loop": number}, 1.0)
            try:
                lists.append([(d.segments, d.planned.time) for d in found.best_first(
                    lambda cuts: True)])
            except InfeasibleBudgetError:
                lists.append([])
        assert lists[0] == lists[1], seed


def test_the_rule_is_that_of_finished_plans():
    """The stand-ins of these tests are compared as `best_of` compares plans."""
    made = _Made(1, 3, None)
    planned = [next(made.decisions({"loop": n}, 1.0)).planned for n in range(3)]
    assert best_of(planned, None, "time") in range(3)


def test_a_plan_with_nothing_computed_again_needs_no_search():
    target, known = Target(allocator=False, asked=True), 0
    for seed in range(60):
        graph = random_joint_graph(seed, 18)
        budget = baseline(graph, target).peak_bytes - 1
        at_once = next(plans_of(graph, budget, target=target, searched=False), None)
        for more in ({"objective": "memory"}, {"budget": None}):
            assert not [*plans_of(graph, **{"budget": budget, "target": target,
                                            "searched": False, **more})]
        if at_once is not None:
            known += 1
            found = next(plans_of(graph, budget, solver="approx_dp", target=target))
            assert at_once.peak_bytes <= budget and not at_once.plan.recomputed
            assert at_once.time == pytest.approx(found.time) == pytest.approx(graph.total_time)
    assert known > 10
