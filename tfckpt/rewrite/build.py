"""Turns a plan into edits: copies, fences, guards, pins, bypassed joins."""

from __future__ import annotations

import dataclasses

from tfckpt.cost.build import REARRANGED
from tfckpt.cost.costgraph import BACKWARD, FORWARD, CostGraph
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.errors import RewriteError
from tfckpt.graph import Graph, TensorId
from tfckpt.plan.fences import Fence, fences
from tfckpt.plan.schedule import Plan, Step
from tfckpt.plan.simulate import Resolved, resolve
from tfckpt.rewrite.edits import AddControl, Clone, Create, Edits, Rewire, op_of
from tfckpt.rewrite.guards import DataGuard
from tfckpt.rewrite.names import SCOPE, copy_name, guard_name, identity, tap_name

_PASSES_ON = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient",
                        "PlaceholderWithDefault"})
WEIGHT_BYTES = 1 << 16
_FLOATS = ("float32", "float64", "float16", "bfloat16")


def build_edits(graph: Graph, cost: CostGraph, plan: Plan, *, await_updates: bool = True) -> Edits:
    """The edits that realise a plan.

    Args:
      graph: the captured step.
      cost: its cost graph, which the plan refers to.
      plan: schedule, moves and pins.
      await_updates: see `tfckpt.plan.fences.fences`.

    Raises:
      RewriteError: under XLA, no incoming gradient is left to guard a region with.
    """
    return _EditBuilder(graph, cost, plan, await_updates).build()


