"""What loops and branches allocate, besides their results, while their bodies run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from tfckpt.cost.kernel_copies import kernel_workspace, rearranged_bytes
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.ir.edits import TAKES
from tfckpt.ir.graph import FORWARD, Graph, Op, TensorId
from tfckpt.ops import record

_Order = Callable[["_Tensors", Sequence[Collection[int]]], Sequence[int]]
"""Says in which order ops run, from their tensors and what each needs."""
_MOST_OPS = 20_000
"""Ops of iterations that are looked at together."""


def working_bytes(graph: Graph, op: Op, kernels_by: str = "") -> int:
    """Return the bytes that an op's body, or the largest of its branches, holds at most.

    An iteration's results are counted as the loop's, and so is what its lists keep. Iterations that
    wait for little of what the one before computes run at the same time; in the forward they do so
    before the lists are full, and count as far as they hold more than what fills these. Together
    they hold no more than each by itself where nothing that it takes out of lists is gone yet: what
    becomes of an entry waits until others have theirs. What the gradient of branches holds has room
    in what it has read by then of what they kept; more than that counts.

    Args:
      graph: that the op belongs to.
      op: the op; one without a body holds nothing.
      kernels_by: whose kernels compute convolutions and products (`Target.kernels_by`).
    """
    told = cast("tuple[int, ...]", op.attrs.get(TAKES, ()))[-len(op.bodies):]  # no condition's
    most = max((takes or _held(_Runs(body, kernels_by)) for body, takes in zip(
        op.bodies, told or (0,) * len(op.bodies), strict=True)), default=0)
    if op.loop is not None and op.loop.at_once > 1 and op.loop.arguments:
        together = _held(_Runs(op.loop.body, kernels_by, op.loop.at_once, op.loop.arguments,
                               op.region == FORWARD))
        alone = max(most, _held(_Runs(op.loop.body, kernels_by, among=True)))
        most = max(most, min(together, op.loop.at_once * alone))
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
      fills: whether the lists are not full before the last iteration is over.
      among: whether it is one iteration of several that run at the same time.
    """

    body: Graph
    kernels_by: str
    at_once: int = 1
    arguments: tuple[int, ...] = ()
    fills: bool = False
    among: bool = False

    def __hash__(self) -> int:
        return hash((len(self.body.ops), self.body.fetches, self.at_once, self.kernels_by))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Runs)
        return (
            (self.at_once, self.arguments, self.fills, self.among) == (
                other.at_once, other.arguments, other.fills, other.among)
            and (self.kernels_by, self.body.fetches) == (other.kernels_by, other.body.fetches)
            and len(self.body.ops) == len(other.body.ops)
            and all(map(_same_but_for_names, self.body.ops, other.body.ops)))


def _same_but_for_names(one: Op, other: Op) -> bool:
    return one is other or (
        not (one.bodies or other.bodies) and (one.type, one.inputs, one.workspace) == (
            other.type, other.inputs, other.workspace)
        and one.outputs == other.outputs and one.attrs == other.attrs)


@functools.lru_cache(maxsize=256)
def _held(runs: _Runs) -> int:
    """Return the bytes that a body holds at most, or several iterations of it."""
    body, count = runs.body, len(runs.body.ops)
    extra = [_extra(body, op, runs.kernels_by) for op in body.ops]
    if runs.at_once == 1:
        return _peak(body, _Tensors(body, among=runs.among), extra, range(count))
    orders = (_oldest, _newest) if runs.fills else (_oldest, _newest, _growing)
    whole, needed, of = _several(runs)
    tensors, extra = _Tensors(whole, runs.fills), [extra[i] for i in of]
    return max(_peak(whole, tensors, extra, order(tensors, needed)) for order in orders)


def _extra(body: Graph, op: Op, kernels_by: str) -> int:
    """Return the bytes that an op of a body allocates besides its results while it runs."""
    return (working_bytes(body, op, kernels_by) + rearranged_bytes(body, op)
            + kernel_workspace(body, op, kernels_by) + op.workspace)


