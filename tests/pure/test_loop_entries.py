"""Entries that a loop's gradient computes again: which, and as plain data."""

from __future__ import annotations

import itertools
import random

import pytest

from tfckpt.cost.time import seconds
from tfckpt.errors import PlanError
from tfckpt.ir.edits import check_edits
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Loop, Op, Segments, Tensor
from tfckpt.ir.target import HERE
from tfckpt.plan.loops.again import with_entries_again
from tfckpt.plan.loops.entries import Bodies, _Flows, choices_of_entries
from tfckpt.plan.loops.segments import AGAIN, PREFIX

TRIPS, STATE, GIVEN, FIRST = 5, 2, 3, 4
"""Iterations; slots of a state, of what all iterations are given, and of the first list."""
NUMBER, LIST = Tensor("int32", (), 4), Tensor("variant", (), 0)


def _tensor(size):
    return Tensor("float32", (size,), 4 * size)


def _argument(name, made):
    return Op(name, "Placeholder", (), (), (made,), FORWARD, False)


def _step(ops, pushed):
    """Return a step with a loop whose body has some ops, some of which it appends to lists.

    Args:
      ops: of each its type, its size, and what it reads: places among the state, what is given and
        the ops before.
      pushed: places whose results are appended.
    """
    lists = range(FIRST, FIRST + len(pushed))
    body = [_argument(f"argument{n}", made) for n, made in enumerate(
        (NUMBER, NUMBER, _tensor(1000), _tensor(1000), *[LIST] * len(pushed)))]
    places = [STATE, GIVEN]
    for n, (kind, size, read) in enumerate(ops):
        places.append(len(body))
        body.append(Op(f"op{n}", kind, tuple((places[r], 0) for r in read), (), (_tensor(size),),
                       FORWARD, False))
    for slot, place in zip(lists, pushed, strict=True):
        body.append(Op(f"push{slot}", "TensorListPushBack", ((slot, 0), (places[place], 0)), (),
                       (LIST,), FORWARD, False))
    results = [(0, 0), (1, 0), (places[-1], 0), (GIVEN, 0),
               *((len(body) - len(pushed) + n, 0) for n in range(len(pushed)))]
    forward = Loop(TRIPS, Graph("forward", tuple(body), tuple(results), ()), segments=Segments(
        "gradient", True, (0, STATE), tuple(lists), tuple(lists), 2),
        arguments=tuple(range(FIRST + len(pushed))))

    gradient = [_argument(f"gradient{n}", made) for n, made in enumerate(
        (NUMBER, NUMBER, NUMBER, _tensor(1000), *[LIST] * len(pushed)))]
    results, total = [(0, 0), (1, 0), (2, 0)], (3, 0)
    for slot, place in zip(lists, pushed, strict=True):
        entry = body[places[place]].outputs[0]
        gradient.append(Op(f"pop{slot}", "TensorListPopBack", ((slot, 0), (0, 0)), (),
                           (LIST, entry), FORWARD, False))
        gradient.append(Op(f"use{slot}", "Mul", (total, (len(gradient) - 1, 1)), (),
                           (_tensor(1000),), FORWARD, False))
        total = len(gradient) - 1, 0
    results += [total, *((4 + len(pushed) + 2 * n, 0) for n in range(len(pushed)))]
    backward = Loop(TRIPS, Graph("backward", tuple(gradient), tuple(results), ()),
                    arguments=tuple(range(4 + len(pushed))))

    sizes = [TRIPS * (body[places[place]].outputs[0].bytes or 0) for place in pushed]
    outputs = (NUMBER, NUMBER, _tensor(1000), _tensor(1000),
               *(Tensor("variant", (), size) for size in sizes))
    step = [_argument("x", _tensor(1000)), _argument("w", _tensor(1000)),
            Op("zero", "Const", (), (), (NUMBER,), FORWARD, True),
            Op("empty", "EmptyTensorList", ((2, 0), (2, 0)), (), (LIST,), FORWARD, True)]
    step.append(Op("loop", "StatelessWhile", ((2, 0), (2, 0), (0, 0), (1, 0), *[(3, 0)] * len(
        pushed)), (), outputs, FORWARD, True, loop=forward))
    step.append(Op("gradient", "StatelessWhile", (
        (2, 0), (2, 0), (4, 0), (4, STATE), *((4, slot) for slot in lists)), (), (
            NUMBER, NUMBER, NUMBER, _tensor(1000), *[LIST] * len(pushed)), BACKWARD, False,
        loop=backward))
    step.append(Op("end", "Identity", ((5, 3),), (4,), (_tensor(1000),), BACKWARD, False))
    return Graph("step", tuple(step), ((6, 0),), ())


