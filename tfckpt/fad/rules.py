"""One tangent rule for each element-wise primitive.

A rule says how a tangent passes an op: given the op's inputs `a`, `b`, `c` (by position), its
output `y` and a tangent `t`, what that tangent contributes. An element-wise op's Jacobian is
diagonal, so the same rule carries a tangent of an input to the output and a cotangent of the
output to an input: the table serves both directions. At kinks and ties the rules follow
TensorFlow's own gradients: relu'(0) = 0, |x|' = sign(x), a tie of Maximum or Minimum goes to the
first operand, a Select passes to the chosen branch only.

`fused` rules use TensorFlow's gradient kernel on a full tangent and a formula where the tangent
is a number. Where a rule selects between numbers, the derivative takes two values, and what is
kept of it is a boolean (see `tfckpt.fad.program`).

Source: Guo et al., section III-A (the fad operations).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from tfckpt.fad.program import Term, select

TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


@dataclasses.dataclass(frozen=True, slots=True)
class At:
    """One op at which a rule is applied."""

    inputs: Sequence[Term]
    y: Term
    t: Term
    attrs: Mapping[str, object]

    @property
    def a(self) -> Term:
        """First input."""
        return self.inputs[0]

    @property
    def b(self) -> Term:
        """Second input."""
        return self.inputs[1]

    @property
    def c(self) -> Term:
        """Third input."""
        return self.inputs[2]


TangentRule = Callable[[At], Term]


def _zero(o: At) -> Term:
    """The output does not move with this input."""
    return o.t * 0.0


def _pass(o: At) -> Term:
    return o.t


def _fused(kernel: str, saved: str, one: TangentRule, gradient_first: bool = False,
           attrs: tuple[str, ...] = ()) -> TangentRule:
    """The gradient kernel on (saved, t), or on (t, saved); a formula for a number."""
    def rule(o: At) -> Term:
        if o.t.number is not None or o.t.two:
            return o.t * one(o)
        kept = getattr(o, saved)
        args = (o.t, kept) if gradient_first else (kept, o.t)
        return args[0].op(kernel, args[1], dtype=o.t.dtype,
                          **{name: o.attrs[name] for name in attrs})
    return rule


def _relu(o: At) -> Term:
    return select(o.y.test("Greater", 0.0), o.t, o.t * 0.0)


def _relu6(o: At) -> Term:
    inside = o.y.test("Greater", 0.0).test("LogicalAnd", o.y.test("Less", 6.0))
    return select(inside, o.t, o.t * 0.0)


def _leaky_relu(o: At) -> Term:
    alpha = o.attrs.get("alpha", 0.2)
    assert isinstance(alpha, float)
    return select(o.a.test("Greater", 0.0), o.t, o.t * alpha)


def _one_elu(o: At) -> Term:
    return select(o.y.test("Less", 0.0), o.y + 1.0, o.y.builder.number(1.0, o.y.dtype))


def _one_selu(o: At) -> Term:
    scale = o.y.builder.number(SELU_SCALE, o.y.dtype)
    return select(o.y.test("Less", 0.0), o.y + SELU_SCALE * SELU_ALPHA, scale)


def _one_softsign(o: At) -> Term:
    return 1.0 / (o.a.op("Abs") + 1.0).op("Square")


def _pow_exponent(o: At) -> Term:
    """y ln(a), and 0 where a <= 0, as TensorFlow has it."""
    if o.a.number is not None:
        return o.t * o.y * (math.log(o.a.number) if o.a.number > 0 else 0.0)
    positive = o.a.test("Greater", 0.0)
    safe = select(positive, o.a, o.a.builder.number(1.0, o.a.dtype))
    return select(positive, o.t * o.y * safe.op("Log"), o.t * 0.0)


def _branch(chosen: Callable[[At], Term], when_true: bool) -> TangentRule:
    """The tangent where the mask chooses this operand."""
    def rule(o: At) -> Term:
        mask, zero = chosen(o), o.t * 0.0
        return select(mask, o.t, zero) if when_true else select(mask, zero, o.t)
    return rule


def _tie_to_first(test: str) -> tuple[TangentRule, ...]:
    def chosen(o: At) -> Term:
        return o.a.test(test, o.b)
    return _branch(chosen, True), _branch(chosen, False)


def _cast(o: At) -> Term:
    """Numbers change dtype for nothing."""
    return cast(o.t, o.a.dtype)


def cast(t: Term, dtype: str) -> Term:
    """The term in another floating dtype."""
    if t.dtype == dtype:
        return t
    if t.number is not None:
        return t.builder.number(t.number, dtype)
    if t.two:
        return t.builder.two(*t.two, dtype)
    return t.op("Cast", dtype=dtype, SrcT=f"dtype:{t.dtype}", DstT=f"dtype:{dtype}",
                Truncate=False)


def _first(o: At) -> Term:
    return o.a


RULES: dict[str, tuple[TangentRule, ...]] = {
    # Pass-through.
    "Identity": (_pass,), "StopGradient": (_zero,), "Cast": (_cast,),
    # Sums and products.
    "Add": (_pass, _pass), "AddV2": (_pass, _pass),
    "Sub": (_pass, lambda o: -o.t),
    "Mul": (lambda o: o.t * o.b, lambda o: o.t * o.a),
    "RealDiv": (lambda o: o.t / o.b, lambda o: o.t * (-o.a / o.b / o.b)),
    "DivNoNan": (lambda o: o.t.op("DivNoNan", o.b),
                 lambda o: o.t * (-o.a).op("DivNoNan", o.b).op("DivNoNan", o.b)),
    "SquaredDifference": (lambda o: o.t * 2.0 * (o.a - o.b), lambda o: o.t * -2.0 * (o.a - o.b)),
    "Neg": (lambda o: -o.t,),
    # Powers.
    "Square": (lambda o: o.t * (o.a * 2.0),),
    "Pow": (lambda o: o.t * o.b * o.a.op("Pow", o.b - 1.0, dtype=o.t.dtype), _pow_exponent),
    "Sqrt": (_fused("SqrtGrad", "y", lambda o: 0.5 / o.y),),
    "Rsqrt": (_fused("RsqrtGrad", "y", lambda o: (o.y * o.y) * (o.y * -0.5)),),
    "Reciprocal": (_fused("ReciprocalGrad", "y", lambda o: (-o.y) * o.y),),
    "Inv": (_fused("InvGrad", "y", lambda o: (-o.y) * o.y),),
    # Exponentials and logarithms.
    "Exp": (lambda o: o.t * o.y,), "Expm1": (lambda o: o.t * o.a.op("Exp"),),
    "Log": (lambda o: o.t * (1.0 / o.a),), "Log1p": (lambda o: o.t * (1.0 / (o.a + 1.0)),),
    # Trigonometric and hyperbolic functions.
    "Sin": (lambda o: o.t * o.a.op("Cos"),), "Cos": (lambda o: -(o.t * o.a.op("Sin")),),
    "Tan": (lambda o: o.t * (1.0 / o.a.op("Cos")).op("Square"),),
    "Asin": (lambda o: o.t * (1.0 / (1.0 - o.a.op("Square")).op("Sqrt")),),
    "Acos": (lambda o: -(o.t * (1.0 / (1.0 - o.a.op("Square")).op("Sqrt"))),),
    "Atan": (lambda o: o.t * (1.0 / (o.a.op("Square") + 1.0)),),
    "Sinh": (lambda o: o.t * o.a.op("Cosh"),), "Cosh": (lambda o: o.t * o.a.op("Sinh"),),
    "Asinh": (lambda o: o.t / o.y.op("Cosh"),), "Acosh": (lambda o: o.t / o.y.op("Sinh"),),
    "Atanh": (lambda o: o.t * (1.0 / (1.0 - o.a.op("Square"))),),
    "Tanh": (_fused("TanhGrad", "y", lambda o: 1.0 - o.y.op("Square")),),
    # Error functions.
    "Erf": (lambda o: o.t * TWO_OVER_ROOT_PI * (-o.a.op("Square")).op("Exp"),),
    "Erfc": (lambda o: o.t * -TWO_OVER_ROOT_PI * (-o.a.op("Square")).op("Exp"),),
    # Sigmoids.
    "Sigmoid": (_fused("SigmoidGrad", "y", lambda o: o.y * (1.0 - o.y)),),
    "Softplus": (_fused("SoftplusGrad", "a", lambda o: o.a.op("Sigmoid"), True),),
    "Softsign": (_fused("SoftsignGrad", "a", _one_softsign, True),),
    # Piecewise linear: two-valued derivatives.
    "Relu": (_relu,), "Relu6": (_relu6,), "LeakyRelu": (_leaky_relu,),
    "Maximum": _tie_to_first("GreaterEqual"), "Minimum": _tie_to_first("LessEqual"),
    "Select": (_zero, _branch(_first, True), _branch(_first, False)),
    "SelectV2": (_zero, _branch(_first, True), _branch(_first, False)),
    # Piecewise smooth.
    "Elu": (_fused("EluGrad", "y", _one_elu, True),),
    "Selu": (_fused("SeluGrad", "y", _one_selu, True),),
    "Abs": (lambda o: o.t * o.a.op("Sign"),),
    # Steps: they move with nothing.
    **{kind: (_zero,) for kind in (
        "Sign", "Floor", "Ceil", "Round", "Rint", "ZerosLike", "OnesLike", "IsNan", "IsInf",
        "IsFinite", "LogicalNot")},
    **{kind: (_zero, _zero) for kind in (
        "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "LogicalAnd",
        "LogicalOr")},
}
"""By op type, one rule for each input."""

VARIADIC: dict[str, TangentRule] = {"AddN": _pass, "IdentityN": _pass}
"""Ops of any number of inputs; slot i of an IdentityN is input i."""

TWO_VALUED = frozenset({"Relu", "Relu6", "LeakyRelu", "Maximum", "Minimum", "Select", "SelectV2"})
"""Primitives whose derivative takes two values (`Abs` takes three)."""


def rule_for(op_type: str, position: int) -> TangentRule:
    """The rule of an input."""
    return VARIADIC[op_type] if op_type in VARIADIC else RULES[op_type][position]


def has_rule(op_type: str) -> bool:
    """Whether the op is a fad primitive."""
    return op_type in RULES or op_type in VARIADIC
