"""The schedule that changes by one copy at a time, against the simulator after each change."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from tests.support.families import FAMILIES, random_net
from tests.support.graphs import random_joint_graph, seeds
from tests.support.liveness import live_bytes
from tfckpt.ir.costgraph import CostGraph
from tfckpt.plan.rescheduling.incremental import CopySchedule

pytestmark = pytest.mark.pure


def assert_priced(graph: CostGraph, state: CopySchedule) -> None:
    schedule = state.schedule()
    assert state.live.tolist() == list(live_bytes(graph, schedule))
    assert state.time == pytest.approx(sum(graph.vertices[v].time for v, _ in schedule))


def change(state: CopySchedule, rng: random.Random) -> None:
    """Add or remove one random copy."""
    if state.copies and rng.random() < 0.4:
        state.remove(rng.choice(list(state.copies)))
        return
    stage = rng.randrange(1, len(state.order))
    v = rng.choice(state.order[:stage])
    if state.graph.vertices[v].recomputable and state.key(v, stage) not in state.copies:
        state.add(v, stage)


@given(seeds)
def test_changes_are_priced_as_the_second_derivation_of_liveness(seed):
    rng = random.Random(seed)
    graph = random_joint_graph(seed, 14) if seed % 2 else random_net(seed, 8)
    state = CopySchedule(graph, range(len(graph.vertices)))
    assert_priced(graph, state)
    for _ in range(25):
        change(state, rng)
        assert_priced(graph, state)
    again = CopySchedule(graph, state.order, [
        (key // state.stride, state.vertex(key)) for key in sorted(state.copies)])
    assert again.live.tolist() == state.live.tolist()
    assert (again.spans, again.taken) == (state.spans, {
        key: size for key, size in state.taken.items() if size})
    state.become(sorted(again.copies)[::2])
    assert_priced(graph, state)


@given(seeds)
def test_what_is_undone_leaves_no_trace(seed):
    rng = random.Random(seed)
    graph = random_joint_graph(seed, 14) if seed % 2 else random_net(seed, 8)
    state = CopySchedule(graph, range(len(graph.vertices)))
    for _ in range(10):
        before = state.schedule()
        mark = len(state.log)
        for _ in range(rng.randrange(6)):
            change(state, rng)
        if rng.random() < 0.7:
            state.undo(mark)
            assert state.schedule() == before
        assert_priced(graph, state)


def test_idle_copies():
    make, sizes = FAMILIES["chain"]
    graph = make(sizes[0])
    state = CopySchedule(graph, range(len(graph.vertices)))
    state.add(3, 9)
    assert state.idle(state.key(3, 9))  # a product's result: only the ReLU reads it, and has run
    state.add(4, 9)
    assert not state.idle(state.key(3, 9)) and not state.idle(state.key(4, 9))
