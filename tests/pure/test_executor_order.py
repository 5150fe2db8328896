"""The executor's order: by hand, and against `tests.support.reference_executor`."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import reference_executor
from tests.support.graphs import random_joint_graph, random_schedule, seeds
from tests.support.planner_calls import POLICIES, Fence, Wait, fences_of, order_of
from tfckpt.errors import PlanError
from tfckpt.ir.costgraph import FORWARD, CostGraph, Storage, Vertex

CHEAP, DEAR = 1e-7, 1e-3


def graph_of(rows: str, after=None) -> CostGraph:
    """Return a graph from words like "c:ab" (c reads what a and b make); capitals are expensive."""
    names = [word.partition(":")[0] for word in rows.split()]
    vertices = []
    for i, word in enumerate(rows.split()):
        name, _, reads = word.partition(":")
        vertices.append(Vertex(
            name, FORWARD, DEAR if name.isupper() else CHEAP,
            reads=tuple(sorted(names.index(r) for r in reads)), writes=(i,), recomputable=True,
            after=tuple(names.index(r) for r in (after or {}).get(name, ""))))
    return CostGraph(tuple(vertices), tuple(Storage(f"of {n}", 1, i) for i, n in enumerate(names)))


def schedule_of(graph, names: str):
    """Return steps from letters; a letter that comes again is a copy."""
    vertices = [v.name for v in graph.vertices]
    return tuple((vertices.index(n), names[:i].count(n)) for i, n in enumerate(names))


FROM_THE_FIRST = [policy for policy in POLICIES if policy != "pool_turned"]


def ran(graph, policy, names=None, **edges) -> str:
    """Return the order as letters, copies in their place; the reference has the same."""
    names = names or "".join(v.name for v in graph.vertices)
    schedule = schedule_of(graph, names)
    found = order_of(graph, schedule, policy, **edges)
    assert found == reference_executor.order(graph, schedule, policy, **edges)
    return "".join(names[p] for p in found)


@pytest.mark.parametrize(("rows", "breadth_first", "pool", "pool_late"), [
    # two chains; with B in the pool the thread goes on with E, made ready last
    ("a b:a c:b d e:d f:e", "adbecf", "adbecf", "adbecf"),
    ("A B:A C:B D E:D F:E", "ADBECF", "ADEFBC", "ADEFBC"),
    # three readers: the thread keeps the last, and then takes the newest from the pool
    ("A B:A C:A D:A E:BCD", "ABCDE", "ADCBE", "ABCDE"),
    # beside an inexpensive reader no expensive one is kept
    ("A B:A c:A D:A e:c", "ABcDe", "AceDB", "AceBD"),
    ("A b:A C:A", "AbC", "AbC", "AbC"),
    ("a B:a c:a d:c E:d", "aBcdE", "acdEB", "acdEB"),
    # what waits for two becomes ready when the second has run
    ("a b c:ab d:b e:a", "abecd", "abecd", "abedc"),
    ("a b D:ab C:b E:a", "abEDC", "abCDE", "abDCE"),
    # what is in the own queue comes before everything in the pool
    ("A B:A C:A d:C e:d F:B", "ABCFde", "ACdeBF", "ABFCde"),
])
def test_orders_by_hand(rows, breadth_first, pool, pool_late):
    graph = graph_of(rows)
    assert ran(graph, "breadth_first") == breadth_first
    assert ran(graph, "pool") == pool
    assert ran(graph, "pool_late") == pool_late


@pytest.mark.parametrize(("rows", "turned"), [
    ("a b:a c:b D E:D F:E", "DabcEF"),
    ("A B:A C:B D E:D F:E", "DABCEF"),
    ("A D B:A C:AD E:D F:E", "DACBEF"),
    ("A B:A C:A", "ACB"),
])
def test_an_order_by_hand_that_begins_with_the_last(rows, turned):
    assert ran(graph_of(rows), "pool_turned") == turned


def test_what_takes_three_microseconds_is_not_expensive_yet():
    graph = graph_of("A B:A C:A d:A")

    def taking(seconds):
        return dataclasses.replace(graph, vertices=tuple(
            dataclasses.replace(v, time=seconds) for v in graph.vertices))

    assert ran(taking(3.0e-6), "pool") == "ABCd"
    assert ran(taking(3.1e-6), "pool") == "AdCB"
    assert ran(taking(3.1e-6), "breadth_first") == "ABCd"


def wait(graph, names, waiting, awaited):
    """Return a wait of one position for another."""
    schedule = schedule_of(graph, names)
    return Wait(schedule[waiting], schedule[awaited])


@pytest.mark.parametrize("policy", FROM_THE_FIRST)
def test_waits_are_edges(policy):
    graph = graph_of("a b c:a")
    assert ran(graph, policy) == "abc"
    assert ran(graph, policy, waits=[wait(graph, "abc", 0, 1)]) == "bac"
    assert ran(graph, policy, waits=[wait(graph, "abc", 1, 2)]) == "acb"
    # of a copy and of its original each waits for itself
    assert ran(graph, policy, "aabc", waits=[wait(graph, "aabc", 0, 2)]) == "abca"
    twice = [wait(graph, "abc", 1, 2), wait(graph, "abc", 1, 2)]
    assert ran(graph, policy, waits=twice) == "acb"


@pytest.mark.parametrize("policy", FROM_THE_FIRST)
def test_after_is_an_edge_unless_the_join_is_released(policy):
    graph = graph_of("a j b", after={"b": "j", "a": ""})
    waits = [wait(graph, "ajb", 1, 0)]  # the join runs after a, so that b must wait
    assert ran(graph, policy, waits=waits) == "ajb"
    assert ran(graph, policy, "ab", released=(1,)) == "ab"
    late = graph_of("j b c:j", after={"b": "c"})
    assert ran(late, policy, "jcb") == "jcb"


@pytest.mark.parametrize("policy", FROM_THE_FIRST)
def test_a_reader_of_a_copy_does_not_wait_for_the_original(policy):
    """Neither by data nor by an edge beside the data, and a copy waits for data alone."""
    graph = graph_of("a b:a c", after={"b": "a"})
    original_last = [wait(graph, "acab", 0, 3)]
    assert ran(graph, policy, "acab", waits=original_last) == "caba"
    other = graph_of("a b:a c", after={"a": "", "b": "", "c": "b"})
    assert ran(other, policy, "abcc", waits=[wait(other, "abcc", 1, 3)]) == "acbc"


@pytest.mark.parametrize("policy", FROM_THE_FIRST)
def test_a_fence_delays_its_gates_until_its_awaits_have_run(policy):
    graph = graph_of("a b c d:c")
    fence = Fence(0, awaits=(3,), gates=(0, 1))
    assert ran(graph, policy, found=[fence]) == ("cdba" if policy == "pool_late" else "cdab")
    # a fence takes its turn in the queue
    assert ran(graph, policy, found=[Fence(0, awaits=(), gates=(0,))]) == "bcda"


@pytest.mark.parametrize("policy", FROM_THE_FIRST)
def test_a_fence_waits_for_the_one_before_it(policy):
    graph = graph_of("a b c d:c e:d")
    first, second = Fence(0, awaits=(4,), gates=(0,)), Fence(1, awaits=(), gates=(1,))
    # b waits for e only through the first fence
    assert ran(graph, policy, found=[first, second]) == "cdeab"
    assert ran(graph, policy, found=[second, first]) == "cdbea"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("edges", [
    {"waits": [Wait((0, 0), (2, 0))]},
    {"waits": [Wait((0, 0), (0, 0))]},
    {"waits": [Wait((0, 0), (1, 0)), Wait((1, 0), (0, 0))]},
    {"found": [Fence(0, awaits=(2,), gates=(0,))]},
    {"found": [Fence(0, awaits=(2,), gates=(1,)), Fence(1, awaits=(), gates=(0,))]},
], ids=["data", "itself", "two waits", "fence", "through a fence"])
def test_cycles_are_refused(policy, edges):
    graph = graph_of("a b c:a")
    with pytest.raises(PlanError, match="cycle"):
        order_of(graph, schedule_of(graph, "abc"), policy, **edges)
    assert reference_executor.order(graph, schedule_of(graph, "abc"), policy, **edges) == []


@given(seeds, st.integers(1, 18), st.sampled_from(POLICIES), st.booleans())
@settings(max_examples=250)
def test_random_graphs(seed, count, policy, some_cheap):
    """Data, other edges, released joins, fences and waits, some of which close a cycle."""
    rng = random.Random(seed)
    graph = random_joint_graph(seed, count)
    if some_cheap:
        graph = dataclasses.replace(graph, vertices=tuple(
            dataclasses.replace(v, time=rng.choice((1e-6, 1e-5))) for v in graph.vertices))
    released = [v for v, entry in enumerate(graph.vertices)
                if not entry.writes and rng.random() < 0.5]
    schedule = tuple(step for step in random_schedule(graph, seed + 1) if step[0] not in released)
    waits = [Wait(*rng.choices(schedule, k=2)) for _ in range(rng.choice((0, 0, 1, 3)))
             ] if schedule else []
    if rng.random() < 0.7:
        waits = [w for w in waits if schedule.index(w.awaited) < schedule.index(w.waiting)]
    found = fences_of(graph, schedule) if rng.random() < 0.7 else ()
    edges = {"released": released, "waits": waits, "found": found}
    expected = reference_executor.order(graph, schedule, policy, **edges)
    if len(expected) < len(schedule):
        with pytest.raises(PlanError):
            order_of(graph, schedule, policy, **edges)
    else:
        assert order_of(graph, schedule, policy, **edges) == expected
