"""What arrives at a branch of what earlier branches returned, against a run of the graph."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tfckpt.ir.branches import arriving

Tensor = tuple[str, int]
DEAD = object()


@dataclasses.dataclass(frozen=True)
class Op:
    name: str
    type: str
    inputs: tuple[Tensor, ...] = ()
    controls: tuple[str, ...] = ()


def _arriving(ops):
    nodes = {op.name: op for op in ops}

    def source(tensor):
        while nodes[tensor[0]].type == "Identity":
            tensor = nodes[tensor[0]].inputs[0]
        return tensor

    return arriving(nodes, list(nodes), source)


def _run(ops, deciders):
    """Return what each op returns, or DEAD, as an executor would."""
    found: dict[Tensor, object] = {}
    dead = set()
    for op in ops:
        read = [found[tensor] for tensor in op.inputs]
        alive = [value for value in read if value is not DEAD]
        if op.type == "Merge":
            assert len(alive) <= 1
            found[op.name, 0] = alive[0] if alive else DEAD
        elif len(alive) < len(read) or dead.intersection(op.controls):
            found |= {(op.name, 0): DEAD, (op.name, 1): DEAD}
        elif op.type in ("Switch", "_SwitchN"):
            found |= {(op.name, n): read[0] if n == read[1] else DEAD for n in range(2)}
        else:
            found[op.name, 0] = (read[0] if op.type == "Identity" else deciders[op.name]
                                 if op.name in deciders else (op.name, *read))
        if found[op.name, 0] is DEAD and op.type != "Switch":
            dead.add(op.name)
    return found


X, P, Q = Op("x", "Placeholder"), Op("p", "Placeholder"), Op("q", "Placeholder")


def _branches(decider, last):
    """One branch computes, the other awaits its turn and has no input."""
    return [X, P, Q, Op("s", "Switch", (("x", 0), (decider, 0))),
            Op("turn", "Identity", (("s", 0),)), Op("none", "Const", (), ("turn",)),
            Op("neg", "Neg", (("s", 1),)), Op("m", "Merge", (("none", 0), ("neg", 0))),
            Op("again", "Identity", (("p", 0),)), Op("t", "Switch", (("m", last), ("again", 0)))]


def test_what_the_same_decides():
    assert _arriving(_branches("p", 0)) == {("t", 0): ("none", 0), ("t", 1): ("neg", 0)}


def test_what_another_decides_may_be_any():
    assert not _arriving(_branches("q", 0))


def test_the_number_of_a_branch_is_no_result_of_it():
    assert not _arriving(_branches("p", 1))


def test_a_result_of_no_branch_may_arrive_always():
    ops = _branches("p", 0)
    ops[7] = Op("m", "Merge", (("x", 0), ("neg", 0)))
    assert not _arriving(ops)


@pytest.mark.parametrize("seed", range(200))
def test_what_arrives_is_what_a_run_hands_on(seed):
    rng = random.Random(seed)
    ops, alive = [X, P, Q], [("x", 0)]
    for n in range(rng.randrange(1, 8)):
        decider = rng.choice("pq")
        given, sides = rng.choice(alive), []
        ops.append(Op(f"s{n}", rng.choice(("Switch", "_SwitchN")), (given, (decider, 0))))
        for side in (0, 1):
            sides.append((f"s{n}", side))
            if rng.random() < 0.7:
                ops.append(Op(f"f{n}{side}", rng.choice(("Neg", "Identity")), (sides[-1],)))
                sides[-1] = (f"f{n}{side}", 0)
            if rng.random() < 0.3:
                inner = "p" if decider == "q" else "q"
                ops += [Op(f"i{n}{side}", "Switch", (sides[-1], (inner, 0))),
                        Op(f"j{n}{side}", "Abs", ((f"i{n}{side}", 0),)),
                        Op(f"k{n}{side}", "Merge", ((f"j{n}{side}", 0), (f"i{n}{side}", 1)))]
                sides[-1] = (f"k{n}{side}", 0)
        rng.shuffle(sides)
        ops.append(Op(f"m{n}", "Merge", tuple(sides)))
        alive.append((f"m{n}", 0))
    handed_on = _arriving(ops)
    for p in (0, 1):
        for q in (0, 1):
            found = _run(ops, {"p": p, "q": q})
            for handed, tensor in handed_on.items():
                assert found[handed] is DEAD or found[handed] == found[tensor]


def test_a_run_hands_on_what_the_branch_taken_returns():
    ops = _branches("p", 0)
    assert _run(ops, {"p": 1, "q": 0})["t", 1] == ("neg", ("x",))
    assert _run(ops, {"p": 0, "q": 0})["t", 0] == ("none",)
