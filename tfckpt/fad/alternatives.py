"""Forward-AD alternatives: what each region could keep instead, as values. Decides nothing.

An `Alternative` says for one region: compute D_v = dv/dx in the forward by this program, keep
what `kept` lists, and replace one tensor of the backward by the sum of g * D_v. It carries the
bytes of the region kept for the backward before and after, given what other ops read anyway.

Source: Guo et al., sections II-E and III-B. Beyond it: two-valued derivatives are kept as
booleans, and a derivative that is a tensor the step has anyway costs nothing to keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfckpt.errors import CostError
from tfckpt.fad.backward import Match, Walk, agree
from tfckpt.fad.derivative import Derivatives, Samples, on_samples
from tfckpt.fad.liveness import Liveness
from tfckpt.fad.regions import FLOATS, Region, constants, find_regions
from tfckpt.fad.residuals import DTYPE_BYTES, Residuals, elements
from tfckpt.ir.graph import BACKWARD, UPDATE, Graph, TensorId
from tfckpt.ops.terms import CAST, NUMBER, TENSOR, TWO, Program


@dataclasses.dataclass(frozen=True)
class Kept:
    """One derivative and the gradients that it multiplies.

    Attributes:
      of: v, the tensor of the region whose derivative it is.
      gradients: tensors of the backward; their sum is the gradient that reaches v from outside.
      node: node of the program that is kept: a float tensor, a mask, or a number (nothing).
      on, off: values of the derivative where the mask is true and elsewhere; None without a mask.
      bytes: what keeping it takes beyond what is kept anyway; 0 for a tensor of the region.
    """

    of: TensorId
    gradients: tuple[TensorId, ...]
    node: int
    on: float | None = None
    off: float | None = None
    bytes: int = 0

    @property
    def two_valued(self) -> bool:
        """Return whether a mask is kept."""
        return self.on is not None


@dataclasses.dataclass(frozen=True)
class Alternative:
    """The change that forward AD would make to one region.

    Attributes:
      region: the ops and x.
      outputs: tensors of the region that ops outside of it read, in the forward.
      program: how the derivatives are computed, from tensors of the region.
      kept: one entry for each tensor with an incoming gradient.
      addends: gradients that join the sum without passing the region.
      sink: the tensor of the backward that is replaced by addends plus sum of g * D.
      removed: ops that then stop running, ascending.
      bytes_before, bytes_after: of x, the region and D, what is kept for the backward.
    """

    region: Region
    outputs: tuple[TensorId, ...]
    program: Program
    kept: tuple[Kept, ...]
    addends: tuple[TensorId, ...]
    sink: TensorId
    removed: tuple[int, ...]
    bytes_before: int
    bytes_after: int

    @property
    def saves(self) -> int:
        """Return bytes no longer kept for the backward; negative where more would be kept."""
        return self.bytes_before - self.bytes_after


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A region whose backward could not be matched, and why."""

    region: Region
    reason: str


@dataclasses.dataclass(frozen=True)
class Offers:
    """Alternatives and refusals of a graph, each in the order of the regions."""

    alternatives: tuple[Alternative, ...]
    refusals: tuple[Refusal, ...]


def find_alternatives(graph: Graph, root: Sequence[tuple[TensorId, ...]],
                      least_bytes: int = 0) -> Offers:
    """Return every region of a step with what forward AD could do there.

    Args:
      graph: the captured step; shapes known.
      root: for each output of each op the tensor that allocates its memory.
      least_bytes: regions whose x is smaller are left out.

    O(edges) plus, for each region, its own size and that of its backward times some 200 samples.
    """
    known, live = constants(graph), Liveness(graph)
    alternatives: list[Alternative] = []
    refusals: list[Refusal] = []
    for region in find_regions(graph, known):
        size = graph.ops[region.source[0]].outputs[region.source[1]].bytes or 0
        if size < least_bytes or not any(
                graph.ops[r].region == BACKWARD and live.alive[r]
                for i in (region.source[0], *region.ops) for r in live.readers[i]):
            continue
        samples = Samples(graph, region, known)
        walk = Walk(graph, region, samples, live)
        if not walk.read:
            continue  # nothing element-wise in the backward reads it: there is nothing to replace
        match = walk.match()
        if match is None:
            refusals.append(Refusal(region, _why(walk)))
            continue
        found = _offer(graph, region, samples, walk, match, live, root)
        if isinstance(found, Alternative):
            alternatives.append(found)
        else:
            refusals.append(found)
    offers = Offers(tuple(alternatives), tuple(refusals))
    for alternative in offers.alternatives:
        check_alternative(graph, alternative)
    return offers


def _why(walk: Walk) -> str:
    if not walk.forms:
        return ("no gradient passes it: what the backward reads of it, it uses for something "
                "other than an element-wise gradient")
    return ("its backward computes something other than the sum of g * derivative: a custom "
            "gradient, a gradient that is not linear, or ops that are not element-wise")


