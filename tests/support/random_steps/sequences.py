"""Pieces for sequences: attention, convolutions over time, recurrences."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.support.random_steps.draw import Apply, Draw, Shape, piece, sizes


def _heads(draw: Draw, shape: Shape) -> int:
    return draw.choice([n for n in (1, 2, 4) if shape[-1] % n == 0])


@piece(3)
def attention(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Self attention with heads, and one mask or another."""
    width, heads = shape[-1], _heads(draw, shape)
    size = width // heads
    q, k, v, o = (draw.weight(width, width) for _ in range(4))
    mask, dropped = draw.choice(("", "causal", "band", "data")), draw.chance(0.3)
    seed = draw.integer(1, 99)

    def apply(h):
        batch, length, _ = sizes(h)

        def cut(weight):
            made = tf.reshape(tf.tensordot(h, weight, 1), [batch, length, heads, size])
            return tf.transpose(made, [0, 2, 1, 3])
        scores = tf.matmul(cut(q), cut(k), transpose_b=True) * size ** -0.5
        if mask == "causal":
            seen = tf.linalg.band_part(tf.ones([length, length]), -1, 0)
            scores = scores * seen - 1e9 * (1.0 - seen)
        elif mask == "band":
            near = tf.abs(tf.range(length)[:, None] - tf.range(length)[None]) < 3
            scores = tf.where(near, scores, -1e9)
        elif mask == "data":
            seen = h[:, :, 0] > -1.5
            scores += tf.where(seen, 0.0, -1e4)[:, None, None, :]
        shares = tf.nn.softmax(scores)
        if dropped:
            keep = tf.random.stateless_uniform(tf.shape(shares), [seed, 1]) > 0.1
            shares = tf.where(keep, shares / 0.9, 0.0)
        mixed = tf.transpose(tf.matmul(shares, cut(v)), [0, 2, 1, 3])
        return h + tf.tensordot(tf.reshape(mixed, [batch, length, width]), o, 1)
    return apply, shape


