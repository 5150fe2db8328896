"""Search for ops that run in one branch only, in graphs where branches are Switch and Merge.

TF1's `tf.cond`, and TensorFlow's own lowering of `If` and `Case` before Grappler, run every op and
mark results of the branch that is not taken as dead. An op that reads or awaits a dead one is
dead too, so a wait put on an op of a branch would take the branch's readers away with it, and
whatever waits for those. A Merge alone may await what is dead: that is how all that follows an
assertion waits for the branch in which it fails.

Branches return through a Merge, and the branches of their gradient read that through a Switch. What
decides there has decided before: it is the result of one branch that arrives, whatever the others
return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from tfckpt.ops import Branch, record

Taken = tuple[str, int]
"""The tensor that decides, and which output of the Switch is taken."""
Tensor = tuple[str, int]
"""A result of an op: the op's name, and the number of the result."""
Conditions = Mapping[str, frozenset[Taken]]
NOTHING: frozenset[Taken] = frozenset()


class Node(Protocol):
    """An op of an executed graph."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def type(self) -> str:
        """Return its type."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Return what it reads."""

    @property
    def controls(self) -> Sequence[str]:
        """Return the names of the ops that it waits for."""


def has_branches(types: Iterable[str]) -> bool:
    """Return whether a graph of ops of these types has branches; most have none.

    Args:
      types: op types, in any order; an op type may come several times.
    """
    return any(record(kind).branch is Branch.SWITCH for kind in types)


def conditions(ops: Iterable[tuple[str, str, Sequence[str], Sequence[str]]]) -> Conditions:
    """Return the branches that each op needs taken in order to run; none for most.

    Args:
      ops: (name, type, inputs as `op:slot`, names of ops it waits for), in topological order.
    """
    found: dict[str, frozenset[Taken]] = {}
    switches: dict[str, str] = {}
    for name, kind, inputs, controls in ops:
        of_inputs = [of_tensor(tensor, found, switches) for tensor in inputs]
        part = record(kind).branch
        if part is Branch.MERGE:  # runs once one of them is there
            found[name] = frozenset.intersection(*of_inputs) if of_inputs else NOTHING
        else:
            found[name] = NOTHING.union(*of_inputs, *(found.get(c, NOTHING) for c in controls))
        if part is Branch.SWITCH and len(inputs) > 1:
            switches[name] = inputs[1]
    return found


def of_tensor(tensor: str, needed: Conditions, deciders: Mapping[str, str]) -> frozenset[Taken]:
    """Return the branches without which there is no tensor.

    Args:
      tensor: as `op:slot`.
      needed: the branches that each op needs taken, as `conditions` returns them.
      deciders: the tensor that decides, by the name of the Switch.
    """
    op, _, slot = tensor.rpartition(":")
    found = needed.get(op, NOTHING)
    return found | {(deciders[op], int(slot))} if op in deciders else found


def arriving(nodes: Mapping[str, Node], order: Sequence[str],
             source: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """Return the results that arrive at branches, by the result of the Switch that hands them on.

    Args:
      nodes: of an executed graph, by name.
      order: their names, each after what the op reads, but for the ends of loops.
      source: returns the tensor that comes before ops which only pass it on.
    """
    deciders = {name: _text(source(node.inputs[1])) for name in order if record(
        (node := nodes[name]).type).branch is Branch.SWITCH and len(node.inputs) > 1}
    if not deciders:
        return {}
    needed = conditions((name, nodes[name].type, _read(nodes[name], deciders),
                         nodes[name].controls) for name in order)
    found: dict[Tensor, Tensor] = {}
    for name, decider in deciders.items():
        before, slot = source(nodes[name].inputs[0])
        if record(nodes[before].type).branch is Branch.MERGE and slot == 0:
            numbers = [[number for by, number in of_tensor(_text(tensor), needed, deciders)
                        if by == decider] for tensor in nodes[before].inputs]
            if all(len(each) == 1 for each in numbers) and (
                    len({number for number, in numbers}) == len(numbers)):
                found |= {(name, number): tensor for (number,), tensor in zip(
                    numbers, nodes[before].inputs, strict=True)}
    return found


def _read(node: Node, deciders: Mapping[str, str]) -> list[str]:
    """Return what an op reads, what decides under the name that it has in `deciders`."""
    texts = [_text(tensor) for tensor in node.inputs]
    return [texts[0], deciders[node.name]] if node.name in deciders else texts


def _text(tensor: Tensor) -> str:
    return f"{tensor[0]}:{tensor[1]}"
