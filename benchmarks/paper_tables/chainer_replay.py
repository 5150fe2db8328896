"""Peak memory of Chainer 6, executing a canonical strategy as the paper's program did, or none.

Kusumoto et al. measured their tables on a GPU, with a program of their own that told Chainer what
to compute and what to drop. Here its steps are derived from a sequence of lower sets, and the
buffers are counted that Chainer's functions allocate meanwhile. Beyond the paper's model:

* The gradient of a function reads its inputs (a ReLU's does not) and, if it is a ReLU, a pooling
  or a local response normalisation, its output. Where the boundary of a lower set lies between
  the two, the output was dropped, and the function runs once more, for its gradient alone.
* A crop and a reshape are views of their input. Sum, concatenation and reshape hand on views of
  their gradient: that of a concatenation lives until the last of its parts has been used.
* A second gradient of the same value is added to the first in a third buffer; convolution,
  normalisation and fully connected layers copy a gradient that is not in one piece.
* Function objects keep something until they run again or the step ends: local response
  normalisation its scale and its output, dropout its mask, the loss the probabilities.
* Gradients of parameters are made as the backward reaches them, and stay.
* Without recomputation Chainer drops a value once computed unless some function keeps it for its
  gradient, and what is kept stays to the end (appendix C).

The workspace of convolutions (8 MB at most by default) is left out.

Source: Kusumoto et al. 2019, section 3 (canonical strategy), appendix C; the authors' program,
github.com/pfnet-research/recompute, and Chainer at commit 9f243e66fc, which it names.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from benchmarks.paper_tables.kusumoto_graphs import Network
from tfckpt.errors import PlanError
from tfckpt.solvers.forward.forward_graph import ForwardGraph
from tfckpt.solvers.forward.lower_sets import boundary, nodes_of

__all__ = ["Step", "canonical_steps", "peak_bytes", "plain_steps", "with_liveness"]

VALUE, GRADIENT, DROP_VALUE, DROP_GRADIENT = "value", "gradient", "drop value", "drop gradient"

KEEP_INPUTS = frozenset({"conv", "deconv", "fc", "bn", "pool", "lrn", "loss"})
KEEP_OUTPUT = frozenset({"relu", "pool", "lrn"})
VIEWS = frozenset({"crop", "reshape"})
HAND_ON_VIEWS = frozenset({"add", "concat", "reshape"})
COPY_PIECES = frozenset({"conv", "deconv", "fc", "bn"})


@dataclasses.dataclass(frozen=True)
class Step:
    """One action of the program.

    Attributes:
      what: VALUE runs the function of the vertex, GRADIENT its gradient; the others drop.
      vertex: whose value or gradient is made or dropped, or whose gradient is handed back.
      reads: vertices whose values it reads.
      inputs: of a GRADIENT, the vertices whose gradients it makes or adds to.
    """

    what: str
    vertex: int
    reads: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()


def canonical_steps(network: Network, lower_sets: Sequence[int]) -> list[Step]:
    """Return the canonical strategy without liveness analysis: a segment's drops come at its end.
    """
    forward = network.forward
    steps: list[Step] = []
    have: set[int] = set()
    kept: set[int] = set()
    segments = []
    below = 0
    for mask in lower_sets:
        segment = nodes_of(mask & ~below)
        segments.append((below, segment))
        below = mask
        steps += [_value(forward, v) for v in segment]
        have.update(segment)
        kept.update(nodes_of(boundary(forward, mask)))
        steps += _drop(DROP_VALUE, have, have - kept)
    graded: set[int] = set()
    for below, segment in reversed(segments):
        steps += [_value(forward, v) for v in segment if v not in have]
        have.update(segment)
        graded.update(segment)
        steps += _gradients(network, set(segment), have)
        following = {w for v in nodes_of(below) for w in forward.successors[v]
                     if not below >> w & 1}
        beside = {u for w in following for u in forward.predecessors[w]}
        steps += _drop(DROP_VALUE, have,
                       {v for v in have if not below >> v & 1 and v not in beside})
        steps += _drop(DROP_GRADIENT, graded, graded - following)
    return steps


def _value(forward: ForwardGraph, vertex: int) -> Step:
    return Step(VALUE, vertex, forward.predecessors[vertex])


def _drop(what: str, have: set[int], gone: Iterable[int]) -> list[Step]:
    """Return drops in the order of the vertices, and take these out of `have`."""
    order = sorted(gone)
    have.difference_update(order)
    return [Step(what, vertex) for vertex in order]


def _gradients(network: Network, segment: set[int], have: set[int]) -> list[Step]:
    """Return the steps for the gradients of a segment, the last function first."""
    forward, kinds = network.forward, network.kinds
    steps = []
    for w in reversed(range(len(forward))):
        needs = forward.predecessors[w]
        inputs = tuple(u for u in needs if u in segment)
        if not inputs and (needs or w not in segment):
            continue
        reads = (() if kinds[w] == "relu" else needs) + (w,) * (kinds[w] in KEEP_OUTPUT)
        step = Step(GRADIENT, w, reads, inputs)
        again = w in reads and w not in have
        steps += [_value(forward, w), step, Step(DROP_VALUE, w)] if again else [step]
    return steps


def with_liveness(steps: Sequence[Step]) -> list[Step]:
    """Return the same steps, each drop right after the last that makes or reads what it drops."""
    last: dict[tuple[str, int], int] = {}
    drops: list[list[Step]] = [[] for _ in steps]
    for at, step in enumerate(steps):
        if step.what in (VALUE, GRADIENT):
            own = DROP_VALUE if step.what == VALUE else DROP_GRADIENT
            last[own, step.vertex] = at
            last.update(((DROP_VALUE, v), at) for v in step.reads)
            last.update(((DROP_GRADIENT, v), at) for v in step.inputs)
        else:
            drops[last[step.what, step.vertex]].append(step)
    return [moved for step, dropped in zip(steps, drops, strict=True)
            for moved in ([step] if step.what in (VALUE, GRADIENT) else []) + dropped]


def plain_steps(network: Network) -> list[Step]:
    """Return Chainer's own steps: every function once, gradients by rank, the deepest first."""
    forward, kinds = network.forward, network.kinds
    kept_by = [(needs if kind in KEEP_INPUTS else ()) + (v,) * (kind in KEEP_OUTPUT)
               for v, (kind, needs) in enumerate(zip(kinds, forward.predecessors, strict=True))]
    kept = {v for reads in kept_by for v in reads}
    steps = []
    rank = [0] * len(forward)
    for v, needs in enumerate(forward.predecessors):
        rank[v] = 1 + max((rank[u] for u in needs), default=0)
        steps.append(_value(forward, v))
        steps += [Step(DROP_VALUE, u) for u in needs
                  if u not in kept and forward.successors[u][-1] == v]
    found = {len(forward) - 1}
    heap = [(-rank[v], 0, v) for v in found]
    while heap:
        _, _, w = heapq.heappop(heap)
        inputs = forward.predecessors[w]
        steps += [Step(GRADIENT, w, kept_by[w], inputs), Step(DROP_GRADIENT, w)]
        for u in inputs:
            if u not in found:
                heapq.heappush(heap, (-rank[u], len(found), u))
                found.add(u)
    return steps


