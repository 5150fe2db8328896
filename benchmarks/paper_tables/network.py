"""A small builder of forward graphs with the shapes of image networks.

A vertex is one float32 tensor of a batch of one, [channels, height, width], and costs its bytes.
Times are those of Kusumoto et al. 2019: a convolution 10, anything else 1.
"""

from __future__ import annotations

import math

from benchmarks.paper_tables.joint_graphs import from_edges
from tfckpt.solvers.forward.forward_graph import ForwardGraph

Size = int | tuple[int, int]

FLOAT32 = 4


def pair(size: Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


class Network:
    """Collects vertices in the order they are computed; each method returns the new vertex."""

    def __init__(self, channels: int = 3, height: int = 224, width: int = 224):
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.time: list[int] = []
        self.edges: list[tuple[int, int]] = []
        self.value("input", (channels, height, width))

    def value(self, kind: str, shape: tuple[int, ...], *needs: int, time: int = 1) -> int:
        index = len(self.names)
        self.names.append(f"{kind}_{index}")
        self.shapes.append(shape)
        self.time.append(time)
        self.edges.extend((need, index) for need in needs)
        return index

    def _slide(self, shape, kernel: Size, stride: int, padding: Size | None):
        """Height and width after a window has been moved over; padding None keeps them."""
        kernel = pair(kernel)
        pad = (kernel[0] // 2, kernel[1] // 2) if padding is None else pair(padding)
        return tuple((size + 2 * p - k) // stride + 1
                     for size, k, p in zip(shape[1:], kernel, pad, strict=True))

    def conv(self, x: int, channels: int, kernel: Size = 3, stride: int = 1,
             padding: Size | None = None) -> int:
        """Return a convolution, with what is computed in its place (bias, activation)."""
        shape = (channels, *self._slide(self.shapes[x], kernel, stride, padding))
        return self.value("conv", shape, x, time=10)

    def norm(self, x: int) -> int:
        """Return a batch normalisation, with an activation in its place."""
        return self.value("norm", self.shapes[x], x)

    def conv_norm(self, x: int, channels: int, kernel: Size = 3, stride: int = 1,
                  padding: Size | None = None) -> int:
        return self.norm(self.conv(x, channels, kernel, stride, padding))

    def relu(self, x: int) -> int:
        """Return an activation that leaves its input alone, since others read it too."""
        return self.value("relu", self.shapes[x], x)

    def pool(self, x: int, kernel: int = 3, stride: int = 2, padding: Size | None = None) -> int:
        shape = (self.shapes[x][0], *self._slide(self.shapes[x], kernel, stride, padding))
        return self.value("pool", shape, x)

    def global_pool(self, x: int) -> int:
        return self.value("pool", (self.shapes[x][0], 1, 1), x)

    def add(self, *xs: int) -> int:
        return self.value("add", self.shapes[xs[0]], *dict.fromkeys(xs))

    def concat(self, *xs: int) -> int:
        channels = sum(self.shapes[x][0] for x in xs)
        return self.value("concat", (channels, *self.shapes[xs[0]][1:]), *xs)

    def dense(self, x: int, units: int) -> int:
        return self.value("dense", (units,), x)

    def graph(self) -> ForwardGraph:
        sizes = [FLOAT32 * math.prod(shape) for shape in self.shapes]
        return from_edges(sizes, self.time, self.edges, self.names)
