"""Functions of one tensor: exponentials, trigonometric functions, activations; their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from tfckpt.ops.op_record import SUM, UNARY, Array, OpRecord
from tfckpt.ops.registry import register
from tfckpt.ops.tangents import At, fused
from tfckpt.ops.terms import Term, select

_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

# Functions that Grappler knows and may merge with a reader that it knows, and others.
_UNARY = functools.partial(OpRecord, reuses_input=True, kinds=frozenset({UNARY}),
                           merges_into=frozenset({UNARY}))
_FUSED = functools.partial(_UNARY, fused_by_xla=True)


def _of_floats(function: Callable[[float], float]) -> Callable[[Array], Array]:
    one_by_one = np.vectorize(function, otypes=[np.float64])
    return lambda x: one_by_one(np.asarray(x, np.float64))


# Exponentials, logarithms, error functions.
register(
    _FUSED("Exp", np.exp, (lambda o: o.t * o.y,), per_byte=2.0,
           merges_into=frozenset({UNARY, "Sub"})),
    _UNARY("Expm1", np.expm1, (lambda o: o.t * o.a.op("Exp"),)),
    _FUSED("Log", np.log, (lambda o: o.t * (1.0 / o.a),),
           one_with=frozenset({SUM})),  # log(x + 1) is made log1p(x)
    _FUSED("Log1p", np.log1p, (lambda o: o.t * (1.0 / (o.a + 1.0)),)),
    _FUSED("Erf", _of_floats(math.erf),
           (lambda o: o.t * _TWO_OVER_ROOT_PI * (-o.a.op("Square")).op("Exp"),), per_byte=6.0),
    _UNARY("Erfc", _of_floats(math.erfc),
           (lambda o: o.t * -_TWO_OVER_ROOT_PI * (-o.a.op("Square")).op("Exp"),), per_byte=6.0,
           lengthy=True),
)

# Trigonometric and hyperbolic functions.
register(
    _UNARY("Sin", np.sin, (lambda o: o.t * o.a.op("Cos"),)),
    _UNARY("Cos", np.cos, (lambda o: -(o.t * o.a.op("Sin")),)),
    OpRecord("Tan", np.tan, (lambda o: o.t * (1.0 / o.a.op("Cos")).op("Square"),)),
    OpRecord("Asin", np.arcsin, (lambda o: o.t * (1.0 / (1.0 - o.a.op("Square")).op("Sqrt")),)),
    OpRecord("Acos", np.arccos, (lambda o: -(o.t * (1.0 / (1.0 - o.a.op("Square")).op("Sqrt"))),)),
    OpRecord("Atan", np.arctan, (lambda o: o.t * (1.0 / (o.a.op("Square") + 1.0)),)),
    OpRecord("Sinh", np.sinh, (lambda o: o.t * o.a.op("Cosh"),)),
    OpRecord("Cosh", np.cosh, (lambda o: o.t * o.a.op("Sinh"),)),
    OpRecord("Asinh", np.arcsinh, (lambda o: o.t / o.y.op("Cosh"),)),
    OpRecord("Acosh", np.arccosh, (lambda o: o.t / o.y.op("Sinh"),)),
    OpRecord("Atanh", np.arctanh, (lambda o: o.t * (1.0 / (1.0 - o.a.op("Square"))),)),
    _FUSED("Tanh", np.tanh, fused("TanhGrad", "y", lambda o: 1.0 - o.y.op("Square")), per_byte=3.0),
)


# Activations. Relu and its like have two-valued derivatives.
def _sigmoid(x: Array) -> Array:
    result: Array = np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (
        1 + np.exp(-np.abs(x))))
    return result


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
    scale = o.y.builder.number(_SELU_SCALE, o.y.dtype)
    return select(o.y.test("Less", 0.0), o.y + _SELU_SCALE * _SELU_ALPHA, scale)


register(
    _FUSED("Sigmoid", _sigmoid, fused("SigmoidGrad", "y", lambda o: o.y * (1.0 - o.y)),
           per_byte=3.0, gates=True, merges_into=frozenset({UNARY, "Mul"})),
    _UNARY("Softplus", lambda x: np.logaddexp(x, 0.0),
           fused("SoftplusGrad", "a", lambda o: o.a.op("Sigmoid"), True)),
    _UNARY("Softsign", lambda x: x / (1 + np.abs(x)),
           fused("SoftsignGrad", "a", lambda o: 1.0 / (o.a.op("Abs") + 1.0).op("Square"), True)),
    _UNARY("Relu", lambda x: np.maximum(x, 0.0), (_relu,)),
    _UNARY("Relu6", lambda x: np.clip(x, 0.0, 6.0), (_relu6,)),
    OpRecord("LeakyRelu", lambda x, alpha=0.2: np.where(x > 0, x, x * alpha), (_leaky_relu,),
             attrs=("alpha",), reuses_input=True),
    _UNARY("Elu", lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x),
           fused("EluGrad", "y", _one_elu, True)),
    _UNARY("Selu", lambda x: np.where(x < 0, _SELU_SCALE * _SELU_ALPHA * np.expm1(
        np.minimum(x, 0)), _SELU_SCALE * x), fused("SeluGrad", "y", _one_selu, True)),
)

# Gradient kernels: linear in the gradient, which comes before or after the residual.
_FIRST = functools.partial(OpRecord, linear=(0,), reuses_input=True, fused_by_xla=True)
_SECOND = functools.partial(OpRecord, linear=(1,), reuses_input=True, fused_by_xla=True)
register(
    _SECOND("TanhGrad", lambda y, g: g * (1 - y * y)),
    _SECOND("SigmoidGrad", lambda y, g: g * y * (1 - y)),
    _SECOND("SqrtGrad", lambda y, g: g * 0.5 / y),
    _SECOND("RsqrtGrad", lambda y, g: g * -0.5 * y ** 3),
    _SECOND("ReciprocalGrad", lambda y, g: -g * y * y),
    _SECOND("InvGrad", lambda y, g: -g * y * y),
    _FIRST("ReluGrad", lambda g, f: np.where(f > 0, g, 0.0)),
    _FIRST("Relu6Grad", lambda g, f: np.where((f > 0) & (f < 6), g, 0.0)),
    _FIRST("LeakyReluGrad", lambda g, f, alpha=0.2: np.where(f > 0, g, g * alpha),
           attrs=("alpha",)),
    _FIRST("EluGrad", lambda g, y: np.where(y < 0, g * (y + 1), g)),
    _FIRST("SeluGrad", lambda g, y: np.where(
        y < 0, g * (y + _SELU_SCALE * _SELU_ALPHA), g * _SELU_SCALE)),
    _FIRST("SoftplusGrad", lambda g, f: g * _sigmoid(f)),
    _FIRST("SoftsignGrad", lambda g, f: g / (1 + np.abs(f)) ** 2),
)

# What Grappler makes of several in a row, and of x * sigmoid(x).
register(
    OpRecord("_UnaryOpsComposition", reuses_input=True, per_byte=4.0),
    OpRecord("_MklSwish", per_byte=3.0), OpRecord("_MklFusedMish", per_byte=6.0),
)