def _several(loop: _Runs) -> tuple[Graph, list[set[int]], list[int]]:
    """Return several iterations as one body, one after the other.

    What an iteration hands on is counted but for the last one's, which is the loop's.

    Returns:
      The body; and of each of its ops what it needs, and which op of the loop's body it is.
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
    number = {node: n for n, node in enumerate(nodes)}
    inputs = [[(number[of, op], slot) for of, (op, slot) in (
        read(turn, t) for t in body.ops[i].inputs)] for turn, i in nodes]
    whole = Graph(body.name, tuple(
        dataclasses.replace(body.ops[i], inputs=tuple(read_))
        for (_, i), read_ in zip(nodes, inputs, strict=True)), tuple(
            (number[of, op], slot) for of, (op, slot) in (
                read(count - 1, t) for t in body.fetches)), ())
    needed = []
    for (turn, _), op in zip(nodes, whole.ops, strict=True):
        of, (start, _) = read(turn, (first, 0))
        began = {number[of, start]} if turn else set[int]()
        needed.append({source for source, _ in op.inputs} or began)
    return whole, needed, [i for _, i in nodes]


def _oldest(tensors: _Tensors, needed: Sequence[Collection[int]]) -> list[int]:
    """Return the order that takes the oldest of what is ready."""
    return _in_turn(needed, deque[int](), deque.append, deque.popleft)


def _newest(tensors: _Tensors, needed: Sequence[Collection[int]]) -> list[int]:
    """Return the order that takes the newest of what is ready."""
    return _in_turn(needed, deque[int](), deque.append, deque.pop)


def _growing(tensors: _Tensors, needed: Sequence[Collection[int]]) -> list[int]:
    """Return the order that takes of what is ready what makes memory grow most.

    So do threads that compute the terms of a gradient's sums over iterations before they add these.
    """
    left = collections.Counter(t for read in tensors.read for t in read)
    since = itertools.count()

    def growth(op: int) -> int:
        return sum(tensors.allocated[op].values()) - sum(
            tensors.size.get(t, 0) for t in tensors.read[op] if left[t] == 1)

    def add(ready: list[tuple[int, int, int]], op: int) -> None:
        heapq.heappush(ready, (-growth(op), next(since), op))

    def take(ready: list[tuple[int, int, int]]) -> int:
        while True:
            grows, _, op = heapq.heappop(ready)
            if -grows > growth(op):  # what reads the same as well has run meanwhile
                add(ready, op)
                continue
            left.subtract(tensors.read[op])
            return op

    return _in_turn(needed, [], add, take)


def _in_turn(needed: Sequence[Collection[int]], ready: Any, add: Callable[[Any, int], None],
             take: Callable[[Any], int]) -> list[int]:
    """Return ops in an order in which each comes after those that it needs."""
    readers: list[list[int]] = [[] for _ in needed]
    for op, sources in enumerate(needed):
        for source in sources:
            readers[source].append(op)
    left = [len(sources) for sources in needed]
    order = []
    for op, count in enumerate(left):
        if not count:
            add(ready, op)
    while ready:
        order.append(take(ready))
        for reader in readers[order[-1]]:
            left[reader] -= 1
            if not left[reader]:
                add(ready, reader)
    return order


class _Tensors:
    """The temporary tensors of a body.

    What is put into a list or an optional is counted elsewhere, and so is what the body hands out.
    Where lists are not full yet the first are allocated here, and stay. Of an iteration among
    others nothing is gone that it takes out of a list.

    Attributes:
      put: what is put away so.
      allocated: of each op, what it allocates, with its bytes.
      read: of each op, what it reads of these.
      size: bytes of what is gone once it has been read. What is taken out of a list or an optional
        was there before.
    """

    def __init__(self, body: Graph, fills: bool = False, among: bool = False) -> None:
        root = roots(body)
        self.put = _put_away(body, root)
        elsewhere = {root[i][slot] for i, slot in body.fetches} - {RESIDENT}
        if not fills:
            elsewhere |= self.put
        takes_out = [_takes_out(body, op) for op in body.ops]
        made = [{(i, slot): t.bytes or 0 for slot, t in enumerate(op.outputs)
                 if root[i][slot] == (i, slot) and (i, slot) not in elsewhere}
                for i, op in enumerate(body.ops)]
        self.all = {t: size for tensors in made for t, size in tensors.items()}
        self.size = {t: size for t, size in self.all.items()
                     if t not in self.put and not (among and takes_out[t[0]])}
        self.read = [tuple(t for t in dict.fromkeys(root[s][slot] for s, slot in op.inputs)
                           if t in self.all) for op in body.ops]
        self.allocated: list[dict[TensorId, int]] = [
            {} if taken else tensors for taken, tensors in zip(takes_out, made, strict=True)]


def _peak(body: Graph, tensors: _Tensors, extra: Sequence[int], order: Sequence[int]) -> int:
    """Return the most bytes of temporary tensors that live at once.

    Lists that are not full before its end count as if they were: so what is not there yet counts
    less than nothing.

    Args:
      body: what runs.
      tensors: its temporary tensors.
      extra: bytes that each op allocates besides.
      order: in which the ops run.
    """
    last = {t: i for i in order for t in tensors.read[i]}
    live = peak = 0
    for i in order:
        dying = [tensors.size[t] for t in tensors.read[i] if last[t] == i and t in tensors.size]
        made = tensors.allocated[i]
        taken = _taken_over(body.ops[i], made, dying)
        peak = max(peak, live + sum(made.values()) - taken + extra[i])
        live += sum(made[t] for t in made if t in last) - sum(dying)
    return peak - sum(size for t, size in tensors.all.items() if t in tensors.put)


def _takes_out(body: Graph, op: Op) -> bool:
    """Return whether an op hands out what is in a list or an optional."""
    return not record(op.type).lists.stacks and any(
        body.ops[i].outputs[slot].dtype == "variant" for i, slot in op.inputs)


def _taken_over(op: Op, made: dict[TensorId, int], dying: list[int]) -> int:
    """Return the bytes of a result for which the op takes over the buffer of an input that dies."""
    sizes = list(made.values())
    return sizes[0] if record(op.type).reuses_input and len(sizes) == 1 and sizes[0] in dying else 0


def _put_away(body: Graph, root: list[tuple[TensorId, ...]]) -> frozenset[TensorId]:
    """Return what the body puts into lists or optionals."""
    found: set[TensorId] = set()
    for op in body.ops:
        known = record(op.type)
        put = op.inputs if known.wraps else () if known.lists.entry is None else (
            op.inputs[known.lists.entry],)
        found.update(root[i][slot] for i, slot in put)
    return frozenset(found - {RESIDENT})
