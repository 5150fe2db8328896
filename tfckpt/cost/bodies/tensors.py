"""The temporary tensors of bodies, and how much of them lives at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfckpt.cost.bodies.runs import Runs, written_over
from tfckpt.cost.storage import RESIDENT, roots
from tfckpt.ir.graph import Graph, Op, TensorId
from tfckpt.ops import record


class Tensors:
    """The temporary tensors of a body.

    What is put into a list or an optional is counted elsewhere, and so is what the body hands out,
    but for states. Where lists are not full yet the first are allocated here, and stay. Of an
    iteration among others nothing is gone that it takes out of a list.

    Args:
      runs: the body.
      fills: whether lists are not full before the last iteration is over.
      among: whether it is one iteration of several that run at the same time.

    Attributes:
      put: what is put away so.
      kept: what the body hands on as states.
      begins: the states that it is handed, with their bytes.
      allocated: of each op, what it allocates, with its bytes.
      read: of each op, what it reads of these.
      takes: of each op, for what it allocates the tensors whose buffers that may have.
      size: bytes of what is gone once it has been read. What is taken out of a list or an optional
        was there before.
    """

    def __init__(self, runs: Runs, fills: bool = False, among: bool = False) -> None:
        body = runs.body
        given = [runs.arguments[slot] for slot in runs.states]
        root = roots(body, counted=given)
        self.put = _put_away(body, root)
        handed = {slot: root[i][of] for slot, (i, of) in enumerate(body.fetches)}
        self.kept = {handed[slot] for slot in runs.states} - {RESIDENT}
        elsewhere = {*handed.values()} - self.kept - {RESIDENT}
        if not fills:
            elsewhere |= self.put
        taken_out = [takes_out(body, op) for op in body.ops]
        made = [{(i, slot): t.bytes or 0 for slot, t in enumerate(op.outputs)
                 if root[i][slot] == (i, slot) and (i, slot) not in elsewhere}
                for i, op in enumerate(body.ops)]
        self.all = {t: size for tensors in made for t, size in tensors.items()}
        self.begins = {(i, 0): made[i].pop((i, 0)) for i in given if (i, 0) in made[i]}
        self.size = {t: size for t, size in self.all.items() if t not in self.put
                     and t not in self.kept and not (among and taken_out[t[0]])}
        self.read = [tuple(t for t in dict.fromkeys(root[s][slot] for s, slot in op.inputs)
                           if t in self.all) for op in body.ops]
        self.allocated: list[dict[TensorId, int]] = [
            {} if taken else tensors for taken, tensors in zip(taken_out, made, strict=True)]
        self.takes = [self._takes(body, i, root) for i in range(len(body.ops))]

    def _takes(self, body: Graph, i: int, root: list[tuple[TensorId, ...]]
               ) -> dict[TensorId, tuple[TensorId, ...]]:
        op = body.ops[i]
        if record(op.type).reuses_input and len(self.allocated[i]) == 1:
            return dict.fromkeys(self.allocated[i], self.read[i])
        return {(i, slot): (root[op.inputs[n][0]][op.inputs[n][1]],)
                for slot, n in written_over(op)}


def peak(body: Graph, tensors: Tensors, extra: Sequence[int], order: Sequence[int]) -> int:
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
    stays = last.keys() | tensors.kept
    live = most = sum(size for t, size in tensors.begins.items() if t in stays)
    for i in order:
        dying = {t: tensors.size[t] for t in tensors.read[i] if last[t] == i and t in tensors.size}
        made = tensors.allocated[i]
        taken = _taken_over(tensors.takes[i], made, dying)
        most = max(most, live + sum(made.values()) - taken + extra[i])
        live += sum(made[t] for t in made if t in stays) - sum(dying.values())
    return most - sum(size for t, size in tensors.all.items() if t in tensors.put)


def takes_out(body: Graph, op: Op) -> bool:
    """Return whether an op hands out what is in a list or an optional.

    Args:
      body: that the op is part of.
      op: the op.
    """
    return not record(op.type).lists.stacks and any(
        body.ops[i].outputs[slot].dtype == "variant" for i, slot in op.inputs)


def _taken_over(takes: Mapping[TensorId, Sequence[TensorId]], made: Mapping[TensorId, int],
                dying: Mapping[TensorId, int]) -> int:
    """Return the bytes of results for which an op takes over the buffers of inputs that die."""
    left, found = dict(dying), 0
    for result, wishes in takes.items():
        given = next((t for t in wishes if t in left and left[t] == made.get(result)), None)
        if given is not None:
            found += left.pop(given)
    return found


def _put_away(body: Graph, root: list[tuple[TensorId, ...]]) -> frozenset[TensorId]:
    """Return what the body puts into lists or optionals."""
    found: set[TensorId] = set()
    for op in body.ops:
        known = record(op.type)
        put = op.inputs if known.wraps else () if known.lists.entry is None else (
            op.inputs[known.lists.entry],)
        found.update(root[i][slot] for i, slot in put)
    return frozenset(found - {RESIDENT})
