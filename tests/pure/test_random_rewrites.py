"""The passes on random steps and random plans: the edits exist, in order, and change no number.

Plans are drawn, not planned: any order of the step with any repeats, released joins and waits.
"""

from __future__ import annotations

import dataclasses
import random

import networkx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.graphs import random_schedule, seeds
from tests.support.passes import MATRIX, assert_same_numbers, chain_of_layers, graph_of
from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import Edits, edited
from tfckpt.ir.graph import BACKWARD, FORWARD, UPDATE, Graph
from tfckpt.ir.schedule import Moves, resolve
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.choosing.planned import Planned, baseline
from tfckpt.plan.forward_ad import decisions_of
from tfckpt.rewrite.passes.manager import Context, Node, PlannedPart
from tfckpt.rewrite.realise import realise
from tfckpt.simulate.check import check_plan
from tfckpt.simulate.fences import fenced
from tfckpt.simulate.waits import place_waits

TARGETS = (Target(device=GPU), Target(device=GPU, optimised=True), Target().compiled(),
           Target(device=GPU).compiled(), Target(otherwise=True).compiled(),
           Target(device=GPU, otherwise=True).compiled())
UNARY, BINARY = ("Tanh", "Sin", "Square", "Neg", "Identity"), ("Mul", "AddV2", "AddV2", "MatMul")
REFUSED = ("a sum that writes into", "no incoming gradient")
"""Messages of plans that are refused because they cannot be carried out."""


