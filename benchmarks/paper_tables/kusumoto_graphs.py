"""The networks of Kusumoto et al. 2019, vertex by vertex, at that paper's batch and input sizes.

A vertex is the output of one function call of a Chainer program: convolution, batch
normalisation, ReLU, pooling, concatenation, sum, dropout, fully connected layer, the reshape
before the first of these, and the loss. Edges, bytes and parameters are those of the graphs that
the authors published with their program (github.com/pfnet-research/recompute), compared by
isomorphism; so the U-Net's topmost deconvolution has 128 channels, not 64.

Costs: bytes of the output in float32, 10 units of time for a convolution, 1 for anything else, a
deconvolution too (section 3 and that program). The input batch is no vertex.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.paper_tables.joint_graphs import from_edges
from tfckpt.solvers.forward.forward_graph import ForwardGraph

__all__ = ["NETWORKS", "Network"]

FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and what the tables need to know about it.

    Attributes:
      name: as in the paper's tables.
      forward: the graph; bytes for the whole batch.
      kinds: for each vertex what function it is the output of: "conv", "relu" ...
      parameters: bytes of each vertex's trainable parameters.
      input_bytes: the batch that is fed.
      batch: samples in the paper's tables.
      published_batch: samples in the graph that the authors published and gave their solvers.
    """

    name: str
    forward: ForwardGraph
    kinds: tuple[str, ...]
    parameters: tuple[int, ...]
    input_bytes: int
    batch: int
    published_batch: int

    @property
    def fixed_bytes(self) -> int:
        """Parameters, their gradients and the batch that is fed."""
        return 2 * sum(self.parameters) + self.input_bytes


