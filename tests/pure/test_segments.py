"""Loops in segments as plain data: lengths, bytes, edits."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import InfeasibleBudgetError, PlanError, RewriteError
from tfckpt.ir.edits import TRIPS, check_edits
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Loop, Op, Segments, Tensor
from tfckpt.ir.target import HERE
from tfckpt.plan.choosing.planned import baseline
from tfckpt.plan.forward_ad import Decision
from tfckpt.plan.loops import choice
from tfckpt.plan.loops.change import in_segments
from tfckpt.plan.loops.segments import (
    LAST,
    MARK,
    SEGMENTED,
    Cut,
    best_length,
    best_lengths,
    segmentable,
)
from tfckpt.plan.planner import plans_of

STATE, ENTRY = 1000, 3000
NUMBER = Tensor("int32", (), 4)
EMPTY = Graph("body", (), (), ())


def _step(trips=12, entry=ENTRY, loops=1, body=EMPTY, size=STATE):
    """Return a chain of loops, each with its gradient's; a loop has a counter, a bound, a state, a
    list.

    The gradient's loops stand in the reverse order, each fed by the one before it.
    """
    given = Tensor("float32", (size // 4,), size)
    ops = [Op("x", "Placeholder", (), (), (given,), FORWARD, False),
           Op("zero", "Const", (), (), (NUMBER,), FORWARD, True),
           Op("empty", "EmptyTensorList", ((1, 0), (1, 0)), (), (Tensor("variant", (), 0),),
              FORWARD, True)]
    state, made = (0, 0), []
    for n in range(loops):
        segments = Segments(f"gradient{n}", True, (0, 2), (3,), (4,), 2)
        ops.append(Op(f"loop{n}", "StatelessWhile", ((1, 0), (1, 0), state, (2, 0)), (), (
            NUMBER, NUMBER, given,
            Tensor("variant", (), trips * entry)), FORWARD, True,
            loop=Loop(trips, body, segments=segments, at_once=10)))
        made.append(len(ops) - 1)
        state = (made[-1], 2)
    before = state
    for n in reversed(range(loops)):
        ops.append(Op(f"gradient{n}", "StatelessWhile", (
            (1, 0), (1, 0), (made[n], 0), before, (made[n], 3)), (), (
            NUMBER, NUMBER, NUMBER, given, Tensor("variant", (), 0)),
            BACKWARD, False, loop=Loop(trips, body, at_once=10)))
        before = (len(ops) - 1, 3)
    ops.append(Op("end", "Identity", (before,), (made[0],), (given,),
                  BACKWARD, False))
    return Graph("step", tuple(ops), ((len(ops) - 1, 0),), ())


@pytest.mark.parametrize("trips", [1, 2, 7, 12, 100])
@pytest.mark.parametrize("entry", [10, STATE, 7 * STATE])
def test_the_length_of_segments_takes_the_minimum_of_memory(trips, entry):
    loop = next(op for op in _step(trips, entry).ops if op.name == "loop0")
    peaks = [-(-trips // k) * (STATE + 4) + k * entry for k in range(1, trips + 1)]
    assert peaks[best_length(loop) - 1] == min(peaks)
    if trips == 100 and entry == STATE:
        assert best_length(loop) == pytest.approx(math.sqrt(trips), abs=1)


@pytest.mark.parametrize("trips", [4, 7, 12, 60])
@pytest.mark.parametrize("entry", [STATE, 7 * STATE, 100 * STATE])
def test_the_lengths_of_segments_in_segments_take_the_minimum_of_memory(trips, entry):
    loop = next(op for op in _step(trips, entry).ops if op.name == "loop0")
    peaks = {(long, short): (-(-trips // long) - (-long // short)) * (STATE + 4) + short * entry
             for long in range(2, trips + 1) for short in range(1, long)}
    assert peaks[best_lengths(loop)] <= 1.02 * min(peaks.values())


@pytest.mark.parametrize("length", [1, 5, 12])
def test_states_and_entries_of_one_segment_are_kept(length):
    graph, edits = in_segments(_step(), {"loop0": Cut(length)})
    new = {op.name: op for op in graph.ops}
    forward, backward = new["loop0" + MARK], new["gradient0" + MARK]
    count = -(-12 // length)
    assert sum(t.bytes for t in forward.outputs if t.dtype == "variant") == count * (STATE + 4)
    assert forward.workspace == backward.workspace == length * ENTRY
    assert forward.pure and not backward.pure  # as the loops are that were there
    assert "loop0" not in new and "gradient0" not in new
    roles = [op.attrs[SEGMENTED] for op in edits.added if SEGMENTED in op.attrs]
    assert [(role.is_gradient, role.length, role.count) for role in roles] == [
        (False, length, count), (True, length, count)]


@pytest.mark.parametrize("within, states", [((4,), 3), ((5,), 3), ((6, 2), 2 + 3)])
def test_of_segments_in_segments_the_states_and_one_of_the_last_are_kept(within, states):
    body = Graph("body", (Op("tanh", "Tanh", (), (), (), FORWARD, True),), (), ())
    graph, edits = in_segments(_step(24, body=body), {"loop0": Cut(12, within=within)})
    new = {op.name: op for op in graph.ops}
    forward, backward = new["loop0" + MARK], new["gradient0" + MARK]
    assert sum(t.bytes for t in forward.outputs if t.dtype == "variant") == 2 * (STATE + 4)
    assert forward.workspace == backward.workspace == states * (STATE + 4) + within[-1] * ENTRY
    assert len(forward.loop.body.ops) == 1  # the forward runs it once, whatever is kept
    assert len(backward.loop.body.ops) == 1 + len(within) + 1
    assert [op.attrs[SEGMENTED].within for op in edits.added if SEGMENTED in op.attrs] == [
        within, within]


@pytest.mark.parametrize("cut", [Cut(4, within=(4,)), Cut(4, within=(5,)), Cut(4, within=(2, 3)),
                                 Cut(4, within=(0,)), Cut(0), Cut(3, -1)])
def test_segments_that_are_not_shorter_than_those_around_them_are_refused(cut):
    with pytest.raises(PlanError, match="'loop0' cannot be recomputed in segments"):
        in_segments(_step(), {"loop0": cut})


@pytest.mark.parametrize("length, last", [(3, 3), (4, 5), (1, 11)])
def test_the_last_iterations_keep_their_lists_and_run_once(length, last):
    graph, edits = in_segments(_step(), {"loop0": Cut(length, last)})
    new = {op.name: op for op in graph.ops}
    over, kept, again, backward = (new[name] for name in (
        "loop0" + MARK, "loop0" + LAST, "gradient0" + MARK, "gradient0" + LAST))
    count = -(-(12 - last) // length)
    assert sum(t.bytes for t in over.outputs if t.dtype == "variant") == count * (STATE + 4)
    assert kept.outputs[3].bytes == last * ENTRY and kept.workspace == backward.workspace == 0
    assert [op.loop.trips for op in (over, kept, again, backward)] == [
        12 - last, last, 12 - last, last]
    assert [op.loop.at_once for op in (over, kept, again, backward)] == [
        1, min(last, 10), 1, min(last, 10)]
    assert {clone.name: (clone.source, clone.attrs[TRIPS]) for clone in edits.clones} == {
        "loop0" + LAST: ("loop0", last), "gradient0" + LAST: ("gradient0", last)}
    assert [op.attrs[SEGMENTED].count for op in edits.added if SEGMENTED in op.attrs] == [count] * 2

    def read(op, slot):
        source, number = op.inputs[slot]
        return graph.ops[source].name, number

    assert read(kept, 2) == (over.name, 2) and read(backward, 4) == (kept.name, 3)
    assert read(again, 4) == (backward.name, 3)  # after the segments left and three that are passed
    assert read(kept, 1) == ("zero", 0) and read(over, 1) == (over.name + "_until", 0)
    ran = new[read(backward, 2)[0]]
    assert [read(ran, n) for n in range(2)] == [(kept.name, 0), (over.name, 0)]


def test_the_last_iterations_are_told_apart_by_a_bound_or_a_number():
    plain = _step()
    unbounded = dataclasses.replace(plain, ops=tuple(
        dataclasses.replace(op, loop=dataclasses.replace(op.loop, segments=dataclasses.replace(
            op.loop.segments, bounded=False))) if op.name == "loop0" else op for op in plain.ops))
    in_segments(unbounded, {"loop0": Cut(3)})
    with pytest.raises(PlanError, match="'loop0' cannot be recomputed in segments"):
        in_segments(unbounded, {"loop0": Cut(3, 2)})
    counted = dataclasses.replace(unbounded, ops=tuple(
        dataclasses.replace(op, loop=dataclasses.replace(op.loop, bound=12))
        if op.name == "loop0" else op for op in unbounded.ops))
    graph, _ = in_segments(counted, {"loop0": Cut(3, 2)})
    new = {op.name: op for op in graph.ops}
    until = new[f"loop0{MARK}_until"]
    assert [graph.ops[i].name for i, _ in until.inputs] == ["zero", f"loop0{MARK}_in_segments"]
    assert new[f"loop0{MARK}_in_segments"].attrs["value"] == ("const", "int32", 10)


@pytest.mark.parametrize("last, fixed", [(0, False), (4, False), (4, True)])
def test_the_edits_give_the_graph_that_is_planned(last, fixed):
    plain = _step(loops=3)
    graph, edits = in_segments(
        plain, {"loop0": Cut(3, last), "loop1": Cut(4), "loop2": Cut(5, last // 2)}, fixed)
    check_edits(plain, edits)
    created = {op.name: op for op in edits.added}
    for op in graph.ops:
        read = [f"{graph.ops[i].name}:{slot}" for i, slot in op.inputs]
        waits = [graph.ops[i].name for i in op.controls]
        if op.name in created:
            assert list(created[op.name].inputs) == read and list(created[op.name].controls) == (
                waits), op.name
    assert {op.name for op in graph.ops if MARK in op.name or LAST in op.name} == set(created)
    end = next(op for op in graph.ops if op.name == "end")
    assert [graph.ops[i].name for i in end.controls] == ["loop0" + (LAST if last else MARK)]
    assert {entry.old for entry in edits.replaced} == {
        f"{kind}{n}" for kind in ("loop", "gradient") for n in range(3)}


@pytest.mark.parametrize("last", [0, 2])
def test_a_gradient_waits_for_the_one_before_it(last):
    """Else it would run the loop again before the backward is there, or before lists are gone."""
    graph, _ = in_segments(_step(loops=2), {"loop0": Cut(3, last), "loop1": Cut(3)})
    op = next(op for op in graph.ops if op.name == "gradient0" + MARK)
    before = "loop0" + MARK + "_over3" if last else "gradient1" + MARK
    assert before in [graph.ops[i].name for i in op.controls]


def test_what_reads_a_loop_that_gave_way_is_found():
    plain = _step()
    _, edits = in_segments(plain, {"loop0": Cut(3)})
    with pytest.raises(RewriteError, match="'end' reads 'gradient0:3', which is replaced"):
        check_edits(plain, dataclasses.replace(edits, rewires=()))


def test_other_loops_are_refused():
    plain = _step()
    with pytest.raises(PlanError, match="'gradient0' cannot be recomputed in segments"):
        in_segments(plain, {"gradient0": Cut(3)})
    lists = dataclasses.replace(plain, fetches=((3, 3),))
    assert not segmentable(lists) and segmentable(plain)


def test_choices_take_what_saves_and_longer_segments_for_several():
    found = choice.choices(_step(trips=100, loops=4), HERE)
    assert set(found[0]) == {"loop0", "loop1", "loop2", "loop3"}
    assert len(found) <= choice.CHOICES and all(found)
    together, ending, alone = (next(iter(f.values())).length for f in found[:3])
    assert together == ending > alone
    assert [cut.last for cut in found[1].values()] == [0, 0, 0, found[1]["loop3"].length]
    assert choice.choices(_step(trips=2, entry=1), HERE) == []


def test_segments_are_in_segments_where_they_alone_keep_too_much():
    body = Graph("body", (Op("tanh", "Tanh", (), (), (Tensor("float32", (250_000,), 10**6),),
                             FORWARD, True),), (), ())
    graph = _step(400, 6 * 10**6, 2, body, 10**6)
    cost = build_cost_graph(graph)
    plain = baseline(cost, HERE)

    def best(budget, objective):
        def plans(graph, cost, share):
            for planned in plans_of(cost, budget, solver="store_all", plain=plain):
                yield Decision(graph, cost, planned)

        return next(choice.with_loops_in_segments(
            graph, cost, plans, budget=budget, objective=objective, target=HERE))

    least = best(None, "time")
    assert not any(cut.within for _, cut in least.segments)
    for budget, objective in ((0.6 * least.planned.peak_bytes, "time"), (None, "memory")):
        deeper = best(budget and int(budget), objective)
        assert all(cut.within for _, cut in deeper.segments)
        assert deeper.planned.peak_bytes < 0.6 * least.planned.peak_bytes
        assert deeper.planned.time > least.planned.time
    with pytest.raises(InfeasibleBudgetError) as error:
        best(1000, "time")
    least = error.value.smallest_bytes  # as named, it is accepted
    assert best(least, "time").planned.peak_bytes <= least < 0.6 * plain.peak_bytes


def test_the_cost_graph_counts_a_segment_while_the_gradient_runs():
    graph, _ = in_segments(_step(), {"loop0": Cut(3)})
    cost = build_cost_graph(graph)
    vertex = next(v for v in cost.vertices if v.name == "gradient0" + MARK)
    assert vertex.workspace == 3 * ENTRY


@pytest.mark.parametrize("share", [0.35, 0.5, 0.7, 0.9])
def test_a_budget_is_spent_on_lists_of_the_last_iterations(share):
    """On those of the loop first whose lists are gone first."""
    body = Graph("body", (Op("tanh", "Tanh", (), (), (Tensor("float32", (250_000,), 10**6),),
                             FORWARD, True),), (), ())
    graph, entry = _step(40, 2 * 10**6, 2, body), 2 * 10**6
    cost = build_cost_graph(graph)
    plain = baseline(cost, HERE)
    budget = int(share * plain.peak_bytes)

    def plans(graph, cost, share):
        for planned in plans_of(cost, budget, solver="store_all", plain=plain):
            yield Decision(graph, cost, planned)

    best = next(choice.with_loops_in_segments(
        graph, cost, plans, budget=budget, objective="time", target=HERE))
    cuts = dict(best.segments)
    kept = {name: cuts[name].last if name in cuts else 40 for name in ("loop0", "loop1")}
    assert budget - 6 * entry <= best.planned.peak_bytes <= budget
    assert kept["loop1"] == 40 if kept["loop0"] else kept["loop1"]
    assert best.planned.time < plain.timeline.time * (1 + (80 - sum(kept.values())) / 150)


@pytest.mark.parametrize("share, most", [(None, 2), (0.3, 6), (0.5, 6), (0.8, 3)])
def test_graphs_that_cannot_win_are_not_planned(share, most):
    """The decision is that of all graphs, planned as if nothing were known of them."""
    body = Graph("body", (Op("tanh", "Tanh", (), (), (Tensor("float32", (250_000,), 10**6),),
                             FORWARD, True),), (), ())
    graph = _step(40, 2 * 10**6, 4, body)
    cost = build_cost_graph(graph)
    plain = baseline(cost, HERE)
    budget = share and int(share * plain.peak_bytes)
    searched = {True: 0, False: 0}

    def best(bounded):
        def plans(graph, cost, share):
            searched[bounded] += share > 0
            for planned in plans_of(cost, budget, solver="approx_dp", plain=plain,
                                    searched=share > 0):
                yield Decision(graph, cost, planned)

        return next(choice.with_loops_in_segments(
            graph, cost, plans, budget=budget, objective="time", target=HERE,
            plain=plain if bounded else None))

    found, wanted = best(True), best(False)
    assert found.planned.peak_bytes <= (budget or wanted.planned.peak_bytes)
    assert found.planned.time <= 1.002 * wanted.planned.time
    assert searched[True] <= most < searched[False]
