"""Beginnings and ends of steps: batches of all kinds, and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.support.random_steps.draw import Draw, Shape, rows

CLASSES = 5


@dataclasses.dataclass(frozen=True)
class Source:
    """A kind of batch.

    Attributes:
      batch: makes the arguments `(x, y)` of the step from numbers and a count of rows.
      apply: from `x` to a float tensor.
      shape: of that tensor, for a batch of `rows`.
      labels: "classes" or "numbers".
    """

    batch: Callable
    apply: Callable
    shape: Shape
    rows: int
    labels: str


def _labels(kind: str, made: np.random.Generator, count: int) -> tf.Tensor:
    if kind == "classes":
        return tf.constant(made.integers(0, CLASSES, (count,)), tf.int32)
    return tf.constant(made.standard_normal((count, 1)), tf.float32)


def _floats(draw: Draw, shape: Shape, wrap: Callable = lambda x: x,
            unwrap: Callable = lambda x: x) -> Source:
    labels = draw.choice(("classes", "numbers"))

    def batch(made, count):
        x = tf.constant(made.standard_normal((count, *shape[1:])), tf.float32)
        return wrap(x), _labels(labels, made, count)
    return Source(batch, unwrap, shape, shape[0], labels)


def features(draw: Draw) -> Source:
    """Rows of numbers."""
    return _floats(draw, draw.choice(((1024, 64), (2048, 32), (4096, 16), (1024, 96), (600, 128))))


def sequences(draw: Draw) -> Source:
    """Sequences of numbers."""
    return _floats(draw, draw.choice(((32, 32, 64), (64, 32, 32), (16, 64, 64), (128, 16, 48))))


def pictures(draw: Draw) -> Source:
    """Pictures."""
    return _floats(draw, draw.choice(((16, 16, 16, 16), (8, 32, 32, 8), (32, 16, 16, 8))))


def volumes(draw: Draw) -> Source:
    """Volumes."""
    return _floats(draw, draw.choice(((4, 8, 16, 16, 8), (8, 4, 16, 16, 8))))


def several(draw: Draw) -> Source:
    """Return a dictionary of a tuple and a tensor."""
    shape = draw.choice(((1024, 64), (64, 32, 32)))
    return _floats(draw, shape, lambda x: {"pair": (x, 0.5 * x), "scale": x[..., :1]},
                   lambda x: x["pair"][0] + tf.tanh(x["pair"][1]) * x["scale"])


def tokens(draw: Draw) -> Source:
    """Sequences of words, embedded."""
    count, length, width = draw.choice(((32, 32, 64), (64, 16, 64)))
    table = draw.weight(draw.choice((50, 1000)), width, scale=1.0)
    size, labels = table.shape[0], draw.choice(("classes", "numbers"))

    def batch(made, n):
        return (tf.constant(made.integers(0, size, (n, length)), tf.int32),
                _labels(labels, made, n))
    return Source(batch, lambda x: tf.nn.embedding_lookup(table, x), (count, length, width), count,
                  labels)


def texts(draw: Draw) -> Source:
    """Strings, hashed and embedded."""
    table, count = draw.weight(64, 64), 1024

    def batch(made, n):
        return (tf.strings.as_string(tf.constant(made.integers(0, 500, (n,)))),
                _labels("classes", made, n))
    return Source(batch, lambda x: tf.gather(table, tf.strings.to_hash_bucket_fast(x, 64)),
                  (count, 64), count, "classes")


def bags(draw: Draw) -> Source:
    """Ragged rows of words, summed."""
    table, count = draw.weight(200, 64), 1024

    def batch(made, n):
        lengths = made.integers(1, 6, (n,))
        values = tf.constant(made.integers(0, 200, (int(lengths.sum()),)), tf.int32)
        return tf.RaggedTensor.from_row_lengths(values, lengths), _labels("classes", made, n)
    return Source(batch, lambda x: tf.reduce_sum(tf.gather(table, x), 1), (count, 64), count,
                  "classes")


def sparse(draw: Draw) -> Source:
    """Return a sparse matrix times a dense one."""
    weight, count = draw.weight(100, 64), 1024

    def batch(made, n):
        dense = made.standard_normal((n, 100)) * (made.random((n, 100)) < 0.1)
        return tf.sparse.from_dense(tf.constant(dense, tf.float32)), _labels("classes", made, n)
    return Source(batch, lambda x: tf.sparse.sparse_dense_matmul(x, weight), (count, 64), count,
                  "classes")


SOURCES = {f.__name__: f for f in (features, sequences, pictures, volumes, several, tokens, texts,
                                   bags, sparse)}
SHARES = {"features": 10, "sequences": 7, "pictures": 6, "volumes": 1, "several": 2, "tokens": 4,
          "texts": 1, "bags": 1, "sparse": 1}
DIFFERENTIABLE = ("features", "sequences", "pictures", "volumes")


def head(draw: Draw, shape: Shape, labels: str) -> Callable:
    """Draw a loss of the features: pooled to one row an example, a product, a distance."""
    width = shape[-1]
    weight = draw.weight(width, CLASSES if labels == "classes" else 1)
    pool = draw.choice((tf.reduce_mean, tf.reduce_max) if not draw.needs.xla else (tf.reduce_mean,))
    kind = draw.integer(0, 2)

    def loss(h, y):
        pooled = _per_example(h, rows(y), pool)
        made = pooled @ weight
        if labels == "classes":
            if kind == 0:
                return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, made))
            hot = tf.one_hot(y, CLASSES)
            if kind == 1:
                return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(hot, made))
            return -tf.reduce_mean(tf.reduce_sum(tf.nn.log_softmax(made) * hot, -1))
        if kind == 0:
            return tf.reduce_mean(tf.math.squared_difference(made, y))
        if kind == 1:
            return tf.reduce_mean(tf.math.log(tf.cosh(0.5 * (made - y)))) + tf.reduce_mean(h * h)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(y), made))
    return loss


def _per_example(h: tf.Tensor, count, pool: Callable) -> tf.Tensor:
    """One row of features for each label, whatever became of the shape."""
    flat = tf.reshape(h, [count, -1, h.shape[-1]])
    return pool(flat, 1)
