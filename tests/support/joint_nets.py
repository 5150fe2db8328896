"""Joint graphs of training steps as a tape makes them, built op by op.

Unlike a paper graph with its mirror image, what a backward vertex reads depends on the kind of the
op: a ReLU's gradient reads its output, a convolution's the input, a sum's nothing. A value with
several consumers has its gradients added up; every weight has a gradient and an update. Bytes and
times are drawn with a fixed seed, so that no two vertices are interchangeable.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tfckpt.ir.costgraph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    CostGraph,
    Storage,
    Vertex,
    check_cost_graph,
)

INPUTS, OUTPUT, BOTH, NEITHER = "inputs", "output", "both", "neither"
"""Forward values that the gradient of an op reads."""


@dataclasses.dataclass(frozen=True)
class _Op:
    inputs: tuple[int, ...]
    bytes: int
    time: float
    reads: str
    weight: int  # its position, -1 for none
    in_place: bool
    pure: bool
    passes: bool  # its gradient is that of its inputs: no vertex computes it


class Net:
    """Forward ops, added one by one; `joint` makes the training step.

    Args:
      seed: of the sizes; `spread` is how much they differ from what is asked for.
    """

    def __init__(self, seed: int, spread: float = 0.3):
        self.rng, self.spread = random.Random(seed), spread
        self.ops: list[_Op] = []
        self.weights: list[int] = []  # bytes

    def drawn(self, size: float) -> int:
        """Return a positive integer about as large as `size`."""
        return max(1, round(size * self.rng.uniform(1 - self.spread, 1 + self.spread)))

    def weight(self, size: float) -> int:
        """Return a new weight of about `size` bytes, for several ops to share."""
        self.weights.append(self.drawn(size))
        return len(self.weights) - 1

    def add(self, inputs: Sequence[int], size: float, time: float, reads: str, *,
            weight: int = -1, in_place: bool = False, pure: bool = True,
            passes: bool = False) -> int:
        """Return the index of a new op's value."""
        size = self.ops[inputs[0]].bytes if in_place else self.drawn(size)
        self.ops.append(_Op(tuple(inputs), int(size), float(self.drawn(time)), reads, weight,
                            in_place, pure, passes))
        return len(self.ops) - 1

    # Kinds of ops.

    def source(self, size: float) -> int:
        """Add what reads nothing that the step makes: an embedding, a first convolution."""
        return self.add((), size, 4, NEITHER)

    def conv(self, x: int, size: float, time: float = 12, weight: int = -2) -> int:
        """Add a convolution or matrix product; it has a weight of its own unless one is given."""
        mine = self.weight(12) if weight == -2 else weight
        return self.add((x,), size, time, INPUTS, weight=mine)

    def relu(self, x: int) -> int:
        """Add an element-wise op whose gradient reads its output."""
        return self.add((x,), 0, 2, OUTPUT, in_place=True)

    def gelu(self, x: int) -> int:
        """Add an element-wise op whose gradient reads its input."""
        return self.add((x,), 0, 3, INPUTS, in_place=True)

    def pool(self, x: int, size: float) -> int:
        """Add an op whose gradient reads input and output."""
        return self.add((x,), size, 2, BOTH)

    def resize(self, x: int, size: float) -> int:
        """Add an op whose gradient reads nothing of the forward."""
        return self.add((x,), size, 2, NEITHER)

    def sum(self, xs: Sequence[int]) -> int:
        """Add a sum; the gradient of each term is that of the sum."""
        return self.add(xs, 0, 2, NEITHER, in_place=True, passes=True)

    def concat(self, xs: Sequence[int]) -> int:
        """Add a value as large as all of these; its gradient is sliced."""
        node = self.add(xs, 1, 2, NEITHER)
        size = sum(self.ops[x].bytes for x in xs)
        self.ops[node] = dataclasses.replace(self.ops[node], bytes=size)
        return node

    def product(self, x: int, y: int, size: float, time: float = 6) -> int:
        """Add a product of two values; its gradient reads both."""
        return self.add((x, y), size, time, INPUTS)

    def mask(self, x: int) -> int:
        """Add dropout: a random mask, which may not be drawn twice, and the product with it."""
        drawn = self.add((), 1, 2, NEITHER, pure=False)
        self.ops[drawn] = dataclasses.replace(self.ops[drawn], bytes=self.ops[x].bytes)
        return self.add((x, drawn), 0, 2, INPUTS, in_place=True)

    # The step.

    def joint(self, losses: Sequence[Sequence[int]] = (), name: str = "") -> CostGraph:
        """Return the step: forward, the backward of each loss one after the other, updates.

        Args:
          losses: the values that each loss reads; by default one reads all that nothing else does.
        """
        return _Step(self, name).build(losses or (self._unread(),))

    def _unread(self) -> list[int]:
        read = {x for op in self.ops for x in op.inputs}
        return [v for v in range(len(self.ops)) if v not in read]


