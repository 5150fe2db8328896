"""What element-wise ops compute, on numpy arrays in float64.

Used to compare the backward that TensorFlow built for a region with the derivative that would
replace it, on sample points, before anything is replaced: a custom gradient that is not the
derivative (a straight-through estimator, a clipped gradient) is thereby left alone. One sample
stands for one element. Rounding and dtypes are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfckpt.fad.program import NUMBER, TENSOR, TWO, Program

Array = np.ndarray
_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_SELU_SCALE, _SELU_SCALE_ALPHA = 1.0507009873554805, 1.7580993408473766


def _sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (
        1 + np.exp(-np.abs(x))))


def _div_no_nan(a: Array, b: Array) -> Array:
    return np.where(b == 0, 0.0, a / np.where(b == 0, 1.0, b))


def _floats(function: Callable) -> Callable:
    return lambda x: function(np.asarray(x, np.float64))


UNARY: dict[str, Callable] = {
    "Identity": lambda x: x, "StopGradient": lambda x: x, "PreventGradient": lambda x: x,
    "Snapshot": lambda x: x, "Cast": lambda x: x, "Neg": np.negative, "Square": np.square,
    "Sqrt": np.sqrt, "Rsqrt": lambda x: 1 / np.sqrt(x), "Reciprocal": lambda x: 1 / x,
    "Inv": lambda x: 1 / x, "Exp": np.exp, "Expm1": np.expm1, "Log": np.log, "Log1p": np.log1p,
    "Sin": np.sin, "Cos": np.cos, "Tan": np.tan, "Asin": np.arcsin, "Acos": np.arccos,
    "Atan": np.arctan, "Sinh": np.sinh, "Cosh": np.cosh, "Asinh": np.arcsinh,
    "Acosh": np.arccosh, "Atanh": np.arctanh, "Tanh": np.tanh, "Erf": _floats(_erf),
    "Erfc": _floats(_erfc), "Sigmoid": _sigmoid, "Softplus": lambda x: np.logaddexp(x, 0.0),
    "Softsign": lambda x: x / (1 + np.abs(x)), "Relu": lambda x: np.maximum(x, 0.0),
    "Relu6": lambda x: np.clip(x, 0.0, 6.0), "Abs": np.abs, "Sign": np.sign,
    "Elu": lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x),
    "Selu": lambda x: np.where(x < 0, _SELU_SCALE_ALPHA * np.expm1(np.minimum(x, 0)),
                               _SELU_SCALE * x),
    "Floor": np.floor, "Ceil": np.ceil, "Round": np.round, "Rint": np.rint,
    "ZerosLike": np.zeros_like, "OnesLike": np.ones_like, "IsNan": np.isnan, "IsInf": np.isinf,
    "IsFinite": np.isfinite, "LogicalNot": np.logical_not,
}
BINARY: dict[str, Callable] = {
    "Add": np.add, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply,
    "RealDiv": np.divide, "Div": np.divide, "DivNoNan": _div_no_nan, "Pow": np.power,
    "MulNoNan": lambda a, b: np.where(b == 0, 0.0, a * b),
    "SquaredDifference": lambda a, b: (a - b) ** 2, "Maximum": np.maximum, "Minimum": np.minimum,
    "Greater": np.greater, "GreaterEqual": np.greater_equal, "Less": np.less,
    "LessEqual": np.less_equal, "Equal": np.equal, "NotEqual": np.not_equal,
    "LogicalAnd": np.logical_and, "LogicalOr": np.logical_or,
    "Xdivy": lambda a, b: np.where(a == 0, 0.0, a / np.where(a == 0, 1.0, b)),
}
GRADIENTS: dict[str, tuple[int, Callable]] = {
    "TanhGrad": (1, lambda y, g: g * (1 - y * y)),
    "SigmoidGrad": (1, lambda y, g: g * y * (1 - y)),
    "SqrtGrad": (1, lambda y, g: g * 0.5 / y),
    "RsqrtGrad": (1, lambda y, g: g * -0.5 * y ** 3),
    "ReciprocalGrad": (1, lambda y, g: -g * y * y),
    "InvGrad": (1, lambda y, g: -g * y * y),
    "ReluGrad": (0, lambda g, f: np.where(f > 0, g, 0.0)),
    "Relu6Grad": (0, lambda g, f: np.where((f > 0) & (f < 6), g, 0.0)),
    "EluGrad": (0, lambda g, y: np.where(y < 0, g * (y + 1), g)),
    "SeluGrad": (0, lambda g, y: np.where(y < 0, g * (y + _SELU_SCALE_ALPHA), g * _SELU_SCALE)),
    "SoftplusGrad": (0, lambda g, f: g * _sigmoid(f)),
    "SoftsignGrad": (0, lambda g, f: g / (1 + np.abs(f)) ** 2),
    "LeakyReluGrad": (0, lambda g, f, alpha=0.2: np.where(f > 0, g, g * alpha)),
}
"""Gradient kernels: the position of the argument in which they are linear, and what they do."""

LINEAR: dict[str, tuple[int, ...]] = {
    **{kind: (0,) for kind in ("Identity", "PreventGradient", "Snapshot", "Cast", "Neg",
                               "RealDiv", "Div", "DivNoNan")},
    "Mul": (0, 1), "MulNoNan": (0, 1), "Xdivy": (0,),
    **{kind: (position,) for kind, (position, _) in GRADIENTS.items()},
}
"""Positions of which an op is linear in one, the others being held."""
SUMS: dict[str, float] = {"Add": 1.0, "AddV2": 1.0, "AddN": 1.0, "Sub": -1.0}
"""Ops linear in all inputs together; the sign of the second."""
SELECTS = frozenset({"Select", "SelectV2"})


def can_evaluate(op_type: str) -> bool:
    """Whether `evaluate` knows the op."""
    return (op_type in UNARY or op_type in BINARY or op_type in GRADIENTS or op_type in SELECTS
            or op_type in ("AddN", "LeakyRelu"))


def evaluate(op_type: str, args: Sequence[Array], attrs: Mapping[str, object]) -> Array:
    """The op on samples; args are arrays of one length or scalars."""
    if op_type in UNARY:
        return UNARY[op_type](args[0])
    if op_type in BINARY:
        return BINARY[op_type](args[0], args[1])
    if op_type in SELECTS:
        return np.where(np.asarray(args[0], bool), args[1], args[2])
    if op_type == "AddN":
        return sum(args[1:], np.asarray(args[0]))
    if op_type == "LeakyRelu":
        return np.where(args[0] > 0, args[0], args[0] * attrs.get("alpha", 0.2))
    kernel = GRADIENTS[op_type][1]
    if op_type == "LeakyReluGrad":
        return kernel(args[0], args[1], attrs.get("alpha", 0.2))
    return kernel(args[0], args[1])


def run(program: Program, tensors: Mapping[object, Array]) -> list[Array]:
    """The value of every node, given those of the tensors it reads."""
    values: list[Array] = []
    for node in program:
        args = [values[i] for i in node.args]
        if node.type == TENSOR:
            values.append(tensors[node.attr("tensor")])
        elif node.type == NUMBER:
            values.append(np.asarray(node.attr("value")))
        elif node.type == TWO:
            values.append(np.where(args[0], node.attr("on"), node.attr("off")))
        else:
            values.append(evaluate(node.type, args, dict(node.attrs)))
    return values