def _random_step(seed):
    drawn = random.Random(seed)
    ops = []
    for n in range(drawn.randint(3, 9)):
        kind = drawn.choice(["Tanh", "AddV2", "Mul", "Neg"])
        count = 2 if kind in ("AddV2", "Mul") else 1
        ops.append((kind, drawn.choice([10, 1000, 5000]),
                    [drawn.randrange(n + 2) for _ in range(count)]))
    pushed = drawn.sample(range(len(ops) + 2), drawn.randint(2, min(6, len(ops))))
    return _step(ops, pushed), ops, pushed


def _least(ops, pushed, body, price):
    """Return the least cost of what is kept and computed again: of all choices, tried in turn."""
    def run_again(dropped):
        kept = {place for place in pushed if place not in dropped}
        found, left = set(), [place for place in dropped]
        while left:
            place = left.pop()
            if place == 0:
                return None
            if place == 1 or place in found:
                continue
            found.add(place)
            left += [read for read in ops[place - 2][2] if read not in kept]
        return found

    times = {op.name: seconds(body, op, HERE.rates) for op in body.ops}
    best = {}
    for count in range(len(pushed) + 1):
        for dropped in itertools.combinations(pushed, count):
            again = run_again(dropped)
            if again is not None:
                size = {0: 1000, 1: 1000} | {n + 2: op[1] for n, op in enumerate(ops)}
                best[frozenset(dropped)] = sum(
                    4 * TRIPS * size[place] + 1 for place in pushed if place not in dropped
                ) + price * TRIPS * sum(times[f"op{place - 2}"] for place in again)
    return best


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("price", [1e12, 1e9, 1e6])
def test_what_is_kept_costs_least(seed, price):
    graph, ops, pushed = _random_step(seed)
    loop = next(op for op in graph.ops if op.name == "loop")
    slots = _Flows(Bodies(graph, loop), HERE.rates).dropped(price)
    costs = _least(ops, pushed, loop.loop.body, price)
    assert costs[frozenset(pushed[slot - FIRST] for slot in slots)] == pytest.approx(
        min(costs.values()), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_changed_step_is_one(seed):
    graph, ops, pushed = _random_step(seed)
    loop = next(op for op in graph.ops if op.name == "loop")
    slots = _Flows(Bodies(graph, loop), HERE.rates).dropped(1e3)
    if not slots:
        with pytest.raises(PlanError, match="cannot be computed again"):
            with_entries_again(graph, {"loop": slots})
        return
    changed, edits = with_entries_again(graph, {"loop": slots})
    check_edits(graph, edits)
    forward, gradient = (next(op for op in changed.ops if op.name == name + AGAIN)
                         for name in ("loop", "gradient"))
    assert all((forward.outputs[slot].bytes or 0) == 0 for slot in slots)
    body = gradient.loop.body
    assert {op.name for op in body.ops if op.type == "TensorListPopBack"} == {
        f"pop{slot}" for slot in range(FIRST, FIRST + len(pushed)) if slot not in slots}
    values = [f"{op.name.removeprefix(PREFIX)}" for op in body.ops]
    for op in body.ops:  # what an op reads is what it, or what it is a copy of, read before
        if op.name.startswith(f"{PREFIX}op"):
            read = ops[int(op.name.removeprefix(f"{PREFIX}op"))][2]
            wanted = [f"op{place - 2}" if place > 1 else ("state", "given_3")[place]
                      for place in read]
            for (source, _), name in zip(op.inputs, wanted, strict=True):
                slot = values[source].removeprefix("pop")
                assert values[source] == name or pushed[int(slot) - FIRST] == (
                    0 if name == "state" else 1 if name == "given_3" else int(name[2:]) + 2)
    assert [op.name for op in changed.ops if op.name in ("loop", "gradient")] == []


def test_what_cannot_be_had_again_is_refused():
    graph = _step([("Tanh", 1000, [0]), ("Neg", 1000, [2])], [2, 3])
    with_entries_again(graph, {"loop": (FIRST + 1,)})
    with pytest.raises(PlanError, match="cannot be computed again"):
        with_entries_again(graph, {"loop": (FIRST,)})
    with pytest.raises(PlanError, match="'other' cannot be computed again"):
        with_entries_again(graph, {"other": (FIRST,)})


def test_of_lists_with_the_same_entries_none_is_dropped_alone():
    """A state is kept, and so are its entries: to compute them again saves nothing."""
    graph = _step([("Tanh", 1000, [0])], [0, 2])
    loop = graph.ops[4]
    shared = Loop(TRIPS, loop.loop.body, {FIRST + 1: FIRST}, segments=loop.loop.segments,
                  arguments=loop.loop.arguments)
    ops = [Op(loop.name, loop.type, loop.inputs, (), loop.outputs, FORWARD, True, loop=shared)
           if op is loop else op for op in graph.ops]
    assert choices_of_entries(graph, HERE.rates)
    assert not choices_of_entries(Graph("step", tuple(ops), graph.fetches, ()), HERE.rates)
