"""Pieces for pictures and volumes: convolutions, pooling, resizing."""

from __future__ import annotations

import tensorflow as tf

from tests.support.random_steps.draw import Apply, Draw, Shape, piece, rows, sizes


@piece(4, twice=False)
def convolution(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a convolution, with or without bias and activation."""
    made, size = draw.width(shape), draw.choice((1, 3, 3, 5))
    weight = draw.weight(size, size, shape[-1], made)
    bias = draw.weight(made) if draw.chance(0.7) else None
    dilation, activation = draw.choice((1, 1, 2)), draw.activation()

    def apply(h):
        h = tf.nn.conv2d(h, weight, 1, "SAME", dilations=dilation)
        return activation(h if bias is None else tf.nn.bias_add(h, bias))
    return apply, (*shape[:-1], made)


@piece(4, twice=False)
def depthwise(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a depthwise convolution, and one of single pixels after it."""
    width = shape[-1]
    weight, mixed = draw.weight(3, 3, width, 1, scale=0.3), draw.weight(1, 1, width, width)
    separable, activation = draw.chance(0.4), draw.activation()

    def apply(h):
        if separable:
            return activation(tf.nn.separable_conv2d(h, weight, mixed, [1, 1, 1, 1], "SAME"))
        h = tf.nn.depthwise_conv2d(h, weight, [1, 1, 1, 1], "SAME")
        return tf.nn.conv2d(activation(h), mixed, 1, "SAME")
    return apply, shape


@piece(4, twice=False, fixed=True)
def down_and_up(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Half the size and back: strides or pooling, then a transposed convolution or resizing."""
    width = shape[-1]
    if shape[1] < 4 or shape[1] % 2 or shape[2] % 2:
        return lambda h: h, shape
    down, up = draw.weight(3, 3, width, width), draw.weight(3, 3, width, width)
    first, second = draw.integer(0, 2), draw.integer(0, 2 if draw.needs.xla else 3)
    half = (shape[0], shape[1] // 2, shape[2] // 2, width)
    part = draw.inner(half)

    def apply(h):
        if first == 0:
            small = tf.nn.conv2d(h, down, 2, "SAME")
        elif first == 1:
            small = tf.nn.max_pool2d(h, 2, 2, "SAME")
        else:
            small = tf.nn.avg_pool2d(h, 2, 2, "VALID")
        small = part(small)
        batch, high, wide, _ = sizes(h)
        if second == 0:
            large = tf.nn.conv2d_transpose(small, up, [batch, high, wide, width], 2)
        elif second == 1:
            large = tf.repeat(tf.repeat(small, 2, axis=1), 2, axis=2)
        else:
            method = "bilinear" if second == 2 else "nearest"
            large = tf.image.resize(small, [high, wide], method)
        return h + large
    return apply, shape


@piece(4, twice=False)
def fused_normalisation(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """TensorFlow's fused batch normalisation, its averages kept."""
    width = shape[-1]
    gamma, beta = draw.constant_weight(1.0, width), draw.weight(width)
    mean, variance = draw.variable([0.0] * width), draw.variable([1.0] * width)
    activation = draw.choice((tf.nn.relu, tf.nn.swish, tf.identity))

    def apply(h):
        made, m, v = tf.compat.v1.nn.fused_batch_norm(h, gamma, beta, epsilon=1e-2)
        mean.assign_sub(0.1 * (mean - m))
        variance.assign_sub(0.1 * (variance - v))
        return activation(made)
    return apply, shape


@piece(4, 5)
def group_norm(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Normalised over pixels and groups of channels."""
    groups = draw.choice([g for g in (1, 2, 4) if shape[-1] % g == 0])
    gamma = draw.constant_weight(1.0, shape[-1])

    def apply(h):
        shape_now = sizes(h)
        cut = tf.reshape(h, [*shape_now[:-1], groups, shape[-1] // groups])
        axes = [*range(1, h.shape.rank - 1), h.shape.rank]
        mean, variance = tf.nn.moments(cut, axes, keepdims=True)
        return tf.reshape((cut - mean) * tf.math.rsqrt(variance + 1e-2), shape_now) * gamma
    return apply, shape


@piece(4)
def squeeze_excite(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Channels weighed by what the whole picture has."""
    width = shape[-1]
    small = max(width // 4, 2)
    w, v = draw.weight(width, small), draw.weight(small, width)

    def apply(h):
        seen = tf.nn.swish(tf.reduce_mean(h, [1, 2]) @ w) @ v
        return h * tf.sigmoid(seen)[:, None, None, :]
    return apply, shape


@piece(4, twice=False, xla=False)
def neighbours(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Pooling and other windows of stride one."""
    kind, width = draw.integer(0, 5), shape[-1]
    weight = draw.weight(3, 3, width, scale=0.1)
    mixed = draw.weight(9 * width, width) if width <= 32 else None

    def apply(h):
        if kind == 0:
            return tf.nn.max_pool2d(h, 3, 1, "SAME")
        if kind == 1:
            return h - tf.nn.avg_pool2d(h, 3, 1, "SAME")
        if kind == 2:
            return tf.nn.dilation2d(h, weight, [1] * 4, "SAME", "NHWC", [1] * 4)
        if kind == 3 and mixed is not None:
            made = tf.image.extract_patches(h, [1, 3, 3, 1], [1] * 4, [1] * 4, "SAME")
            return tf.tensordot(made, mixed, 1)
        if kind == 4:
            return tf.nn.local_response_normalization(h, 2)
        return tf.nn.pool(h, [2, 2], "AVG", padding="SAME") + h
    return apply, shape


@piece(4, fixed=True)
def rearranged(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Pixels turned into channels and back, flips, crops, reflected edges."""
    kind, even = draw.integer(0, 3), shape[1] % 2 == 0 and shape[2] % 2 == 0 and shape[1] > 2
    part = draw.inner((shape[0], shape[1] // 2, shape[2] // 2, 4 * shape[3])) if even else None

    def apply(h):
        if kind == 0 and part is not None:
            return tf.nn.depth_to_space(part(tf.nn.space_to_depth(h, 2)), 2)
        if kind == 1:
            return h + tf.image.flip_left_right(h)
        if kind == 2 and even:
            grown = tf.pad(h, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
            return grown[:, 2:, 2:] - 0.5 * grown[:, :-2, :-2]
        return h + tf.transpose(h, [0, 2, 1, 3]) if shape[1] == shape[2] else -h
    return apply, shape


@piece(4, xla=False, twice=False, rare=True)
def cropped(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Boxes cut out of pictures, and differences between pixels."""
    total = draw.chance(0.5)

    def apply(h):
        if total:
            return h + 1e-3 * tf.reduce_mean(tf.image.total_variation(h))
        count = rows(h)
        boxes = tf.tile([[0.1, 0.1, 0.8, 0.8]], [count, 1])
        crops = tf.image.crop_and_resize(h, boxes, tf.range(count), [4, 4])
        return h + tf.reduce_mean(crops, [1, 2], keepdims=True)
    return apply, shape


@piece(5, twice=False)
def convolution_3d(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a convolution over volumes, or up and down again."""
    width = shape[-1]
    made = draw.width(shape)
    weight, activation = draw.weight(3, 3, 3, width, made), draw.activation()
    pooled = draw.chance(0.3)

    def apply(h):
        h = activation(tf.nn.conv3d(h, weight, [1] * 5, "SAME"))
        return tf.nn.avg_pool3d(h, 3, 1, "SAME") if pooled else h
    return apply, (*shape[:-1], made)


@piece(5, twice=False, fixed=True)
def strided_3d(draw: Draw, shape: Shape) -> tuple[Apply, Shape]:
    """Return a strided convolution over volumes and its transposed one."""
    width = shape[-1]
    down, up = draw.weight(2, 2, 2, width, width), draw.weight(2, 2, 2, width, width)
    if any(size % 2 for size in shape[1:4]):
        return lambda h: h, shape

    def apply(h):
        small = tf.nn.conv3d(h, down, [1, 2, 2, 2, 1], "SAME")
        return h + tf.nn.conv3d_transpose(tf.nn.relu(small), up, sizes(h), [1, 2, 2, 2, 1])
    return apply, shape
