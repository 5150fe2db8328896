"""Pieces for tensors of every rank, and for rows of features: products, activations, statistics."""

from __future__ import annotations

import tensorflow as tf

from tests.support.random_steps.draw import Apply, Draw, Shape, piece, sizes


def _product(draw: Draw, width: int, made: int) -> Apply:
    """Return a product of the last dimension with a matrix, written in one of several ways."""
    weight = draw.weight(width, made)
    turned = draw.weight(made, width) if draw.chance(0.2) else None
    kind = draw.integer(0, 4)

    def apply(h):
        if turned is not None:
            return tf.linalg.matmul(h, turned, transpose_b=True) if h.shape.rank == 2 else (
                tf.einsum("...i,oi->...o", h, turned) + 0.0 * tf.reduce_sum(weight))
        if kind == 0:
            return tf.tensordot(h, weight, [[-1], [0]])
        if kind == 1:
            return tf.einsum("...i,io->...o", h, weight)
        if kind == 2 and h.shape.rank > 2:
            flat = tf.reshape(h, [-1, width])
            return tf.reshape(flat @ weight, [*sizes(h)[:-1], made])
        return h @ weight if h.shape.rank == 2 else tf.matmul(h, weight)
    return apply


@piece()
def dense(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a dense layer."""
    made = draw.width(shape)
    product, activation = _product(draw, shape[-1], made), draw.activation()
    bias = draw.weight(made) if draw.chance(0.7) else None
    fused = draw.chance(0.5)

    def apply(h):
        h = product(h)
        if bias is not None:
            h = tf.nn.bias_add(h, bias) if fused and h.shape.rank == 2 else h + bias
        return activation(h)
    return apply, (*shape[:-1], made)


@piece()
def residual_mlp(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Two products around an activation, added to what came in."""
    width = shape[-1] * draw.choice((1, 2))
    first, second = _product(draw, shape[-1], width), _product(draw, width, shape[-1])
    activation = draw.activation()
    scale = draw.constant_weight(0.5, shape[-1]) if draw.chance(0.4) else 1.0
    return lambda h: h + second(activation(first(h))) * scale, shape


@piece()
def activations(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a few activations in a row, element-wise."""
    chosen = [draw.activation() for _ in range(draw.integer(1, 3))]
    scale = draw.constant_weight(0.9, shape[-1])

    def apply(h):
        for f in chosen:
            h = f(h * scale)
        return h
    return apply, shape


@piece()
def gated(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a gated linear unit."""
    product, gate = _product(draw, shape[-1], 2 * shape[-1]), draw.activation()
    cut = draw.choice(("split", "slice", "strided"))

    def apply(h):
        both = product(h)
        if cut == "split":
            a, b = tf.split(both, 2, axis=-1)
        elif cut == "slice":
            a, b = both[..., :shape[-1]], both[..., shape[-1]:]
        else:
            a, b = both[..., ::2], both[..., 1::2]
        return a * gate(b)
    return apply, shape


@piece()
def layer_norm(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Layer normalisation by hand."""
    gamma, beta = draw.constant_weight(1.0, shape[-1]), draw.weight(shape[-1])
    kind = draw.integer(0, 2)

    def apply(h):
        if kind == 0:
            mean, variance = tf.nn.moments(h, -1, keepdims=True)
            return tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-3)
        if kind == 1:
            return h * tf.math.rsqrt(tf.reduce_mean(tf.square(h), -1, keepdims=True) + 1e-3) * gamma
        centred = h - tf.reduce_mean(h, -1, keepdims=True)
        spread = tf.reduce_mean(centred * centred, -1, keepdims=True)
        return centred / tf.sqrt(spread + 1e-3) * gamma + beta
    return apply, shape


@piece()
def batch_statistics(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Batch normalisation by hand; moving averages are written, and sometimes read."""
    gamma, beta = draw.constant_weight(1.0, shape[-1]), draw.weight(shape[-1])
    mean, variance = draw.variable([0.0] * shape[-1]), draw.variable([1.0] * shape[-1])
    renorm, stopped = draw.chance(0.3), draw.chance(0.3)

    def apply(h):
        axes = list(range(h.shape.rank - 1))
        m, v = tf.nn.moments(h, axes)
        if stopped:
            m = tf.stop_gradient(m)
        mean.assign_sub(0.1 * (mean - m))
        variance.assign(0.9 * variance + 0.1 * tf.stop_gradient(v))
        if renorm:
            v = v * 0.5 + 0.5 * variance
        return (h - m) * tf.math.rsqrt(v + 1e-2) * gamma + beta
    return apply, shape


@piece(xla=False)
def dropout(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Dropout with a stateful generator."""
    rate, seed = draw.choice((0.1, 0.3, 0.5)), draw.integer(1, 99)
    noise = draw.integer(0, 2)

    def apply(h):
        if noise == 1:
            return h + 0.1 * tf.random.normal(tf.shape(h), seed=seed)
        if noise == 2:
            return tf.nn.dropout(h, rate, noise_shape=[1] * (h.shape.rank - 1) + [shape[-1]],
                                 seed=seed)
        return tf.nn.dropout(h, rate, seed=seed)
    return apply, shape


@piece()
def stateless_dropout(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Dropout from a seed: a constant one, or a counter that is a variable."""
    rate, number = draw.choice((0.1, 0.3)), draw.integer(1, 99)
    counter = draw.variable([number, 0], "int32") if draw.chance(0.6) else None

    def apply(h):
        seed = tf.constant([number, 7])
        if counter is not None:
            seed = counter.read_value() if number % 2 else tf.identity(counter)
            counter.assign_add([0, 1])
        keep = tf.random.stateless_uniform(tf.shape(h), seed) >= rate
        return tf.where(keep, h / (1.0 - rate), 0.0)
    return apply, shape


@piece(xla=False)
def generator(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Noise of a `tf.random.Generator`."""
    made = tf.random.Generator.from_seed(draw.integer(1, 999))
    draw.state.append(made.state)
    return lambda h: h + 0.1 * made.normal(tf.shape(h)), shape


@piece()
def branches(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return the same tensor read several times, joined by a sum, a product or a maximum."""
    parts = [draw.inner(shape) for _ in range(draw.integer(2, 3))]
    join = draw.choice(("add", "add_n", "mul", "max", "mean", "lerp"))

    def apply(h):
        made = [part(h) for part in parts]
        if join == "add_n":
            return tf.add_n([h, *made]) * 0.5
        if join == "mul":
            return tf.tanh(made[0]) * made[1]
        if join == "max":
            return tf.maximum(made[0], made[1])
        if join == "mean":
            return tf.reduce_mean(tf.stack(made), 0)
        if join == "lerp":
            gate = tf.sigmoid(made[0])
            return gate * made[1] + (1.0 - gate) * h
        return made[0] + made[1]
    return apply, shape


@piece()
def shared(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """One layer, used several times."""
    part, times = draw.inner(shape), draw.integer(2, 3)
    skips = draw.chance(0.5)

    def apply(h):
        for _ in range(times):
            h = part(h) + h if skips else part(h)
        return h
    return apply, shape


@piece()
def softmax(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Softmax in one of several forms."""
    kind, scale = draw.integer(0, 3), float(shape[-1])

    def apply(h):
        if kind == 0:
            return tf.nn.softmax(h) * scale
        if kind == 1:
            return tf.nn.log_softmax(h) + 3.0
        if kind == 2:
            e = tf.exp(h - tf.stop_gradient(tf.reduce_max(h, -1, keepdims=True)))
            return scale * e / tf.reduce_sum(e, -1, keepdims=True)
        return h - tf.reduce_logsumexp(h, -1, keepdims=True) + 3.0
    return apply, shape


@piece()
def chosen(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """`tf.where`, clipping, straight-through rounding."""
    kind, edge = draw.integer(0, 5), draw.choice((0.0, 0.5))
    part = draw.inner(shape)

    def apply(h):
        if kind == 0:
            return tf.where(h > edge, part(h), h)
        if kind == 1:
            return tf.where(h > edge, h, 0.1)
        if kind == 2:
            return tf.clip_by_value(part(h), -2.0, 2.0)
        if kind == 3:
            return h + tf.stop_gradient(tf.round(4.0 * h) / 4.0 - h)
        if kind == 4:
            return tf.where(tf.reduce_mean(h) > edge, part(h), h)
        return tf.minimum(tf.maximum(h, -1.5), part(h))
    return apply, shape


@piece()
def other_precision(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a part in another floating type."""
    dtype = draw.choice((tf.float16, tf.bfloat16, tf.float64))
    weight, activation = draw.weight(shape[-1]), draw.choice((tf.tanh, tf.nn.relu, tf.sigmoid))
    matrix = draw.weight(shape[-1], shape[-1]) if draw.chance(0.5) else None

    def apply(h):
        low = tf.cast(h, dtype) * tf.cast(weight, dtype)
        if matrix is not None:
            low = tf.tensordot(low, tf.cast(matrix, dtype), 1)
        return tf.cast(activation(low), tf.float32)
    return apply, shape


@piece(xla=False, twice=False)
def complex_numbers(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Complex arithmetic and Fourier transforms."""
    kind = draw.integer(0, 3)
    real, imaginary = draw.weight(shape[-1]), draw.weight(shape[-1])
    half, half_imaginary = draw.weight(shape[-1] // 2 + 1), draw.weight(shape[-1] // 2 + 1)

    def apply(h):
        if kind == 0:
            z = tf.signal.rfft(h) * tf.complex(half, half_imaginary)
            return h + tf.signal.irfft(z, [shape[-1]])
        z = tf.complex(h, h * imaginary)
        if kind == 1:
            z = tf.signal.ifft(tf.signal.fft(z) * tf.complex(real, imaginary))
            return h + tf.math.real(z) * tf.math.imag(z)
        if kind == 2:
            z = z * tf.exp(tf.complex(tf.zeros_like(h), h * real))
            return tf.math.imag(z * tf.math.conj(z + 1.0)) + tf.math.real(z)
        return tf.abs(z + tf.complex(0.5, 0.5)) + real
    return apply, shape


@piece()
def norms(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Normalised by a norm or a spread over one dimension or another."""
    kind, axis = draw.integer(0, 3), draw.choice((-1, 0))

    def apply(h):
        if kind == 0:
            return 3.0 * tf.math.l2_normalize(h, axis, epsilon=1e-3)
        if kind == 1:
            return h / (1.0 + tf.reduce_mean(tf.abs(h), axis, keepdims=True))
        if kind == 2:
            return h / (1.0 + tf.math.reduce_std(h + 1e-3, axis, keepdims=True))
        return h - tf.reduce_mean(h, axis, keepdims=True)
    return apply, shape


@piece(rare=True)
def watched(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Assertions and checks of numbers."""
    part, kind = draw.inner(shape), draw.integer(0, 2)

    def apply(h):
        if kind == 0:
            return part(tf.debugging.check_numerics(h, "not finite"))
        if kind == 1:
            tf.debugging.assert_less(tf.reduce_mean(tf.abs(h)), 1e6)
            return part(h)
        with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(h)[0], 0)]):
            return part(tf.identity(h))
    return apply, shape


@piece()
def counted(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a variable is written, and read before and after."""
    part, count = draw.inner(shape), draw.variable(0.0)
    kind = draw.integer(0, 2)

    def apply(h):
        if kind == 0:
            count.assign_add(1.0)
            return part(h) * (1.0 + 0.01 * count)
        before = h * (1.0 - 0.01 * count)
        count.assign(tf.reduce_mean(tf.abs(h)))
        if kind == 1:
            return part(before) / (1.0 + count)
        with tf.control_dependencies([count.assign_add(0.5)]):
            return part(tf.identity(before)) + tf.stop_gradient(count.read_value())
    return apply, shape
