"""Has XLA for GPUs run the backward in the plan's order, where that matters for memory.

XLA chooses an order by itself: it may compute a large gradient before what is to be recomputed
beside it, and leave gradients of weights, with all that they read, to a later time. A barrier over
what shall come first and a gradient that is read next, through which that is read, leaves it no
choice: XLA for GPUs keeps barriers until everything is scheduled. They keep nothing alive longer:
of what comes first only that is among their operands which is read later anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tfckpt.ir.costgraph import BACKWARD, UPDATE
from tfckpt.ir.edits import Clone, Create, Rewire
from tfckpt.ir.graph import Op, TensorId
from tfckpt.ops import names, record
from tfckpt.rewrite.edit_builder import FLOATS, LARGE, EditBuilder
from tfckpt.rewrite.names import SCOPE, copy_name


class BackwardOrder:
    """Barriers between gradients that are read next and what comes before that in the plan.

    That is the copies of the latest segment, before all that reads an earlier gradient; and
    gradients of weights, before the next op that does.
    """

    def __init__(self, builder: EditBuilder) -> None:
        self.builder = builder
        self.seen = 0  # positions that were looked at
        self.region = 0  # where the latest run of copies begins
        self.copies: list[tuple[str, str]] = []  # of that: names and dtypes
        self.weights: list[tuple[str, str]] = []  # gradients that nothing waits for yet
        self.since = 0  # where the latest of them was made
        self.after: dict[TensorId, str] = {}  # gradients by their latest barriers
        self.after_copies: dict[TensorId, None] = {}  # those after the copies of that segment
        self.views: dict[tuple[TensorId, str], str] = {}
        self.barriers = 0

    def trigger(self, position: int, tensor: str, dtype: str) -> str:
        """Return a gradient, ordered after those of weights before a segment at a position.

        Args:
          position: of the recomputation segment's first step in the schedule.
          tensor: the gradient, named `op:slot`.
          dtype: of the gradient.

        Returns:
          A tensor, named `op:slot`; `tensor` itself where no gradient of weights is to come first.
        """
        self._look(position)
        return self._barrier(tensor, dtype, []) if self.weights else tensor

    def before_original(self, op: Op, position: int) -> None:
        """Have an op of the backward read earlier gradients after what shall come before.

        Args:
          op: the original.
          position: of its step in the schedule.
        """
        self._look(position)
        for i, tensor in enumerate(op.inputs):
            made = self._gradient_made(tensor, position)
            if made is None or op.region != BACKWARD:
                continue
            origin = self.builder.made_by(tensor)
            if self.copies and made < self.region and origin not in self.after_copies:
                self._put_after(origin, self.copies)
                self.after_copies[origin] = None
            elif self.weights and made < self.since:
                self._put_after(origin, [])
            if origin in self.after:
                self.builder.rewires.append(Rewire(op.name, i, self._seen(tensor, origin)))

    def _put_after(self, origin: TensorId, copies: Sequence[tuple[str, str]]) -> None:
        """Have what reads a gradient from now on wait for copies and gradients of weights."""
        name = self.after.get(origin, self.builder.tensor_name(origin))
        self.after[origin] = self._barrier(name, self.builder.tensor(origin).dtype, copies)

    def _seen(self, tensor: TensorId, origin: TensorId) -> str:
        """Return a tensor read through the latest barrier of the one whose memory it lies in."""
        if tensor == origin:
            return self.after[origin]
        key = (tensor, self.after[origin])
        if key not in self.views:
            op = self.builder.graph.ops[tensor[0]]
            inputs = [self.builder.tensor_name(t) for t in op.inputs]
            inputs[tensor[1]] = self._seen(op.inputs[tensor[1]], origin)
            name = f"{op.name}-{SCOPE}_after{len(self.views) + 1}"
            self.builder.added.append(Clone(name, op.name, tuple(inputs)))
            self.views[key] = f"{name}:{tensor[1]}"
        return self.views[key]

    def _look(self, position: int) -> None:
        """Note what of the steps before a position shall come first."""
        schedule = self.builder.plan.schedule
        for p in range(self.seen, position):
            if not schedule[p][1]:
                found = self._results(p)
                self.since = p if found else self.since
                self.weights += found
                continue
            if not (p and schedule[p - 1][1]):
                self.region, self.copies, self.after_copies = p, [], {}
            self.copies += self._results(p)
        self.seen = position

    def _results(self, position: int) -> list[tuple[str, str]]:
        """Return what a step makes that later ones wait for: large copies, gradients of weights."""
        builder = self.builder
        vertex, copy = builder.plan.schedule[position]
        made = builder.cost.vertices[vertex]
        op = builder.op(vertex)
        if not copy and (made.region != BACKWARD or record(op.type).flops is None):
            return []
        found = []
        for s, instance in zip(made.writes, builder.resolved.writes[position], strict=True):
            root = builder.cost.storages[s].tensor
            tensor = builder.tensor(root)
            if (tensor.dtype not in FLOATS or builder.graph.ops[root[0]] is not op
                    or copy and (tensor.bytes or 0) < LARGE):
                continue
            later = self._regions.get(instance)
            if later and (copy or all(region == UPDATE for region in later)):
                name = copy_name(op.name, copy) if copy else op.name
                found.append((f"{name}:{root[1]}", tensor.dtype))
        return found

    @functools.cached_property
    def _regions(self) -> dict[int, list[str]]:
        """Return the regions of the steps that read each instance, but for copies."""
        found: dict[int, list[str]] = {}
        for (vertex, copy), reads in zip(self.builder.plan.schedule, self.builder.resolved.reads,
                                         strict=True):
            made = self.builder.cost.vertices[vertex]
            if not (copy or made.join):
                for instance in reads:
                    found.setdefault(instance, []).append(made.region)
        return found

    def _gradient_made(self, tensor: TensorId, position: int) -> int | None:
        """Return where the large gradient was made that a step reads; None where it is none."""
        builder = self.builder
        made, root = builder.tensor(tensor), builder.root[tensor[0]][tensor[1]]
        if (root[0] < 0 or builder.graph.ops[root[0]].region != BACKWARD or made.dtype not in FLOATS
                or (made.bytes or 0) < LARGE or builder.read(position, tensor)[1]):
            return None
        instance = builder.instance(position, tensor)
        return None if instance is None else builder.resolved.maker[instance]

    def _barrier(self, tensor: str, dtype: str, copies: Sequence[tuple[str, str]]) -> str:
        """Return a tensor ordered after copies and the gradients of weights not yet waited for."""
        self.barriers += 1
        first = [*copies, *self.weights]
        self.weights = []
        dtypes = (dtype, *(each for _, each in first))
        name = f"{SCOPE}/after_{self.barriers}"
        self.builder.added.append(Create(
            name, names.XLA_BARRIER, (tensor, *(read for read, _ in first)), (), dtypes,
            {"T": ("types", *dtypes)}))
        return f"{name}:0"
