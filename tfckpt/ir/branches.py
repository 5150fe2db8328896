"""Search for ops that run in one branch only, in graphs where branches are Switch and Merge.

TF1's `tf.cond`, and TensorFlow's own lowering of `If` and `Case` before Grappler, run every op and
mark results of the branch that is not taken as dead. An op that reads or awaits a dead one is
dead too, so a wait put on an op of a branch would take the branch's readers away with it, and
whatever waits for those. A Merge alone may await what is dead: that is how all that follows an
assertion waits for the branch in which it fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tfckpt.ops import Branch, record

Taken = tuple[str, int]
"""The tensor that decides, and which output of the Switch is taken."""
Conditions = Mapping[str, frozenset[Taken]]
NOTHING: frozenset[Taken] = frozenset()


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
        of_inputs = [_of_tensor(tensor, found, switches) for tensor in inputs]
        part = record(kind).branch
        if part is Branch.MERGE:  # runs once one of them is there
            found[name] = frozenset.intersection(*of_inputs) if of_inputs else NOTHING
        else:
            found[name] = NOTHING.union(*of_inputs, *(found.get(c, NOTHING) for c in controls))
        if part is Branch.SWITCH and len(inputs) > 1:
            switches[name] = inputs[1]
    return found


def _of_tensor(tensor: str, found: Conditions, switches: Mapping[str, str]) -> frozenset[Taken]:
    op, _, slot = tensor.rpartition(":")
    needed = found.get(op, NOTHING)
    return needed | {(switches[op], int(slot))} if op in switches else needed
