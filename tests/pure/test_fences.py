"""Fences: by hand, and on random schedules by what can be reached along the edges."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import liveness
from tests.support.graphs import seeds
from tests.support.planner_calls import fences_of
from tests.support.reachability import (
    marked_case,
    may_be_awaited,
    ordering,
    runs_of_copies,
)
from tfckpt.ir.costgraph import BACKWARD, FORWARD, OTHER, UPDATE, CostGraph, Storage, Vertex
from tfckpt.ir.schedule import Moves
from tfckpt.simulate.fences import fenced


def waited_for(await_updates):
    return (FORWARD, BACKWARD, UPDATE, OTHER) if await_updates else (FORWARD, BACKWARD)


def updates(graph, schedule) -> list[int]:
    """Return the steps of the update."""
    return [p for p, (v, _) in enumerate(schedule) if graph.vertices[v].region == UPDATE]


cases = given(seeds, st.integers(2, 18), st.booleans())


@cases
@settings(max_examples=150)
def test_one_fence_for_each_run_of_copies(seed, count, await_updates):
    graph, schedule = marked_case(seed, count)
    found = fences_of(graph, schedule, await_updates=await_updates)
    runs = runs_of_copies(schedule)
    assert [fence.position for fence in found] == [start for start, _ in runs]
    reads = liveness.bindings(graph, schedule)
    for fence, (start, stop) in zip(found, runs, strict=True):
        entries = [p for p in range(start, stop) if all(i.made < start for i in reads[p])]
        assert list(fence.gates) == entries and entries[0] == start
        assert list(fence.awaits) == sorted(set(fence.awaits))


@cases
@settings(max_examples=150)
def test_fences_close_no_cycle_and_follow_the_schedule(seed, count, await_updates):
    graph, schedule = marked_case(seed, count)
    found = fences_of(graph, schedule, await_updates=await_updates)
    assert networkx.is_directed_acyclic_graph(ordering(graph, schedule, found=found))
    for fence in found:
        assert all(p < fence.position for p in fence.awaits)
        for p in fence.awaits:
            vertex = graph.vertices[schedule[p][0]]
            assert may_be_awaited(vertex) and vertex.region in waited_for(await_updates)


@cases
@settings(max_examples=200)
def test_what_is_scheduled_before_a_fence_runs_before_what_it_delays(seed, count, await_updates):
    """Except steps that nothing may wait for, and two kinds that are overlooked; see below."""
    graph, schedule = marked_case(seed, count)
    found = fences_of(graph, schedule, await_updates=await_updates)
    edges, plain = ordering(graph, schedule, found=found), ordering(graph, schedule)
    plain.remove_nodes_from(updates(graph, schedule) if not await_updates else ())
    overlooked = {p for p, vertex in enumerate(graph.vertices[v] for v, _ in schedule)
                  if vertex.region not in waited_for(True)
                  or (vertex.after and (vertex.fusible or vertex.join))}
    for number, (start, stop) in enumerate(runs_of_copies(schedule)):
        before = networkx.ancestors(edges, ("fence", number))
        after = networkx.descendants(edges, ("fence", number))
        assert after >= set(range(start, stop))
        for p in filter(plain.has_node, range(start)):
            leads_to = {p} | {q for q in networkx.descendants(plain, p) if q < start}
            if may_be_awaited(graph.vertices[schedule[p][0]]) and not leads_to & overlooked:
                assert p in before, f"step {p} {schedule[p]} may run after fence {number}"


@cases
@settings(max_examples=100)
def test_only_leaves_are_waited_for(seed, count, await_updates):
    """Except steps that are awaited in place of their readers, which cannot be awaited."""
    graph, schedule = marked_case(seed, count)
    found = fences_of(graph, schedule, await_updates=await_updates)
    plain = ordering(graph, schedule)
    passed_over = updates(graph, schedule) if not await_updates else ()
    starts = [0, *(fence.position for fence in found)]
    for start, fence in zip(starts, found, strict=False):
        for p in fence.awaits:
            readers = [q for q in plain.successors(p) if q < fence.position]
            is_leaf = p >= start and not any(
                q >= start for q in readers if q not in passed_over)
            assert is_leaf or any(
                not may_be_awaited(graph.vertices[schedule[q][0]]) for q in readers)


# By hand. Small letters are forward, capitals backward, digits update; a letter that comes again
# is a copy, and "b:a" reads a.


def graph_of(rows: str, after=None, **marks) -> CostGraph:
    """Return a graph from words; `marks` name the vertices with a property, `after` other edges."""
    names = [word.partition(":")[0] for word in rows.split()]
    vertices = []
    for i, word in enumerate(rows.split()):
        name, _, reads = word.partition(":")
        region = FORWARD if name.islower() else UPDATE if name.isdigit() else BACKWARD
        vertices.append(Vertex(
            name, OTHER if name in marks.get("other", "") else region, 1.0,
            reads=tuple(sorted(names.index(r) for r in reads)), writes=(i,), recomputable=True,
            after=tuple(names.index(r) for r in (after or {}).get(name, "")),
            fusible=name in marks.get("fusible", ""), join=name in marks.get("join", ""),
            conditional=name in marks.get("conditional", "")))
    return CostGraph(tuple(vertices), tuple(Storage(n, 1, i) for i, n in enumerate(names)))


def found_in(graph, names: str, **options) -> list[tuple[int, str, str]]:
    """Return position, awaited and gated steps of each fence, steps as letters."""
    vertices = [v.name for v in graph.vertices]
    schedule = tuple((vertices.index(n), names[:i].count(n)) for i, n in enumerate(names))
    return [(f.position, "".join(names[p] for p in f.awaits), "".join(names[p] for p in f.gates))
            for f in fences_of(graph, schedule, **options)]


def test_no_copies_no_fences():
    assert found_in(graph_of("a b:a C:b"), "abC") == []


def test_a_fence_awaits_leaves_and_delays_entries():
    graph = graph_of("a b:a c:b D:c E:bD F:aE")
    # D is the only leaf; the copy of b reads the copy of a, so that a alone is delayed
    assert found_in(graph, "abcDabEF") == [(4, "D", "a")]
    assert found_in(graph, "abcDbEaF") == [(4, "D", "b"), (6, "E", "a")]
    # at the end of the schedule, and at its start but for the original
    assert found_in(graph, "abcDEFab") == [(6, "F", "a")]
    assert found_in(graph, "aabcDEF") == [(1, "a", "a")]


def test_a_weight_gradient_is_a_leaf():
    graph = graph_of("a b:a c:b D:c E:c F:bD")
    assert found_in(graph, "abcDEbF") == [(5, "DE", "b")]
    # one that only an older copy leads to stays before the first of two fences
    assert found_in(graph, "abcDEbFa") == [(5, "DE", "b"), (7, "F", "a")]


def test_a_copy_that_nothing_reads_before_the_next_fence_is_a_leaf():
    graph = graph_of("a b:a C:b D:aC")
    assert found_in(graph, "abCabDb") == [(3, "C", "a"), (6, "bD", "b")]


def test_what_is_awaited_by_another_edge_is_no_leaf():
    graph = graph_of("a B:a C D", after={"C": "B"})
    assert found_in(graph, "aBCaD") == [(3, "C", "a")]
    # a copy has no such edges, and one that goes with the data moves with it
    copied = graph_of("a b C", after={"b": "a"})
    assert found_in(copied, "abbC") == [(2, "b", "b")]
    moved = graph_of("a b C:a", after={"C": "a"})
    assert found_in(moved, "abaCb") == [(2, "ab", "a"), (4, "C", "b")]


@pytest.mark.parametrize("mark", ["fusible", "join", "conditional"])
def test_in_place_of_what_cannot_be_awaited_what_it_reads_is(mark):
    graph = graph_of("a b C:a D:Cb E:D", **{mark: "D"})
    assert found_in(graph, "abCDa") == [(4, "bC", "a")]
    assert found_in(graph, "abCDEa") == [(5, "E", "a")]
    both = graph_of("a b C:a D:Cb E:D", **{mark: "CD"})
    assert found_in(both, "abCDa") == [(4, "ab", "a")]
    assert found_in(both, "abCDaEb") == [(4, "ab", "a"), (6, "aE", "b")]


def test_updates_and_what_is_returned_are_awaited_unless_told_otherwise():
    graph = graph_of("a B:a 1:B C:a 2", other="2")
    assert found_in(graph, "aB1C2a") == [(5, "1C2", "a")]
    assert found_in(graph, "aB1C2a", await_updates=False) == [(5, "BC", "a")]


def test_a_gradient_is_awaited_where_its_update_is_not():
    graph = graph_of("a B:a 1:B C:a")
    assert found_in(graph, "aB1Ca", await_updates=False) == [(4, "BC", "a")]


def test_what_a_conditional_step_waits_for_is_awaited_in_its_place():
    graph = graph_of("a b C:a D:b", after={"D": "C"}, conditional="D")
    assert found_in(graph, "abCDa") == [(4, "bC", "a")]


def test_what_is_not_scheduled_is_not_awaited():
    """A released join: what waited for it is a leaf without it."""
    graph = graph_of("a B:a J D:a", after={"D": "JB"}, join="J")
    assert found_in(graph, "aBDa") == [(3, "D", "a")]


def test_a_plan_with_its_fences():
    graph = graph_of("a B:a 1:B C:a")
    schedule = tuple((v, 0) for v in range(4)) + ((0, 1),)
    moves = Moves(deferred=(1,))
    for await_updates in (True, False):
        plan = fenced(graph, schedule, moves, await_updates=await_updates, solver="some")
        assert plan.fences == fences_of(graph, schedule, await_updates=await_updates)
        assert (plan.schedule, plan.moves, plan.waits) == (schedule, moves, ())
        assert plan.order == tuple(range(5))
        assert (plan.await_updates, plan.solver) == (await_updates, "some")
    plain = fenced(graph, schedule, Moves(), await_updates=True, solver="")
    assert fenced(graph, schedule) == plain


def test_a_fence_reaches_back_to_the_one_before_it_only():
    """The second fence waits for the first, and so for all that comes before that one."""
    graph = graph_of("a b C:a D:b E")
    assert found_in(graph, "abCaDbE") == [(3, "bC", "a"), (5, "aD", "b")]
