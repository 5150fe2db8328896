"""Sums, products, powers, comparisons and choices."""

from __future__ import annotations

import functools
import math

import numpy as np

from tfckpt.ops.op_record import BIAS, PRODUCT, SUM, UNARY, Array, OpRecord
from tfckpt.ops.registry import register
from tfckpt.ops.tangents import At, TangentRule, branch, fused, same, zero
from tfckpt.ops.terms import Term, cast, select

_BINARY = functools.partial(OpRecord, reuses_input=True, fused_by_xla=True)

# Sums. Grappler makes one AddN of a tree of them, log(1 + x) log1p(x), and a - (-b) a + b.
_SUM = functools.partial(_BINARY, kinds=frozenset({SUM, BIAS}),
                         merges_into=frozenset({SUM, PRODUCT, "Log", "Square", "Neg"}))
register(
    _SUM("Add", np.add, (same, same), commutative=True, neutral=0.0),
    _SUM("AddV2", np.add, (same, same), commutative=True, neutral=0.0),
    _SUM("Sub", np.subtract, (same, lambda o: -o.t), neutral=0.0, subtracts=True,
         one_with=frozenset({"Exp"})),  # exp(x) - 1 is made expm1(x)
    _SUM("AddN", lambda *terms: sum(terms[1:], np.asarray(terms[0])), (same,), variadic=True,
         commutative=True, kinds=frozenset({SUM}), holds_values=True),  # it sums gradients, no bias
)


# Products. x^3 is made x * x^2, and c * (a * b) is made a * (c * b).
def _div_no_nan(a: Array, b: Array) -> Array:
    return np.where(b == 0, 0.0, a / np.where(b == 0, 1.0, b))


def _pow_exponent(o: At) -> Term:
    """Return y ln(a), and 0 where a <= 0, as TensorFlow has it."""
    if o.a.number is not None:
        return o.t * o.y * (math.log(o.a.number) if o.a.number > 0 else 0.0)
    positive = o.a.test("Greater", 0.0)
    safe = select(positive, o.a, o.a.builder.number(1.0, o.a.dtype))
    return select(positive, o.t * o.y * safe.op("Log"), o.t * 0.0)


_PRODUCT = functools.partial(_BINARY, kinds=frozenset({PRODUCT}), scales=True,
                             merges_into=frozenset({SUM, PRODUCT}))
register(
    _PRODUCT("Mul", np.multiply, (lambda o: o.t * o.b, lambda o: o.t * o.a), linear=(0, 1),
             commutative=True, neutral=1.0),
    _PRODUCT("RealDiv", np.divide, (lambda o: o.t / o.b, lambda o: o.t * (-o.a / o.b / o.b)),
             linear=(0,), neutral=1.0),
    # x^2, x^0.5, x^-0.5 and x^-1 are made unary ops
    OpRecord("Pow", np.power,
             (lambda o: o.t * o.b * o.a.op("Pow", o.b - 1.0, dtype=o.t.dtype), _pow_exponent),
             reuses_input=True, fused_by_xla=True, per_byte=8.0, cube=("Mul", "Square"),
             kinds=frozenset({PRODUCT, UNARY}),
             merges_into=frozenset({SUM, PRODUCT, UNARY, "Div", "Xdivy"})),
    _BINARY("Div", np.divide, linear=(0,)),
    _BINARY("DivNoNan", _div_no_nan,
            (lambda o: o.t.op("DivNoNan", o.b),
             lambda o: o.t * (-o.a).op("DivNoNan", o.b).op("DivNoNan", o.b)), linear=(0,)),
    OpRecord("MulNoNan", lambda a, b: np.where(b == 0, 0.0, a * b), linear=(0, 1),
             fused_by_xla=True),
    _BINARY("Xdivy", lambda a, b: np.where(a == 0, 0.0, a / np.where(a == 0, 1.0, b)),
            linear=(0,)),
    _BINARY("Xlogy"),
    _BINARY("SquaredDifference", lambda a, b: (a - b) ** 2,
            (lambda o: o.t * 2.0 * (o.a - o.b), lambda o: o.t * -2.0 * (o.a - o.b))),
    OpRecord("FloorDiv", reuses_input=True), OpRecord("FloorMod", reuses_input=True),
)

