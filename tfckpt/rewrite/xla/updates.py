"""Has variables be updated after the last op that reads their old values.

XLA writes what becomes of a variable in its place. Where a read may come after that, it copies the
variable before the step and keeps the copy until then. A gradient of weights that the plan makes
before the gradient of what went in, which reads the weights, would have it do so: its update waits
for the latter, through a barrier.
"""

from __future__ import annotations

from collections.abc import Iterator

from tfckpt.ir.costgraph import BACKWARD, UPDATE
from tfckpt.ir.edits import Create, Rewire
from tfckpt.ir.graph import Op, TensorId
from tfckpt.ops import Access, names, record
from tfckpt.rewrite.edit_builder import FLOATS, LARGE, EditBuilder
from tfckpt.rewrite.names import SCOPE, copy_name


def delay_updates(builder: EditBuilder) -> None:
    """Have updates read gradients through barriers with the last results made of the old values.

    Args:
      builder: the edits in the making, which the barriers are added to.
    """
    made_at = {vertex: p for p, (vertex, copy) in enumerate(builder.plan.schedule) if not copy}
    vertex_of = {i: v for v, vertex in enumerate(builder.cost.vertices) for i in vertex.ops}
    last = _last_readers(builder)
    for count, (gradient, handle) in enumerate(dict.fromkeys(_updated(builder))):
        vertex = vertex_of.get(builder.made_by(gradient)[0])
        if handle not in last or vertex is None or vertex not in made_at:
            continue
        position, (index, copy) = last[handle]
        if position > made_at[vertex]:
            _delay(builder, gradient, index, copy, count)


def _last_readers(builder: EditBuilder) -> dict[TensorId, tuple[int, tuple[int, int]]]:
    """Return by variable where the last step is that reads it, and the op and copy of that."""
    found: dict[TensorId, tuple[int, tuple[int, int]]] = {}
    for position, (vertex, copy) in enumerate(builder.plan.schedule):
        for i in builder.cost.vertices[vertex].ops:
            op = builder.graph.ops[i]
            if op.region == UPDATE or not op.outputs or op.outputs[0].dtype not in FLOATS or (
                    op.outputs[0].bytes or 0) < LARGE:
                continue
            for tensor in op.inputs:
                source, slot = builder.made_by(tensor)
                read = builder.graph.ops[source]
                if record(read.type).access is Access.VALUE:
                    found[read.inputs[slot]] = position, (i, copy)
    return found


def _updated(builder: EditBuilder) -> Iterator[tuple[TensorId, TensorId]]:
    """Yield large gradients that go into updates, each with the handle of what it updates."""
    writers: dict[TensorId, list[Op]] = {}
    for op in builder.graph.ops:
        if op.region == UPDATE and record(op.type).writes:
            for tensor in op.inputs:
                if builder.tensor(tensor).dtype == "resource":
                    writers.setdefault(tensor, []).append(op)
    for handle, ops in writers.items():
        for gradient in _gradients(builder, ops, writers):
            yield gradient, handle


def _gradients(builder: EditBuilder, updates: list[Op], writers: dict[TensorId, list[Op]]
               ) -> Iterator[TensorId]:
    """Yield the large gradients that updates are computed from, through moments as well."""
    pending = [t for op in updates for t in op.inputs]
    seen: set[TensorId] = set()
    while pending:
        tensor = pending.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        made, value = builder.graph.ops[tensor[0]], builder.tensor(tensor)
        known = record(made.type)
        if made.region == BACKWARD and value.dtype in FLOATS and (value.bytes or 0) >= LARGE:
            yield tensor
        elif made.region == UPDATE:
            passes = known.aliases and known.access is None  # each output its own input
            pending += [made.inputs[tensor[1]]] if passes else made.inputs
            if known.access is Access.VALUE:
                pending += [t for op in writers.get(made.inputs[0], ()) for t in op.inputs]


def _delay(builder: EditBuilder, gradient: TensorId, index: int, copy: int, count: int) -> None:
    """Have the update read a gradient through a barrier with a result of an op or a copy of it."""
    op = builder.graph.ops[index]
    read = f"{copy_name(op.name, copy)}:0" if copy else builder.tensor_name((index, 0))
    dtypes = builder.tensor(gradient).dtype, op.outputs[0].dtype
    name = f"{SCOPE}/update_{count}"
    builder.added.append(Create(name, names.XLA_BARRIER, (builder.tensor_name(gradient), read), (),
                              dtypes, {"T": ("types", *dtypes)}))
    builder.rewires += [Rewire(builder.graph.ops[r].name, i, f"{name}:0")
                      for r in builder.readers[gradient[0]] if builder.graph.ops[r].region == UPDATE
                      for i, tensor in enumerate(builder.graph.ops[r].inputs) if tensor == gradient]