class _Step:
    """A joint graph in the making."""

    def __init__(self, net: Net, name: str):
        self.net, self.name = net, name
        self.vertices: list[Vertex] = []
        self.storages: list[Storage] = []

    def put(self, name: str, region: str, time: float, reads: Sequence[int],
            sizes: Sequence[int], in_place: Sequence[int] = (), pure: bool = False
            ) -> tuple[int, ...]:
        """Return the storages that a new vertex writes."""
        index = len(self.vertices)
        made = tuple(range(len(self.storages), len(self.storages) + len(sizes)))
        self.storages += [Storage(f"{name}:{i}", size, index) for i, size in enumerate(sizes)]
        reuses = tuple((w, r) for w in made for r in in_place
                       if self.storages[r].bytes == self.storages[w].bytes)
        self.vertices.append(Vertex(
            name, region, time, reads=tuple(sorted(set(reads))), writes=made, reuses=reuses,
            recomputable=pure, cheap=time < 5))
        return made

    def build(self, losses: Sequence[Sequence[int]]) -> CostGraph:
        """Return the checked graph."""
        self.value: list[int] = []
        for v, op in enumerate(self.net.ops):
            reads = [self.value[x] for x in op.inputs]
            self.value += self.put(f"op{v}", FORWARD, op.time, reads, (op.bytes,),
                                   reads if op.in_place else (), op.pure)
        gradients: dict[int, list[int]] = {}
        for number, ends in enumerate(losses):
            self.backward(number, ends, gradients)
        for weight, parts in sorted(gradients.items()):
            whole = self.total(f"weight{weight}", parts)
            self.put(f"weight{weight}/update", UPDATE, 1.0, (whole,), ())
        graph = CostGraph(tuple(self.vertices), tuple(self.storages), name=self.name)
        check_cost_graph(graph)
        return graph

    def total(self, name: str, parts: Sequence[int]) -> int:
        """Return the storage of the sum of gradients."""
        if len(parts) == 1:
            return parts[0]
        size = self.storages[parts[0]].bytes
        return self.put(f"{name}/sum", BACKWARD, 1.0, parts, (size,), parts)[0]

    def backward(self, number: int, ends: Sequence[int], gradients: dict[int, list[int]]) -> None:
        """Add the backward pass of one loss; `gradients` collects those of weights."""
        ops = self.net.ops
        made: dict[int, list[int]] = {}
        seeds = self.put(f"loss{number}", BACKWARD, 2.0, [self.value[v] for v in ends],
                         [ops[v].bytes for v in ends])
        for v, seed in zip(ends, seeds, strict=True):
            made.setdefault(v, []).append(seed)
        for v in range(max(ends), -1, -1):
            if v not in made:
                continue
            op, name = ops[v], f"loss{number}/op{v}"
            gradient = self.total(name, made[v])
            reads = [self.value[x] for x in op.inputs if op.reads in (INPUTS, BOTH)]
            reads += [self.value[v]] if op.reads in (OUTPUT, BOTH) else []
            if op.weight >= 0:
                gradients.setdefault(op.weight, []).extend(self.put(
                    f"{name}/weight", BACKWARD, op.time, [*reads, gradient],
                    (self.net.weights[op.weight],)))
                reads = []  # the gradient of the input reads the weight instead
            towards = [x for x in op.inputs if ops[x].pure]
            if op.passes:
                parts: Sequence[int] = [gradient] * len(towards)
            else:
                parts = self.put(f"{name}/inputs", BACKWARD, op.time, [*reads, gradient],
                                 [ops[x].bytes for x in towards],
                                 (gradient,) if op.in_place else ()) if towards else ()
            for x, part in zip(towards, parts, strict=True):
                made.setdefault(x, []).append(part)
