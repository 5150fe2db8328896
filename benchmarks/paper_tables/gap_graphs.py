"""Joint graphs small enough to prove an optimum on: the shapes that networks are made of.

Bytes and times are drawn with a fixed seed, so that no two vertices are interchangeable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.paper_tables.joint_graphs import with_backward
from tfckpt.ir.costgraph import CostGraph


class _Net:
    """Forward values, collected one by one."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.bytes: list[int] = []
        self.time: list[int] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, inputs: Sequence[int], size: float, time: float) -> int:
        """Add a value of about the given size and time, and return its index."""
        node = len(self.bytes)
        self.bytes.append(max(1, round(size * self.rng.uniform(0.7, 1.3))))
        self.time.append(max(1, round(time * self.rng.uniform(0.7, 1.3))))
        self.edges += [(u, node) for u in inputs]
        return node

    def joint(self) -> CostGraph:
        """Return the training step."""
        return with_backward((None, self.bytes, self.time, self.edges))


def chain(length: int, seed: int = 0) -> CostGraph:
    """Alternating costly and cheap values of one width."""
    net, last = _Net(seed), []
    for i in range(length):
        last = [net.add(last, 100, 2 if i % 2 else 10)]
    return net.joint()


def residual(blocks: int, seed: int = 0) -> CostGraph:
    """Blocks of convolution, activation, convolution and a sum with the block's input."""
    net = _Net(seed)
    last = net.add([], 100, 10)
    for _ in range(blocks):
        inner = net.add([net.add([net.add([last], 100, 10)], 100, 1)], 100, 10)
        last = net.add([last, inner], 100, 1)
    return net.joint()


def unet(depth: int, seed: int = 0) -> CostGraph:
    """Two values on each level down and up; each level is half as large, and skips across."""
    net, skips, last = _Net(seed), [], []
    for level in range(depth):
        size = 400 / 2 ** level
        skips.append(net.add([net.add(last, size, 10)], size, 2))
        last = [net.add([skips[-1]], size / 4, 1)]
    last = [net.add(last, 400 / 2 ** depth, 10)]
    for level in reversed(range(depth)):
        size = 400 / 2 ** level
        up = net.add(last, size, 3)
        last = [net.add([net.add([skips[level], up], size, 10)], size, 2)]
    return net.joint()


def attention(layers: int, seed: int = 0) -> CostGraph:
    """Queries, keys, values, scores, softmax, mix, sum; then two dense layers and a sum."""
    net = _Net(seed)
    last = net.add([], 60, 5)
    for _ in range(layers):
        query, key, value = (net.add([last], 60, 8) for _ in range(3))
        softmax = net.add([net.add([query, key], 200, 6)], 200, 2)
        mixed = net.add([last, net.add([softmax, value], 60, 6)], 60, 1)
        wide = net.add([net.add([mixed], 240, 20)], 240, 2)
        last = net.add([mixed, net.add([wide], 60, 20)], 60, 1)
    return net.joint()


def inception(modules: int, seed: int = 0) -> CostGraph:
    """Three branches of one, two and three values that are joined."""
    net = _Net(seed)
    last = net.add([], 100, 10)
    for _ in range(modules):
        ends = []
        for length in (1, 2, 3):
            node = last
            for _ in range(length):
                node = net.add([node], 60, 8)
            ends.append(node)
        last = net.add(ends, 180, 1)
    return net.joint()


GRAPHS: dict[str, Callable[[], CostGraph]] = {
    "chain12": lambda: chain(12),
    "chain20": lambda: chain(20),
    "residual4": lambda: residual(4),
    "unet3": lambda: unet(3),
    "attention2": lambda: attention(2),
    "inception2": lambda: inception(2),
}
"""By name and number of values, blocks, levels, layers or modules; 25 to 47 joint vertices."""