class _EditBuilder:
    """Walks the schedule once; `added` grows in an order in which everything read exists."""

    def __init__(self, graph: Graph, cost: CostGraph, plan: Plan, await_updates: bool):
        self.graph, self.cost, self.plan = graph, cost, plan
        self.resolved: Resolved = resolve(cost, plan.schedule)
        self.fences = {f.position: f for f in fences(cost, self.resolved,
                                                     await_updates=await_updates)}
        self.root = roots(graph)
        self.readers = graph.consumers()
        self.storage = {s.tensor: i for i, s in enumerate(cost.storages)}
        self.added: list[Create | Clone] = []
        self.rewires: list[Rewire] = []
        self.controls: list[AddControl] = []
        self.protected: dict[str, int] = {}
        self.index = {op.name: i for i, op in enumerate(graph.ops)}
        self.views: dict[tuple[TensorId, int], str] = {}
        self.guarded: dict[tuple[int, str], str] = {}
        self.region = 0
        self.waits = 0
        self.taps: dict[str, None] = {}
        self.fence: Fence | None = None
        self.barrier: str | None = None
        self.data_guard: DataGuard | None = None

    def build(self) -> Edits:
        """All edits."""
        held: dict[Step, list[Step]] = {}
        for pin in self.plan.pins:
            held.setdefault(pin.held, []).append(pin.trigger)
        for position, step in enumerate(self.plan.schedule):
            if position in self.fences:
                self._open_region(self.fences[position])
            if step[1]:
                self._copy(position, step, [self._signal(t) for t in held.get(step, ())])
            else:
                self._original(position, step[0])
                if step in held and not self.graph.in_xla:
                    self._pin_original(step, [self._signal(t) for t in held[step]])
        self._bypass_joins()
        if not self.graph.in_xla:
            self._keep_apart()
        return Edits(tuple(self.added), tuple(self.rewires), tuple(self.controls),
                     self.graph.in_xla)

    def _keep_apart(self) -> None:
        """Gives a second reader to what had several and is left with one.

        Grappler merges an op into its only reader (a MatMul with bias and activation, a sum of
        sums), and does not where it has several. An original whose backward readers moved to a
        copy, and a copy that is read once, would be merged where the plain step's op is not, and
        round differently. A tap that the next fence awaits is such a reader. (Marking the op
        itself as not to be removed would also forbid the rewrites that the plain step gets.)
        """
        readers: dict[str, int] = {}
        for tensor in [t for new in self.added for t in new.inputs] + [
                r.tensor for r in self.rewires]:
            readers[op_of(tensor)] = readers.get(op_of(tensor), 0) + 1
        pending = [self._tap(name, self.graph.ops[index])
                   for name, index in self.protected.items()]
        made = {op.name: op for op in self.added}
        ordered: list[Create | Clone] = [made[tap] for tap in pending]
        early = frozenset(pending)
        for op in tuple(self.added):  # taps made below are placed at once
            if op.name in early:
                continue
            if isinstance(op, Create) and op.name.startswith(f"{SCOPE}/fence_"):
                op = dataclasses.replace(op, controls=tuple(dict.fromkeys(
                    [*op.controls, *pending])))
                pending = []
            ordered.append(op)
            if isinstance(op, Clone) and op.alone and readers.get(op.name, 0) < 2:
                source = self.graph.ops[self.index[op.source]]
                tap = tap_name(op.name)
                if tap not in self.taps:
                    self._tap(op.name, source)
                    ordered.append(self.added[-1])
                    pending.append(tap)
        self.added = ordered
        self._await_at_end(pending)

    def _await_at_end(self, taps: list[str]) -> None:
        """Has the step's last write wait for taps behind the last fence, so that they exist.

        Only a write scheduled after the last copy will do; an earlier one may be what the copies
        wait for.
        """
        last = None
        for v, copy in reversed(self.plan.schedule):
            op = self.graph.ops[self.cost.vertices[v].ops[0]]
            if copy:
                break
            if not op.outputs:
                last = op.name
                break
        if last is not None:
            self.controls.extend(AddControl(last, tap) for tap in taps)

    def name_of(self, step: Step) -> str:
        """Name of the op that a step runs."""
        index = self.cost.vertices[step[0]].ops[0]
        name = self.graph.ops[index].name
        return name if not step[1] else copy_name(name, step[1])

    def _signal(self, step: Step) -> str:
        """The op to wait for in order to wait for a step.

        Grappler leaves sums, products and chains of unary ops as they are when another op waits
        for one of them, and rearranges them otherwise, which changes their rounding: such an op
        is waited for through a pass-through of its result.
        """
        name = self.name_of(step)
        op = self.graph.ops[self.cost.vertices[step[0]].ops[0]]
        if op.type not in REARRANGED or self.graph.in_xla:
            return name
        return self._tap(name, op)

    def _tap(self, name: str, op) -> str:
        """A pass-through that reads the first result of the op `name`, made once."""
        tap = tap_name(name)
        if tap not in self.taps:
            dtype = op.outputs[0].dtype
            self.taps[tap] = None
            self.added.append(identity(tap, f"{name}:0", (), dtype, op.device))
        return tap

    # Regions: an executor waits at a fence, XLA at a data guard.

    def _open_region(self, fence: Fence) -> None:
        self.region += 1
        self.fence = fence
        if self.graph.in_xla:
            triggers = (self._incoming_gradient(fence.position), *self._leaves(fence))
            self.data_guard = DataGuard(f"{SCOPE}/guard_{self.region}", triggers)
            self.added.extend(self.data_guard.trigger_ops())
            return
        controls = [self._signal(self.plan.schedule[p]) for p in fence.awaits]
        if self.barrier is not None:
            controls.append(self.barrier)
        self.barrier = f"{SCOPE}/fence_{self.region}"
        self.added.append(Create(self.barrier, "NoOp", (), tuple(controls), (), {}))

    def _incoming_gradient(self, position: int) -> tuple[str, str]:
        """The latest float tensor that the step made before a region, and its dtype."""
        for p in range(position - 1, -1, -1):
            vertex, copy = self.plan.schedule[p]
            op = self.graph.ops[self.cost.vertices[vertex].ops[0]]
            if copy or not self.cost.vertices[vertex].reads:
                continue  # before the first gradient, the end of the forward must do
            for slot, tensor in enumerate(op.outputs):
                if tensor.dtype in _FLOATS and (self.root[self.cost.vertices[vertex].ops[0]][slot]
                                                != RESIDENT):
                    return f"{op.name}:{slot}", tensor.dtype
        raise RewriteError("rewrite: a region has no incoming gradient to guard it with under XLA")

    def _leaves(self, fence: Fence) -> list[tuple[str, str]]:
        """Float results of what the fence awaits in the backward, and their dtypes."""
        found = []
        for p in fence.awaits:
            step = self.plan.schedule[p]
            index = self.cost.vertices[step[0]].ops[0]
            op = self.graph.ops[index]
            if op.region == BACKWARD and op.outputs and op.outputs[0].dtype in _FLOATS:
                found.append((f"{self.name_of(step)}:0", op.outputs[0].dtype))
        return found

    def _guard(self, tensor: str, dtype: str, device: str, triggers: tuple[str, ...]) -> str:
        """The tensor behind the region's guard; each tensor passes it once, unless pinned."""
        if triggers:
            assert self.barrier is not None
            return self._wait(tensor, dtype, device, (*triggers, self.barrier))
        key = (self.region, tensor)
        if key not in self.guarded:
            name = guard_name(tensor, self.region)
            if self.data_guard is not None:
                self.added.extend(self.data_guard.pass_through(name, tensor, dtype))
            else:
                assert self.barrier is not None
                self.added.append(identity(name, tensor, (self.barrier,), dtype, device))
            self.guarded[key] = f"{name}:0"
        return self.guarded[key]

    # Steps.

    def _copy(self, position: int, step: Step, triggers: list[str]) -> None:
        index = self.cost.vertices[step[0]].ops[0]
        op = self.graph.ops[index]
        inputs, outside = [], []
        for i, (source, slot) in enumerate(op.inputs):
            reference, copy = self._read(position, (source, slot))
            inputs.append(reference)
            tensor = self.graph.ops[source].outputs[slot]
            if not (copy and self._made_here(position, source, slot)):
                outside.append((True, tensor.bytes or 0, -i))
        assert self.fence is not None
        entry = position in self.fence.gates
        controls: tuple[str, ...] = ()
        if self.graph.in_xla or entry or triggers:
            chosen = self._to_guard(op, outside, every=self.graph.in_xla)
            for i in chosen:
                source, slot = op.inputs[i]
                inputs[i] = self._guard(inputs[i], self.graph.ops[source].outputs[slot].dtype,
                                        op.device, () if self.graph.in_xla else tuple(triggers))
            if not chosen and not self.graph.in_xla:
                controls = tuple(triggers) + ((self.barrier,) if entry and self.barrier else ())
        self.added.append(Clone(self.name_of(step), op.name, tuple(inputs), controls,
                                self._alone(index)))

    def _alone(self, index: int) -> bool:
        """Whether the original has several readers, so that nothing merges it into one."""
        return len(self.readers[index]) > 1

    def _to_guard(self, op, outside, every: bool) -> list[int]:
        """Inputs that pass the guard: all storages from outside under XLA, else the largest."""
        usable = []
        for *_, negative in sorted(outside, reverse=True):
            source, slot = op.inputs[-negative]
            resident = self.root[source][slot] == RESIDENT
            dtype = self.graph.ops[source].outputs[slot].dtype
            if dtype in ("resource", "variant", "string") or resident and (
                    self.graph.ops[source].type == "Const"):
                continue
            if every and self.root[source][slot] not in self.storage and not (
                    self._is_weight((source, slot))):
                continue
            usable.append(-negative)
        if every and not usable:  # only small or resident inputs: guard the largest of them
            return self._to_guard(op, outside, every=False) if not any(
                self._is_copy(op, i) for i in range(len(op.inputs))) else []
        return usable if every else usable[:1]

    def _is_weight(self, tensor: TensorId) -> bool:
        """Whether a tensor is resident and large enough for a compiler's copy of it to matter."""
        op = self.graph.ops[tensor[0]]
        return (self.root[tensor[0]][tensor[1]] == RESIDENT and op.type not in ("Const", "_Arg")
                and (op.outputs[tensor[1]].bytes or 0) >= WEIGHT_BYTES
                and op.outputs[tensor[1]].dtype in _FLOATS)

    def _delay_weights(self, op) -> None:
        """Under XLA, has a backward op see its weights only when its gradient is there.

        XLA transposes weights for the backward as soon as it can, that is at the start of the
        step, and holds the transposed ones until they are used.
        """
        gradient = next(
            ((f"{self.graph.ops[s].name}:{slot}", self.graph.ops[s].outputs[slot].dtype)
             for s, slot in op.inputs if self.graph.ops[s].region == BACKWARD
             and self.root[s][slot] in self.storage
             and self.graph.ops[s].outputs[slot].dtype in _FLOATS), None)
        weights = [i for i, tensor in enumerate(op.inputs) if self._is_weight(tensor)]
        if gradient is None or not weights:
            return
        guard = DataGuard(f"{SCOPE}/late/{op.name}", (gradient,))
        self.added.extend(guard.trigger_ops())
        for i in weights:
            source, slot = op.inputs[i]
            self.waits += 1
            name = guard_name(f"{self.graph.ops[source].name}:{slot}", -self.waits)
            self.added.extend(guard.pass_through(
                name, f"{self.graph.ops[source].name}:{slot}",
                self.graph.ops[source].outputs[slot].dtype))
            self.rewires.append(Rewire(op.name, i, f"{name}:0"))

    def _is_copy(self, op, i) -> bool:
        source, slot = op.inputs[i]
        s = self.storage.get(self.root[source][slot])
        return s is not None and self.cost.vertices[self.cost.storages[s].producer].recomputable

    def _made_here(self, position: int, source: int, slot: int) -> bool:
        """Whether the storage that step `position` reads was made in the present region."""
        instance = self._instance(position, (source, slot))
        assert self.fence is not None
        return instance is not None and self.resolved.maker[instance] >= self.fence.position

    def _original(self, position: int, vertex: int) -> None:
        index = self.cost.vertices[vertex].ops[0]
        op = self.graph.ops[index]
        if op.region == FORWARD:
            return
        if self.graph.in_xla and op.region == BACKWARD:
            self._delay_weights(op)
        for i, tensor in enumerate(op.inputs):
            reference, copy = self._read(position, tensor)
            if copy:
                self.rewires.append(Rewire(op.name, i, reference))
                original = self.root[tensor[0]][tensor[1]][0]
                if self._alone(original):
                    self.protected[self.graph.ops[original].name] = original

    def _pin_original(self, step: Step, triggers: list[str]) -> None:
        """Holds an existing op back at an input, or itself where all its inputs are constants.

        Ops that TensorFlow merges are held back together, at the input they share.
        """
        ops = [self.graph.ops[i] for i in self.cost.vertices[step[0]].ops]
        held = self._held_input(ops)
        if held is None:
            self.controls.extend(AddControl(ops[0].name, trigger) for trigger in triggers)
            return
        source = self.graph.ops[held[0]]
        present = {(r.op, r.index): r.tensor for r in self.rewires if r.op == ops[0].name}
        tensor = present.get((ops[0].name, ops[0].inputs.index(held)), self._view(held, 0))
        guard = self._wait(tensor, source.outputs[held[1]].dtype, ops[0].device, tuple(triggers))
        self.rewires.extend(Rewire(op.name, i, guard) for op in ops
                            for i, read in enumerate(op.inputs) if read == held)

    def _held_input(self, ops) -> TensorId | None:
        """The input at which ops are held back: the one they share, else the largest.

        A gradient is the last choice, since it is shared with ops that are not held.
        """
        for tensor in ops[0].inputs:
            if len(ops) > 1 and all(tensor in op.inputs for op in ops[1:]):
                return tensor
        sizes = [(self.graph.ops[s].region != BACKWARD, self.graph.ops[s].outputs[slot].bytes or 0,
                  -i) for i, (s, slot) in enumerate(ops[0].inputs)]
        chosen = self._to_guard(ops[0], sizes, every=False)
        return ops[0].inputs[chosen[0]] if chosen else None

    def _wait(self, tensor: str, dtype: str, device: str, controls: tuple[str, ...]) -> str:
        """`tensor`, passed on once `controls` have run."""
        self.waits += 1
        name = guard_name(tensor, -self.waits)
        self.added.append(identity(name, tensor, controls, dtype, device))
        return f"{name}:0"

    def _instance(self, position: int, tensor: TensorId) -> int | None:
        s = self.storage.get(self.root[tensor[0]][tensor[1]])
        if s is None:
            return None
        reads = self.cost.vertices[self.plan.schedule[position][0]].reads
        return self.resolved.reads[position][reads.index(s)] if s in reads else None

    def _read(self, position: int, tensor: TensorId) -> tuple[str, int]:
        """What a step reads for `tensor`, and the number of the copy it comes from."""
        instance = self._instance(position, tensor)
        copy = 0 if instance is None else self.resolved.copy[instance]
        return self._view(tensor, copy), copy

    def _view(self, tensor: TensorId, copy: int) -> str:
        """`tensor` as seen on copy `copy` of its storage; pass-through ops are cloned with it."""
        op = self.graph.ops[tensor[0]]
        if not copy:
            return f"{op.name}:{tensor[1]}"
        if tensor == self.root[tensor[0]][tensor[1]]:
            return f"{copy_name(op.name, copy)}:{tensor[1]}"
        if op.type in _PASSES_ON:
            return self._view(op.inputs[tensor[1]], copy)
        key = (tensor, copy)
        if key not in self.views:
            name = copy_name(op.name, copy)
            inputs = [self._view(op.inputs[0], copy)]
            inputs += [f"{self.graph.ops[s].name}:{slot}" for s, slot in op.inputs[1:]]
            self.added.append(Clone(name, op.name, tuple(inputs)))
            self.views[key] = f"{name}:{tensor[1]}"
        return self.views[key]

    def _bypass_joins(self) -> None:
        """Has each reader of a released join read its own tensor, through a join of its own.

        It is of the same type and sorts where the released one does, so that Grappler treats it
        alike (see `copy_name`); it reads the tensor twice, since a join of one is no join to it.
        """
        joins = {self.cost.vertices[v].ops[0] for v in self.plan.moves.released}
        passed: dict[TensorId, str] = {}
        for op in self.graph.ops:
            for i, tensor in enumerate(op.inputs):
                if tensor[0] not in joins:
                    continue
                if tensor not in passed:
                    join = self.graph.ops[tensor[0]]
                    origin, at = join.inputs[tensor[1]]
                    name = f"{join.name}-{SCOPE}_slot{tensor[1]}"
                    dtype = join.outputs[tensor[1]].dtype
                    self.added.append(Create(
                        name, join.type, (f"{self.graph.ops[origin].name}:{at}",) * 2, (),
                        (dtype, dtype), {"T": ("types", dtype, dtype)},
                        self.graph.ops[origin].device))
                    passed[tensor] = f"{name}:0"
                self.rewires.append(Rewire(op.name, i, passed[tensor]))