@piece(3)
def einsum_attention(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Attention in einsums; several queries share keys."""
    width, heads = shape[-1], _heads(draw, shape)
    size = width // heads
    q, o = draw.weight(width, heads, size, scale=width ** -0.5), draw.weight(heads, size, width)
    kv = draw.weight(width, 2, size, scale=width ** -0.5)
    linear = draw.chance(0.3)

    def apply(h):
        query = tf.einsum("btd,dhe->bhte", h, q)
        key, value = tf.unstack(tf.einsum("btd,dke->kbte", h, kv))
        if linear:
            query, key = tf.nn.elu(query) + 1.0, tf.nn.elu(key) + 1.0
            sums = tf.einsum("bse,bsv->bev", key, value)
            norm = tf.einsum("bhte,be->bht", query, tf.reduce_sum(key, 1)) + 1.0
            mixed = tf.einsum("bhte,bev->bhtv", query, sums) / norm[..., None]
        else:
            scores = tf.einsum("bhte,bse->bhts", query, key) * size ** -0.5
            mixed = tf.einsum("bhts,bsv->bhtv", tf.nn.softmax(scores, axis=-1), value)
        return h + tf.einsum("bhtv,hvd->btd", mixed, o)
    return apply, shape


@piece(3, twice=False)
def convolution_1d(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a convolution over time; causal, dilated, gated."""
    made, size = draw.width(shape), draw.choice((1, 2, 3))
    dilation, causal = draw.choice((1, 2)), draw.chance(0.4)
    weight, activation = draw.weight(size, shape[-1], made), draw.activation()

    def apply(h):
        if causal:
            h = tf.pad(h, [[0, 0], [(size - 1) * dilation, 0], [0, 0]])
        h = tf.nn.convolution(h, weight, padding="VALID" if causal else "SAME",
                              dilations=[dilation])
        return activation(h)
    return apply, (*shape[:-1], made)


@piece(3)
def along_time(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Shifts, running sums and lengths over time."""
    kind = draw.integer(0, 4)

    def apply(h):
        batch, length, _ = sizes(h)
        if kind == 0:
            return h + tf.pad(h, [[0, 0], [1, 0], [0, 0]])[:, :-1]
        if kind == 1:
            return tf.cumsum(h, 1) / tf.cast(tf.range(1, length + 1), tf.float32)[None, :, None]
        lengths = tf.math.floormod(tf.range(batch), length) + 1
        if kind == 2:
            mask = tf.sequence_mask(lengths, length, tf.float32)[:, :, None]
            mean = tf.reduce_sum(h * mask, 1, keepdims=True) / tf.reduce_sum(mask, 1, keepdims=True)
            return h * mask + tf.tanh(mean)
        if kind == 3:
            return h + tf.reverse_sequence(tf.sin(h), lengths, seq_axis=1, batch_axis=0)
        last = tf.gather(h, lengths - 1, batch_dims=1)
        return h + tf.tanh(last)[:, None]
    return apply, shape


def _cell(draw: Draw, width: int):
    """Return a recurrent cell: `(x, h) -> h`."""
    w, u, b = draw.weight(width, width), draw.weight(width, width), draw.weight(width)
    gates = draw.weight(2 * width, width) if draw.chance(0.5) else None

    def cell(x, h):
        made = tf.tanh(x @ w + h @ u + b)
        if gates is None:
            return made
        gate = tf.sigmoid(tf.concat([x, h], -1) @ gates)
        return gate * h + (1.0 - gate) * made
    return cell


@piece(3, xla=False, twice=False, fixed=True)
def recurrence(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a recurrent layer: unrolled, in a `tf.while_loop`, a scan, or under autograph."""
    _, length, width = shape
    cell, steps = _cell(draw, width), min(length, 12)
    kind = draw.choice(("unrolled", "while", "scan", "autograph", "keras"))
    keras_cell = None
    if kind == "keras":
        import keras
        keras_cell = draw.choice((keras.layers.GRU, keras.layers.LSTM))(
            width, return_sequences=True,
            kernel_initializer=keras.initializers.Constant(0.05))
        keras_cell.build((None, length, width))
        draw.trainable += [v.value for v in keras_cell.trainable_variables]

    def apply(h):
        turned = tf.transpose(h[:, :steps], [1, 0, 2])
        start = tf.zeros_like(turned[0])
        if kind == "keras":
            return h + keras_cell(h)
        if kind == "unrolled":
            found, state = [], start
            for i in range(steps):
                state = cell(turned[i], state)
                found.append(state)
            made = tf.stack(found)
        elif kind == "scan":
            made = tf.scan(lambda s, x: cell(x, s), turned, start)
        elif kind == "while":
            made = _looped(cell, turned, start, steps)
        else:
            made = _autographed(cell, turned, start)
        made = tf.ensure_shape(tf.transpose(made, [1, 0, 2]), [None, steps, width])
        return h + tf.pad(made, [[0, 0], [0, length - steps], [0, 0]])
    return apply, shape


def _looped(cell, turned, start, steps):
    def body(i, state, found):
        state = cell(turned[i], state)
        return i + 1, state, found.write(i, state)
    found = tf.TensorArray(tf.float32, steps, element_shape=start.shape)
    return tf.while_loop(lambda i, *_: i < steps, body, (0, start, found))[2].stack()


@tf.autograph.experimental.do_not_convert
def _autographed(cell, turned, start):
    def run(turned, state):
        found = tf.TensorArray(tf.float32, size=0, dynamic_size=True,
                               element_shape=state.shape)
        for x in turned:
            state = cell(x, state)
            found = found.write(found.size(), state)
        return found.stack()
    return tf.autograph.to_graph(run)(turned, start)


@piece(3, 4, xla=False, twice=False)
def mapped(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """`tf.map_fn` or `tf.vectorized_map` over the batch."""
    weight, kind = draw.weight(shape[-1], shape[-1]), draw.choice(("map", "vectorized"))
    activation = draw.activation()

    def one(x):
        return activation(tf.tensordot(x, weight, 1))

    def apply(h):
        if kind == "map":
            first = tf.map_fn(one, h[:4])
            return tf.concat([first, h[4:]], 0)
        return tf.vectorized_map(one, h)
    return apply, shape


@piece(3, fixed=True)
def positions(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Positions: learned, of sines, or turning pairs of features."""
    _, length, width = shape
    kind = draw.integer(0, 2)
    table = draw.weight(length, width)
    angles = np.arange(length)[:, None] / 10.0 ** np.linspace(0, 3, width)[None]

    def apply(h):
        if kind == 0:
            return h + table
        if kind == 1:
            return h + tf.constant(np.sin(angles), tf.float32)
        c, s = (tf.constant(f(angles), tf.float32) for f in (np.cos, np.sin))
        return h * c + tf.roll(h, width // 2, -1) * s
    return apply, shape


@piece(3, xla=False, twice=False, rare=True, fixed=True)
def frames(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Overlapping frames and their spectra."""
    _, length, width = shape
    if length < 8:
        return lambda h: h, shape
    weight = draw.weight(4 // 2 + 1, width)

    def apply(h):
        signal = tf.reduce_mean(h, -1)
        spectra = tf.abs(tf.signal.stft(signal, 4, 2, fft_length=4) + tf.complex(0.1, 0.1))
        return h + tf.reduce_mean(tf.tensordot(spectra, weight, 1), 1, keepdims=True)
    return apply, shape
