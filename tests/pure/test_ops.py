"""One record is all that it takes to teach tfckpt an op, or a tangent rule."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.pure.test_fad import HAND, ROOTS
from tfckpt.capture.purity import is_pure, is_write
from tfckpt.cost.build import build_cost_graph
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.cost.time import Rates, seconds
from tfckpt.fad.alternatives import find_alternatives
from tfckpt.fad.transform import take
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, Graph, Op, Tensor, check_graph
from tfckpt.ops import (
    ListUse,
    OpRecord,
    Source,
    families,
    record,
    register,
    register_families,
    registered,
    registry,
)

pytestmark = pytest.mark.pure
F32 = Tensor("float32", (64, 4), 1024)


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    """Undo after each test what it registers."""
    for name in ("_records", "_families"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    monkeypatch.setattr(registry, "_found", {})


def chain(kind: str) -> Graph:
    """Return a step in which an op of this type stands between two products."""
    def op(name: str, op_type: str, inputs, region=FORWARD) -> Op:
        return Op(name, op_type, tuple((i, 0) for i in inputs), (), (F32,), region,
                  is_pure(op_type, False, ("float32",)))

    ops = (op("in", "Placeholder", (), OTHER), op("x", "MatMul", (0, 0)), op("y", kind, (1,)),
           op("out", "MatMul", (2, 2)), op("g", "MatMul", (3, 3), BACKWARD),
           op("dw", "MatMul", (4, 2), BACKWARD))
    return Graph("chain", ops, ((5, 0),), ())


def test_an_unknown_op_is_an_opaque_pure_function_with_memory_of_its_own():
    assert record("Unheard") == OpRecord("Unheard")
    graph = chain("Unheard")
    assert graph.ops[2].pure and roots(graph)[2] == ((2, 0),)
    vertex = next(v for v in build_cost_graph(graph).vertices if v.name == "y")
    assert vertex.recomputable and vertex.cheap and not vertex.reuses and not vertex.fusible


def test_a_record_makes_an_op_impure():
    register(OpRecord("Counts", repeatable=False, writes=True))
    assert not is_pure("Counts", False, ("float32",))
    assert is_write("Counts", True, True) and not is_write("Counts", False, True)
    vertices = build_cost_graph(chain("Counts")).vertices
    assert not next(v for v in vertices if v.name == "y").recomputable


def test_a_record_makes_an_op_an_alias_or_a_source():
    register(OpRecord("Hands", aliases=True), OpRecord("Fed", source=Source.ELEMENT, resident=True))
    assert roots(chain("Hands"))[2] == ((1, 0),)
    assert "y" not in [v.name for v in build_cost_graph(chain("Hands")).vertices]
    assert roots(chain("Fed"))[2] == (RESIDENT,)


def test_a_record_says_what_an_op_costs():
    register(OpRecord("Slow", per_byte=4.0, reuses_input=True),
             OpRecord("Hard", flops=lambda inputs, output, attrs: 7.0 * inputs[0][0] * output[1]))
    rates = Rates(1.0, 1.0e12, 0.0)
    assert seconds(chain("Hard"), chain("Hard").ops[2], rates) == 7.0 * 64 * 4
    rates = Rates(1.0, 1.0, 0.0)
    assert seconds(chain("Slow"), chain("Slow").ops[2], rates) == 4.0 * 2 * 1024
    slow, hard = (next(v for v in build_cost_graph(chain(kind)).vertices if v.name == "y")
                  for kind in ("Slow", "Hard"))
    assert slow.reuses and slow.cheap
    assert not hard.reuses and not hard.cheap


def with_bend() -> Graph:
    """Return the step of `tests.pure.test_fad` with another function in the place of tanh."""
    new = {"Tanh": "Bend", "TanhGrad": "BendGrad"}
    ops = tuple(dataclasses.replace(op, type=new.get(op.type, op.type)) for op in HAND.ops)
    return dataclasses.replace(HAND, ops=ops)


BEND = OpRecord("Bend", np.sinh, (lambda o: o.t * (o.y * o.y + 1.0).op("Sqrt"),))


def test_an_op_without_a_rule_belongs_to_no_region():
    register(OpRecord("Bend", np.sinh), OpRecord("BendGrad", lambda y, g: g * np.sqrt(1 + y * y),
                                                 linear=(1,)))
    assert not find_alternatives(with_bend(), ROOTS).alternatives


def test_a_tangent_rule_is_a_field_of_a_record():
    register(BEND, OpRecord("BendGrad", lambda y, g: g * np.sqrt(1 + y * y), linear=(1,)))
    alternative, = find_alternatives(with_bend(), ROOTS).alternatives
    assert (alternative.bytes_before, alternative.bytes_after) == (3 * 128, 2 * 128)
    check_graph(take(with_bend(), [alternative])[0])


def test_a_backward_that_is_not_the_rule_is_left_alone():
    register(BEND, OpRecord("BendGrad", lambda y, g: g * (1 + y * y), linear=(1,)))
    assert not find_alternatives(with_bend(), ROOTS).alternatives


def test_a_family_is_known_by_how_its_op_types_begin_and_the_longest_counts():
    register_families(OpRecord("Foo", repeatable=False),
                      OpRecord("FooList", lists=ListUse(rows=True)))
    assert not record("FooBar").repeatable and record("FooBar").type == "FooBar"
    assert record("FooListBar").repeatable and record("FooListBar").lists.rows
    register(OpRecord("FooExact"))
    assert record("FooExact").repeatable


def test_what_was_asked_for_before_it_was_registered_is_known_afterwards():
    assert not record("Late").aliases
    register(OpRecord("Late", aliases=True))
    assert record("Late").aliases


def test_no_op_type_has_two_records():
    with pytest.raises(ValueError, match="'Tanh' has a record already"):
        register(OpRecord("Tanh"))


@pytest.mark.parametrize("family", families(), ids=lambda family: family.type)
def test_a_record_of_its_own_says_what_its_family_says(family):
    """Of effects: forgetting that an op writes would be wrong without a sign."""
    for known in registered():
        longest = max((f.type for f in families() if known.type.startswith(f.type)), key=len,
                      default=None)
        if longest == family.type:
            for fact in ("writes", "collective", "no_variables", "holds_values"):
                assert getattr(known, fact) or not getattr(family, fact), (known.type, fact)
            assert not known.repeatable or family.repeatable, known.type


@pytest.mark.parametrize("known", registered(), ids=lambda known: known.type)
def test_a_record_is_consistent(known):
    assert not known.passes_on or known.aliases
    assert not known.scales or known.linear
    assert known.neutral is None or known.evaluate is not None
    assert not known.tangents or known.evaluate is not None or known.joins
    assert all(name[:1].isupper() or name in ("sum", "product", "unary", "bias")
               for name in known.merges_into | known.rounds_with | known.one_with)
    if known.neutral is not None:  # a second operand that changes nothing
        np.testing.assert_array_equal(known.evaluate(np.arange(4.0), known.neutral), np.arange(4.0))
    if known.fills is not None:
        np.testing.assert_array_equal(known.evaluate(np.arange(3.0)), np.full(3, known.fills))


@pytest.mark.parametrize("known", [op for op in registered() if op.linear and op.evaluate],
                         ids=lambda op: op.type)
def test_what_is_called_linear_is(known):
    rng = np.random.default_rng(3)
    for position in known.linear:
        args = [rng.uniform(0.5, 2.0, 5) for _ in range(max(known.linear) + 2)]
        count = known.evaluate.__code__.co_argcount if hasattr(known.evaluate, "__code__") else (
            known.evaluate.nin)
        args = args[:count - len(known.attrs)]
        a, b = rng.uniform(0.5, 2.0, 5), rng.uniform(0.5, 2.0, 5)
        parts = [known.evaluate(*args[:position], v, *args[position + 1:]) for v in (a, b)]
        whole = known.evaluate(*args[:position], a + 3 * b, *args[position + 1:])
        np.testing.assert_allclose(whole, parts[0] + 3 * parts[1], rtol=1e-12)


def test_what_grappler_has_seen_merges_no_more():
    marks = [next(v for v in build_cost_graph(chain("BiasAdd"), settled=settled).vertices
                  if v.name == "x").fusible for settled in (False, True)]
    assert marks == [True, False]
