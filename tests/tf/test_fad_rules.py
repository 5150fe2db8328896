"""Each tangent rule against TensorFlow's forward accumulator and against finite differences."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfckpt.fad import evaluate as numbers
from tfckpt.ops import record, registered
from tfckpt.ops.tangents import At
from tfckpt.ops.terms import NUMBER, TENSOR, TWO, Builder

RULES = {op.type: op.tangents for op in registered() if op.tangents}
TWO_VALUED = {"Relu", "Relu6", "LeakyRelu", "Maximum", "Minimum", "Select", "SelectV2"}

SMOOTH = np.array([-5.4, -2.3, -1.1, -0.4, -0.013, 0.017, 0.35, 0.9, 1.7, 3.2, 5.1])
KINKS = np.array([0.0, -0.0, 1.0, -1.0, 6.0, 0.5, -3.0, 3.0, 2.0])
WIDE = np.concatenate([SMOOTH, KINKS, [30.0, -30.0, 80.0, -80.0]])
POSITIVE, INSIDE, ABOVE = np.abs(SMOOTH), SMOOTH / 6.0, np.abs(SMOOTH) + 1.01
OTHER = np.array([0.7, -1.3, 2.0, 3.0, -0.2, 0.5, 1.5, -2.0, 0.9, 1.1, 4.0])
MASK = np.arange(len(SMOOTH)) % 3 == 0
TIED = np.where(np.arange(len(SMOOTH)) % 2 == 0, SMOOTH, OTHER)

# By op type: inputs at which it is tried; the first without kinks, for finite differences.
CASES: dict[str, list[tuple[np.ndarray, ...]]] = {
    **{kind: [(SMOOTH,), (WIDE,)] for kind in (
        "Identity", "Neg", "Square", "Sigmoid", "Tanh", "Softplus", "Softsign", "Erf", "Erfc",
        "Sin", "Cos", "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Abs", "Asinh", "Sign",
        "Floor", "Ceil", "Round", "Rint", "ZerosLike", "OnesLike", "Atan", "Tan")},
    **{kind: [(SMOOTH,)] for kind in ("Exp", "Expm1", "Sinh", "Cosh", "Reciprocal", "Inv")},
    **{kind: [(POSITIVE,)] for kind in ("Sqrt", "Rsqrt", "Log", "Log1p")},
    **{kind: [(INSIDE,)] for kind in ("Asin", "Acos", "Atanh")}, "Acosh": [(ABOVE,)],
    **{kind: [(SMOOTH, OTHER), (SMOOTH, TIED)] for kind in (
        "Add", "AddV2", "Sub", "Mul", "RealDiv", "SquaredDifference", "Maximum", "Minimum",
        "DivNoNan")},
    "Pow": [(POSITIVE, OTHER), (SMOOTH, np.full_like(SMOOTH, 3.0)),
            (KINKS, np.full_like(KINKS, 2.0))],
    "Select": [(MASK, SMOOTH, OTHER)], "SelectV2": [(MASK, SMOOTH, OTHER)],
    "AddN": [(SMOOTH, OTHER, TIED)],
}
NOT_MOVED = {"StopGradient", "Cast", "IdentityN", "IsNan", "IsInf", "IsFinite", "LogicalNot",
             "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "LogicalAnd",
             "LogicalOr"}
CLOSE = {"float64": 1e-12, "float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}
ATTRS = {"LeakyRelu": {"alpha": 0.25}}


def raw(kind: str, inputs, **attrs):
    """Return a primitive by its TensorFlow name, run eagerly."""
    function = getattr(tf.raw_ops, kind)
    names = [n for n in inspect.signature(function).parameters if n != "name"]
    if kind == "AddN":
        return function(inputs=list(inputs))
    return function(**dict(zip(names, inputs, strict=False)), **attrs)


def run(builder: Builder, index: int, tensors: dict):
    """Execute a program with TensorFlow's kernels."""
    values: list = []
    for node in builder.program():
        args = [values[a] for a in node.args]
        if node.type == TENSOR:
            values.append(tensors[node.attr("tensor")])
        elif node.type == NUMBER:
            values.append(tf.constant(node.attr("value"), node.dtype))
        elif node.type == TWO:
            on, off = (tf.constant(node.attr(v), node.dtype) for v in ("on", "off"))
            values.append(tf.raw_ops.SelectV2(condition=args[0], t=on, e=off))
        else:
            attrs = {} if node.type == "Cast" else dict(node.attrs)
            values.append(raw(node.type, args, **attrs))
    return values[index]


def apply_rule(kind: str, position: int, inputs, y, tangent):
    """Return what the rule says, computed by TensorFlow; a tangent of None stands for the number
    one.
    """
    builder = Builder()
    dtype = y.dtype.name
    terms = [builder.tensor((0, n), t.dtype.name) for n, t in enumerate(inputs)]
    t = builder.number(1.0, dtype) if tangent is None else builder.tensor((2, 0), dtype)
    term = record(kind).tangent(position)(At(terms, builder.tensor((1, 0), dtype), t,
                                       ATTRS.get(kind, {})))
    tensors = {(0, n): v for n, v in enumerate(inputs)} | {(1, 0): y, (2, 0): tangent}
    return tf.broadcast_to(run(builder, term.index, tensors), y.shape)


