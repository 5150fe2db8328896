"""Several threads of the executor: starts and ends, and what is live while steps overlap."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import liveness, reference_executor
from tests.support.graphs import random_joint_graph, random_schedule, seeds
from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE, CostGraph, Storage, Vertex
from tfckpt.ir.schedule import resolve
from tfckpt.ir.target import HERE
from tfckpt.plan.choosing.planned import executed_peaks
from tfckpt.simulate.allocator import allocated_peaks, replayed_peaks
from tfckpt.simulate.executor import ORDERS, POOL, POOL_LATE, Edges
from tfckpt.simulate.liveness import walk
from tfckpt.simulate.simulate import simulate_order
from tfckpt.simulate.workers import concurrent, events, requested_peak, sizes, walk_events

pytestmark = pytest.mark.pure
MIB = 1 << 20


def run(graph, schedule, threads, policy=POOL):
    """Return starts and ends of a schedule all of whose steps are expensive."""
    resolved = resolve(graph, schedule)
    readers, waiting = Edges(graph, resolved, (), ()).waiting_for(())
    seconds = [graph.vertices[v].time for v, _ in schedule]
    return resolved, events(readers, waiting, [True] * len(schedule), seconds, threads, policy)


@given(seeds, st.integers(1, 24), st.integers(1, 5), st.sampled_from(ORDERS))
@settings(max_examples=150, deadline=None)
def test_every_step_runs_once_after_what_it_needs_and_no_more_at_once_than_threads(
        seed, count, threads, policy):
    graph = random_joint_graph(seed, count)
    schedule = random_schedule(graph, seed)
    _, happened = run(graph, schedule, threads, policy)
    needed = reference_executor.edges(graph, schedule)
    assert sorted(happened) == sorted((p, e) for p in range(len(schedule)) for e in (False, True))
    ended, running = set(), set()
    for position, ends in happened:
        if ends:
            running.remove(position)
            ended.add(position)
            continue
        assert needed[position] <= ended
        running.add(position)
        assert len(running) <= threads


@given(seeds, st.integers(1, 24), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_bytes_are_those_of_what_started_and_is_still_read(seed, count, threads):
    """Without reuses and donations: from the start of its maker to the end of its last reader."""
    graph = random_joint_graph(seed, count)
    graph = dataclasses.replace(graph, vertices=tuple(
        dataclasses.replace(v, reuses=(), donates=()) for v in graph.vertices))
    schedule = random_schedule(graph, seed)
    resolved, happened = run(graph, schedule, threads)
    start = {p: n for n, (p, ends) in enumerate(happened) if not ends}
    end = {p: n for n, (p, ends) in enumerate(happened) if ends}
    spans = [(start[p], end[p], graph.vertices[v].workspace) for p, (v, _) in enumerate(schedule)]
    read_by: dict = {}
    for position, bound in liveness.bindings(graph, schedule).items():
        for instance in bound:
            read_by.setdefault((instance.storage, instance.made), []).append(position)
    for p, (v, _) in enumerate(schedule):
        for s in graph.vertices[v].writes:
            last = max(end[r] for r in (p, *read_by.get((s, p), ())))
            last = len(happened) if graph.storages[s].fetched else last
            spans.append((start[p], last, graph.storages[s].bytes))
    most = max(sum(size for a, b, size in spans if a <= n < b) for n in range(len(happened)))
    moments = list(walk_events(graph, resolved, happened))
    assert requested_peak(moments, sizes(graph, resolved)) == most


@given(seeds, st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_one_thread_is_counted_as_steps_one_after_the_other(seed, count):
    graph = random_joint_graph(seed, count)
    schedule = random_schedule(graph, seed)
    resolved, happened = run(graph, schedule, 1)
    order = [p for p, ends in happened if not ends]
    assert [p for p, ends in happened if ends] == order
    moments = list(walk_events(graph, resolved, happened))
    assert requested_peak(moments, sizes(graph, resolved)) == simulate_order(
        graph, resolved, order).peak_bytes


def test_what_another_thread_makes_meanwhile_is_counted():
    """While `long` runs, with 64 MiB to itself, a second thread makes a, b and c in turn."""
    def chain(name, reads, writes):
        return Vertex(name, FORWARD, 1e-3, reads=reads, writes=writes)

    graph = CostGraph(
        (Vertex("root", FORWARD, 1e-3, writes=(0,)),
         Vertex("long", FORWARD, 1.0, reads=(0,), writes=(1,), workspace=64 * MIB),
         chain("a", (0,), (2,)), chain("b", (2,), (3,)), chain("c", (2, 3), (4,)),
         Vertex("end", BACKWARD, 1e-3, reads=(1, 4))),
        tuple(Storage(f"s{n}", MIB, v) for n, v in enumerate((0, 1, 2, 3, 4))))
    resolved = resolve(graph, tuple((v, 0) for v in range(6)))
    edges = Edges(graph, resolved, (), ())
    alone, together = ({requested_peak(concurrent(edges, policy, threads),
                                       sizes(graph, resolved)) for policy in (POOL, POOL_LATE)}
                       for threads in (1, 2))
    assert together == {(64 + 5) * MIB}  # root, long, a, b, c
    assert min(alone) == (64 + 2) * MIB


def _updated(reader_first: bool) -> CostGraph:
    """Return a gradient by which a variable of 8 MiB is updated before, or after, its last reader.
    """
    middle = [Vertex("dx", BACKWARD, 1e-3, reads=(0,), writes=(2,), reads_variables=(0,)),
              Vertex("update", UPDATE, 1e-3, reads=(1,), updates=0)]
    after = (2,) if reader_first else ()
    dx, update = middle
    vertices = (Vertex("forward", FORWARD, 1e-3, writes=(0,), reads_variables=(0,)),
                Vertex("dw", BACKWARD, 1e-3, reads=(0,), writes=(1,)),
                dx, dataclasses.replace(update, after=after),
                Vertex("end", UPDATE, 1e-3, reads=(2,)))
    return CostGraph(vertices, (Storage("h", 8 * MIB, 0), Storage("dw", 8 * MIB, 1),
                                Storage("dx", 8 * MIB, 2)), variable_bytes=(8 * MIB,))


@pytest.mark.parametrize(("order", "peak"), [((0, 1, 2, 3, 4), 24), ((0, 1, 3, 2, 4), 24)])
def test_a_variable_that_is_still_read_is_copied_when_it_is_updated(order, peak):
    """Before dx: h, dw and the copy; then h, the old value, and dx. After it: h, dw and dx."""
    graph = _updated(order[2] == 2)
    resolved = resolve(graph, tuple((v, 0) for v in range(5)))
    found = allocated_peaks(graph, resolved, order)
    assert min(found) == peak * MIB
    without = dataclasses.replace(graph, vertices=tuple(
        dataclasses.replace(v, reads_variables=(), updates=-1) for v in graph.vertices))
    minimum = min(allocated_peaks(without, resolved, order))
    assert minimum == (24 if order[2] == 2 else 16) * MIB


def test_threads_of_the_pool_take_the_oldest_of_another_thread():
    """A root makes a, b and c ready: its thread keeps c, then takes b; the other takes a."""
    readers, waiting = [[1, 2, 3], [], [], []], [0, 1, 1, 1]
    happened = events(readers, waiting, [True] * 4, [1.0, 5.0, 1.0, 1.0], 2)
    assert happened == [(0, False), (0, True), (3, False), (1, False), (3, True), (2, False),
                        (2, True), (1, True)]



def _two_branches(rows: int) -> CostGraph:
    """Return branches that two threads may run at once, each of a large and a small tensor."""
    vertices, storages = [Vertex("root", FORWARD, 1e-3, writes=(0,))], [Storage("root", MIB, 0)]
    for row in range(rows):
        n = len(storages)
        storages += [Storage(f"a{row}", 8 * MIB, len(vertices)),
                     Storage(f"b{row}", MIB, len(vertices) + 1)]
        vertices += [Vertex(f"a{row}", FORWARD, 1e-3 * (row + 1), reads=(0,), writes=(n,)),
                     Vertex(f"b{row}", BACKWARD, 1e-3, reads=(n,), writes=(n + 1,))]
    vertices.append(Vertex("end", BACKWARD, 1e-3, reads=tuple(range(2, len(storages), 2))))
    return CostGraph(tuple(vertices), tuple(storages))


def test_the_bound_covers_other_paces_and_is_the_same_each_time():
    graph = _two_branches(6)
    one, two = (executed_peaks(graph, HERE.with_threads(n)) for n in (1, 2))
    assert one[0] < two[0] <= two[1]
    assert executed_peaks(graph, HERE.with_threads(2)) == two
    resolved = resolve(graph, tuple((v, 0) for v in range(len(graph.vertices))))
    sizes_ = sizes(graph, resolved)
    for pace in range(5):
        moments = concurrent(Edges(graph, resolved, (), ()), POOL, 2, pace=pace)
        assert requested_peak(moments, sizes_) <= two[1]


def test_variables_that_move_leave_memory_in_pieces():
    """If a variable moves in each step, later steps need more than the second one."""
    rows = 12
    vertices, storages = [], []
    for row in range(rows):
        storages.append(Storage(f"h{row}", (3 + row % 4) * MIB, row))
        vertices.append(Vertex(f"h{row}", FORWARD, 1e-3, writes=(row,), reads_variables=(row,)))
    for row in range(rows):
        vertices += [Vertex(f"update{row}", UPDATE, 1e-3, reads=(row,), updates=row),
                     Vertex(f"dx{row}", BACKWARD, 1e-3, reads=(row,), reads_variables=(row,))]
    graph = CostGraph(tuple(vertices), tuple(storages), variable_bytes=tuple(
        (1 + row % 3) * MIB for row in range(rows)))
    resolved = resolve(graph, tuple((v, 0) for v in range(len(vertices))))
    still = dataclasses.replace(graph, vertices=tuple(
        dataclasses.replace(v, updates=-1) for v in vertices))
    moving, fixed = (replayed_peaks(g, list(walk(g, resolved, None)), [
        s.bytes for s in g.storages], resolved.storage, settled=True) for g in (graph, still))
    assert max(moving) > max(fixed)
