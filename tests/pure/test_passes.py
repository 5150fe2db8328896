"""Passes: their order, what each one changes, and what it leaves as it was."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.support.passes import MATRIX, assert_edits, chain_of_layers, graph_of
from tfckpt.capture.devices import device_parts
from tfckpt.cost.build import build_cost_graph
from tfckpt.errors import PlanError, RewriteError
from tfckpt.ir.edits import AddControl, Clone, Create, Edits, Replace, Rewire
from tfckpt.ir.graph import BACKWARD, FORWARD, UPDATE, Graph, Loop
from tfckpt.ir.target import GPU, Target
from tfckpt.plan.forward_ad import decisions_of
from tfckpt.plan.planner import plans_of
from tfckpt.rewrite.passes.late_products import delay_factors
from tfckpt.rewrite.passes.manager import (
    Context,
    Node,
    Outcome,
    Pass,
    PlannedPart,
    Property,
    run_passes,
)
from tfckpt.rewrite.passes.operand_order import keep_given_order, keep_operand_order
from tfckpt.rewrite.passes.reference_variables import await_readers, has_references
from tfckpt.rewrite.passes.state_writes import delay_writes
from tfckpt.rewrite.realise import PASSES, realise, refusals

PLAIN = graph_of([("x", "Placeholder", (), FORWARD), ("a", "Tanh", ("x",), FORWARD),
                  ("b", "Exp", ("a",), BACKWARD)], fetches=["b"])
AGAIN = Edits(added=(Clone("again", "a", ("x:0",)),), rewires=(Rewire("b", 0, "again:0"),))
CYCLE = Edits(controls=(AddControl("x", "b"),))
FIRST = Pass("first", lambda _, edits: edits, ensures=frozenset({Property.DERIVATIVES}))
SECOND = Pass("second", lambda _, edits: edits.then(AGAIN),
              requires=frozenset({Property.DERIVATIVES}), ensures=frozenset({Property.COPIES}))
LAST = Pass("last", lambda _, edits: edits, requires=frozenset({Property.COPIES}))


# What runs them.


def test_passes_run_in_order_and_say_what_became_of_them():
    done = run_passes((FIRST, SECOND, LAST), Context(PLAIN))
    assert done.edits == AGAIN
    assert done.outcomes == (Outcome("first", False), Outcome("second", True),
                             Outcome("last", False))


@pytest.mark.parametrize("passes, said", [
    ((SECOND, FIRST), "'second' requires that kept derivatives are computed.*before it: none"),
    ((FIRST, LAST, SECOND), "'last' requires that copies .*before it: first"),
    ((dataclasses.replace(LAST, requires=frozenset(Property)),), "requires that copies "),  # sorted
])
def test_an_order_in_which_a_requirement_is_not_ensured_is_refused(passes, said):
    with pytest.raises(RewriteError, match=said):
        run_passes(passes, Context(PLAIN))


def test_no_other_order_of_the_copies_and_what_depends_on_them_is_accepted():
    accepted = []
    for order in itertools.permutations(PASSES):
        try:
            run_passes(order, Context(PLAIN))
            accepted.append([each.name for each in order])
        except RewriteError:
            pass
    for names in accepted:
        assert names.index("derivatives") < names.index("copies") < names.index("operand order")
        assert names.index("operand order") < names.index("reference variables")
        assert names.index("copies") < names.index("state writes")
    assert [each.name for each in PASSES] in accepted


def test_a_copy_of_a_sum_adds_in_the_order_of_its_source():
    """Also where it reads what a pass-through passes on, which has another name."""
    graph = graph_of([("z", "Placeholder", (), FORWARD), ("a", "Identity", ("z",), FORWARD),
                      ("b", "Tanh", ("a",), FORWARD), ("c", "Exp", ("a",), FORWARD),
                      ("sum", "AddN", ("a", "b", "c"), FORWARD), ("g", "Exp", ("sum",), BACKWARD)],
                     fetches=["g"])
    copy = Clone("sum-tfckpt1", "sum", ("z:0", "b:0", "c:0"))
    rewired = Rewire("g", 0, "sum-tfckpt1:0")
    found = keep_given_order(Edits((copy,), (rewired,)), graph)
    reads = {new.name: new.inputs[0] for new in found.added if isinstance(new, Create)}
    (again,) = found.clones
    terms = [name.removesuffix(":0") for name in again.inputs]
    assert terms == sorted(terms) and [reads[name] for name in terms] == ["z:0", "b:0", "c:0"]
    plain = sorted((r.index, r.tensor) for r in found.rewires if r.op == "sum")
    assert [reads[tensor.removesuffix(":0")] for _, tensor in plain] == ["a:0", "b:0", "c:0"]
    moved = Edits((Clone("z-tfckpt1", "z", ()),), (Rewire("sum", 0, "z-tfckpt1:0"),))
    found = keep_given_order(moved, graph)
    reads = {new.name: new.inputs[0] for new in found.added if isinstance(new, Create)}
    again = sorted((r.index, r.tensor.removesuffix(":0")) for r in found.rewires)
    assert [reads[name] for _, name in again] == ["z-tfckpt1:0", "b:0", "c:0"]
    assert [name for _, name in again] == sorted(name for _, name in again)
    in_order = Edits((dataclasses.replace(copy, inputs=("a:0", "b:0", "c:0")),), (rewired,))
    assert keep_given_order(in_order, graph) == in_order


def test_what_a_refused_pass_ensures_is_settled():
    refused = dataclasses.replace(SECOND, refusal=lambda _: "nothing to copy")
    done = run_passes((FIRST, refused, LAST), Context(PLAIN))
    assert done.edits == Edits()
    assert done.outcomes[1] == Outcome("second", False, "nothing to copy")


@pytest.mark.parametrize("kind", [PlanError, RewriteError])
def test_an_error_names_its_pass_and_those_before(kind):
    def fail(_, edits):
        raise kind("rewrite: for this test")

    passes = (FIRST, SECOND, dataclasses.replace(LAST, run=fail))
    with pytest.raises(kind) as caught:
        run_passes(passes, Context(PLAIN))
    assert str(caught.value) == "rewrite: for this test (pass: last; before it: first, second)"
    refused = dataclasses.replace(FIRST, refusal=lambda _: "for this test")
    with pytest.raises(kind, match=r"\(pass: second; before it: none\)"):
        run_passes((refused, dataclasses.replace(SECOND, run=fail)), Context(PLAIN))


def test_edits_are_checked_after_the_last_pass():
    last = dataclasses.replace(LAST, run=lambda _, edits: edits.then(CYCLE))
    with pytest.raises(RewriteError, match="cycle .*pass: check; before it: first, second, last"):
        run_passes((FIRST, SECOND, last), Context(PLAIN))


def test_which_passes_apply_follows_from_the_context():
    asked = FakeStep()
    refused = refusals(Context(PLAIN, plain=asked))
    assert "only XLA" in refused.pop("zero lists") and set(refused.values()) == {""}
    assert "not at hand" in refusals(Context(PLAIN))["operand order"]
    optimised, compiled = Target(optimised=True), Target().compiled()
    seen = refusals(Context(PLAIN, target=optimised))  # nothing needs to be asked any more
    assert "has run already" in seen["late products"] and not seen["operand order"]
    seen = refusals(Context(PLAIN, plain=asked, target=compiled))
    assert "XLA" in seen["operand order"] and "not at hand" in seen["zero lists"]


# Derivatives and copies, of one part and of two.


GPU_TARGET = Target(device=GPU)


def decided(graph: Graph, fad: object):
    cost = build_cost_graph(graph)
    return next(decisions_of(graph, cost, lambda c: plans_of(c, target=GPU_TARGET), fad=fad))


def test_copies_are_made_of_what_is_recomputed():
    graph = graph_of(chain_of_layers(3), sinks=["write0", "write1", "write2"])
    decision = decided(graph, False)
    edits = realise(Context(graph, (PlannedPart(decision),))).edits
    again = {decision.cost.vertices[v].name for v, _ in decision.planned.plan.recomputed}
    assert again and {clone.source for clone in edits.clones} == again
    readers = {r.op for r in edits.rewires}
    assert readers and all(graph.ops[[op.name for op in graph.ops].index(name)].region == BACKWARD
                           for name in readers)
    assert not edits.dropped


def two_devices() -> Graph:
    rows = [row for n in range(2) for row in chain_of_layers(
        3, f"r{n}/", f"/device:CPU:{n}")]
    return graph_of(rows, sinks=[f"r{n}/write{i}" for n in range(2) for i in range(3)])


def test_the_edits_of_several_devices_are_those_of_each_and_nothing_is_lost():
    graph = two_devices()
    parts = [PlannedPart(decided(part, True), device, f"_{n}")
             for n, (device, part) in enumerate(device_parts(graph).items())]
    assert len(parts) == 2
    apart = [realise(Context(graph, (part,))).edits
             for part in parts]
    both = realise(Context(graph, tuple(parts))).edits
    assert all(edits.dropped for edits in apart)
    assert both.dropped == apart[0].dropped + apart[1].dropped
    assert {op.name for op in both.added} == {op.name for edits in apart for op in edits.added}
    assert sorted(both.rewires, key=repr) == sorted(apart[0].rewires + apart[1].rewires, key=repr)


# State writes.

LIST = dataclasses.replace(MATRIX, dtype="variant")


def loop_step(*, device: str = "", follows: bool = False, writes=("write",)) -> Graph:
    """Return a loop whose gradient follows, and a write that only sometimes follows from that."""
    loop = Loop(3, Graph("body", (), (), ()))
    return graph_of([
        ("x", "Placeholder", (), FORWARD), ("v", "VarHandleOp", (), FORWARD),
        ("loop", "While", ("x",), FORWARD, {"loop": loop, "later_writes": writes}),
        ("grad", "Exp", ("loop",), BACKWARD),
        ("write", "AssignVariableOp", ("v", "grad" if follows else "x"), UPDATE,
         {"device": device})], fetches=["grad"], sinks=["write"])


COPY = Edits(added=(Clone("loop-again", "loop", ("x:0",)),),
             rewires=(Rewire("grad", 0, "loop-again:0"),))


def test_a_later_write_waits_for_the_copy_of_a_loop():
    edits = delay_writes(loop_step(), COPY)
    assert edits.controls == (AddControl("write", "loop-again"),)
    assert_edits(loop_step(), edits, COPY, delta={}, modified={"write"})


def test_a_later_write_waits_for_the_copy_of_a_loop_that_took_its_place():
    """A loop over segments is none of the captured step."""
    segments = Create("loop-segments", "While", ("x:0",), (), ("variant",), {})
    edits = Edits(added=(segments, Clone("again", "loop-segments", ("x:0",))),
                  rewires=(Rewire("grad", 0, "again:0"),), dropped=("loop",),
                  replaced=(Replace("loop", "loop-segments"),))
    assert delay_writes(loop_step(), edits).controls == (AddControl("write", "again"),)


@pytest.mark.parametrize("graph, edits", [
    (loop_step(follows=True), COPY),  # it follows from the copy already
    (loop_step(writes=()), COPY),  # nothing writes what the loop reads
    (loop_step(writes=("elsewhere",)), COPY),  # an initialiser, which is no part of the step
    (loop_step(), Edits()),  # no copy
], ids=["follows", "no write", "initialiser", "no copy"])
def test_other_writes_are_left_alone(graph, edits):
    assert delay_writes(graph, edits) is edits


def test_a_write_on_another_device_is_refused():
    with pytest.raises(RewriteError, match="'write'.*runs on another device"):
        delay_writes(loop_step(device="/device:GPU:1"), COPY)


# Reference variables.

REFERENCE = graph_of([
    ("v", "VariableV2", (), FORWARD), ("read", "Identity", ("v",), FORWARD),
    ("x", "Placeholder", (), FORWARD), ("h", "MatMul", ("x", "read"), FORWARD),
    ("g", "Exp", ("h",), BACKWARD), ("write", "AssignVariableOp", ("v", "g"), UPDATE)],
    fetches=["g"], sinks=["write"])


@pytest.mark.parametrize("read", ["v:0", "read:0"])
def test_a_write_of_a_reference_awaits_its_new_readers(read):
    before = Edits(added=(Clone("again", "h", ("x:0", read)),),
                   rewires=(Rewire("g", 0, "again:0"),))
    assert_edits(REFERENCE, await_readers(REFERENCE, before), before, delta={}, modified={"write"})


@pytest.mark.parametrize("passed", [
    Create("pass", "Identity", ("read:0",), (), ("float32",), {}), Clone("pass", "read", ("v:0",))],
    ids=["created", "copied"])
def test_a_new_pass_through_of_a_reference_is_followed(passed):
    before = Edits(added=(passed, Clone("again", "h", ("x:0", "pass:0"))),
                   rewires=(Rewire("g", 0, "again:0"),))
    edits = await_readers(REFERENCE, before)
    assert edits.controls == (AddControl("write", "again"),)


def test_which_graphs_have_references():
    assert has_references(REFERENCE) and not has_references(PLAIN)


def test_new_readers_of_values_are_not_awaited():
    before = Edits(added=(Clone("again", "g", ("h:0",)),))
    assert await_readers(REFERENCE, before) == before


# Late products.


def product(scaled: str, by: str = "c", factor: str = "a", read: str = "h") -> Graph:
    """Return the gradient of c * a * x, as it is traced."""
    return graph_of([
        ("x", "Placeholder", (), FORWARD), ("a", "Tanh", ("x",), FORWARD),
        ("c", "Const", (), FORWARD), ("d", "Exp", ("x",), FORWARD),
        ("g", "Neg", ("a",), BACKWARD), ("h", "Sin", ("g",), BACKWARD),
        ("p", "Mul", ("g", factor), BACKWARD), ("q", scaled, (by, "p"), BACKWARD),
        ("r", "Cos", (read,), BACKWARD)], fetches=["q", "d", "r"])


def test_a_factor_of_the_forward_waits_for_the_gradient():
    edits = delay_factors(product("Mul"), Edits())
    (late,), (rewire,) = edits.added, edits.rewires
    assert (late.inputs, late.controls, late.type) == (("a:0",), ("g",), "Identity")
    assert rewire == Rewire("p", 1, f"{late.name}:0")
    assert sorted(["g", "a", late.name]) == ["a", late.name, "g"]  # where its factor sorts


def test_a_factor_that_is_read_from_a_copy_waits_there():
    before = Edits(added=(Clone("a-tfckpt1", "a", ("x:0",)),),
                   rewires=(Rewire("p", 1, "a-tfckpt1:0"),))
    edits = delay_factors(product("Mul"), before)
    assert edits.added[-1].inputs == ("a-tfckpt1:0",) and len(edits.rewires) == 1


def test_what_a_gradient_needs_of_the_forward_alone_waits_for_what_is_not_rearranged():
    """The edge to a product is lost where Grappler moves the product: the op after it stays."""
    graph = graph_of([
        ("x", "Placeholder", (), FORWARD), ("a", "Tanh", ("x",), FORWARD),
        ("up", "MatMul", ("a", "a"), BACKWARD), ("scaled", "Mul", ("up", "a"), BACKWARD),
        ("square", "Square", ("a",), BACKWARD, {"controls": ("scaled",)}),
        ("out", "Mul", ("scaled", "square"), BACKWARD)], fetches=["out"])
    (late,) = delay_factors(graph, Edits()).added
    assert (late.inputs, late.controls) == (("a:0",), ("up",))


@pytest.mark.parametrize("graph", [
    product("Add"), product("Mul", by="d"), product("Mul", factor="h"), product("Mul", factor="c"),
    product("Mul", read="p")],
    ids=["added", "no constant", "two gradients", "constant", "two readers"])
def test_other_products_are_left_alone(graph):
    assert delay_factors(graph, Edits()) == Edits()


# Operand order.


class FakeStep:
    """A plain step whose graph after Grappler consists of the given nodes."""

    def __init__(self, *nodes: Node):
        self.nodes, self.asked = nodes, 0

    def attributes(self, op):
        return op.rpartition("/")[2]

    def is_stateful(self, op):
        return False

    def optimised(self):
        self.asked += 1
        return {node.name: node for node in self.nodes} or None


SUM = [("x", "Placeholder", (), FORWARD), ("z/sin", "Sin", ("x",), FORWARD),
       ("a/sin", "Sin", ("x",), FORWARD), ("m/exp", "Exp", ("x",), FORWARD),
       ("n/tanh", "Tanh", ("x",), FORWARD)]


def sum_of(*terms, kind="AddN", dtype="float32") -> Graph:
    tensor = dataclasses.replace(MATRIX, dtype=dtype)
    return graph_of([*SUM, ("total", kind, terms, FORWARD, {"outputs": (tensor,)}),
                     ("twin", "Neg", ("a/sin",), FORWARD)], fetches=["total", "twin"])


def test_a_sum_whose_order_is_open_reads_its_terms_in_the_order_of_the_plain_step():
    graph = sum_of("z/sin", "m/exp", "n/tanh")
    plain = FakeStep(Node("total", "AddN", ("a/sin", "m/exp", "n/tanh", "^x")))
    edits = keep_operand_order(Edits(), graph, plain)
    assert_edits(graph, edits, delta={"Identity": 3}, modified={"total"})
    order = sorted(op.name for op in edits.added)
    read = {op.name: op.inputs[0] for op in edits.added if isinstance(op, Create)}
    assert [read[name] for name in order] == ["z/sin:0", "m/exp:0", "n/tanh:0"] and plain.asked == 1


def test_a_copy_of_such_a_sum_does_so_too():
    graph = sum_of("z/sin", "m/exp", "n/tanh")
    before = Edits(added=(Clone("again", "total", ("z/sin:0", "m/exp:0", "n/tanh:0")),))
    plain = FakeStep(Node("total", "AddN", ("m/exp", "a/sin", "n/tanh")))
    edits = keep_operand_order(before, graph, plain)
    assert_edits(graph, edits, before, delta={"Identity": 6}, modified={"total", "again"})


@pytest.mark.parametrize("graph, asked", [
    (sum_of("x", "m/exp", "n/tanh"), 0),  # no term has an equal
    (sum_of("z/sin", "m/exp"), 0),  # both orders of two are the same
    (sum_of("z/sin", "m/exp", "n/tanh", dtype="int32"), 0),  # nothing rounds
    (sum_of("z/sin", "m/exp", kind="Mul"), 0),
    (sum_of("z/sin", "m/exp", "n/tanh"), 1),  # Grappler refuses the graph
], ids=["no equal", "two terms", "integers", "product", "refused"])
def test_other_sums_are_left_alone(graph, asked):
    plain = FakeStep()
    edits = Edits(controls=(AddControl("twin", "x"),))
    assert keep_operand_order(edits, graph, plain) is edits and plain.asked == asked


def test_a_sum_that_derivatives_replace_is_left_alone():
    graph, plain = sum_of("z/sin", "m/exp", "n/tanh"), FakeStep()
    edits = Edits(dropped=("total",))
    assert keep_operand_order(edits, graph, plain) is edits and not plain.asked


def cube(name: str) -> Graph:
    """Return x^3 of an op whose name may sort before or after that of Grappler's x^2."""
    return graph_of([
        ("x", "Placeholder", (), FORWARD), (name, "Tanh", ("x",), FORWARD),
        ("three", "Const", (), FORWARD, {"attrs": {"value": 3.0}}),
        ("cube", "Pow", (name, "three"), FORWARD)], fetches=["cube"])