def made(array: np.ndarray, dtype: str):
    return tf.constant(array) if array.dtype == np.bool_ else tf.constant(
        array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def test_every_rule_is_tried_or_moves_with_nothing_or_is_tried_by_hand():
    assert set(RULES) == set(CASES) | NOT_MOVED


def test_every_primitive_that_was_asked_for_has_a_rule():
    asked = ("Add AddV2 Sub Mul RealDiv Neg Square Pow Sqrt Rsqrt Exp Expm1 Log Log1p Sigmoid Tanh "
             "Softplus Softsign Erf Erfc Sin Cos Relu Relu6 LeakyRelu Elu Selu Abs Minimum Maximum "
             "SelectV2 Reciprocal Inv Cast Greater Less LogicalAnd AddN")
    assert all(record(kind).tangents for kind in asked.split())


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", CASES)
def test_a_rule_agrees_with_the_forward_accumulator(kind, dtype):
    if kind in ("Inv", "Round", "Rint") and dtype != "float32":
        pytest.skip("no kernel for every dtype")
    for case in CASES[kind]:
        inputs = [made(a, dtype) for a in case]
        for position, x in enumerate(inputs):
            if x.dtype == tf.bool:
                continue
            direction = np.random.default_rng(position).standard_normal(x.shape)
            for values in (direction, np.ones(x.shape)):
                tangent = made(values, dtype)
                y, wanted = differentiate(kind, inputs, x, tangent)
                one = values is not direction
                found = apply_rule(kind, position, inputs, y, None if one else tangent)
                compare(found, wanted, CLOSE[dtype], f"{kind} input {position} one={one}")


def differentiate(kind: str, inputs, x, tangent):
    """Return the op and its tangent by TensorFlow.

    The forward accumulator differentiates the gradient, and TensorFlow has no gradient of
    SoftsignGrad: there the tape does, since an element-wise op's Jacobian is its own transpose.
    """
    if kind == "Softsign":
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = raw(kind, inputs)
        return y, tape.gradient(y, x, output_gradients=tangent)
    with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
        y = raw(kind, inputs, **ATTRS.get(kind, {}))
    return y, accumulator.jvp(y, tf.UnconnectedGradients.ZERO)


def compare(found, wanted, close: float, what: str):
    a, b = (np.asarray(tf.cast(t, tf.float64)) for t in (found, wanted))
    finite = np.isfinite(b)
    assert np.isfinite(a[finite]).all(), f"{what}: not finite where TensorFlow is"
    scale = np.abs(b[finite]) + 1e-3 * np.abs(b[finite]).max(initial=0.0)
    far = np.abs(a[finite] - b[finite]) > close * scale
    assert not far.any(), f"{what}: {a[finite][far]} is not {b[finite][far]}"


@pytest.mark.parametrize("kind", CASES)
def test_a_rule_agrees_with_finite_differences(kind):
    """In float64 away from kinks: central differences of TensorFlow's own kernel."""
    case = CASES[kind][0]
    for position, array in enumerate(case):
        if array.dtype == np.bool_ or kind in ("Inv",):
            continue
        step = 1e-6 * np.maximum(1.0, np.abs(array))
        ends = [raw(kind, [made(array + sign * step if n == position else a, "float64")
                           for n, a in enumerate(case)], **ATTRS.get(kind, {})).numpy()
                for sign in (1.0, -1.0)]
        wanted = (ends[0] - ends[1]) / (2 * step)
        inputs = [made(a, "float64") for a in case]
        y = raw(kind, inputs, **ATTRS.get(kind, {}))
        found = apply_rule(kind, position, inputs, y, None).numpy()
        np.testing.assert_allclose(found, wanted, rtol=2e-8, atol=2e-8 * np.abs(wanted).max() + (
            1e-9))


@pytest.mark.parametrize("kind", sorted(TWO_VALUED))
def test_piecewise_linear_primitives_have_two_valued_derivatives(kind):
    builder = Builder()
    terms = [builder.tensor((0, n), "bool" if kind.startswith("Select") and not n else "float32")
             for n in range(3)]
    rules = RULES[kind][1:] if kind.startswith("Select") else RULES[kind]
    for rule in rules:
        term = rule(At(terms, builder.tensor((1, 0), "float32"), builder.number(1.0, "float32"),
                       {"alpha": 0.25}))
        assert term.two is not None
        assert term.two[0].dtype == "bool"


@pytest.mark.parametrize("kind", sorted(set(RULES) - TWO_VALUED - NOT_MOVED - {"AddN"}))
def test_no_other_primitive_is_marked(kind):
    builder = Builder()
    terms = [builder.tensor((0, n), "float32") for n in range(2)]
    at = At(terms, builder.tensor((1, 0), "float32"), builder.number(1.0, "float32"), {})
    assert all(rule(at).two is None for rule in RULES[kind])


# What the numbers say that are compared before anything is replaced.

FLOATS_ONLY = {"Cast", "Div", "Snapshot", "PreventGradient"}


@pytest.mark.parametrize("kind", sorted({op.type for op in registered() if op.evaluate is not None}
                                        - FLOATS_ONLY))
def test_the_evaluator_computes_what_the_kernel_does(kind):
    logical = kind.startswith("Logical")
    positive = kind in ("Pow", "Log", "Sqrt", "Rsqrt", "Log1p", "Acosh")
    a = (MASK if logical else np.abs(WIDE) + (1.0 if kind == "Acosh" else 0.0) if positive
         else INSIDE if kind in ("Asin", "Acos", "Atanh") else WIDE)
    b = ~MASK if logical else np.concatenate([OTHER, WIDE])[:len(a)]
    count = 2 if kind == "AddN" else len(op_def_registry.get(kind).input_arg)
    args = [WIDE > 0, WIDE, b] if count == 3 else [a, b][:count]
    wanted = raw(kind, [tf.constant(v) for v in args], **(
        {"alpha": 0.25} if kind.startswith("LeakyRelu") else {})).numpy()
    with np.errstate(all="ignore"):
        found = numbers.evaluate(kind, args, {"alpha": 0.25})
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-300, equal_nan=True)
