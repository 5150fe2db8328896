"""Delays of copies under XLA, which ignores control edges: guards on their inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tfckpt.cost.views import is_element_wise
from tfckpt.errors import RewriteError
from tfckpt.ir.costgraph import BACKWARD, FORWARD, UPDATE
from tfckpt.ir.edits import Rewire
from tfckpt.ir.graph import Graph, Op, TensorId
from tfckpt.ir.schedule import Fence, Step
from tfckpt.ir.target import FUSED, ORDER, Target
from tfckpt.ops import Source, record
from tfckpt.rewrite.edit_builder import FLOATS, LARGE, EditBuilder
from tfckpt.rewrite.names import SCOPE, guard_name
from tfckpt.rewrite.xla.early import EarlyOps
from tfckpt.rewrite.xla.guards import XLA_GUARDS, BarrierGuard, Guard
from tfckpt.rewrite.xla.order import BackwardOrder
from tfckpt.rewrite.xla.updates import delay_updates

_NO_WEIGHTS = (Source.CONSTANT, Source.ELSEWHERE)
_INTEGERS = ("int32", "int64")


def _known_when_compiled(graph: Graph) -> list[bool]:
    """Return for each op whether XLA may know its results when it compiles.

    Shapes, axes and sizes must be known then, and nothing read through a guard is. They come from
    constants, from shapes, and from small ints that are passed in.
    """
    found: list[bool] = []
    for op in graph.ops:
        known = record(op.type)
        small = all(t.dtype in _INTEGERS and (t.bytes or 0) < LARGE for t in op.outputs)
        found.append(known.is_constant or known.shape_only or known.fed and small
                     or op.pure and bool(op.inputs) and all(found[i] for i, _ in op.inputs))
    return found


class XlaDelays:
    """One guard for each segment, and one for each gradient before which nothing may be read.

    Attributes:
      weights: whether weights are guarded too: it pays where their layout is changed early, and
        elsewhere they are one more copy.
      every_read: whether not only ops that XLA fuses see late what the forward kept for them.
      barriers: whether XLA keeps its own barriers.
      order, early: what has XLA keep the plan's order; None where nothing does.
    """

    def __init__(self, builder: EditBuilder, target: Target) -> None:
        self.builder = builder
        self.kind: type[Guard] = XLA_GUARDS[target.guard]
        self.weights = target.transposes_weights_early
        self.barriers = target.keeps_barriers
        self.every_read = target.hold != FUSED
        self.when_compiled = _known_when_compiled(builder.graph)
        self.order = BackwardOrder(builder) if target.hold == ORDER else None
        self.early = EarlyOps(builder, self.when_compiled) if target.hold == ORDER else None
        self.segments = 0
        self.guard: Guard | None = None
        self.guarded: dict[tuple[str, type[Guard]], str] = {}
        self.delayed: set[int] = set()  # ops whose copies in this segment depend on its guard
        self.trigger: tuple[str, str] | None = None  # the latest segment's
        self.gradient: TensorId | None = None  # the latest
        self.openers: dict[tuple[TensorId, type[Guard]], Guard] = {}
        self.late: dict[tuple[TensorId, TensorId, type[Guard]], str] = {}

    def open_segment(self, fence: Fence) -> None:
        """Make the guard of a run of copies, which depends on the gradient that comes in.

        Args:
          fence: the control barrier that the plan has before the run; only its position counts.

        Raises:
          RewriteError: the step has made no gradient before the segment.
        """
        trigger = self._incoming_gradient(fence.position)
        if self.order is not None:
            trigger = self.order.trigger(fence.position, *trigger), trigger[1]
        self.segments += 1
        self.guarded, self.delayed = {}, set()
        self.guard = self.kind(f"{SCOPE}/guard_{self.segments}", *trigger)
        self.builder.added.extend(self.guard.trigger_ops())

    def _incoming_gradient(self, position: int) -> tuple[str, str]:
        """Return the latest float tensor that the step made before a segment, and its dtype.

        One that more than the update reads: a gradient of weights would delay copies as well, but
        XLA's depth-first scheduler then computes it on the way to the segment, and leaves its
        update, which no segment waits for, to the end of the step. Where that would be the trigger
        of the segment before, whose copies could be merged with these, it is the latest of all.
        Not one that begins with padding, if there is another: to XLA that guard is open.
        """
        builder = self.builder
        latest = None
        for vertex, copy in reversed(builder.plan.schedule[:position]):
            made = builder.cost.vertices[vertex]
            if copy or not made.reads or made.region == UPDATE:
                continue  # before the first gradient, the end of the forward must do
            for slot, tensor in enumerate(builder.op(vertex).outputs):
                result = (made.ops[0], slot)
                if tensor.dtype not in FLOATS or builder.is_resident(result) or (
                        self._needs_later(result, position)):
                    continue
                found = builder.tensor_name(result), tensor.dtype
                latest = latest or found
                if self._goes_on(result) and not self._begins_padded(result):
                    self.trigger = latest if found == self.trigger else found
                    return self.trigger
        if latest is None:
            raise RewriteError("rewrite: a recomputation segment has no incoming gradient to guard "
                               "it with under XLA")
        return latest

    def _goes_on(self, tensor: TensorId) -> bool:
        """Return whether more than the update reads a tensor."""
        cost, s = self.builder.cost, self.builder.storage_of(tensor)
        return s is None or any(cost.vertices[v].region != UPDATE and not cost.vertices[v].join
                                for v in cost.readers[s])

    def _begins_padded(self, tensor: TensorId) -> bool:
        """Return whether XLA may know the first element of a tensor, whatever is computed."""
        graph = self.builder.graph
        op = graph.ops[tensor[0]]
        while not record(op.type).pads:
            read = [t for t in op.inputs if self.builder.tensor(t).dtype in FLOATS]
            if len(read) != 1 or not (record(op.type).aliases or record(op.type).fused_by_xla):
                return False
            op = graph.ops[read[0][0]]
        return True

    def signals(self, steps: Sequence[Step]) -> tuple[str, ...]:
        """Return no op: waits are control edges, which XLA ignores.

        Args:
          steps: not looked at.
        """
        return ()

    def delay_copy(self, op: Op, inputs: list[str], outside: Sequence[int], entry: bool,
                  triggers: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        """Pass all storages and weights from outside the segment through its guard.

        An op that reads nothing else through the guard has at least one input pass it. Small
        integers that XLA may know when it compiles pass none, even if they are computed, and
        copied.

        Args:
          op: the original.
          inputs: what the copy would read.
          outside: those of them, by index, that come from outside its recomputation segment.
          entry: not looked at.
          triggers: not looked at.

        Returns:
          What the copy reads, and no op that it waits for.
        """
        read, chosen = list(inputs), self._large_inputs(op, outside)
        delayed = self._reads_delayed(op, inputs, outside)
        if not (chosen or delayed):
            chosen = self._usable_inputs(op, outside)[:1]  # the largest
        for i in chosen:
            read[i] = self._guard(inputs[i], op, i)
        if chosen or delayed:
            self.delayed.add(self.builder.index[op.name])
        return read, ()

    def _reads_delayed(self, op: Op, inputs: list[str], outside: Sequence[int]) -> bool:
        """Return whether an op reads what depends on the segment's guard already."""
        return any(self.builder.root[made][slot][0] in self.delayed
                   or inputs[i] in self.guarded.values()
                   for i, (made, slot) in enumerate(op.inputs) if i not in outside)

    def _usable_inputs(self, op: Op, outside: Sequence[int]) -> list[int]:
        return [i for i in self.builder.guardable(op, outside)
                if not self.when_compiled[op.inputs[i][0]]]

    def _large_inputs(self, op: Op, outside: Sequence[int]) -> list[int]:
        return [i for i in self._usable_inputs(op, outside)
                if self.builder.storage_of(op.inputs[i]) is not None
                or self._is_weight(op.inputs[i])]

    def _guard(self, read: str, op: Op, index: int) -> str:
        """Return a tensor read through the segment's guard, made once for each tensor and kind."""
        guard = self.guard
        assert guard is not None
        kind = self._kind(op)
        if (read, kind) not in self.guarded:
            name = guard_name(read, self.segments, "" if kind is self.kind else "_whole")
            self.builder.added.extend(kind(guard.name, guard.trigger, guard.dtype).pass_through(
                name, read, self.builder.tensor(op.inputs[index]).dtype))
            self.guarded[read, kind] = f"{name}:0"
        return self.guarded[read, kind]

    def _kind(self, op: Op) -> type[Guard]:
        """Return the kind of guard for what an op reads.

        A select of what a convolution reads or a table is gathered from would be computed whole,
        and be one more copy: where XLA keeps its barriers, it passes one.
        """
        fused = is_element_wise(op) or record(op.type).reduces
        return self.kind if fused or not self.barriers else BarrierGuard

    def _is_weight(self, tensor: TensorId) -> bool:
        """Return whether a tensor is resident, and so large that a copy that XLA makes matters."""
        return (self.weights and self.builder.is_resident(tensor)
                and record(self.builder.graph.ops[tensor[0]].type).source not in _NO_WEIGHTS
                and (self.builder.tensor(tensor).bytes or 0) >= LARGE
                and self.builder.tensor(tensor).dtype in FLOATS)

    def before_original(self, op: Op, position: int) -> None:
        """Have a backward op see what the forward kept for it only when its gradient is there.

        Otherwise XLA keeps other tensors instead. It merges what the backward computes from a kept
        tensor with equal ops of the forward (x - mean of a normalization), and computes a kept
        tensor again within the op that reads it (`max(z, 0) > 0` is `z > 0` to it), so that the
        tensor's own inputs stay in memory, too. Only ops that XLA fuses are treated so: a guard
        takes no memory there.

        All ops read weights late: on a CPU, XLA transposes them for the backward as soon as it
        can, that is at the start of the step, and keeps the transposed ones until then. It does the
        same with activations that a convolution's filter gradient reads, for which every read can
        be guarded (`every_read`).

        Args:
          op: the original.
          position: of its step in the schedule.
        """
        if self.early is not None:
            self.early.before_original(op, position)
        if op.region != BACKWARD:
            return
        if self.order is not None:
            self.order.before_original(op, position)
        builder = self.builder
        gradient = next((t for t in op.inputs if self._is_gradient(t)), None)
        self.gradient = gradient or self.gradient
        if self.gradient is None or self._needs_later(self.gradient, position):
            return
        for i, tensor in enumerate(op.inputs):
            if (gradient is not None and self._is_weight(tensor)
                    or (self.every_read or record(op.type).fused_by_xla)
                    and self._is_kept(tensor, position)):
                late = self._late(tensor, self.gradient, self._kind(op))
                builder.rewires.append(Rewire(op.name, i, late))

    def _needs_later(self, tensor: TensorId, position: int) -> bool:
        """Return whether a tensor needs what comes at a position of the schedule or after it.

        It may need the shape of that: a schedule does not wait for what reads shapes alone.
        """
        return self._last_needed[tensor[0]] >= position

    @functools.cached_property
    def _last_needed(self) -> list[int]:
        """Return for each op the last position in the schedule of all that it needs."""
        builder = self.builder
        found = [-1] * len(builder.graph.ops)
        for position, (vertex, copy) in enumerate(builder.plan.schedule):
            for made in () if copy else builder.cost.vertices[vertex].ops:
                found[made] = position
        for i, op in enumerate(builder.graph.ops):
            for needed in (*(source for source, _ in op.inputs), *op.controls):
                found[i] = max(found[i], found[needed])
        return found

    def _is_gradient(self, tensor: TensorId) -> bool:
        """Return whether a tensor is made of what the backward made, not the forward alone."""
        builder = self.builder
        made = builder.root[tensor[0]][tensor[1]][0]
        return (builder.storage_of(tensor) is not None and builder.tensor(tensor).dtype in FLOATS
                and builder.graph.ops[made].region == BACKWARD)

    def _is_kept(self, tensor: TensorId, position: int) -> bool:
        """Return whether a step reads a large result of the forward, and not a copy of it."""
        builder = self.builder
        made = builder.root[tensor[0]][tensor[1]][0]
        return (builder.storage_of(tensor) is not None and builder.graph.ops[made].region == FORWARD
                and (builder.tensor(tensor).bytes or 0) >= LARGE
                and builder.tensor(tensor).dtype in FLOATS and not builder.read(position,
                tensor)[1])

    def _late(self, tensor: TensorId, gradient: TensorId, kind: type[Guard]) -> str:
        """Return a tensor read through a guard that a gradient opens, made once for both."""
        builder = self.builder
        if (gradient, kind) not in self.openers:
            opener = kind(f"{SCOPE}/late_{len(self.openers) + 1}", builder.tensor_name(gradient),
                          builder.tensor(gradient).dtype)
            builder.added.extend(opener.trigger_ops())
            self.openers[gradient, kind] = opener
        if (tensor, gradient, kind) not in self.late:
            read = builder.tensor_name(tensor)
            name = guard_name(read, -1 - len(self.late))
            builder.added.extend(self.openers[gradient, kind].pass_through(
                name, read, builder.tensor(tensor).dtype))
            self.late[tensor, gradient, kind] = f"{name}:0"
        return self.late[tensor, gradient, kind]

    def delay_original(self, step: Step, triggers: tuple[str, ...]) -> None:
        """Do nothing: see `signals`.

        Args:
          step: not looked at.
          triggers: not looked at.
        """

    def close(self) -> None:
        """Have updates come after the last reads of what they change."""
        if self.order is not None:
            delay_updates(self.builder)