def optimised(base: str, square: str) -> FakeStep:
    return FakeStep(Node(base, "Tanh", ("x",)), Node(square, "Square", (base,)),
                    Node("cube", "Mul", (base, square)))


@pytest.mark.parametrize("base, square", [("z", "ArithmeticOptimizer/own"), ("0", "1")])
def test_a_cube_in_the_order_of_the_plain_step_is_left_alone(base, square):
    assert keep_operand_order(Edits(), cube(base), optimised(base, square)) == Edits()


@pytest.mark.parametrize("base, square, kind", [("z", "zz", "0"), ("9", "10", "z")])
def test_a_cube_reads_its_base_under_a_name_that_sorts_as_in_the_plain_step(base, square, kind):
    """Against x^2: that of the plain step is called `square`, the cube's own ArithmeticO..."""
    graph = cube(base)
    edits = keep_operand_order(Edits(), graph, optimised(base, square))
    assert_edits(graph, edits, delta={"Identity": 1}, modified={"cube"})
    (made,) = edits.added
    assert made.inputs == (f"{base}:0",) and made.name.startswith(kind)


def test_a_cube_that_is_no_product_is_left_alone():
    graph = cube("z")
    assert keep_operand_order(Edits(), graph, FakeStep(Node("cube", "Pow", ("z", "three")))
                              ) == Edits()
