"""Networks made of searched cells, as forward graphs of about a thousand vertices.

Each cell takes the results of the two cells before it, so that no single vertex separates one
cell from the next. The cells are those their papers found: NASNet-A (Zoph et al. 2018),
AmoebaNet (Real et al. 2019, the cell of AmoebaNet-D) and DARTS (Liu et al. 2019, second order).
A separable convolution is activation, depthwise, pointwise, norm, twice; an activation in front
of a convolution is a vertex, since others read its input. Feng and Huang 2021 (supplement, table
1) give their graphs' vertex numbers (1149, 1015, 1073) and no more, so ours are near them and not
the same.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paper_tables.network import Network
from tfckpt.solvers.forward.forward_graph import ForwardGraph

Cell = Callable[[Network, int, int, int, bool], int]
"""(network, result before the last, last result, channels, reduce) -> result."""


def nasnet() -> ForwardGraph:
    """NASNet-A with three stages of six normal cells, 168 channels at first, 224 x 224."""
    net = Network()
    stem = net.conv_norm(0, 96, 3, 2, 0)
    states = [stem, _nasnet_cell(net, stem, stem, 42, True)]
    states.append(_nasnet_cell(net, *states[-2:], 84, True))
    _stages(net, states, _nasnet_cell, channels=168, cells=6, stages=3)
    return _head(net, states[-1])


def amoebanet() -> ForwardGraph:
    """AmoebaNet with three stages of six normal cells, 128 channels at first, 224 x 224."""
    net = Network()
    stem = net.conv(0, 64, 3, 2)
    states = [stem, _amoebanet_cell(net, stem, stem, 32, True)]
    states.append(_amoebanet_cell(net, *states[-2:], 64, True))
    _stages(net, states, _amoebanet_cell, channels=128, cells=6, stages=3)
    return _head(net, states[-1])


def darts() -> ForwardGraph:
    """DARTS with twenty cells, 36 channels at first, 32 x 32."""
    net = Network(3, 32, 32)
    stem = net.conv_norm(0, 108)
    states = [stem, stem]
    _stages(net, states, _darts_cell, channels=36, cells=6, stages=3)
    return _head(net, states[-1])


def _stages(net: Network, states: list[int], cell: Cell, channels: int, cells: int, stages: int):
    """Stages of normal cells with a reduction between, which doubles the channels."""
    for stage in range(stages):
        if stage:
            channels *= 2
            states.append(cell(net, *states[-2:], channels, True))
        for _ in range(cells):
            states.append(cell(net, *states[-2:], channels, False))


def _head(net, x):
    net.dense(net.global_pool(net.relu(x)), 1000)
    return net.graph()


def _conv(net, x, channels, kernel=1, stride=1):
    """Activation, convolution, norm."""
    return net.conv_norm(net.relu(x), channels, kernel, stride)


def _separable(net, x, channels, kernel, stride=1):
    """Activation, depthwise and pointwise convolution, norm; all twice."""
    for step in (stride, 1):
        x = net.conv(net.relu(x), net.shapes[x][0], kernel, step)  # depthwise
        x = net.conv_norm(x, channels, 1)
    return x


def _dilated(net, x, channels):
    """Activation, depthwise (dilated: of the same size) and pointwise convolution, norm."""
    x = net.relu(x)
    return net.conv_norm(net.conv(x, net.shapes[x][0], 3), channels, 1)


def _halve(net, x, channels):
    """Half the resolution with two convolutions, each on every second pixel."""
    x = net.relu(x)
    return net.norm(net.concat(net.conv(x, channels // 2, 1, 2), net.conv(x, channels // 2, 1, 2)))


def _fit(net, older, last, channels):
    """Both inputs of a cell, brought to its channels and the resolution of the last."""
    if net.shapes[older][1:] != net.shapes[last][1:]:
        older = _halve(net, older, channels)
    else:
        older = _conv(net, older, channels)
    return older, _conv(net, last, channels)


def _nasnet_cell(net, older, last, channels, reduce):
    p, h = _fit(net, older, last, channels)
    if reduce:
        a = net.add(_separable(net, h, channels, 5, 2), _separable(net, p, channels, 7, 2))
        b = net.add(net.pool(h), _separable(net, p, channels, 7, 2))
        c = net.add(net.pool(h), _separable(net, p, channels, 5, 2))
        d = net.add(net.pool(a, stride=1), b)
        e = net.add(_separable(net, a, channels, 3), net.pool(h))
        return net.concat(b, c, d, e)
    a = net.add(_separable(net, h, channels, 3), h)
    b = net.add(_separable(net, p, channels, 3), _separable(net, h, channels, 5))
    c = net.add(net.pool(h, stride=1), p)
    d = net.add(net.pool(p, stride=1), net.pool(p, stride=1))
    e = net.add(_separable(net, p, channels, 5), _separable(net, p, channels, 3))
    return net.concat(p, a, b, c, d, e)


def _factorised(net, x, channels, stride=1):
    """1 x 7 and 7 x 1 convolutions on a quarter of the channels."""
    narrow = channels // 4
    x = _conv(net, x, narrow)
    x = net.conv_norm(net.relu(x), narrow, (1, 7))
    x = net.conv_norm(net.relu(x), narrow, (7, 1), stride)
    return _conv(net, x, channels)


def _amoebanet_cell(net, older, last, channels, reduce):
    p, h = _fit(net, older, last, channels)
    if reduce:
        a = net.add(net.pool(p, 2, 2, 0), net.pool(p))
        b = net.add(net.pool(h, 2, 2, 0), _conv(net, h, channels, 3, 2))
        c = net.add(_factorised(net, a, channels), net.pool(a, stride=1))
        d = net.add(net.pool(h, 2, 2, 0), b)
        e = net.add(net.pool(a, stride=1), _conv(net, b, channels))
        return net.concat(c, d, e)
    a = net.add(_conv(net, h, channels), net.pool(h, stride=1))
    b = net.add(h, _factorised(net, p, channels))
    c = net.add(_conv(net, p, channels), _factorised(net, p, channels))
    d = net.add(net.pool(a, stride=1), a)
    e = net.add(net.pool(h, stride=1), _conv(net, d, channels))
    return net.concat(p, b, c, e)


def _darts_cell(net, older, last, channels, reduce):
    p, h = _fit(net, older, last, channels)
    if reduce:
        a = net.add(net.pool(p), net.pool(h))
        b = net.add(a, net.pool(h))
        c = net.add(net.pool(p), a)
        d = net.add(a, net.pool(h))
        return net.concat(a, b, c, d)
    a = net.add(_separable(net, p, channels, 3), _separable(net, h, channels, 3))
    b = net.add(_separable(net, p, channels, 3), _separable(net, h, channels, 3))
    c = net.add(_separable(net, h, channels, 3), p)
    d = net.add(p, _dilated(net, a, channels))
    return net.concat(a, b, c, d)
