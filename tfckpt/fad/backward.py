"""The part of the backward pass that carries gradients through a region.

Rather than recognising the gradient of each primitive by its pattern, which custom gradients and
TensorFlow's shortcuts defeat, ops of the backward that read the region are followed for as long
as they are element-wise, and each tensor on the way is kept as a linear form: for every incoming
gradient g (a tensor of the backward that is computed outside) the coefficient with which it enters,
as an array over sample points. An op that reads anything else ends the walk. What is looked for
is one tensor, the *sink*, whose every coefficient is the derivative dv/dx of some tensor v of the
region: then sink = sum of g * dv/dx, and that sum may replace it, whatever else reads the ops in
between. A coefficient of one, dx/dx, is a gradient that joins the sum from elsewhere.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfckpt.fad.derivative import Samples
from tfckpt.fad.evaluate import can_evaluate, evaluate
from tfckpt.fad.liveness import Liveness
from tfckpt.fad.regions import FLOATS, Region
from tfckpt.ir.graph import BACKWARD, Graph, Op, TensorId
from tfckpt.ops import SUM, Array, Broadcast, record

LARGEST_WALK = 4096
"""Ops followed for one region; a longer walk is cut off, which can only lose a match."""
LONGEST_CHAIN = 6
_EPSILON = {"float16": 9.8e-4, "bfloat16": 7.8e-3, "float32": 1.2e-7, "float64": 2.2e-16}

Form = dict[TensorId, Array]


@dataclasses.dataclass(frozen=True)
class Match:
    """sink = sum over `gradients` of g * dv/dx.

    Attributes:
      sink: the tensor of the backward that is replaced.
      gradients: pairs (v, incoming gradients that are multiplied by dv/dx), by v; v is a tensor
        of the region, or its source for gradients that are only added.
      removed: ops that nothing needs once the sink is replaced, ascending.
    """

    sink: TensorId
    gradients: tuple[tuple[TensorId, tuple[TensorId, ...]], ...]
    removed: tuple[int, ...]


class Walk:
    """Follows the backward of one region; `forms` and `plain` are what it found."""

    def __init__(self, graph: Graph, region: Region, samples: Samples, live: Liveness) -> None:
        self.graph, self.region, self.samples, self.live = graph, region, samples, live
        x = region.source
        self.shape = graph.ops[x[0]].outputs[x[1]].shape
        self.mine = frozenset(region.ops)
        self.forms: dict[TensorId, Form] = {}
        self.plain: dict[TensorId, Array] = {}
        self.read = False
        self._follow()

    def _follow(self) -> None:
        waiting: list[int] = []
        queued: set[int] = set()
        for tensor in [self.region.source[0], *self.region.ops]:
            self._queue(tensor, waiting, queued)
        steps = 0
        while waiting and steps < LARGEST_WALK:
            i = heapq.heappop(waiting)
            steps += 1
            with np.errstate(all="ignore"):
                done = self._visit(i, self.graph.ops[i])
            if done:
                self._queue(i, waiting, queued)

    def _queue(self, op: int, waiting: list[int], queued: set[int]) -> None:
        for reader in self.live.readers[op]:
            if (self.graph.ops[reader].region == BACKWARD and reader not in queued
                    and self.live.alive[reader]):
                queued.add(reader)
                heapq.heappush(waiting, reader)

    def _visit(self, i: int, op: Op) -> bool:
        """Note what the op computes; False where it is not of the kind that is followed."""
        fills = record(op.type).fills
        if fills is not None and op.outputs[0].shape == self.shape:
            self.plain[(i, 0)] = np.full(len(self.samples.x), fills)
            return True
        if self._changes_no_shape(op):
            return self._copy(i, op.inputs[0])
        if not can_evaluate(op.type) or len(op.outputs) != 1 or op.outputs[0].shape != self.shape:
            return False
        if op.outputs[0].dtype not in FLOATS and op.outputs[0].dtype != "bool":
            return False
        inputs = [self._input(t) for t in op.inputs]
        if any(entry is None for entry in inputs):
            return False
        moving = [n for n, entry in enumerate(inputs) if isinstance(entry, dict)]
        self.read = True
        if not moving:
            self.plain[(i, 0)] = evaluate(op.type, inputs, op.attrs)  # type: ignore[arg-type]
            return True
        form = _linear(op, inputs, moving)
        if form is None or op.outputs[0].dtype not in FLOATS:
            return False
        self.forms[(i, 0)] = form
        return True

    def _copy(self, i: int, source: TensorId) -> bool:
        entry = self._input(source)
        if isinstance(entry, dict):
            self.forms[(i, 0)] = entry
        elif entry is not None:
            self.plain[(i, 0)] = entry
        return entry is not None

    def _input(self, tensor: TensorId) -> Form | Array | None:
        """Return a linear form, plain values, or None for what ends the walk."""
        if tensor in self.forms:
            return self.forms[tensor]
        if tensor in self.plain:
            return self.plain[tensor]
        value = self.samples.value(tensor)
        if value is not None:
            return value
        op = self.graph.ops[tensor[0]]
        output = op.outputs[tensor[1]]
        if record(op.type).fills == 0.0 and output.shape == self.shape:
            return np.zeros_like(self.samples.x)
        if op.region == BACKWARD and output.shape == self.shape and output.dtype in FLOATS:
            return {tensor: np.ones_like(self.samples.x)}  # an incoming gradient
        return None

    def _changes_no_shape(self, op: Op) -> bool:
        """Return whether the op undoes a broadcast that did not happen.

        Where shapes are unknown when a step is traced, TensorFlow sums a gradient over the axes
        that `BroadcastGradientArgs` finds at run time, and reshapes it. Between tensors of one
        shape there are none.
        """
        part = record(op.type).broadcast
        if part is Broadcast.RESHAPE and op.outputs[0].shape == self.shape:
            tensor = self.graph.ops[op.inputs[0][0]].outputs[op.inputs[0][1]]
            return tensor.shape == self.shape or op.inputs[0] in self.forms
        if part is not Broadcast.SUM:
            return False
        axes = self.graph.ops[op.inputs[1][0]]
        if record(axes.type).broadcast is not Broadcast.AXES:
            return False
        shapes = [self._shape_read(t) for t in axes.inputs]
        return shapes[op.inputs[1][1]] == self.shape and self._broadcasts(
            shapes[1 - op.inputs[1][1]])

    def _shape_read(self, tensor: TensorId) -> tuple[int | None, ...] | None:
        op = self.graph.ops[tensor[0]]
        if record(op.type).broadcast is Broadcast.SHAPE:
            source, slot = op.inputs[0]
            return self.graph.ops[source].outputs[slot].shape
        length = op.outputs[tensor[1]].shape
        return (None,) * (length[0] or 0) if (
            record(op.type).is_constant and length) else None

    def _broadcasts(self, shape: tuple[int | None, ...] | None) -> bool:
        """Return whether a shape cannot make x's grow, whatever x's first dimension will be."""
        if shape is None or self.shape is None:
            return False
        return shape == self.shape or len(shape) < len(self.shape) or shape[:1] == (1,)

    # Matching.

    def match(self) -> Match | None:
        """Return the sink that frees most with the fewest derivatives; None where none is a sum."""
        best: tuple[tuple[int, int, int], Match] | None = None
        x = self.graph.ops[self.region.source[0]].outputs[self.region.source[1]]
        for sink in sorted(self.forms):
            if self.live.required[sink[0]] or (
                    self.graph.ops[sink[0]].outputs[sink[1]].dtype != x.dtype):
                continue
            for form in self._rewritten(self.forms[sink]):
                gradients = self._gradients(form)
                if gradients is None or all(v == self.region.source for v, _ in gradients):
                    continue
                keep = [g[0] for _, group in gradients for g in group]
                removed = self.live.dies(sink[0], keep)
                score = (sum(1 for i in removed if self._reads_region(i)), -len(gradients),
                         len(removed))
                if best is None or score > best[0]:
                    best = (score, Match(sink, gradients, removed))
        return best[1] if best else None

    def _rewritten(self, form: Form) -> list[Form]:
        """Return the form, and the form with constant multiples of one gradient put together.

        Branches of a region often end in constant factors (celu), and their incoming gradients
        are then multiples of the one gradient that reaches their sum.
        """
        chains = {g: self._multiple_of(g) for g in form}
        shared: dict[TensorId, int] = {}
        for chain in chains.values():
            for ancestor, _ in chain:
                shared[ancestor] = shared.get(ancestor, 0) + 1
        result: Form = {}
        for g, coefficient in form.items():
            base, factor = next(((a, f) for a, f in chains[g] if shared[a] > 1), (g, 1.0))
            part = coefficient * factor
            result[base] = result[base] + part if base in result else part
        return [form] if len(result) == len(form) else [form, result]

    def _multiple_of(self, g: TensorId) -> list[tuple[TensorId, float]]:
        """Return the gradient and those that it is a constant multiple of, with the factors."""
        chain = [(g, 1.0)]
        for _ in range(LONGEST_CHAIN):
            tensor, factor = chain[-1]
            op = self.graph.ops[tensor[0]]
            if op.region == BACKWARD and self._changes_no_shape(op):
                chain.append((op.inputs[0], factor))
                continue
            if op.region != BACKWARD or not record(op.type).scales:
                break
            values = [self.samples.known.get(s) for s, _ in op.inputs]
            moving = [n for n, (s, _) in enumerate(op.inputs) if s not in self.samples.known]
            if len(moving) != 1 or moving[0] not in record(op.type).linear:
                break
            others = [v for n, v in enumerate(values) if n != moving[0]]
            source = op.inputs[moving[0]]
            if None in others or self.graph.ops[source[0]].outputs[source[1]].shape != self.shape:
                break
            args = [1.0 if n == moving[0] else v for n, v in enumerate(values)]
            step = evaluate(op.type, [np.asarray(v, np.float64) for v in args], op.attrs)
            chain.append((source, factor * float(step)))
        return chain

    def _reads_region(self, i: int) -> bool:
        return any(s in self.mine or (s, slot) == self.region.source
                   for s, slot in self.graph.ops[i].inputs)

    def _gradients(self, form: Form) -> tuple[tuple[TensorId, tuple[TensorId, ...]], ...] | None:
        """For each v the gradients whose coefficient is dv/dx, or None if one has no v."""
        groups: dict[TensorId, list[TensorId]] = {}
        for g, coefficient in form.items():
            v = self._whose(coefficient, self.graph.ops[g[0]].outputs[g[1]].dtype)
            if v is None:
                return None
            groups.setdefault(v, []).append(g)
        return tuple((v, tuple(sorted(groups[v]))) for v in sorted(groups))

    def _whose(self, coefficient: Array, dtype: str) -> TensorId | None:
        """Return the first tensor of the region with this derivative and this dtype."""
        for v, slope in self.samples.slopes.items():
            if (self.graph.ops[v[0]].outputs[v[1]].dtype == dtype
                    and agree(coefficient, slope, dtype)):
                return v
        return None


def _linear(op: Op, inputs: Sequence[Any], moving: list[int]) -> Form | None:
    """Return the linear form of an op's result, or None where it is not linear in the gradients."""
    known = record(op.type)
    if SUM in known.kinds:
        if len(moving) != len(inputs):
            return None
        signs = [1.0] + [1.0 if known.adds else -1.0] * (len(inputs) - 1)
        result: Form = {}
        for sign, form in zip(signs, inputs, strict=True):
            for g, coefficient in form.items():
                result[g] = result[g] + sign * coefficient if g in result else sign * coefficient
        return result
    if known.selects:
        return _selected(inputs, moving)
    if len(moving) != 1 or moving[0] not in known.linear:
        return None
    position = moving[0]
    return {g: evaluate(op.type, [*inputs[:position], c, *inputs[position + 1:]], op.attrs)
            for g, c in inputs[position].items()}