class _Builder:
    """Adds vertices one by one; each is (channels, side) for one square feature map."""

    def __init__(self, name: str, batch: int, side: int, channels: int = 3):
        self.name, self.batch, self.fed = name, batch, (channels, side)
        self.names: list[str] = []
        self.kinds: list[str] = []
        self.shapes: list[tuple[int, int]] = []
        self.inputs: list[tuple[int, ...]] = []
        self.flat: list[bool] = []
        self.parameters: list[int] = []

    def add(self, kind: str, inputs: tuple[int, ...], channels: int, side: int,
            parameters: int = 0) -> int:
        """Append a vertex and return its number; input -1 is the batch that is fed."""
        self.names.append(f"{kind}{len(self.names)}")
        self.kinds.append(kind)
        self.shapes.append((channels, side))
        self.inputs.append(tuple(i for i in inputs if i >= 0))
        self.parameters.append(parameters)
        self.flat.append(kind == "reshape" or any(self.flat[i] for i in self.inputs[-1]))
        return len(self.names) - 1

    def shape(self, x: int) -> tuple[int, int]:
        return self.shapes[x] if x >= 0 else self.fed

    def conv(self, x: int, out: int, kernel: int, stride: int = 1, pad: int | None = None,
             dilate: int = 1, bias: bool = False) -> int:
        """Return a convolution; `pad` keeps the side at stride 1 unless given."""
        channels, side = self.shape(x)
        reach = dilate * (kernel - 1)
        padding = reach // 2 if pad is None else pad
        return self.add("conv", (x,), out, (side + 2 * padding - reach - 1) // stride + 1,
                        kernel * kernel * channels * out + out * bias)

    def deconv(self, x: int, out: int) -> int:
        """Doubles the side with a 2x2 kernel."""
        channels, side = self.shape(x)
        return self.add("deconv", (x,), out, 2 * side, 4 * channels * out + out)

    def bn(self, x: int) -> int:
        channels, side = self.shape(x)
        return self.add("bn", (x,), channels, side, 2 * channels)

    def same(self, kind: str, *inputs: int) -> int:
        """Return a function whose output has the shape of its first input."""
        return self.add(kind, inputs, *self.shape(inputs[0]))

    def relu(self, x: int) -> int:
        return self.same("relu", x)

    def pool(self, x: int, kernel: int, stride: int, pad: int = 0) -> int:
        """Pooling whose last window may hang over the edge."""
        channels, side = self.shape(x)
        return self.add("pool", (x,), channels, -(-(side + 2 * pad - kernel) // stride) + 1)

    def concat(self, *inputs: int) -> int:
        return self.add("concat", inputs, sum(self.shape(x)[0] for x in inputs),
                        self.shape(inputs[0])[1])

    def resize(self, x: int, side: int) -> int:
        return self.add("resize", (x,), self.shape(x)[0], side)

    def fc(self, x: int, out: int) -> int:
        """Return a fully connected layer, after a reshape if its input has spatial dimensions."""
        channels, side = self.shape(x)
        size = channels * side * side
        if not self.flat[x]:
            x = self.add("reshape", (x,), size, 1)
        return self.add("fc", (x,), out, 1, size * out + out)

    def conv_relu(self, x: int, *args, **kwargs) -> int:
        return self.relu(self.conv(x, *args, bias=True, **kwargs))

    def conv_bn(self, x: int, *args, **kwargs) -> int:
        return self.bn(self.conv(x, *args, **kwargs))

    def conv_bn_relu(self, x: int, *args, **kwargs) -> int:
        return self.relu(self.conv_bn(x, *args, **kwargs))

    def loss(self, *inputs: int) -> int:
        """Return a scalar."""
        return self.add("loss", inputs, 0, 1)

    def build(self, published_batch: int = 32) -> Network:
        unit = FLOAT * self.batch
        forward = from_edges(
            [max(FLOAT, channels * side * side * unit) for channels, side in self.shapes],
            [10 if kind == "conv" else 1 for kind in self.kinds],
            [(x, v) for v, inputs in enumerate(self.inputs) for x in inputs], self.names)
        channels, side = self.fed
        return Network(self.name, forward, tuple(self.kinds),
                       tuple(FLOAT * count for count in self.parameters),
                       channels * side * side * unit, self.batch, published_batch)


def _bottleneck(net: _Builder, x: int, width: int, stride: int, dilate: int, project: bool,
                stride_first: bool) -> int:
    """Return the residual block of ResNet50 and deeper: 10 vertices, 12 with a projection."""
    first, second = (stride, 1) if stride_first else (1, stride)
    h = net.conv_bn_relu(x, width, 1, stride=first, pad=0)
    h = net.conv_bn_relu(h, width, 3, stride=second, pad=dilate, dilate=dilate)
    h = net.conv_bn(h, 4 * width, 1)
    shortcut = net.conv_bn(x, 4 * width, 1, stride=stride, pad=0) if project else x
    return net.relu(net.same("add", h, shortcut))


def _residual_stages(net: _Builder, x: int, blocks: tuple[int, ...],
                     dilated: bool) -> list[int]:
    """Return the output of each stage; `dilated` keeps the side of the last two (as in PSPNet)."""
    outputs = []
    for stage, count in enumerate(blocks):
        keep = dilated and stage >= 2
        for block in range(count):
            stride = 2 if block == 0 and stage > 0 and not keep else 1
            dilate = 2 ** (stage - 1) if keep else 1
            x = _bottleneck(net, x, 64 << stage, stride, dilate, block == 0, not dilated)
        outputs.append(x)
    return outputs


def resnet(name: str, batch: int, blocks: tuple[int, ...]) -> Network:
    """ResNet of bottleneck blocks at 224x224."""
    net = _Builder(name, batch, 224)
    x = net.pool(net.conv_bn_relu(-1, 64, 7, stride=2, pad=3), 3, 2)
    x = _residual_stages(net, x, blocks, dilated=False)[-1]
    net.loss(net.fc(net.pool(x, 7, 1), 1000))
    return net.build()


def pspnet(batch: int = 2) -> Network:
    """PSPNet on a dilated ResNet101 at 713x713, 19 classes, with its auxiliary loss."""
    net = _Builder("PSPNet", batch, 713)
    x = net.conv_bn_relu(-1, 64, 3, stride=2, pad=1)
    x = net.conv_bn_relu(net.conv_bn_relu(x, 64, 3), 128, 3)
    stages = _residual_stages(net, net.pool(x, 3, 2, pad=1), (3, 4, 23, 3), dilated=True)
    channels, side = net.shape(stages[3])
    levels = []
    for bins in (1, 2, 3, 6):
        level = net.conv_bn_relu(net.add("pool", (stages[3],), channels, bins), channels // 4, 1)
        levels.append(net.resize(level, side))
    h = net.conv_bn_relu(net.concat(stages[3], *levels), 512, 3)
    main = net.conv(net.same("dropout", h), 17, 1, bias=True)
    h = net.conv_bn_relu(stages[2], 512, 3)
    side_loss = net.loss(net.resize(net.conv(net.same("dropout", h), 17, 3, bias=True), 713))
    main = net.loss(net.resize(main, 713))
    net.same("add", net.same("scale", side_loss), main)
    return net.build(published_batch=1)


def unet(batch: int = 8) -> Network:
    """U-Net with unpadded convolutions at 572x572, dropout at the end of the contracting path."""
    net = _Builder("U-Net", batch, 572, channels=1)
    x, skipped = -1, []
    for level in range(5):
        for _ in range(2):
            x = net.conv_relu(x, 64 << level, 3, pad=0)
        if level >= 3:
            x = net.same("dropout", x)
        if level < 4:
            skipped.append(x)
            x = net.pool(x, 2, 2)
    for level in reversed(range(4)):
        x = net.relu(net.deconv(x, max(64 << level, 128)))
        side = net.shape(x)[1]
        x = net.concat(net.add("crop", (skipped[level],), 64 << level, side), x)
        for _ in range(2):
            x = net.conv_relu(x, 64 << level, 3, pad=0)
    net.loss(net.conv(x, 2, 1, bias=True))
    return net.build(published_batch=8)


def vgg19(batch: int = 64) -> Network:
    """VGG19 at 224x224."""
    net = _Builder("VGG19", batch, 224)
    x = -1
    for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            x = net.conv_relu(x, width, 3)
        x = net.pool(x, 2, 2)
    for _ in range(2):
        x = net.same("dropout", net.relu(net.fc(x, 4096)))
    net.loss(net.fc(x, 1000))
    return net.build()


def densenet161(batch: int = 32) -> Network:
    """DenseNet161 at 224x224: growth 48, layers with a 1x1 bottleneck of 4 x 48."""
    net = _Builder("DenseNet161", batch, 224)
    x = net.pool(net.conv_bn_relu(-1, 96, 7, stride=2, pad=3), 3, 2)
    for block, layers in enumerate((6, 12, 36, 24)):
        for _ in range(layers):
            h = net.conv(net.relu(net.bn(x)), 192, 1)
            x = net.concat(x, net.conv(net.relu(net.bn(h)), 48, 3))
        if block < 3:
            h = net.conv(net.relu(net.bn(x)), net.shape(x)[0] // 2, 1)
            x = net.pool(h, 2, 2)
    net.loss(net.fc(net.pool(net.relu(net.bn(x)), 7, 1), 1000))
    return net.build()


def _inception(net: _Builder, x: int, one: int, *sizes: int) -> int:
    """Return an Inception module whose four branches share one ReLU after the concatenation."""
    reduce3, three, reduce5, five, pooled = sizes
    branches = (
        net.conv(x, one, 1, bias=True),
        net.conv(net.conv_relu(x, reduce3, 1), three, 3, bias=True),
        net.conv(net.conv_relu(x, reduce5, 1), five, 5, bias=True),
        net.conv(net.pool(x, 3, 1, pad=1), pooled, 1, bias=True),
    )
    return net.relu(net.concat(*branches))


def _auxiliary(net: _Builder, x: int) -> int:
    h = net.conv_relu(net.pool(x, 5, 3), 128, 1)
    return net.loss(net.fc(net.relu(net.fc(h, 1024)), 1000))


def googlenet(batch: int = 256) -> Network:
    """GoogLeNet at 224x224 with both auxiliary losses."""
    net = _Builder("GoogLeNet", batch, 224)
    x = net.pool(net.conv_relu(-1, 64, 7, stride=2, pad=3), 3, 2)
    x = net.conv_relu(net.conv_relu(net.same("lrn", x), 64, 1), 192, 3)
    x = net.pool(net.same("lrn", x), 3, 2)
    x = _inception(net, x, 64, 96, 128, 16, 32, 32)
    x = _inception(net, x, 128, 128, 192, 32, 96, 64)
    x = _inception(net, net.pool(x, 3, 2), 192, 96, 208, 16, 48, 64)
    first = _auxiliary(net, x)
    x = _inception(net, x, 160, 112, 224, 24, 64, 64)
    x = _inception(net, x, 128, 128, 256, 24, 64, 64)
    x = _inception(net, x, 112, 144, 288, 32, 64, 64)
    second = _auxiliary(net, x)
    x = _inception(net, x, 256, 160, 320, 32, 128, 128)
    x = _inception(net, net.pool(x, 3, 2), 256, 160, 320, 32, 128, 128)
    x = _inception(net, x, 384, 192, 384, 48, 128, 128)
    last = net.loss(net.fc(net.same("dropout", net.pool(x, 7, 1)), 1000))
    net.same("add", net.same("add", first, second), last)
    return net.build()


NETWORKS: dict[str, Callable[[], Network]] = {
    "PSPNet": pspnet,
    "U-Net": unet,
    "ResNet50": lambda: resnet("ResNet50", 96, (3, 4, 6, 3)),
    "ResNet152": lambda: resnet("ResNet152", 48, (3, 8, 36, 3)),
    "VGG19": vgg19,
    "DenseNet161": densenet161,
    "GoogLeNet": googlenet,
}
"""The rows of the paper's Table 1, in its order."""
