"""Windows of schedules: against proven optima, and the guarantees of the search."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.support import best_schedule, families, liveness
from tests.support.graphs import random_joint_graph, seeds
from tfckpt.ir.schedule import check_schedule, plain_plan
from tfckpt.plan.rescheduling.fitting import WIDTH
from tfckpt.plan.rescheduling.neighbourhood import Neighbourhood, front, working_set
from tfckpt.plan.search import RUNGS
from tfckpt.simulate.order import base_order, moves_of_xla

pytestmark = pytest.mark.pure


def plain(graph):
    return tuple((v, 0) for v in range(len(graph.vertices)))


def priced(graph, schedule) -> tuple[int, float]:
    return max(liveness.live_bytes(graph, schedule)), sum(
        graph.vertices[v].time for v, _ in schedule)


@given(seeds)
def test_the_working_set_is_below_every_schedule(seed):
    graph = random_joint_graph(seed, 9)
    assert working_set(graph) <= best_schedule.front(graph)[-1][0]


def test_the_working_set_by_hand():
    graph = families.chain(2)
    largest = max(sum(graph.storages[s].bytes for s in {*v.reads, *v.writes})
                  for v in graph.vertices if not v.reuses)
    assert working_set(graph) >= largest > 0


def test_the_front_of_small_steps_is_found():
    """The search finds the front of all schedules of its class; the few misses are close."""
    exact = 0
    for seed in range(12):
        graph = random_joint_graph(seed, 10)
        best = best_schedule.front(graph)
        found = [priced(graph, schedule) for schedule in front(
            graph, [plain_plan(graph).schedule], RUNGS, 1500)]
        minimum = min(peak for peak, _ in found)
        exact += minimum == best[-1][0]
        assert best[-1][0] <= minimum <= 1.15 * best[-1][0]
        for peak, time in found:
            assert best_schedule.least_time(best, peak) <= time
    assert exact >= 10


@pytest.mark.parametrize("name", [
    "unet2", "densenet1", "chain1", "attention1", "two_views1", "hrnet1"])
def test_the_proven_minimum_of_larger_steps(name):
    """The minimum peaks that `benchmarks.optimality` has proven."""
    graph = families.graphs()[name]
    order = base_order(graph, moves_of_xla(graph))
    search = Neighbourhood(graph, tuple((v, 0) for v in order))
    minimum = {"unet2": 3054, "densenet1": 3866, "chain1": 690, "attention1": 1510,
             "two_views1": 1150, "hrnet1": 1801}[name]
    assert search.lower(8000, working_set(graph)) == minimum == search.peak
    schedule = search.state.schedule()
    check_schedule(graph, schedule)
    assert priced(graph, schedule) == (minimum, search.state.time)


@pytest.mark.parametrize("evaluations", [50, 200])
def test_evaluations_bound_the_search(evaluations, monkeypatch):
    graph = families.unet(4, 3)
    search = Neighbourhood(graph, plain(graph))
    looked_at, tried = [], []

    def splits(*args, before=search._splits):
        found = before(*args)
        looked_at.extend(found)
        return found

    monkeypatch.setattr(search, "_splits", splits)
    monkeypatch.setattr(search, "_try", lambda split, before=search._try: (
        tried.append(split), before(split))[1])
    search.search(search.peak // 2, evaluations)
    assert evaluations // 4 < len(looked_at) <= evaluations + 2 * WIDTH * 3
    assert 0 < len(tried) < len(looked_at)  # a bound tells which of them cannot be the cheapest


def test_the_same_twice():
    graph = families.random_net(3, 14)
    runs = [front(graph, [plain(graph)], RUNGS, 800) for _ in range(2)]
    assert runs[0] == runs[1]
    peaks, times = zip(*(priced(graph, schedule) for schedule in runs[0]), strict=True)
    assert list(peaks) == sorted(peaks) and list(times) == sorted(times, reverse=True)
