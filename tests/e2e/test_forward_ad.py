"""Steps that keep derivatives train like plain ones. Every alternative is taken, paying or not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.forward_ad import COMPOSED, KERAS, two_layers, with_forward_ad, worst
from tests.support.process import fresh, without_determinism
from tfckpt.verify.executed import executed

ACTIVATIONS = {**{f"keras_{n}": f for n, f in KERAS.items()}, **COMPOSED}
CLOSE = {"float32": 1e-6, "float64": 1e-13, "float16": 1e-2, "bfloat16": 1e-2}


def compare(body, *args, dtype="float32", **options):
    """Run a step plain and with forward AD; the results agree and are as finite."""
    fad, seen = with_forward_ad(body, **options)
    found = fad(*args)
    wanted = tf.function(body, autograph=False,
                         jit_compile=options.get("jit_compile", False))(*args)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        a, b = (np.asarray(tf.cast(t, tf.float64)) for t in (a, b))
        finite = np.isfinite(b)
        assert np.isfinite(a[finite]).all()
        scale = np.abs(b[finite]).max(initial=1e-30)
        assert np.abs(a[finite] - b[finite]).max(initial=0) <= CLOSE[dtype] * scale
    return seen


OTHER_DTYPES = ("keras_mish", "keras_gelu", "keras_gelu_approximate", "keras_hard_silu",
                "keras_celu", "keras_leaky_relu", "keras_silu", "gelu_tanh", "power", "vector")


@pytest.mark.parametrize("name, dtype", [(n, "float32") for n in ACTIVATIONS] + [
    (n, d) for n in OTHER_DTYPES for d in ("float16", "bfloat16", "float64")])
def test_gradients_agree(name, dtype):
    step, x = two_layers(ACTIVATIONS[name], dtype=tf.as_dtype(dtype), scale=0.7)
    seen = compare(step, x, dtype=dtype)
    assert len(seen.taken) == 1


@pytest.mark.parametrize("name", ["mish", "gelu_tanh", "keras_gelu", "keras_celu", "vector",
                                  "keras_silu"])
def test_a_step_traced_for_any_batch_serves_every_batch(name):
    step, _ = two_layers(ACTIVATIONS[name])
    signature = [tf.TensorSpec((None, 8))]
    fad, seen = with_forward_ad(step, batch=32, signature=signature)
    plain = tf.function(step, autograph=False)
    for rows in (32, 5, 1, 2):
        x = tf.random.stateless_normal((rows, 8), (1, rows))
        assert worst(fad(x), plain(x)) <= 1e-6
    activation = max(seen.taken, key=lambda a: a.bytes_after)  # the loss's square is another
    assert activation.bytes_after == 2 * 32 * 16 * 4 or name == "keras_hard_tanh"


@pytest.mark.parametrize("name", ["mish", "keras_gelu", "keras_celu", "keras_hard_tanh"])
def test_compiled_by_xla(name):
    with without_determinism():
        step, x = two_layers(ACTIVATIONS[name])
        seen = compare(step, x, jit_compile=True)
    assert len(seen.taken) == 1


# Several outputs and other readers.

def several(outputs, count):
    made = np.random.default_rng(3)
    weights = [tf.Variable(made.standard_normal((8, 16)), dtype=tf.float32)] + [
        tf.Variable(made.standard_normal((16, 4)), dtype=tf.float32) for _ in range(count)]
    x = tf.constant(made.standard_normal((32, 8)), tf.float32)

    def step(x):
        with tf.GradientTape() as tape:
            ys = outputs(tf.matmul(x, weights[0]))
            loss = tf.add_n([tf.reduce_sum(tf.square(tf.matmul(y, w)))
                             for y, w in zip(ys, weights[1:], strict=True)])
        return loss, tape.gradient(loss, weights)

    return step, x


def gated(x):
    """x is read by the region, a gate and the next layer."""
    y = x * tf.tanh(tf.nn.softplus(x))
    return y * tf.reduce_mean(x, axis=0), x


def nested(x):
    s = tf.sigmoid(x)
    y = x * s
    return s, y, tf.square(y) + s


def stopped(x):
    s = tf.sigmoid(x)
    return tf.stop_gradient(s), x * s + tf.stop_gradient(tf.exp(-x * x))


def residual(x):
    return (x + 0.5 * x * (1 + tf.math.erf(x / np.sqrt(2.0))),)


def skipped(x):
    """Return the skip connection is not element-wise in x alone."""
    return (tf.reverse(x, [1]) + x * tf.sigmoid(x), x)


@pytest.mark.parametrize("outputs, count", [(gated, 2), (nested, 3), (stopped, 2), (residual, 1),
                                            (skipped, 2)])
def test_several_outputs_and_readers(outputs, count):
    step, x = several(outputs, count)
    assert compare(step, x).taken


def test_a_chain_of_layers():
    made = np.random.default_rng(5)
    weights = [tf.Variable(0.4 * made.standard_normal((16, 16)), dtype=tf.float32)
               for _ in range(5)]
    names = ["mish", "gelu_tanh", "keras_gelu", "swish", "keras_hard_silu"]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for name, w in zip(names, weights, strict=True):
                h = ACTIVATIONS[name](tf.matmul(h, w))
            loss = tf.reduce_sum(tf.square(tf.reverse(h, [0])))
        return loss, tape.gradient(loss, weights)

    seen = compare(step, tf.constant(made.standard_normal((32, 16)), tf.float32))
    assert len(seen.taken) == 5


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_keras_model(policy):
    """Convolution, normalisation and activation under a dtype policy; the gradients agree."""
    fresh()
    keras.config.set_dtype_policy(policy)
    try:
        layers = keras.layers
        image = keras.Input((8, 8, 3))
        h = image
        for name in ("mish", "gelu", "silu", "hard_silu"):
            h = layers.Conv2D(8, 3, padding="same", use_bias=False)(h)
            h = layers.Activation(name)(layers.BatchNormalization()(h))
        model = keras.Model(image, layers.Dense(3, dtype="float32")(
            layers.GlobalAveragePooling2D()(h)))
    finally:
        keras.config.set_dtype_policy("float32")
    x = tf.constant(np.random.default_rng(0).standard_normal((4, 8, 8, 3)), tf.float32)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return loss, tape.gradient(loss, model.trainable_variables)

    dtype = {"float32": "float32", "mixed_float16": "float16",
             "mixed_bfloat16": "bfloat16"}[policy]
    fad, seen = with_forward_ad(step)
    # gradients that vanish in exact arithmetic (a bias before a normalisation) are rounding noise
    found, wanted = fad(x), tf.function(step, autograph=False)(x)
    largest = max(float(tf.reduce_max(tf.abs(g))) for g in wanted[1])
    close = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}[dtype]  # sums that cancel
    for a, b in zip(found[1], wanted[1], strict=True):
        assert np.abs(a.numpy() - b.numpy()).max() <= close * max(
            np.abs(b.numpy()).max(), 1e-2 * largest)
    assert len(seen.taken) >= 4


@tf.custom_gradient
def straight_through(x):
    return tf.round(x), lambda g: g * tf.cast(tf.abs(x) < 1.0, x.dtype)


@tf.custom_gradient
def clipped_gradient(x):
    return tf.tanh(x), lambda g: tf.clip_by_value(g, -0.1, 0.1) * (1 - tf.square(tf.tanh(x)))


@pytest.mark.parametrize("activation", [straight_through, clipped_gradient])
def test_custom_gradients_are_kept(activation):
    step, x = two_layers(activation)
    compare(step, x)


def test_what_runs_keeps_a_boolean_and_no_gradient_kernel():
    """Counted in the graph that TensorFlow executed."""
    step, x = two_layers(KERAS["hard_tanh"])
    fad, _ = with_forward_ad(step)
    fad(x)
    ops = executed(fad, x).ops
    assert ops["SelectV2"] == 1 and ops["LogicalAnd"] == 1
    step, x = two_layers(COMPOSED["mish"])
    fad, _ = with_forward_ad(step)
    fad(x)
    ops = executed(fad, x).ops
    # forward x * tanh; loss gradient; g * D; the derivative is one TanhGrad, SoftplusGrad and sum
    assert (ops["TanhGrad"], ops["SoftplusGrad"], ops["Mul"], ops["AddV2"]) == (1, 1, 3, 1)


# Property test: compositions, shapes, broadcast constants, extreme values.

UNARY = [tf.tanh, tf.sigmoid, tf.nn.softplus, tf.nn.relu, tf.nn.elu, tf.square, tf.abs, tf.sin,
         tf.math.erf, tf.nn.softsign, lambda x: tf.exp(-tf.square(x)), tf.nn.leaky_relu,
         lambda x: tf.maximum(x, 0.5), lambda x: tf.minimum(x, 1.0), lambda x: -x,
         lambda x: tf.math.log1p(tf.abs(x)), lambda x: tf.sqrt(1.0 + tf.square(x)),
         lambda x: tf.where(x > 0.25, x, 0.5 * x), lambda x: tf.pow(x, 3.0)]
BINARY = [tf.add, tf.subtract, tf.multiply, tf.maximum, lambda a, b: a / (1.0 + tf.square(b))]


@st.composite
def expressions(draw):
    """Instructions: each applies an op to one or two earlier values; value 0 is x."""
    made = []
    for n in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            made.append((draw(st.integers(0, len(UNARY) - 1)), draw(st.integers(0, n))))
        else:
            made.append((draw(st.integers(0, len(BINARY) - 1)), draw(st.integers(0, n)),
                         draw(st.one_of(st.integers(0, n), st.floats(-2, 2, width=16)))))
    return made


def interpret(made, x):
    values = [x]
    for entry in made:
        if len(entry) == 2:
            values.append(UNARY[entry[0]](values[entry[1]]))
        else:
            second = values[entry[2]] if isinstance(entry[2], int) else tf.constant(
                [entry[2], 1.0, -0.5], x.dtype)
            values.append(BINARY[entry[0]](values[entry[1]], second))
    return values[-1] + 0.125 * values[len(values) // 2]


@settings(max_examples=40, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow])
@given(expressions(), st.sampled_from([(7, 3), (1, 3), (2, 4, 3), (0, 3)]),
       st.sampled_from([1.0, 1e-3, 30.0, 1e4]), st.sampled_from(["float32", "float16"]))
def test_random_compositions(made, shape, size, dtype):
    drawn = np.random.default_rng(1)
    x = tf.cast(size * drawn.standard_normal(shape), dtype)
    upstream = tf.cast(drawn.standard_normal(shape), dtype)

    def step(x):
        h = tf.reverse(x, [-1])  # the region's input is computed, not fed
        with tf.GradientTape() as tape:
            tape.watch(h)
            y = interpret(made, h)
            loss = tf.reduce_sum(tf.reverse(y, [-1]) * upstream)
        return y, tape.gradient(loss, h)

    fad, seen = with_forward_ad(step)
    found, wanted = fad(x), tf.function(step, autograph=False)(x)
    (ya, a), (yb, b) = ([np.asarray(tf.cast(t, tf.float64)) for t in r] for r in (found, wanted))
    assert np.array_equal(ya, yb, equal_nan=True)
    finite = np.isfinite(b)
    assert np.isfinite(a[finite]).all()
    with tf.device("CPU:0"):
        scale = magnitude(made, x)
    close = {"float32": 1e-6, "float16": 1e-2}[dtype]
    assert (np.abs(a - b)[finite] <= close * (np.abs(b) + scale)[finite]).all()


def magnitude(made, x):
    """Return the size of what may cancel in the derivative: 1 plus the slope in float64, smoothed.
    """
    wide = tf.cast(tf.reverse(x, [-1]), tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(wide)
        y = interpret(made, wide)
    slope = np.nan_to_num(np.abs(tape.gradient(y, wide).numpy()), posinf=1e30)
    return slope + 1.0
