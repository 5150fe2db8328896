"""What loops and branches allocate, besides their results, while their bodies run."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from tfckpt.cost.kernel_copies import kernel_workspace, rearranged_bytes
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.ir.edits import TAKES
from tfckpt.ir.graph import Graph, Op, TensorId
from tfckpt.ops import record

_Node = tuple[int, int]
"""An iteration, and an op of the body."""
_MOST_OPS = 20_000
"""Ops of iterations that are looked at together."""


def working_bytes(graph: Graph, op: Op, kernels_by: str = "") -> int:
    """Return the bytes that an op's body, or the largest of its branches, holds at most.

    An iteration's results are counted as the loop's, and so is what its lists keep. Iterations that
    wait for little of what the one before computes run at the same time. What the gradient of
    branches holds has room in what it has read by then of what they kept; more than that counts.

    Args:
      graph: that the op belongs to.
      op: the op; one without a body holds nothing.
      kernels_by: whose kernels compute convolutions and products (`Target.kernels_by`).
    """
    told = cast("tuple[int, ...]", op.attrs.get(TAKES, ()))[-len(op.bodies):]  # no condition's
    most = max((takes or _held(_Runs(body, kernels_by)) for body, takes in zip(
        op.bodies, told or (0,) * len(op.bodies), strict=True)), default=0)
    if op.loop is not None and op.loop.at_once > 1 and op.loop.arguments:
        together = _held(_Runs(op.loop.body, kernels_by, op.loop.at_once, op.loop.arguments))
        most = max(most, min(together, op.loop.at_once * most))
    if record(op.type).chooses and _takes_out(graph, op):
        most -= sum(graph.ops[i].outputs[slot].bytes or 0 for i, slot in op.inputs
                    if graph.ops[i].outputs[slot].dtype == "variant")
    return max(most, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Runs:
    """A body that runs: equal to one that differs by names alone, as those of layers in a row do.

    Attributes:
      body, kernels_by: as for `working_bytes`.
      at_once, arguments: of the loop, where several iterations run at the same time.
    """

    body: Graph
    kernels_by: str
    at_once: int = 1
    arguments: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash((len(self.body.ops), self.body.fetches, self.at_once, self.kernels_by))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Runs)
        return (self.at_once, self.arguments, self.kernels_by, self.body.fetches) == (
            other.at_once, other.arguments, other.kernels_by, other.body.fetches) and all(
                _same_but_for_names(*ops) for ops in zip(
                    self.body.ops, other.body.ops, strict=False)) and (
            len(self.body.ops) == len(other.body.ops))


def _same_but_for_names(one: Op, other: Op) -> bool:
    return one is other or (
        not (one.bodies or other.bodies) and (one.type, one.inputs, one.workspace) == (
            other.type, other.inputs, other.workspace)
        and one.outputs == other.outputs and one.attrs == other.attrs)


@functools.lru_cache(maxsize=256)
def _held(runs: _Runs) -> int:
    """Return the bytes that a body holds at most, or several iterations of it."""
    if runs.at_once == 1:
        return _peak(runs.body, runs.kernels_by)
    return max(_peak(_several(runs, newest), runs.kernels_by) for newest in (False, True))


def _several(loop: _Runs, newest: bool) -> Graph:
    """Return several iterations as one body, in an order in which an executor may run them.

    Of what is ready the oldest is taken first, or the newest. What an iteration hands on is counted
    but for the last one's, which is the loop's.
    """
    body, count = loop.body, min(loop.at_once, max(1, _MOST_OPS // max(len(loop.body.ops), 1)))
    slot_of = {op: slot for slot, op in enumerate(loop.arguments)}
    first = loop.arguments[0]  # counts iterations, and what reads nothing waits for that

    def read(turn: int, tensor: TensorId) -> tuple[int, TensorId]:
        while turn and tensor[0] in slot_of:
            turn, tensor = turn - 1, body.fetches[slot_of[tensor[0]]]
        return turn, tensor

    nodes = [(turn, i) for turn in range(count) for i in range(len(body.ops))
             if not (turn and i in slot_of)]
    inputs = {(turn, i): [read(turn, t) for t in body.ops[i].inputs] for turn, i in nodes}
    needed = {node: {(turn, op) for turn, (op, _) in inputs[node] or (
        [read(node[0], (first, 0))] if node[0] else [])} for node in nodes}
    number = {node: n for n, node in enumerate(_in_turn(nodes, needed, newest))}
    ops = tuple(dataclasses.replace(body.ops[i], inputs=tuple(
        (number[of, op], slot) for of, (op, slot) in inputs[turn, i])) for turn, i in number)
    fetches = tuple((number[of, op], slot) for of, (op, slot) in (
        read(count - 1, t) for t in body.fetches))
    return Graph(body.name, ops, fetches, ())


def _in_turn(nodes: Sequence[_Node], needed: Mapping[_Node, Collection[_Node]], newest: bool
             ) -> list[_Node]:
    """Return nodes in an order in which each comes after those that it needs."""
    readers: dict[_Node, list[_Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in sorted(needed[node]):
            readers[source].append(node)
    left = {node: len(needed[node]) for node in nodes}
    ready = deque(node for node in nodes if not left[node])
    order = []
    while ready:
        order.append(ready.pop() if newest else ready.popleft())
        for reader in readers[order[-1]]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return order


def _peak(body: Graph, kernels_by: str) -> int:
    """Return the most bytes of temporary tensors that live at once, in the order of the body.

    What is taken out of a list or an optional is there before, and gone once it has been read.
    """
    root = roots(body)
    elsewhere = _counted_elsewhere(body, root)
    last = {root[source][slot]: i for i, op in enumerate(body.ops) for source, slot in op.inputs}
    size: dict[TensorId, int] = {}
    live = peak = 0
    for i, op in enumerate(body.ops):
        made = {(i, slot): t.bytes or 0 for slot, t in enumerate(op.outputs)
                if root[i][slot] == (i, slot) and (i, slot) not in elsewhere}
        dying = [t for t in dict.fromkeys(root[s][slot] for s, slot in op.inputs)
                 if last[t] == i and t in size]
        allocated = 0 if _takes_out(body, op) else sum(made.values())
        taken = _taken_over(op, made, [size[t] for t in dying])
        peak = max(peak, live + allocated - taken + working_bytes(body, op, kernels_by)
                   + rearranged_bytes(body, op) + kernel_workspace(body, op, kernels_by)
                   + op.workspace)
        size.update({t: n for t, n in made.items() if t in last})
        live += (sum(made[t] for t in made if t in last) if allocated else 0) - sum(
            map(size.pop, dying))
    return peak


def _takes_out(body: Graph, op: Op) -> bool:
    """Return whether an op hands out what is in a list or an optional."""
    return not record(op.type).lists.stacks and any(
        body.ops[i].outputs[slot].dtype == "variant" for i, slot in op.inputs)


def _taken_over(op: Op, made: dict[TensorId, int], dying: list[int]) -> int:
    """Return the bytes of a result for which the op takes over the buffer of an input that dies."""
    sizes = list(made.values())
    return sizes[0] if record(op.type).reuses_input and len(sizes) == 1 and sizes[0] in dying else 0


def _counted_elsewhere(body: Graph, root: list[tuple[TensorId, ...]]) -> frozenset[TensorId]:
    """Return what the body hands out, as it is or in a list or an optional."""
    found = {root[i][slot] for i, slot in body.fetches}
    for op in body.ops:
        known = record(op.type)
        put = op.inputs if known.wraps else () if known.lists.entry is None else (
            op.inputs[known.lists.entry],)
        found.update(root[i][slot] for i, slot in put)
    return frozenset(found - {RESIDENT})