def drawn_op(rng, made: list[str], also: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return a type and what it reads: recent results most of all, at least one of `made`."""
    kind = rng.choice((rng.choice(UNARY), rng.choice(BINARY), rng.choice(BINARY), "AddN"))
    count = 1 if kind in UNARY else 2 if kind in BINARY else rng.randint(2, 4)
    recent = [rng.choice(made[-4:])]
    return kind, tuple(recent + [rng.choice([*made[-6:], *also]) for _ in range(count - 1)])


def random_step(rng) -> Graph:
    """Return a step with sums of sums, equal ops, views and, most times, a join of its gradients.
    """
    rows = [(f"w{i}", "Placeholder", (), FORWARD, {"pure": False}) for i in range(3)]
    sources, forward, backward = [row[0] for row in rows], ["w0"], []
    for region, made, count in ((FORWARD, forward, rng.randint(3, 12)),
                                (BACKWARD, backward, rng.randint(3, 12))):
        for i in range(count):
            name = f"{rng.choice('az')}/{region[0]}{i}"
            kind, inputs = drawn_op(rng, made or forward, sources if made is forward else forward)
            rows.append((name, kind, inputs, region,
                         {"pure": region == FORWARD and rng.random() < 0.95}))
            made.append(name)
    gradients = rng.sample(backward, 3)
    if rng.random() < 0.7:
        rows.append(("join", "IdentityN", tuple(gradients), BACKWARD, {"outputs": (MATRIX,) * 3}))
        gradients = [f"join:{i}" for i in range(3)]
    for i, gradient in enumerate(gradients):
        rows += [(f"scaled{i}", "Mul", (gradient, "w2"), UPDATE),
                 (f"write{i}", "AssignVariableOp", (f"w{i}", f"scaled{i}"), UPDATE,
                  {"outputs": ()})]
    fetches = rng.sample(backward, 1) if rng.random() < 0.5 else []
    return graph_of(rows, fetches, [f"write{i}" for i in range(3)])


def random_plan(cost, target: Target, rng) -> Planned:
    """Return any plan that its checker accepts."""
    released = tuple(v for v, vertex in enumerate(cost.vertices)
                     if vertex.join and rng.random() < 0.7)
    schedule = tuple(step for step in random_schedule(cost, rng.randrange(1 << 30), 8)
                     if step[0] not in released)
    await_updates = rng.random() < 0.5
    plan = fenced(cost, schedule, Moves((), released), await_updates=await_updates)
    if target.orders_by_control:
        waits, _, order = place_waits(cost, resolve(cost, schedule), released, plan.fences,
                                      rng.choice((0, 1500, 1 << 60)), await_updates=await_updates)
        plan = dataclasses.replace(plan, waits=waits, order=order)
    check_plan(cost, plan)
    plain = baseline(cost, target)
    return Planned(plan, plain.timeline, 0, 0.0, plain, ())


class Shuffled:
    """A plain step in which Grappler keeps every op, but reads the terms of sums in any order."""

    def __init__(self, graph: Graph, rng):
        self.graph, self.rng = graph, rng

    def attributes(self, op):
        return ""

    def is_stateful(self, op):
        return False

    def optimised(self):
        names = [op.name for op in self.graph.ops]
        return {op.name: Node(op.name, op.type, tuple(self.rng.sample(
            [names[s] for s, _ in op.inputs], len(op.inputs)))) for op in self.graph.ops}


def rewritten(graph: Graph, target: Target, rng, fad: bool) -> Edits | None:
    """Return what the passes make of a random plan; None where they refuse it for a reason."""
    cost = build_cost_graph(graph, target.rates, target.fusion)
    decision = next(decisions_of(graph, cost, lambda cost: iter(
        [random_plan(cost, target, rng)]), fad=fad, target=target))
    try:
        return realise(Context(graph, (PlannedPart(decision, target=target),),
                               Shuffled(graph, rng), target)).edits
    except RewriteError as error:
        if any(said in str(error) for said in REFUSED):
            return None
        raise


def assert_in_order(graph: Graph, edits: Edits) -> None:
    """Assert that edits can be applied one by one, each to what exists by then."""
    known = {op.name for op in graph.ops}
    for new in edits.added:
        assert new.name not in known
        assert {t.rpartition(":")[0] for t in new.inputs} | {*new.controls} <= known, new
        known.add(new.name)
    rewired = [(r.op, r.index) for r in edits.rewires]
    assert len(set(rewired)) == len(rewired), "an input is moved twice"
    assert {r.tensor.rpartition(":")[0] for r in edits.rewires} <= known
    reads, waits, _ = edited(graph, edits)
    assert networkx.is_directed_acyclic_graph(networkx.DiGraph([
        (before, name) for name in reads
        for before in (*(t.rpartition(":")[0] for t in reads[name]), *waits[name])]))


@given(seeds, st.sampled_from(TARGETS))
@settings(max_examples=250, deadline=None)
def test_random_plans_of_random_steps_are_realised(seed, target):
    rng = random.Random(seed)
    graph = random_step(rng)
    edits = rewritten(graph, target, rng, False)
    if edits is not None:
        assert_in_order(graph, edits)
        assert_same_numbers(graph, edits)


@given(seeds, st.integers(2, 6), st.sampled_from(TARGETS))
@settings(max_examples=60, deadline=None)
def test_random_plans_with_derivatives_are_realised(seed, layers, target):
    rng = random.Random(seed)
    graph = graph_of(chain_of_layers(layers), [], [f"write{i}" for i in range(layers)])
    edits = rewritten(graph, target, rng, True)
    if edits is not None:
        assert edits.dropped
        assert_in_order(graph, edits)
        assert_same_numbers(graph, edits, 1e-3)


def test_random_rewrites_cover_all_kinds_of_edits():
    """Fences, waits, guards, extra readers, retained terms, bypassed joins and sorted terms."""
    found: set[str] = set()
    kinds = {"fence", "wait", "guard", "tap", "held", "slot", "term"}
    for seed in range(40):
        rng = random.Random(seed)
        edits = rewritten(random_step(rng), TARGETS[0], rng, False) or Edits()
        found.update(kind for new in edits.added for kind in kinds
                     if kind in new.name.partition("tfckpt")[2])
    assert found == kinds
