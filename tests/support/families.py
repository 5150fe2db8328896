"""Steps of 50 to 120 vertices, shaped as networks are: forty of eight families, and others.

The eight are those on which plans are compared with a proven optimum (`benchmarks.optimality`):
U-Net, DenseNet, HRNet, attention, two views, mixture of experts, inception, chain.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.joint_nets import NEITHER, Net
from tfckpt.ir.costgraph import CostGraph


def unet(levels: int, seed: int = 0) -> CostGraph:
    """Return a convolution and a ReLU on each level down and up, halved, with skips across."""
    net, skips = Net(seed), []
    x = net.source(200)
    for level in range(levels):
        x = net.relu(net.conv(x, 800 / 2 ** level))
        skips.append(x)
        x = net.pool(x, 200 / 2 ** level)
    x = net.relu(net.conv(x, 800 / 2 ** levels))
    for level in reversed(range(levels)):
        up = net.resize(x, 800 / 2 ** level)
        x = net.relu(net.conv(net.concat([skips[level], up]), 800 / 2 ** level))
    net.conv(x, 60, 3)
    return net.joint(name=f"unet({levels}, {seed})")


def densenet(layers: int, seed: int = 0) -> CostGraph:
    """Return each layer reads all earlier ones, concatenated."""
    net = Net(seed)
    features = [net.source(300)]
    for _ in range(layers):
        x = net.concat(features) if len(features) > 1 else features[0]
        features.append(net.conv(net.relu(x), 120, 8))
    net.conv(net.concat(features), 40, 4)
    return net.joint(name=f"densenet({layers}, {seed})")


def hrnet(stages: int, seed: int = 0) -> CostGraph:
    """Two resolutions beside each other, exchanged after every stage."""
    net = Net(seed)
    high = net.source(400)
    low = net.relu(net.conv(high, 200))
    for _ in range(stages):
        fine, coarse = net.relu(net.conv(high, 400)), net.relu(net.conv(low, 200))
        high = net.sum([net.resize(coarse, 400), fine])
        low = net.sum([net.conv(fine, 200, 6), coarse])
    net.conv(net.concat([high, low]), 40, 4)
    return net.joint(name=f"hrnet({stages}, {seed})")


def attention(layers: int, seed: int = 0) -> CostGraph:
    """Queries, keys, values, softmax with dropout, and two dense layers, with sums around."""
    net = Net(seed)
    x = net.source(100)
    for layer in range(layers):
        query, key, value = (net.conv(x, 100, 8) for _ in range(3))
        scores = net.product(query, key, 400)
        weights = net.relu(scores)
        x = net.sum([x, net.product(net.mask(weights) if layer == 0 else weights, value, 100)])
        wide = net.gelu(net.conv(x, 400, 14))
        x = net.sum([x, net.conv(wide, 100, 14)])
    return net.joint(name=f"attention({layers}, {seed})")


def two_views(layers: int, seed: int = 0) -> CostGraph:
    """One encoder of shared weights on two inputs without a common main path."""
    net = Net(seed)
    weights = [net.weight(12) for _ in range(layers)]
    ends = []
    for _ in range(2):
        x = net.source(300)
        for layer, weight in enumerate(weights):
            x = net.relu(net.conv(x, 400 / 1.5 ** layer, weight=weight))
        ends.append(net.conv(x, 30, 3))
    net.product(*ends, 20)
    return net.joint(name=f"two_views({layers}, {seed})")


def experts(count: int, seed: int = 0) -> CostGraph:
    """Return a gate and experts of two dense layers each, weighted and added up, twice."""
    net = Net(seed)
    x = net.source(150)
    for _ in range(2):
        gate = net.relu(net.conv(x, 20, 2))
        outs = []
        for _ in range(count):
            wide = net.gelu(net.conv(x, 300, 12))
            outs.append(net.product(net.conv(wide, 150, 12), gate, 150, 2))
        x = net.sum([x, *outs])
    return net.joint(name=f"experts({count}, {seed})")


def inception(modules: int, seed: int = 0) -> CostGraph:
    """Branches of one, two and no convolution, concatenated."""
    net = Net(seed)
    x = net.relu(net.source(300))
    for _ in range(modules):
        one = net.relu(net.conv(x, 100))
        two = net.relu(net.conv(net.relu(net.conv(x, 80, 6)), 120))
        x = net.concat([one, two, net.pool(x, 100)])
    net.conv(x, 40, 4)
    return net.joint(name=f"inception({modules}, {seed})")


def chain(length: int, seed: int = 0) -> CostGraph:
    """Dense layers and activations of different widths."""
    net = Net(seed, 0.6)
    x = net.source(200)
    for i in range(length):
        x = net.relu(net.conv(x, 200)) if i % 3 else net.gelu(net.conv(x, 200))
    return net.joint(name=f"chain({length}, {seed})")


def shared(length: int, seed: int = 0) -> CostGraph:
    """One layer applied again and again: one weight, whose gradients are added up."""
    net = Net(seed)
    x, weight = net.source(200), net.weight(30)
    for _ in range(length):
        x = net.relu(net.conv(x, 200, weight=weight))
    return net.joint(name=f"shared({length}, {seed})")


def siamese(layers: int, seed: int = 0) -> CostGraph:
    """Three towers of one encoder, each with a head of its own, compared pair by pair."""
    net = Net(seed)
    weights = [net.weight(20) for _ in range(layers)]
    ends = []
    for _ in range(3):
        x = net.source(200)
        for weight in weights:
            x = net.relu(net.conv(x, 200, weight=weight))
        ends.append(net.conv(x, 40, 3))
    net.product(ends[0], ends[1], 20)
    net.product(ends[0], ends[2], 20)
    return net.joint(name=f"siamese({layers}, {seed})")


def adversarial(layers: int, seed: int = 0) -> CostGraph:
    """Return a generator, and a discriminator on its image and on a real one; two tapes in one
    step.
    """
    net = Net(seed)
    weights = [net.weight(20) for _ in range(layers)]

    def judged(x: int) -> int:
        for weight in weights:
            x = net.relu(net.conv(x, 200, weight=weight))
        return net.conv(x, 20, 3)

    x = net.source(50)
    for layer in range(layers):
        x = net.relu(net.conv(x, 100 * (layer + 1)))
    fake, real = judged(x), judged(net.source(200))
    return net.joint([[fake], [fake, real]], name=f"adversarial({layers}, {seed})")


def random_net(seed: int, count: int = 12) -> CostGraph:
    """Ops of random kinds on random earlier values."""
    net = Net(seed, 0.5)
    rng = net.rng
    net.source(100)
    for _ in range(count - 1):
        earlier = range(max(0, len(net.ops) - rng.randint(1, 6)), len(net.ops))
        x = rng.choice(earlier)
        size = rng.choice((30, 60, 100, 200))
        kind = rng.randrange(9)
        if kind == 0:
            net.add((x,), size, 3, NEITHER)
        elif kind == 1:
            net.concat(sorted({x, rng.choice(earlier)}))
        elif kind == 2:
            net.product(x, rng.choice(earlier), size)
        elif kind == 3:
            net.mask(x)
        elif kind == 4:
            net.pool(x, size)
        elif kind == 5:
            net.gelu(x)
        elif kind == 6:
            net.source(size)
        else:
            net.relu(net.conv(x, size))
    return net.joint(name=f"random_net({seed}, {count})")


FAMILIES: dict[str, tuple[Callable[..., CostGraph], tuple[int, ...]]] = {
    "unet": (unet, (2, 3, 3, 4, 5)),
    "densenet": (densenet, (6, 7, 8, 9, 10)),
    "hrnet": (hrnet, (2, 2, 3, 3, 3)),
    "attention": (attention, (2, 2, 2, 3, 3)),
    "two_views": (two_views, (4, 4, 5, 5, 6)),
    "experts": (experts, (2, 2, 3, 3, 4)),
    "inception": (inception, (2, 2, 3, 3, 3)),
    "chain": (chain, (9, 9, 11, 13, 15)),
}
"""Family by name: its function, and the sizes of its five graphs, whose seeds are 0 to 4."""

OTHERS: dict[str, tuple[Callable[..., CostGraph], tuple[int, ...]]] = {
    "shared": (shared, (4, 6, 8)),
    "siamese": (siamese, (2, 3)),
    "adversarial": (adversarial, (2, 3)),
}
"""Shapes that no optimum is kept for, in the same way."""


def graphs(families: dict[str, tuple[Callable[..., CostGraph], tuple[int, ...]]] | None = None
           ) -> dict[str, CostGraph]:
    """Return the graphs of some families by name, by default those of `FAMILIES`."""
    return {f"{family}{number}": make(size, number)
            for family, (make, sizes) in (families or FAMILIES).items()
            for number, size in enumerate(sizes)}
