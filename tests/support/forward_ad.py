"""Steps whose traces get forward-AD alternatives, without a planner: all of them, or some."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tests.support.graph_diff import graph_edits
from tfckpt.capture import tf_adapter
from tfckpt.capture.shapes import concrete_shapes, has_unknown_shapes
from tfckpt.capture.tfgraph import capture
from tfckpt.cost.storage import roots
from tfckpt.fad.alternatives import Alternative, Offers, find_alternatives
from tfckpt.fad.transform import take
from tfckpt.ir.edits import check_edits
from tfckpt.ir.graph import Graph
from tfckpt.rewrite.appliers.funcgraph import apply

_MARK = "_fad_test_mark"


@dataclasses.dataclass
class Seen:
    """The hook's findings and actions in its last trace."""

    graph: Graph | None = None
    after: Graph | None = None
    offers: Offers | None = None
    taken: tuple[Alternative, ...] = ()


def with_forward_ad(body: Callable, *, choose: Callable[[Alternative], bool] = lambda a: True,
                    batch: int | None = None, jit_compile: bool = False, signature=None):
    """Return a `tf.function` over `body` whose traces are rewritten, and what was seen."""
    seen = Seen()
    tf_adapter.install_trace_hook(_hook)

    def marked(*args):
        setattr(tf_adapter.tracing_graph(), _MARK, (seen, choose, batch))
        return body(*args)

    return tf.function(marked, jit_compile=jit_compile, input_signature=signature,
                       autograph=False), seen


def _hook(func_graph) -> None:
    mark = getattr(func_graph, _MARK, None)
    if mark is None:
        return
    delattr(func_graph, _MARK)
    seen, choose, batch = mark
    shapes = concrete_shapes(func_graph, batch, {}) if has_unknown_shapes(func_graph) else None
    seen.graph = capture(func_graph, shapes=shapes)
    seen.offers = find_alternatives(seen.graph, roots(seen.graph))
    seen.taken = tuple(a for a in seen.offers.alternatives if choose(a))
    seen.after, edits = take(seen.graph, seen.taken)
    assert edits == graph_edits(seen.graph, seen.after)
    check_edits(seen.graph, edits)
    apply(func_graph, edits)


# Activations: as Keras 3 has them, and as people write them.

C = 0.7978845608028654
KERAS = {name: getattr(keras.activations, name) for name in (
    "mish", "gelu", "silu", "hard_silu", "celu", "squareplus", "relu", "elu", "selu", "softplus",
    "softsign", "log_sigmoid", "hard_sigmoid", "hard_tanh", "leaky_relu", "relu6", "soft_shrink",
    "hard_shrink", "sparse_plus", "tanh_shrink", "threshold", "sparse_sigmoid", "tanh", "sigmoid",
    "exponential") if hasattr(keras.activations, name)}
KERAS["threshold"] = lambda x: keras.activations.threshold(x, 0.5, 0.25)
KERAS["gelu_approximate"] = lambda x: keras.activations.gelu(x, approximate=True)
COMPOSED = {
    "swish": lambda x: x * tf.sigmoid(x),
    "mish": lambda x: x * tf.tanh(tf.nn.softplus(x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + tf.tanh(C * (x + 0.044715 * x ** 3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + tf.math.erf(x / np.sqrt(2.0))),
    "division": lambda x: x / (1 + tf.exp(-x)),
    "polynomial": lambda x: 0.01 * (x ** 2 - 3 * x + tf.square(x + 1) * x),
    "rational": lambda x: (1 + x * x) / (2 + tf.abs(x)),
    "sine": lambda x: x + tf.square(tf.sin(0.7 * x)) / 0.7,
    "power": lambda x: tf.pow(tf.cast(2.0, x.dtype), 0.1 * x) - tf.sqrt(x * x + 1.0),
    "clipped": lambda x: tf.clip_by_value(x, -1.0, 1.5) * x,
    "chosen": lambda x: tf.where(x > 0.3, tf.tanh(x), 0.1 * x),
    "vector": lambda x: tf.sigmoid(x * tf.constant(
        np.linspace(-1, 2, x.shape[-1]), x.dtype)) * x,
}


def two_layers(activation: Callable, *, width: int = 16, dtype=tf.float32, seed: int = 0,
               rows: int = 32, scale: float = 1.0):
    """Activation between two dense layers: a step returning the loss and both gradients, and x."""
    made = np.random.default_rng(seed)
    first = tf.Variable(tf.cast(scale * made.standard_normal((8, width)), dtype))
    second = tf.Variable(tf.cast(0.3 * made.standard_normal((width, 4)), dtype))
    x = tf.constant(made.standard_normal((rows, 8)), dtype)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.matmul(activation(tf.matmul(x, first)), second)))
        return loss, tape.gradient(loss, [first, second])

    return step, x


def tower(activation: Callable, layers: int, *, rows: int = 2048, width: int = 256,
          end: Callable = lambda h, weights: tf.reverse(h, [0])):
    """Dense layers with the activation after each: a step returning loss and gradients, and x.

    Args:
      end: what the loss squares, from the last activation and the weights.
    """
    made = np.random.default_rng(0)
    weights = [tf.Variable(made.standard_normal((width, width)) / np.sqrt(width), dtype=tf.float32)
               for _ in range(layers)]
    x = tf.constant(made.standard_normal((rows, width)), tf.float32)

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = activation(tf.matmul(h, w))
            loss = tf.reduce_sum(tf.square(end(h, weights)))
        return loss, tape.gradient(loss, weights)

    return step, x


def worst(found, wanted) -> float:
    """Largest difference relative to each tensor's largest entry."""
    pairs = [(np.asarray(tf.cast(a, tf.float64)), np.asarray(tf.cast(b, tf.float64)))
             for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)