def _offer(graph: Graph, region: Region, samples: Samples, walk: Walk, match: Match, live: Liveness,
           root: Sequence[tuple[TensorId, ...]]) -> Alternative | Refusal:
    derivatives = Derivatives(graph, region, walk.samples.known)
    found = {v: derivatives.of(v) for v, _ in match.gradients if v != region.source}
    terms = {v: term for v, term in found.items() if term is not None}
    if len(terms) != len(found):
        return Refusal(region, "an output does not move with the input")
    values = on_samples(samples, derivatives.builder)
    kept: list[Kept] = []
    addends: list[TensorId] = []
    for v, gradients in match.gradients:
        if v == region.source:
            addends.extend(gradients)
            continue
        term = terms[v]
        output = graph.ops[v[0]].outputs[v[1]]
        wanted = samples.slopes[v]
        if not agree(np.broadcast_to(values[term.index], wanted.shape), wanted, output.dtype):
            return Refusal(region, "the derivative that would be kept is not that of its backward "
                                   f"for {graph.ops[v[0]].name!r}")
        kept.append(_kept(graph, v, gradients, derivatives.builder.program(), term.index))
    program, kept = _pruned(derivatives.builder.program(), kept)
    reads = sorted({node.attr("tensor") for node in program if node.type == TENSOR})
    needed = [g[0] for _, group in match.gradients for g in group] + [t[0] for t in reads]
    removed = live.dies(match.sink[0], needed)
    residuals = Residuals(graph, region, live, root, walk.samples.known)
    before = residuals.bytes()
    kept, after = _priced(graph, region, residuals, program, kept, removed)
    return Alternative(region, _outputs(graph, region, live), program, tuple(kept),
                       tuple(addends), match.sink, removed, before, after)


def _kept(graph: Graph, v: TensorId, gradients: tuple[TensorId, ...], program: Program, index: int
          ) -> Kept:
    """Return what to keep of a derivative: a mask if it takes two values, never a widened copy."""
    node = program[index]
    if node.type == TWO:
        return Kept(v, gradients, node.args[0], node.attr("on"), node.attr("off"))
    if node.type == CAST and DTYPE_BYTES[program[node.args[0]].dtype] < DTYPE_BYTES[node.dtype]:
        index = node.args[0]
    return Kept(v, gradients, index)


def _pruned(program: Program, kept: list[Kept]) -> tuple[Program, list[Kept]]:
    """Return the program without what no kept node needs."""
    needed = [False] * len(program)
    for entry in kept:
        needed[entry.node] = True
    for i in range(len(program) - 1, -1, -1):
        if needed[i]:
            for arg in program[i].args:
                needed[arg] = True
    number = {old: new for new, old in enumerate(i for i, used in enumerate(needed) if used)}
    nodes = tuple(dataclasses.replace(program[i], args=tuple(number[a] for a in program[i].args))
                  for i in number)
    return nodes, [dataclasses.replace(entry, node=number[entry.node]) for entry in kept]


def _priced(graph: Graph, region: Region, residuals: Residuals, program: Program,
            kept: list[Kept], removed: tuple[int, ...]) -> tuple[list[Kept], int]:
    """Return the kept derivatives with their bytes, and all bytes kept for the backward."""
    read: list[TensorId] = []
    made: dict[int, int] = {}
    result = []
    for entry in kept:
        node = program[entry.node]
        size = 0
        if node.type == TENSOR:
            read.append(node.attr("tensor"))
        elif node.type != NUMBER and entry.node not in made:
            size = made[entry.node] = elements(graph, region.source) * DTYPE_BYTES[node.dtype]
        result.append(dataclasses.replace(entry, bytes=size))
    return result, residuals.bytes(removed, read) + sum(made.values())


def _outputs(graph: Graph, region: Region, live: Liveness) -> tuple[TensorId, ...]:
    inside = frozenset(region.ops)
    found = {t for i in region.ops for r in live.readers[i]
             if r not in inside and graph.ops[r].region not in (BACKWARD, UPDATE)
             for t in graph.ops[r].inputs if t[0] == i}
    return tuple(sorted(found | {t for t in graph.fetches if t[0] in inside}))


def check_alternative(graph: Graph, alternative: Alternative) -> None:
    """Raise `CostError` unless the value refers to the graph consistently.

    Checked: program nodes read earlier ones and tensors of the region, of x or constants; the
    kept nodes exist and are masks exactly where two values are given; sink, gradients and addends
    are tensors of the backward; neither what the program reads nor a gradient is removed.

    Args:
      graph: the step that the alternative was found in.
      alternative: what is checked; not changed.

    Raises:
      CostError: the value does not fit the graph; the message says where.
    """
    inside = frozenset(alternative.region.ops) | {alternative.region.source[0]}
    gone = frozenset(alternative.removed)
    where = f"cost: the alternative for {graph.ops[alternative.region.source[0]].name!r} "
    for i, node in enumerate(alternative.program):
        if any(not 0 <= arg < i for arg in node.args):
            raise CostError(where + f"has a node {i} that reads a later one")
        if node.type == TENSOR:
            op = node.attr("tensor")[0]
            if op in gone or (op not in inside and graph.ops[op].region == BACKWARD):
                raise CostError(where + f"reads {graph.ops[op].name!r}, which it removes or which "
                                        "lies in the backward")
    for entry in alternative.kept:
        if (alternative.program[entry.node].dtype == "bool") != entry.two_valued:
            raise CostError(where + "keeps a mask without values, or values without a mask")
    for op, slot in (alternative.sink, *alternative.addends,
                     *(g for entry in alternative.kept for g in entry.gradients)):
        if graph.ops[op].region != BACKWARD or graph.ops[op].outputs[slot].dtype not in FLOATS:
            raise CostError(where + f"takes {graph.ops[op].name!r} for a gradient")
        if op in gone and op != alternative.sink[0]:
            raise CostError(where + f"removes {graph.ops[op].name!r}, which it reads")
    if alternative.sink[0] not in gone:
        raise CostError(where + "keeps the op that it replaces")
