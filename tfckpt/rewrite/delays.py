"""Delays of copies until the plan's time, by control edges, for TensorFlow's executor.

`tfckpt.rewrite.xla.delays` does the same for XLA, which ignores control edges.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from tfckpt.ir.costgraph import BACKWARD
from tfckpt.ir.edits import AddControl, Clone, Create, Rewire, op_of
from tfckpt.ir.graph import Op, TensorId
from tfckpt.ir.schedule import Fence, Step
from tfckpt.ops import record
from tfckpt.ops.names import IDENTITY, NO_OP
from tfckpt.rewrite.edit_builder import EditBuilder
from tfckpt.rewrite.names import FENCE, extra_reader_name, guard_name, identity, retained_name
from tfckpt.rewrite.summation_starts import RetainedTerm, retained_terms


class Delays(Protocol):
    """The interface that the walk over the schedule calls; everything made goes to the builder."""

    def open_segment(self, fence: Fence) -> None:
        """Begin a run of copies.

        Args:
          fence: the control barrier that the plan has before the run.
        """

    def signals(self, steps: Sequence[Step]) -> tuple[str, ...]:
        """Return the ops to wait for in order to wait for steps.

        Args:
          steps: steps of the schedule; none give no op.
        """

    def delay_copy(self, op: Op, inputs: list[str], outside: Sequence[int], entry: bool,
                  triggers: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        """Return the inputs and control inputs of a copy that is delayed.

        Args:
          op: the original.
          inputs: what the copy would read.
          outside: those of them, by index, that come from outside its recomputation segment.
          entry: whether the copy reads nothing made in its recomputation segment.
          triggers: what `signals` returned for the steps it awaits.
        """

    def before_original(self, op: Op, position: int) -> None:
        """Prepare for an original op, which is next.

        Args:
          op: the original.
          position: of its step in the schedule.
        """

    def delay_original(self, step: Step, triggers: tuple[str, ...]) -> None:
        """Delay an existing op.

        Args:
          step: that of the original; it stands for all ops of its vertex.
          triggers: what `signals` returned for the steps it awaits; empty where it awaits none.
        """

    def close(self) -> None:
        """Finish at the end of the schedule."""


class ExecutorDelays:
    """Fences before recomputation segments, waits, and extra readers to wait for."""

    def __init__(self, builder: EditBuilder) -> None:
        self.builder = builder
        self.segments = 0
        self.starts: list[int] = []
        self.waits = 0
        self.extra_readers: dict[str, None] = {}
        self.barrier: tuple[str, ...] = ()
        self.guarded: dict[str, str] = {}

    def open_segment(self, fence: Fence) -> None:
        """Put a fence before a run of copies, which also awaits the fence before it.

        Args:
          fence: the control barrier that the plan has before the run.
        """
        controls = (*self.signals([self.builder.plan.schedule[p] for p in fence.awaits]),
                    *self.barrier)
        self.segments += 1
        self.starts.append(fence.position)
        self.guarded = {}
        self.barrier = (f"{FENCE}{self.segments}{self.builder.label}",)
        self.builder.added.append(Create(*self.barrier, NO_OP, (), controls, (), {},
                                       self.builder.device))

    def signals(self, steps: Sequence[Step]) -> tuple[str, ...]:
        """Return the ops to wait for in order to wait for steps.

        Grappler leaves sums, products and chains of unary ops as they are when another op waits
        for one of them, and rearranges them otherwise, which changes their rounding: such an op
        is waited for through a pass-through of its result. So are branches, through one of each
        result that is read: who waits for lowered branches does not wait for what they compute. And
        so are loops: who waits for all of a loop has it fill lists that nothing needs.

        Args:
          steps: steps of the schedule; none give no op.
        """
        found: list[str] = []
        for step in steps:
            name, op = self.builder.name_of(step), self.builder.op(step[0])
            if record(op.type).chooses or record(op.type).is_loop:
                read = self.builder.computed(self.builder.index[op.name])
                if record(op.type).is_loop:
                    read = [slot for slot in read if op.outputs[slot].dtype != "variant"]
                found += [self._extra_reader(name, op, slot) for slot in read] or [name]
            else:
                found.append(self._extra_reader(name, op) if record(op.type).rearranged else name)
        return tuple(found)

    def _extra_reader(self, name: str, op: Op, slot: int = 0) -> str:
        """Return a pass-through that reads a result of the op `name`, made once."""
        reader = extra_reader_name(name, slot)
        if reader not in self.extra_readers:
            self.extra_readers[reader] = None
            self.builder.added.append(identity(reader, f"{name}:{slot}", (),
                                               op.outputs[slot].dtype, op.device))
        return reader

    def delay_copy(self, op: Op, inputs: list[str], outside: Sequence[int], entry: bool,
                  triggers: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        """Have the largest input from outside wait, or another, or the copy itself if none can.

        A loop waits itself, whatever it reads: what depends on some of its inputs only would run
        through all iterations as soon as those are there. Branches wait for what decides between
        them, which each copy reads through an op of its own: ops of two lowered branches that read
        the same are merged.

        x * sigmoid(x) is merged only where both read the same x: where the sigmoid reads it through
        a guard, so does the product. The same is true of x * sigmoid(1 * x).

        Args:
          op: the original.
          inputs: what the copy would read.
          outside: those of them, by index, that come from outside its recomputation segment.
          entry: whether the copy reads nothing made in its recomputation segment.
          triggers: what `signals` returned for the steps it awaits.

        Returns:
          What the copy reads, and the ops that it waits for itself.
        """
        known = record(op.type)
        if known.multiplies and any(
                record(self.builder.graph.ops[i].type).gates for i, _ in op.inputs):
            inputs = [self.guarded.get(t, t) if i in outside else t for i, t in enumerate(inputs)]
        if known.is_loop:
            return inputs, (*triggers, *self.barrier)
        if known.chooses:
            decides = self._wait(inputs[0], self.builder.tensor(op.inputs[0]).dtype, op.device,
                                 (*triggers, *self.barrier))
            return [decides, *inputs[1:]], ()
        if not (entry or triggers):
            return inputs, ()
        usable = self.builder.guardable(op, outside)
        if triggers and not usable:  # a control edge on the copy itself would change its rounding
            usable = sorted(self.builder.guardable(op, range(len(inputs))),
                            key=lambda i: self.builder.fuses(op.inputs[i]))
        for i in usable[:1]:
            dtype = self.builder.tensor(op.inputs[i]).dtype
            passed = (self._wait(inputs[i], dtype, op.device, (*triggers, *self.barrier))
                      if triggers else self._guard(inputs[i], dtype, op.device))
            if known.gates or self._is_read_by_gate(op):
                self.guarded[inputs[i]] = passed
            return [*inputs[:i], passed, *inputs[i + 1:]], ()
        return inputs, (*triggers, *(self.barrier if entry else ()))

    def _is_read_by_gate(self, op: Op) -> bool:
        builder = self.builder
        return any(record(builder.graph.ops[i].type).gates
                   for i in builder.readers[builder.index[op.name]])

    def _guard(self, tensor: str, dtype: str, device: str) -> str:
        """Return the tensor, passed on after the segment's fence; made once for each tensor."""
        if tensor not in self.guarded:
            name = guard_name(tensor, self.segments, self.builder.label)
            self.builder.added.append(identity(name, tensor, self.barrier, dtype, device))
            self.guarded[tensor] = f"{name}:0"
        return self.guarded[tensor]

    def _wait(self, tensor: str, dtype: str, device: str, controls: tuple[str, ...]) -> str:
        """Return `tensor`, passed on once `controls` have run."""
        self.waits += 1
        name = guard_name(tensor, -self.waits, self.builder.label)
        self.builder.added.append(identity(name, tensor, controls, dtype, device))
        return f"{name}:0"

    def before_original(self, op: Op, position: int) -> None:
        """Do nothing: an executor runs originals when their inputs are there.

        Args:
          op: the original.
          position: of its step in the schedule.
        """

    def delay_original(self, step: Step, triggers: tuple[str, ...]) -> None:
        """Delay an existing op at an input, or the op itself where all its inputs are constants.

        Ops that TensorFlow merges are delayed together, at the input they share.

        Args:
          step: that of the original; it stands for all ops of its vertex.
          triggers: what `signals` returned for the steps it awaits; empty where it awaits none.
        """
        if not triggers:
            return
        builder = self.builder
        ops = [builder.graph.ops[i] for i in builder.cost.vertices[step[0]].ops]
        delayed = self._delayed_input(ops)
        if delayed is None:
            builder.controls.extend(AddControl(ops[0].name, trigger) for trigger in triggers)
            return
        present = {(r.op, r.index): r.tensor for r in builder.rewires}
        reader = next(op for op in ops if delayed in op.inputs)
        tensor = present.get((reader.name, reader.inputs.index(delayed)),
                             builder.view(delayed, 0))
        guard = self._wait(tensor, builder.tensor(delayed).dtype, ops[0].device, triggers)
        builder.rewires.extend(Rewire(op.name, i, guard) for op in ops
                             for i, read in enumerate(op.inputs) if read == delayed)

    def _delayed_input(self, ops: Sequence[Op]) -> TensorId | None:
        """Return the input at which ops are delayed: the one they share, else the largest.

        A gradient is the last choice, since it is shared with ops that are not delayed; a result
        of an op of the group is never chosen, since that would separate the group. Of branches it
        is what decides between them, for which all that they do waits.
        """
        if record(ops[0].type).chooses:
            return ops[0].inputs[0]
        for tensor in ops[0].inputs:
            if len(ops) > 1 and all(tensor in op.inputs for op in ops[1:]):
                return tensor
        builder = self.builder
        made = {builder.index[op.name] for op in ops}
        usable = [op.inputs[i] for op in ops for i in builder.guardable(op, range(len(op.inputs)))]
        usable = [(i, slot) for i, slot in usable if builder.root[i][slot][0] not in made]
        usable.sort(key=lambda tensor: builder.graph.ops[tensor[0]].region == BACKWARD)
        return usable[0] if usable else None

    def close(self) -> None:
        """Add an extra reader to what had several readers and is left with one.

        Grappler merges an op into its only reader (a MatMul with bias and activation, a sum of
        sums), and does not where it has several. An original whose backward readers moved to a
        copy, and a copy that is read once, would be merged where the plain step's op is not, and
        round differently. A pass-through that the next fence awaits is such an extra reader.
        (Marking the op itself as not to be removed would also forbid the rewrites that the plain
        step gets.)

        A loop does not even fill lists that nobody reads, so that what its body puts there has one
        reader fewer. So the loop's lists get an extra reader where a copy's lists are read
        instead, and the copy's lists where only the loop's are read.
        """
        builder = self.builder
        retained = retained_terms(builder)
        readers: dict[str, int] = {}
        tensors = [t for new in builder.added for t in new.inputs] + [
            r.tensor for r in builder.rewires]
        for tensor in tensors:
            readers[op_of(tensor)] = readers.get(op_of(tensor), 0) + 1
        read = frozenset(tensors)
        extra = {self._extra_reader(builder.graph.ops[i].name, builder.graph.ops[i], slot): i
                 for i, slot in builder.moved}
        fence_after = self._fences_after(list(extra.values()))
        retainers = self._retainers(retained)
        made = {op.name: op for op in builder.added}
        ordered: list[Create | Clone] = [made[reader] for reader in extra]
        pending: list[str] = []
        fence = 0
        for op in tuple(builder.added):  # extra readers made below are placed at once
            if op.name in extra:
                continue
            if isinstance(op, Create) and op.name.startswith(FENCE):
                ordered += retainers[fence]
                pending += [new.name for new in retainers[fence]]
                waiting = [reader for reader, i in extra.items() if fence_after[i] == fence]
                op = dataclasses.replace(op, controls=tuple(dict.fromkeys(
                    [*op.controls, *waiting, *pending])))
                pending = []
                fence += 1
            ordered.append(op)
            if not isinstance(op, Clone):
                continue
            for slot in self._single_consumers(op, readers, read):
                if extra_reader_name(op.name, slot) not in self.extra_readers:
                    source = builder.graph.ops[builder.index[op.source]]
                    pending.append(self._extra_reader(op.name, source, slot))
                    ordered.append(builder.added[-1])
        ordered += retainers[fence]
        pending += [new.name for new in retainers[fence]]
        pending += [reader for reader, i in extra.items() if fence_after[i] == len(self.starts)]
        builder.added = ordered
        self._await_at_end(pending)
        self._read_before_sums()

    def _read_before_sums(self) -> None:
        """Have sums of several wait for the extra readers of their terms.

        The kernel begins with the first term that nothing else is to read; which that is time would
        decide.
        """
        builder = self.builder
        for op in builder.graph.ops:
            if record(op.type).adds and len(op.inputs) > 2:
                made = dict.fromkeys(builder.made_by(tensor) for tensor in op.inputs)
                readers = [extra_reader_name(builder.graph.ops[i].name, slot) for i, slot in made]
                builder.controls.extend(AddControl(op.name, reader) for reader in readers
                                        if reader in self.extra_readers)

    def _single_consumers(self, copy: Clone, readers: Mapping[str, int], read: Collection[str]
                ) -> list[int]:
        """Return results of a copy that need an extra reader to be treated as the original's."""
        index = self.builder.index[copy.source]
        if record(self.builder.graph.ops[index].type).has_bodies:
            return [slot for slot in self.builder.lists_of(index)
                    if f"{copy.name}:{slot}" not in read]
        return [0] if copy.alone and readers.get(copy.name, 0) < 2 else []

    def _retainers(self, retained: Sequence[RetainedTerm]) -> list[list[Create | Clone]]:
        """Return ops that keep terms of sums alive, by the number of the first fence after each."""
        builder = self.builder
        where = {step: p for p, step in enumerate(builder.plan.schedule)}
        found: list[list[Create | Clone]] = [[] for _ in range(len(self.starts) + 1)]
        for number, term in enumerate(retained):
            into = found[bisect.bisect_right(self.starts, where[term.step])]
            name, op = builder.name_of(term.step), builder.op(term.step[0])
            reader = extra_reader_name(name)
            if reader not in self.extra_readers:
                self._extra_reader(name, op)
                into.append(builder.added.pop())
            into.append(identity(retained_name(name, number), term.tensor, (reader,), term.dtype,
                                 op.device))
        return found

    def _fences_after(self, originals: Sequence[int]) -> dict[int, int]:
        """Return for each original the number of the first fence scheduled after it.

        A step that trains twice has forward ops that only run after its first fences.
        """
        builder = self.builder
        where = {op: p for p, (v, copy) in enumerate(builder.plan.schedule) if not copy
                 for op in builder.cost.vertices[v].ops}
        return {i: bisect.bisect_right(self.starts, where[i]) for i in originals}

    def _await_at_end(self, readers: list[str]) -> None:
        """Have the step's last write wait for extra readers after the last fence, so they exist.

        Only a write scheduled after the last copy will do; an earlier one may be what the copies
        wait for. A step without one, which returns its gradients, waits where it returns them, or
        else in its last op that nothing rearranges.
        """
        last = self._last(lambda v, op: not op.outputs) or self._result() or self._last(
            lambda v, op: not (record(op.type).rearranged or self.builder.cost.vertices[v].fusible
                               or len(self.builder.cost.vertices[v].ops) > 1))
        if last is not None:
            self.builder.controls.extend(AddControl(last, reader) for reader in readers)

    def _last(self, wanted: Callable[[int, Op], bool]) -> str | None:
        """Return the last op of a kind that is scheduled after the last copy."""
        for v, copy in reversed(self.builder.plan.schedule):
            if copy:
                break
            if wanted(v, self.builder.op(v)):
                return self.builder.op(v).name
        return None

    def _result(self) -> str | None:
        """Return a pass-through that hands a result out of the step and that nothing else reads."""
        builder = self.builder
        for i, _ in reversed(builder.graph.fetches):
            op = builder.graph.ops[i]
            if op.type == IDENTITY and not builder.readers[i] and (
                    not builder.device or op.device == builder.device):
                return op.name
        return None