# Functions of one tensor that are powers. x / sqrt(y) is made x * rsqrt(y).
_UNARY = functools.partial(OpRecord, reuses_input=True, kinds=frozenset({UNARY}),
                           merges_into=frozenset({UNARY}))
register(
    _UNARY("Neg", np.negative, (lambda o: -o.t,), linear=(0,), scales=True, fused_by_xla=True,
           merges_into=frozenset({UNARY, SUM})),
    _UNARY("Square", np.square, (lambda o: o.t * (o.a * 2.0),), fused_by_xla=True),
    _UNARY("Sqrt", np.sqrt, fused("SqrtGrad", "y", lambda o: 0.5 / o.y), fused_by_xla=True,
           merges_into=frozenset({UNARY, "RealDiv", "Div", "Xdivy"})),
    _UNARY("Rsqrt", lambda x: 1 / np.sqrt(x),
           fused("RsqrtGrad", "y", lambda o: (o.y * o.y) * (o.y * -0.5)), fused_by_xla=True),
    _UNARY("Reciprocal", lambda x: 1 / x, fused("ReciprocalGrad", "y", lambda o: (-o.y) * o.y)),
    _UNARY("Inv", lambda x: 1 / x, fused("InvGrad", "y", lambda o: (-o.y) * o.y)),
    _UNARY("Abs", np.abs, (lambda o: o.t * o.a.op("Sign"),)),
)


# Choices: two-valued derivatives.
def _tie_to_first(test: str) -> tuple[TangentRule, TangentRule]:
    def chosen(o: At) -> Term:
        return o.a.test(test, o.b)
    return branch(chosen, True), branch(chosen, False)


def _first(o: At) -> Term:
    return o.a


_SELECT = functools.partial(
    OpRecord, evaluate=lambda mask, on, off: np.where(np.asarray(mask, bool), on, off),
    tangents=(zero, branch(_first, True), branch(_first, False)), selects=True, fused_by_xla=True)
register(
    _BINARY("Maximum", np.maximum, _tie_to_first("GreaterEqual")),
    _BINARY("Minimum", np.minimum, _tie_to_first("LessEqual")),
    _SELECT("Select"), _SELECT("SelectV2", reuses_input=True),
)

# Comparisons, logic and steps: they move with nothing.
_COMPARES = functools.partial(OpRecord, tangents=(zero, zero))
_LOGICAL = functools.partial(_COMPARES, reuses_input=True, typed=False)
_STEP = functools.partial(OpRecord, tangents=(zero,))
_ANY_SHAPE = (("incompatible_shape_error", True),)
register(
    _COMPARES("Greater", np.greater, compares=">"),
    _COMPARES("GreaterEqual", np.greater_equal, compares=">="),
    _COMPARES("Less", np.less, compares="<"),
    _COMPARES("LessEqual", np.less_equal, compares="<="),
    _COMPARES("Equal", np.equal, made_with=_ANY_SHAPE),
    _COMPARES("NotEqual", np.not_equal, made_with=_ANY_SHAPE),
    _LOGICAL("LogicalAnd", np.logical_and, conjunction=True),
    _LOGICAL("LogicalOr", np.logical_or),
    _LOGICAL("LogicalNot", np.logical_not, tangents=(zero,)),
    _STEP("Sign", np.sign, reuses_input=True), _STEP("Floor", np.floor), _STEP("Ceil", np.ceil),
    _STEP("Round", np.round), _STEP("Rint", np.rint), _STEP("IsNan", np.isnan),
    _STEP("IsInf", np.isinf), _STEP("IsFinite", np.isfinite),
)

# Another dtype.
register(OpRecord("Cast", lambda x: x, (lambda o: cast(o.t, o.a.dtype),), linear=(0,),
                  keeps_number=True, typed=False))