def _selected(inputs: Sequence[Any], moving: list[int]) -> Form | None:
    if 0 in moving or any(n not in moving and np.any(inputs[n]) for n in (1, 2)):
        return None
    mask, on, off = (entry if isinstance(entry, dict) or n == 0 else {}
                     for n, entry in enumerate(inputs))
    mask = np.asarray(mask, bool)
    return {g: np.where(mask, on.get(g, 0.0), off.get(g, 0.0)) for g in dict.fromkeys([*on, *off])}


def agree(a: Array, b: Array, dtype: str) -> bool:
    """Return whether two arrays are equal wherever both are finite.

    Differences that come of constants rounded in `dtype` do not count. At least a third of the
    samples must be finite on both sides (a logarithm has half).

    Args:
      a: values on sample points.
      b: values on the same sample points.
      dtype: of the tensors that both stand for: a float type such as "float32".
    """
    good = np.isfinite(a) & np.isfinite(b)
    if good.sum() * 3 < len(good):
        return False
    a, b = a[good], b[good]
    sizes = np.abs(a[a != 0])
    scale = float(np.median(sizes)) if len(sizes) else 0.0
    close = 8 * max(_EPSILON[dtype], 1e-12)
    return bool(np.all(np.abs(a - b) <= close * (np.abs(a) + np.abs(b) + scale)))
