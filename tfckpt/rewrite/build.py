"""Turns a plan into edits: one walk over its schedule."""

from __future__ import annotations

from tfckpt.ir.costgraph import CostGraph
from tfckpt.ir.edits import Clone, Create, Edits, Rewire
from tfckpt.ir.graph import Graph, TensorId
from tfckpt.ir.schedule import Fence, Plan, Step
from tfckpt.ir.target import HERE, Target
from tfckpt.ops import record
from tfckpt.rewrite.delays import Delays, ExecutorDelays
from tfckpt.rewrite.edit_builder import EditBuilder
from tfckpt.rewrite.names import SCOPE, copy_name
from tfckpt.rewrite.xla.delays import XlaDelays


def build_edits(graph: Graph, cost: CostGraph, plan: Plan, target: Target = HERE, *,
                device: str = "", label: str = "") -> Edits:
    """Return the edits that realise a plan.

    Args:
      graph: the captured step.
      cost: its cost graph, which the plan refers to.
      target: what runs the step.
      plan: one that `tfckpt.simulate.check.check_plan` accepts.
      device: of one of several devices whose parts are edited: where its fences stand; "" else.
      label: of one of several devices: what tells the names of its new ops from those of others.

    Raises:
      RewriteError: under XLA, no incoming gradient is left to guard a segment with; elsewhere, a
        sum would be computed twice from a term that it writes into.
      PlanError: a step of the plan reads a storage that nothing has made yet.
    """
    builder = EditBuilder(graph, cost, plan, target, device, label)
    delays: Delays = (ExecutorDelays(builder) if target.delays_by_control else
                      XlaDelays(builder, target))
    starts = {fence.position: fence for fence in plan.fences}
    where = {step: p for p, step in enumerate(plan.schedule)}
    awaited: dict[Step, list[Step]] = {}
    later: dict[Step, list[Step]] = {}  # what waits for a step that comes after it
    for wait in plan.waits:
        if where[wait.awaited] < where[wait.waiting]:
            awaited.setdefault(wait.waiting, []).append(wait.awaited)
        else:
            later.setdefault(wait.awaited, []).append(wait.waiting)
    fence: Fence | None = None
    for position, step in enumerate(plan.schedule):
        if position in starts:
            fence = starts[position]
            delays.open_segment(fence)
        if step[1]:
            assert fence is not None  # every copy lies in a recomputation segment
            _copy(builder, delays, fence, position, awaited.get(step, []))
        else:
            _original(builder, delays, position)
            delays.delay_original(step, delays.signals(awaited.get(step, [])))
        for waiting in later.get(step, []):
            delays.delay_original(waiting, delays.signals([step]))
    _bypass_joins(builder)
    delays.close()
    return builder.edits()


def _copy(builder: EditBuilder, delays: Delays, fence: Fence, position: int, awaited: list[Step]
          ) -> None:
    """Clone the ops of a copy step; they read the latest copies, and are delayed."""
    vertex, copy = builder.plan.schedule[position]
    anchor, *absorbed = builder.cost.vertices[vertex].ops
    triggers = delays.signals(awaited)
    passed: dict[str, str] = {}  # by what an op of the group would have read
    for index in (*absorbed, anchor):
        op = builder.graph.ops[index]
        inputs, outside, inner, fresh = [], [], False, False
        for i, tensor in enumerate(op.inputs):
            if builder.root[tensor[0]][tensor[1]][0] in absorbed:
                inputs.append(builder.view(tensor, copy))
                inner = True
                continue
            name, made = builder.read(position, tensor)
            if name in passed:
                inner = True  # what delays another op of the group delays this one
            elif made and _made_since(builder, fence.position, position, tensor):
                fresh = True
            else:
                outside.append(i)
            inputs.append(passed.get(name, name))
        ready, controls = delays.delay_copy(op, inputs, outside, not (inner or fresh),
                                          () if inner else triggers)
        passed.update({old: new for old, new in zip(inputs, ready, strict=True) if old != new})
        builder.added.append(Clone(copy_name(op.name, copy), op.name, tuple(ready), controls,
                                 builder.read_by_several(index), builder.marks))


def _made_since(builder: EditBuilder, start: int, position: int, tensor: TensorId) -> bool:
    """Return whether what step `position` reads for `tensor` was made at `start` or later."""
    instance = builder.instance(position, tensor)
    return instance is not None and builder.resolved.maker[instance] >= start


def _original(builder: EditBuilder, delays: Delays, position: int) -> None:
    """Have the ops of an original read the latest copies."""
    vertex = builder.cost.vertices[builder.plan.schedule[position][0]]
    for op in [builder.graph.ops[i] for i in vertex.ops]:
        delays.before_original(op, position)
        for i, tensor in enumerate(op.inputs):
            name, copy = builder.read(position, tensor)
            if copy:
                builder.rewires.append(Rewire(op.name, i, name))
                original, slot = builder.made_by(tensor)
                if record(builder.graph.ops[original].type).has_bodies:
                    builder.moved[(original, slot)] = None
                elif not builder.is_resident((original, slot)) and (
                        builder.read_by_several(original)):
                    builder.moved[(original, 0)] = None


def _bypass_joins(builder: EditBuilder) -> None:
    """Have each reader of a released join read its own tensor, through a join of its own.

    It is of the same type and sorts where the released one does, so that Grappler treats it
    alike (see `copy_name`); it reads the tensor twice, since a join of one is no join to it.
    """
    graph = builder.graph
    joins = {builder.cost.vertices[v].ops[0] for v in builder.plan.moves.released}
    passed: dict[TensorId, str] = {}
    for op in graph.ops:
        for i, tensor in enumerate(op.inputs):
            if tensor[0] not in joins:
                continue
            if tensor not in passed:
                join = graph.ops[tensor[0]]
                origin = join.inputs[tensor[1]]
                name = f"{join.name}-{SCOPE}_slot{tensor[1]}"
                dtype = builder.tensor(tensor).dtype
                builder.added.append(Create(
                    name, join.type, (builder.tensor_name(origin),) * 2, (), (dtype, dtype),
                    {"T": ("types", dtype, dtype)}, graph.ops[origin[0]].device))
                passed[tensor] = f"{name}:0"
            builder.rewires.append(Rewire(op.name, i, passed[tensor]))
