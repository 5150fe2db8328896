"""Pieces for rows of features: order, gathering, segments, linear algebra, other shapes."""

from __future__ import annotations

import tensorflow as tf

from tests.support.random_steps.draw import Apply, Draw, Shape, piece, rows, sizes


@piece(xla=False)
def ordered(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Sorting, the largest few, running sums."""
    kind, count = draw.integer(0, 5), max(shape[-1] // 4, 1)

    def apply(h):
        if kind == 0:
            return tf.sort(h, axis=-1)
        if kind == 1:
            smallest = tf.math.top_k(h, count).values[..., -1:]
            return tf.where(h >= smallest, h, 0.1 * h)
        if kind == 2:
            return tf.cumsum(h, axis=-1, reverse=True) / 8.0
        if kind == 3:
            return tf.math.cumulative_logsumexp(h, axis=-1) - 2.0
        if kind == 4:
            return tf.math.cumprod(1.0 + 0.05 * tf.tanh(h), axis=-1)
        order = tf.argsort(h, axis=-1)
        return tf.gather(h, order, batch_dims=h.shape.rank - 1)
    return apply, shape


@piece()
def moved(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Pads, slices, rolls, reversals, concatenations that give the shape back."""
    kind, width = draw.integer(0, 6), shape[-1]

    def apply(h):
        last = [[0, 0]] * (h.shape.rank - 1)
        if kind == 0:
            return h + tf.pad(h, [*last, [1, 0]])[..., :-1]
        if kind == 1:
            return h * 0.5 + tf.roll(h, 2, -1)
        if kind == 2:
            return tf.reverse(h, [-1]) + h
        if kind == 3:
            return tf.concat([h[..., width // 2:], tf.tanh(h[..., :width // 2])], -1)
        if kind == 4:
            parts = tf.unstack(tf.stack([h, tf.sin(h), h * h], axis=-1), axis=-1)
            return parts[0] + 0.3 * parts[1] - 0.1 * parts[2]
        if kind == 5:
            return tf.repeat(h, 2, axis=-1)[..., ::2] + tf.tile(h[..., :1], [
                *[1] * (h.shape.rank - 1), width])
        grown = tf.pad(h, [*last, [2, 2]], mode="REFLECT")
        return (grown[..., :width] + grown[..., 4:]) * 0.5
    return apply, shape


@piece(2)
def row_statistics(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Rows mixed with a few rows of memory, or among themselves in groups."""
    slots = draw.weight(draw.choice((8, 32)), shape[-1])
    kind = draw.integer(0, 2)

    def apply(h):
        if kind == 0:
            return tf.nn.softmax(h @ tf.transpose(slots)) @ slots + h
        if kind == 1:
            far = tf.reduce_sum(tf.math.squared_difference(h[:, None], slots[None, :8]), -1)
            return h * tf.reduce_mean(tf.exp(-0.1 * far), -1, keepdims=True)
        return h + tf.transpose(tf.tanh(tf.transpose(h)))
    return apply, shape


@piece(2)
def gathered(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Rows read by index, written by index."""
    kind, stride = draw.integer(0, 4), draw.choice((1, 3, 7))
    part = draw.inner(shape)

    def apply(h):
        count = rows(h)
        index = tf.math.floormod(tf.range(count) * stride + 1, count)
        if kind == 0:
            return part(tf.gather(h, index))
        if kind == 1:
            return h + tf.gather_nd(part(h), index[:, None])
        if kind == 2:
            return tf.scatter_nd(index[:, None], part(h), tf.shape(h))
        if kind == 3:
            return tf.tensor_scatter_nd_add(h, index[:, None], part(h))
        return tf.reverse(part(h), [0])
    return apply, shape


@piece(2, 3)
def embedded(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a table read by what is in the tensor: its gradient is sparse."""
    table = draw.weight(draw.choice((16, 64, 4096)), shape[-1])
    count = table.shape[0]
    kind = draw.integer(0, 2)

    def apply(h):
        seen = tf.abs(tf.stop_gradient(h[..., 0])) * 100.0
        ids = tf.math.floormod(tf.cast(seen, tf.int32), count)
        if kind == 0:
            return h + tf.nn.embedding_lookup(table, ids)
        if kind == 1:
            return h * tf.tanh(tf.gather(table, ids))
        return h + tf.one_hot(ids % 16, min(16, count)) @ table[:min(16, count)]
    return apply, shape


@piece(2, xla=False)
def segments(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Sums, means and maxima over groups of rows, given back to the rows."""
    kind, groups = draw.integer(0, 4), draw.choice((4, 16))

    def apply(h):
        count = rows(h)
        ids = tf.math.floormod(tf.range(count), groups)
        in_order = tf.range(count) // 8
        if kind == 0:
            return h + tf.gather(tf.math.unsorted_segment_mean(tf.tanh(h), ids, groups), ids)
        if kind == 1:
            return h + 0.1 * tf.gather(tf.math.segment_sum(h, in_order), in_order)
        if kind == 2:
            return h - tf.gather(tf.math.unsorted_segment_max(h, ids, groups), ids)
        if kind == 3:
            top = tf.stop_gradient(tf.math.unsorted_segment_max(h, ids, groups))
            e = tf.exp(h - tf.gather(top, ids))
            return e / tf.gather(tf.math.unsorted_segment_sum(e, ids, groups), ids) * 4.0
        return h * tf.gather(tf.math.segment_mean(tf.sigmoid(h), in_order), in_order)
    return apply, shape


@piece(2)
def experts(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a mixture of experts."""
    count, width = draw.choice((2, 4)), shape[-1]
    gate, weight = draw.weight(width, count), draw.weight(count, width, width)
    kind, activation = draw.integer(0, 2), draw.activation()

    def apply(h):
        shares = tf.nn.softmax(h @ gate)
        if kind == 0:
            return tf.einsum("be,beo->bo", shares, activation(tf.einsum("bi,eio->beo", h, weight)))
        if kind == 1:
            made = tf.matmul(tf.tile(h[None], [count, 1, 1]), weight)
            return tf.reduce_sum(tf.transpose(shares)[:, :, None] * activation(made), 0)
        outputs = [activation(h @ weight[e]) * shares[:, e:e + 1] for e in range(count)]
        return tf.add_n(outputs)
    return apply, shape


@piece(2, xla=False, rare=True)
def routed(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Rows go to one of two layers, by how large they are: sizes depend on data."""
    first, second = draw.weight(shape[-1], shape[-1]), draw.weight(shape[-1], shape[-1])
    kind = draw.integer(0, 2)

    def apply(h):
        large = tf.reduce_mean(h, -1) > 0.0
        if kind == 0:
            one = tf.boolean_mask(h, large)
            made = tf.tanh(one @ first)
            return h + tf.scatter_nd(tf.where(large), made, tf.shape(h, out_type=tf.int64))
        if kind == 1:
            parts = tf.dynamic_partition(h, tf.cast(large, tf.int32), 2)
            index = tf.dynamic_partition(tf.range(rows(h)), tf.cast(large, tf.int32), 2)
            made = tf.dynamic_stitch(index, [tf.tanh(parts[0] @ first), parts[1] @ second])
            return tf.ensure_shape(made, h.shape)
        ids, back = tf.unique(tf.cast(tf.round(h[:, 0] * 4.0), tf.int32))
        sums = tf.math.unsorted_segment_sum(tf.tanh(h @ first), back, tf.size(ids))
        return h + 0.1 * tf.gather(sums, back)
    return apply, shape


@piece(2, xla=False, rare=True)
def ragged(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Ragged and sparse tensors on the way."""
    weight, kind = draw.weight(shape[-1], shape[-1]), draw.integer(0, 2)

    def apply(h):
        count = rows(h)
        if kind == 0:
            lengths = tf.math.floormod(tf.range(count), 4) + 1
            words = tf.RaggedTensor.from_row_lengths(tf.repeat(h, lengths, axis=0), lengths)
            return h + tf.reduce_mean(words.with_values(tf.tanh(words.values @ weight)), 1)
        index = tf.cast(tf.stack([tf.range(count), tf.reverse(tf.range(count), [0])], 1), tf.int64)
        sparse = tf.SparseTensor(index, tf.ones([count]), tf.cast([count, count], tf.int64))
        if kind == 1:
            return h + tf.sparse.sparse_dense_matmul(sparse, tf.tanh(h @ weight))
        bags = tf.RaggedTensor.from_uniform_row_length(tf.range(count) % shape[-1], 1)
        return h + tf.nn.safe_embedding_lookup_sparse(weight, bags.to_sparse(), combiner="sum")
    return apply, shape


@piece(xla=False, twice=False)
def linear_algebra(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Decompositions of a small matrix that is made of weights or of the features' covariance."""
    size, kind = shape[-1], draw.integer(0, 5)
    weight = draw.weight(size, size)
    low = draw.weight(size, 4)

    def matrix():
        return tf.matmul(weight, weight, transpose_b=True) * 0.1 + tf.eye(size)

    def apply(h):
        if kind == 0:
            turned = tf.linalg.inv(matrix())
        elif kind == 1:
            turned = tf.linalg.cholesky(matrix())
        elif kind == 2:
            turned = tf.linalg.solve(matrix(), weight)
        elif kind == 3:
            q, r = tf.linalg.qr(low)
            inside = tf.matmul(r, r, transpose_b=True)
            turned = tf.eye(size) + tf.matmul(q, inside @ tf.transpose(q))
        elif kind == 4:
            turned = weight / tf.reduce_max(tf.linalg.svd(weight[:6, :6], compute_uv=False))
        else:
            turned = tf.linalg.triangular_solve(
                tf.linalg.band_part(weight, -1, 0) * 0.1 + tf.eye(size), weight)
            turned += tf.linalg.logdet(matrix()) * 0.01
        return tf.tensordot(h, turned, 1)
    return apply, shape


@piece(2, 3)
def powered(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Spectral normalisation: a vector is iterated, and kept in a variable."""
    weight = draw.weight(shape[-1], shape[-1])
    vector = draw.variable([[shape[-1] ** -0.5] * shape[-1]])

    def apply(h):
        v = tf.math.l2_normalize(vector @ weight)
        u = tf.stop_gradient(tf.math.l2_normalize(tf.matmul(v, weight, transpose_b=True)))
        vector.assign(u)
        return tf.tensordot(h, weight / tf.reduce_sum((u @ weight) * tf.stop_gradient(v)), 1)
    return apply, shape


@piece(rare=True)
def empty(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Tensors without elements take part."""
    weight, nothing = draw.weight(shape[-1], shape[-1]), draw.weight(0, shape[-1])

    def apply(h):
        none = tf.tanh(tf.tensordot(h[:0], weight, 1))
        return tf.concat([h, none], 0) + tf.reduce_sum(nothing) + tf.reduce_sum(none)
    return apply, shape


@piece(rare=True)
def unconnected(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Weights whose gradients are zero or missing, and results that nothing reads."""
    part, other = draw.inner(shape), draw.inner(shape)

    def apply(h):
        _ = tf.reduce_sum(other(h))
        return h + tf.stop_gradient(part(h)) + 0.0 * other(h)
    return apply, shape


@piece(2, xla=False, rare=True)
def words(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Strings on the way to an embedding."""
    table = draw.weight(32, shape[-1])

    def apply(h):
        text = tf.strings.as_string(tf.round(tf.stop_gradient(h[:, 0]) * 3.0))
        return h + tf.gather(table, tf.strings.to_hash_bucket_fast(text, 32))
    return apply, shape


@piece(2, keeps=False, fixed=True)
def to_sequence(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return each row becomes a short sequence, or a small picture."""
    if shape[-1] % 16 or draw.chance(0.5):
        made = (shape[-1] // 4, 4) if shape[-1] % 4 == 0 else (shape[-1], 1)
    else:
        made = (4, 4, shape[-1] // 16)
    widened = draw.weight(shape[-1], shape[-1])
    return lambda h: tf.reshape(tf.tanh(h @ widened), [-1, *made]), (shape[0], *made)


@piece(3, 4, 5, keeps=False, fixed=True)
def to_rows(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return all but the last dimension become one."""
    count = 1
    for size in shape[:-1]:
        count *= size
    return lambda h: tf.reshape(h, [-1, shape[-1]]), (count, shape[-1])


@piece(3, 4, fixed=True)
def turned(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a layer over another dimension, by transposing there and back."""
    weight, activation = draw.weight(shape[1], shape[1]), draw.activation()

    def apply(h):
        order = list(range(h.shape.rank))
        order[1], order[-1] = order[-1], order[1]
        mixed = activation(tf.tensordot(tf.transpose(h, order), weight, 1))
        return h + tf.transpose(mixed, order)
    return apply, shape


@piece()
def broadcast(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Tensors of lower rank and single columns are spread out."""
    row, scalar = draw.weight(1, shape[-1]), draw.constant_weight(0.7)
    activation = draw.activation()

    def apply(h):
        column = tf.reduce_mean(h, -1, keepdims=True)
        spread = tf.broadcast_to(column, sizes(h))
        return activation(h * scalar + row[0]) + spread * column
    return apply, shape
