"""The networks of Feng and Huang 2018, table 2, as forward graphs.

Vertices are counted so that the numbers in that table come out: an activation is computed in
place; a residual block is convolution, norm ... addition, with two more for a projection; a
DenseNet layer is norm, convolution, norm, convolution, concatenation. Inputs are 224 x 224, for
Inception-v3 300 x 300. Layer sizes are those of each network's own paper, as common
implementations have them.
"""

from __future__ import annotations

from benchmarks.paper_tables.network import Network
from tfckpt.solvers.forward.forward_graph import ForwardGraph

VGG = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
RESNET = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
DENSENET = {  # first channels, growth, layers of each block
    121: (64, 32, (6, 12, 24, 16)),
    161: (96, 48, (6, 12, 36, 24)),
    169: (64, 32, (6, 12, 32, 32)),
    201: (64, 32, (6, 12, 48, 32)),
}


def alexnet() -> ForwardGraph:
    net = Network()
    x = net.pool(net.conv(0, 64, 11, 4, 2), padding=0)
    x = net.pool(net.conv(x, 192, 5), padding=0)
    for channels in (384, 256, 256):
        x = net.conv(x, channels)
    x = net.pool(x, padding=0)
    for units in (4096, 4096, 1000):
        x = net.dense(x, units)
    return net.graph()


def vgg(depth: int) -> ForwardGraph:
    net, x = Network(), 0
    for channels, convolutions in zip((64, 128, 256, 512, 512), VGG[depth], strict=True):
        for _ in range(convolutions):
            x = net.conv(x, channels)
        x = net.pool(x, 2, padding=0)
    for units in (4096, 4096, 1000):
        x = net.dense(x, units)
    return net.graph()


def resnet(depth: int) -> ForwardGraph:
    net = Network()
    x = net.pool(net.conv_norm(0, 64, 7, 2))
    for stage, blocks in enumerate(RESNET[depth]):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x = _residual(net, x, 64 << stage, stride, bottleneck=depth >= 50)
    net.global_pool(x)
    return net.graph()


def _residual(net, x, channels, stride, bottleneck):
    if bottleneck:
        y = net.conv_norm(x, channels, 1)
        y = net.conv_norm(y, channels, 3, stride)
        y = net.conv_norm(y, 4 * channels, 1)
    else:
        y = net.conv_norm(net.conv_norm(x, channels, 3, stride), channels)
    if net.shapes[x] != net.shapes[y]:
        x = net.conv_norm(x, net.shapes[y][0], 1, stride)
    return net.add(x, y)


def densenet(depth: int) -> ForwardGraph:
    first, growth, blocks = DENSENET[depth]
    net = Network()
    x = net.pool(net.conv_norm(0, first, 7, 2))
    for number, layers in enumerate(blocks):
        if number:
            x = net.pool(net.conv(net.norm(x), net.shapes[x][0] // 2, 1), 2, padding=0)
        for _ in range(layers):
            y = net.conv(net.norm(x), 4 * growth, 1)
            x = net.concat(x, net.conv(net.norm(y), growth))
    net.dense(net.global_pool(net.norm(x)), 1000)
    return net.graph()


def inception_v3() -> ForwardGraph:
    net = Network(3, 300, 300)
    x = net.conv_norm(0, 32, 3, 2, 0)
    x = net.conv_norm(net.conv_norm(x, 32, 3, 1, 0), 64)
    x = net.conv_norm(net.pool(x, padding=0), 80, 1)
    x = net.pool(net.conv_norm(x, 192, 3, 1, 0), padding=0)
    for channels in (32, 64, 64):
        x = _inception_a(net, x, channels)
    x = _inception_b(net, x)
    for channels in (128, 160, 160, 192):
        x = _inception_c(net, x, channels)
    x = _inception_d(net, x)
    for _ in range(2):
        x = _inception_e(net, x)
    net.dense(net.global_pool(x), 1000)
    return net.graph()


def _path(net, x, *convolutions):
    """Convolutions in a row, each (channels, kernel)."""
    for channels, kernel in convolutions:
        x = net.conv_norm(x, channels, kernel)
    return x


def _inception_a(net, x, pooled):
    return net.concat(
        _path(net, x, (64, 1)),
        _path(net, x, (48, 1), (64, 5)),
        _path(net, x, (64, 1), (96, 3), (96, 3)),
        _path(net, net.pool(x, stride=1), (pooled, 1)))


def _inception_b(net, x):
    return net.concat(
        net.conv_norm(x, 384, 3, 2, 0),
        net.conv_norm(_path(net, x, (64, 1), (96, 3)), 96, 3, 2, 0),
        net.pool(x, padding=0))


def _inception_c(net, x, c):
    row, column = (1, 7), (7, 1)
    return net.concat(
        _path(net, x, (192, 1)),
        _path(net, x, (c, 1), (c, row), (192, column)),
        _path(net, x, (c, 1), (c, column), (c, row), (c, column), (192, row)),
        _path(net, net.pool(x, stride=1), (192, 1)))


def _inception_d(net, x):
    return net.concat(
        net.conv_norm(_path(net, x, (192, 1)), 320, 3, 2, 0),
        net.conv_norm(_path(net, x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 3, 2, 0),
        net.pool(x, padding=0))


def _inception_e(net, x):
    def both(y):
        return net.concat(_path(net, y, (384, (1, 3))), _path(net, y, (384, (3, 1))))

    return net.concat(
        _path(net, x, (320, 1)),
        both(_path(net, x, (384, 1))),
        both(_path(net, x, (448, 1), (384, 3))),
        _path(net, net.pool(x, stride=1), (192, 1)))


def two_streams() -> ForwardGraph:
    """Our own graph of 35 vertices, none of which is passed by all paths (but the ends).

    A fine and a coarse stream run side by side and take from each other twice. It stands where
    the 2018 paper has its CustomNet, of which only a lost figure is left.
    """
    net = Network()
    fine = _path(net, net.conv_norm(0, 32, 3, 2), (32, 3), (32, 3))
    coarse = _path(net, net.pool(0), (32, 3), (32, 3), (32, 3))
    coarse = net.add(coarse, _path(net, fine, (32, 1)))
    fine = _path(net, fine, (64, 3), (64, 3), (64, 3))
    coarse = _path(net, coarse, (64, 3), (64, 3), (64, 3))
    fine = net.add(fine, _path(net, coarse, (64, 1)))
    net.concat(net.global_pool(fine), net.global_pool(coarse))
    return net.graph()
