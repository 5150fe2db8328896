"""Bodies of loops and branches as TensorFlow runs them, several iterations at a time perhaps."""

from __future__ import annotations

import dataclasses

from tfckpt.cost.storage import is_handed_on
from tfckpt.ir.graph import Graph, Op, TensorId, ancestors
from tfckpt.ops import record

_HANDLES = ("variant", "resource")
_MOST_OPS = 20_000
"""Ops of iterations that are looked at together."""


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """A body that runs: equal to one that differs by names alone, as those of layers in a row do.

    Attributes:
      body, kernels_by: as for `tfckpt.cost.bodies.working.working_bytes`.
      arguments: of the loop; empty for branches.
      states: as `states` returns them; empty where what an iteration is handed counts elsewhere,
        and what it hands on.
      at_once: how many iterations run at the same time.
      fills: whether the lists are not full before the last iteration is over.
      among: whether it is one iteration of several that run at the same time.
    """

    body: Graph
    kernels_by: str
    arguments: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    at_once: int = 1
    fills: bool = False
    among: bool = False

    def __hash__(self) -> int:
        return hash((len(self.body.ops), self.body.fetches, self.at_once, self.kernels_by))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Runs)
        return (
            (self.at_once, self.arguments, self.states, self.fills, self.among) == (
                other.at_once, other.arguments, other.states, other.fills, other.among)
            and (self.kernels_by, self.body.fetches) == (other.kernels_by, other.body.fetches)
            and len(self.body.ops) == len(other.body.ops)
            and all(map(_same_but_for_names, self.body.ops, other.body.ops)))


def _same_but_for_names(one: Op, other: Op) -> bool:
    return one is other or (
        not (one.bodies or other.bodies) and (one.type, one.inputs, one.workspace, one.pure) == (
            other.type, other.inputs, other.workspace, other.pure)
        and one.outputs == other.outputs and one.attrs == other.attrs)


def states(op: Op) -> tuple[int, ...]:
    """Return the slots of what iterations of a loop hand on, in other memory of the same size.

    Args:
      op: a loop; others have none.
    """
    if op.loop is None:
        return ()
    body, found = op.loop.body, []
    for slot, given in enumerate(op.loop.arguments):
        source, output = body.fetches[slot]
        sizes = {tensor.bytes for tensor in (
            op.outputs[slot], body.ops[given].outputs[0], body.ops[source].outputs[output])}
        if not is_handed_on(op.loop, slot) and len(sizes) == 1 and None not in sizes and (
                op.outputs[slot].dtype not in _HANDLES):
            found.append(slot)
    return tuple(found)


def written_over(op: Op) -> list[tuple[int, int]]:
    """Return which results an op may write over which inputs: states of loops, gradients of losses.

    Args:
      op: one that writes over any of its inputs has none here (`reuses_input`).
    """
    over = record(op.type).writes_over
    return [*((slot, slot) for slot in states(op)), *([over] if over is not None else ())]


def running(runs: Runs) -> Runs:
    """Return a body without what TensorFlow removes before it runs it: nothing needs it.

    So it is of the gradients of constants, which the tape traces along, and of what only these
    read.

    Args:
      runs: the body; of one that says nothing of its results all runs.
    """
    body = runs.body
    if not body.fetches and not body.sinks:
        return runs
    wanted = {i for i, _ in body.fetches} | set(body.sinks) | set(runs.arguments) | {
        i for i, op in enumerate(body.ops) if not op.pure}
    wanted |= ancestors(body.ops, sorted(wanted))
    kept = sorted(wanted)
    number = {old: new for new, old in enumerate(kept)}
    return dataclasses.replace(runs, body=body.part(kept), arguments=tuple(
        number[i] for i in runs.arguments))


def several(loop: Runs) -> tuple[Runs, list[set[int]], list[int]]:
    """Return several iterations as one body, one after the other.

    What an iteration hands on is counted; of the last one, states alone: the rest is the loop's.

    Args:
      loop: the body of a loop, and how many iterations run at the same time.

    Returns:
      What runs; and of each of its ops what it needs, and which op of the loop's body it is.
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
    arguments = tuple(number[0, i] for i in loop.arguments)
    return (dataclasses.replace(loop, body=whole, arguments=arguments), needed,
            [i for _, i in nodes])