def peak_bytes(network: Network, steps: Sequence[Step]) -> int:
    """Return the most bytes allocated at once, with parameters and the batch that is fed.

    Raises:
      PlanError: a step reads a value that is not there.
    """
    memory = _Memory(network)
    for step in steps:
        memory.take(step)
    return memory.peak


class _Buffer:
    """A buffer with a count of the references to it."""

    def __init__(self, size: int, whole: bool = True):
        self.size, self.references, self.whole = size, 1, whole


class _Memory:
    """Chainer's buffers while the steps are taken, one after the other."""

    def __init__(self, network: Network):
        self.network = network
        self.now = self.peak = sum(network.parameters) + network.input_bytes
        self.values: dict[int, _Buffer] = {}
        self.gradients: dict[int, _Buffer] = {}
        self.pieces: set[int] = set()  # vertices whose gradient is a part of another
        self.objects: dict[int, list[_Buffer]] = {}
        self.graded: set[int] = set()

    def new(self, size: int) -> _Buffer:
        self.now += size
        self.peak = max(self.peak, self.now)
        return _Buffer(size)

    def drop(self, *buffers: _Buffer) -> None:
        for buffer in buffers:
            buffer.references -= 1
            if not buffer.references:
                self.now -= buffer.size

    def take(self, step: Step) -> None:
        for v in step.reads:
            if v not in self.values:
                names = self.network.forward.names
                raise PlanError(f"plan: the {step.what} of {names[step.vertex]!r} reads "
                                f"{names[v]!r}, which is not there")
        if step.what == VALUE:
            self.compute(step.vertex)
        elif step.what == GRADIENT:
            self.hand_back(step)
        else:
            table = self.values if step.what == DROP_VALUE else self.gradients
            self.drop(table.pop(step.vertex))

    def compute(self, v: int) -> None:
        """Run the function of a vertex."""
        kind, size = self.network.kinds[v], self.network.forward.bytes
        needs = self.network.forward.predecessors[v]
        self.drop(*self.objects.pop(v, ()))
        if kind in VIEWS:
            self.values[v] = _shared(self.values[needs[0]])
        else:
            self.values[v] = self.new(size[v])
        passing = []
        if kind == "lrn":
            self.objects[v] = [self.new(size[v]), _shared(self.values[v])]
        elif kind == "dropout":
            passing = [self.new(size[v])]  # random numbers
            self.objects[v] = [self.new(size[v])]
        elif kind == "loss":
            passing = [self.new(size[needs[0]])]  # logarithms of the probabilities
            self.objects[v] = [self.new(size[needs[0]])]
        self.drop(*passing)
        if not self.network.forward.successors[v] and v not in self.gradients:
            self.gradients[v] = self.new(size[v])

    def hand_back(self, step: Step) -> None:
        """Run the gradient of a function for some of its inputs."""
        w, size = step.vertex, self.network.forward.bytes
        kind, given = self.network.kinds[w], self.gradients[step.vertex]
        copied = kind == "lrn" or kind in COPY_PIECES and w in self.pieces
        passing = [self.new(size[w])] if copied else []
        for u in step.inputs:
            made = _shared(given) if kind in HAND_ON_VIEWS else self.new(size[u])
            piece = kind in HAND_ON_VIEWS and (kind == "concat" or w in self.pieces)
            if u in self.gradients:
                total = self.new(size[u])
                self.drop(made, self.gradients[u])
                made, piece = total, False
            self.gradients[u] = made
            (self.pieces.add if piece else self.pieces.discard)(u)
        self.drop(*passing)
        if w not in self.graded:
            self.graded.add(w)
            self.new(self.network.parameters[w])


def _shared(buffer: _Buffer) -> _Buffer:
    """Return the buffer, with one more reference."""
    buffer.references += 1
    return buffer
