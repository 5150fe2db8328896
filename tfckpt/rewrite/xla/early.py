"""Delays of what XLA may compute at any time, and on GPUs computes too early.

Nothing of the step leads to random numbers but a seed, and nothing at all to the zeros that a
scatter adds to: XLA's scheduler may put them at the start of the step, where all of them wait for
their readers. So the first see one of their small inputs when the tensor is there that the plan
makes before them, and the second are filled with a zero that comes with what is scattered.
"""

from __future__ import annotations

from tfckpt.ir.costgraph import FORWARD
from tfckpt.ir.edits import Create, Rewire
from tfckpt.ir.graph import Op
from tfckpt.ops import names, record
from tfckpt.rewrite.edit_builder import FLOATS, LARGE, EditBuilder
from tfckpt.rewrite.names import SCOPE
from tfckpt.rewrite.xla.guards import DataGuard, const

_SMALL = 16
"""How many times smaller than a result an input must be that passes a guard, at least."""


class EarlyOps:
    """Guards of what could run at the start of the step.

    Args:
      when_compiled: for each op whether XLA must know its results when it compiles.
    """

    def __init__(self, builder: EditBuilder, when_compiled: list[bool]) -> None:
        self.builder, self.when_compiled = builder, when_compiled
        self.ready = self._ready()
        self.count = 0
        self.latest: tuple[str, str] | None = None  # of the forward: name and dtype

    def _ready(self) -> list[bool]:
        """Return for each op whether its result follows from small tensors and what is fed."""
        found: list[bool] = []
        for n, op in enumerate(self.builder.graph.ops):
            known = record(op.type)
            little = all(self.builder.is_resident((n, slot)) or (t.bytes or 0) < LARGE
                         for slot, t in enumerate(op.outputs))
            found.append(known.source is not None or known.shape_only
                         or little and all(found[i] for i, _ in op.inputs))
        return found

    def before_original(self, op: Op, position: int) -> None:
        """Delay an op of the plan, if it could run before those that the plan has before it.

        Args:
          op: the original.
          position: of its step in the schedule.
        """
        if op.type == names.UNSORTED_SEGMENT_SUM:
            self._fill_late(op, position)
        elif op.region == FORWARD and op.pure and op.outputs:
            self._wait(op)

    def _wait(self, op: Op) -> None:
        """Have an op of the forward read a small input late, or be what later ones wait for."""
        builder, made = self.builder, op.outputs[0]
        index = builder.index[op.name]
        if (made.bytes or 0) < LARGE or builder.storage_of((index, 0)) is None or (
                builder.root[index][0] != (index, 0)):
            return  # it has no memory: what is computed with it comes at once
        if all(self.ready[i] for i, _ in op.inputs):
            small = [i for i in builder.guardable(op, range(len(op.inputs)))
                     if not self.when_compiled[op.inputs[i][0]]
                     and (builder.tensor(op.inputs[i]).bytes or 0) * _SMALL <= (made.bytes or 0)]
            if small and self.latest is not None:
                self._guard(op, small[-1])
        elif made.dtype in FLOATS:
            self.latest = builder.tensor_name((index, 0)), made.dtype

    def _guard(self, op: Op, index: int) -> None:
        builder, tensor = self.builder, op.inputs[index]
        assert self.latest is not None
        self.count += 1
        guard = DataGuard(f"{SCOPE}/early_{self.count}", *self.latest)
        name = f"{builder.graph.ops[tensor[0]].name}-{SCOPE}_early{self.count}"
        builder.added.extend(guard.trigger_ops())
        builder.added.extend(guard.pass_through(name, builder.tensor_name(tensor),
                                              builder.tensor(tensor).dtype))
        builder.rewires.append(Rewire(op.name, index, f"{name}:0"))

    def _fill_late(self, op: Op, position: int) -> None:
        """Scatter into zeros that are filled when what is scattered is there.

        The barrier is of both, since XLA takes out of one what only that one reads.
        """
        builder, made = self.builder, op.outputs[0]
        ids = builder.tensor(op.inputs[1])
        if (made.shape is None or None in made.shape or ids.shape is None or len(ids.shape) != 1
                or made.dtype not in FLOATS):
            return
        self.count += 1
        scope, dtype, attr = f"{SCOPE}/scatter_{self.count}", made.dtype, f"dtype:{made.dtype}"
        data, segments = (builder.read(position, t)[0] for t in op.inputs[:2])
        builder.added += [
            const(f"{scope}/zero", dtype, 0), const(f"{scope}/dims", "int32", list(made.shape)),
            const(f"{scope}/column", "int32", [-1, 1]),
            Create(f"{scope}/barrier", names.XLA_BARRIER, (data, f"{scope}/zero:0"), (),
                   (dtype, dtype), {"T": ("types", dtype, dtype)}),
            Create(f"{scope}/zeros", names.FILL, (f"{scope}/dims:0", f"{scope}/barrier:1"), (),
                   (dtype,), {"T": attr, "index_type": "dtype:int32"}),
            Create(f"{scope}/ids", names.RESHAPE, (segments, f"{scope}/column:0"), (),
                   (ids.dtype,), {"T": f"dtype:{ids.dtype}", "Tshape": "dtype:int32"}),
            Create(f"{scope}/sum", names.TENSOR_SCATTER_ADD,
                   (f"{scope}/zeros:0", f"{scope}/ids:0", f"{scope}/barrier:0"), (), (dtype,),
                   {"T": attr, "Tindices": f"dtype:{ids.dtype}"}),
        ]
        this = builder.index[op.name]
        builder.replaced[this, 0] = f"{scope}/sum:0"
        builder.rewires += [Rewire(builder.graph.ops[r].name, i, f"{scope}/sum:0")
                          for r in builder.readers[this]
                          for i, tensor in enumerate(builder.graph.ops[r].inputs)
                          if tensor == (this, 0)]
