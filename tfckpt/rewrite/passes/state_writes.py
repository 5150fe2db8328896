"""Has what may write a variable wait for the copies of loops and branches that read it.

A copy reads its variables anew, in the backward, so they must not have changed: the
numbers would be wrong without a sign. Which ops may change them is noted at capture
(`tfckpt.capture.loops.repeated`). Most follow from the loop's gradient, and so from the copy, in
any case; the others get a control edge. Who waits for branches does not wait for what they
compute, once TensorFlow has lowered them, and each result may come at another time: a write waits
for all those that are read.
"""

from __future__ import annotations

import networkx as nx

from tfckpt.capture.devices import device_key
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import AddControl, Create, Edits, edited, op_of
from tfckpt.ir.graph import Graph, Op
from tfckpt.ops import record
from tfckpt.ops.names import NO_OP
from tfckpt.rewrite.names import done_name, extra_reader_name, identity
from tfckpt.rewrite.passes.manager import Pass, Property


def delay_writes(graph: Graph, edits: Edits) -> Edits:
    """Return the edits, and control edges from copies to later writes of what they read.

    The edges may close a cycle, which `check_edits` finds.

    Args:
      graph: the captured step.
      edits: what is done to the step so far.

    Raises:
      RewriteError: such a write runs on another device.
    """
    ops = {op.name: op for op in graph.ops}
    ops |= {entry.new: ops[entry.old] for entry in edits.replaced if entry.old in ops}
    waits: list[AddControl] = []
    added: list[Create] = []
    following: nx.DiGraph | None = None
    for clone in edits.clones:
        source = ops.get(clone.source)
        if source is None or not source.later_writes:
            continue
        if following is None:
            following = _following(graph, edits)
        after = nx.descendants(following, clone.name) if source.loop is not None else ()
        done = clone.name
        if record(source.type).chooses:
            added += _all_computed(clone.name, source, edits)
            done = added[-1].name
        for name in source.later_writes:
            if name in after or name not in ops:  # a part of a graph has no initialisers
                continue
            if device_key(ops[name].device) != device_key(source.device):
                raise RewriteError(f"rewrite: {name!r}, which may write a variable that "
                                f"{clone.source!r} reads, runs on another device")
            waits.append(AddControl(name, done))
    return edits.then(Edits(tuple(added), controls=tuple(waits))) if waits else edits


def _all_computed(copy: str, source: Op, edits: Edits) -> list[Create]:
    """Return new ops, of which the last runs once a copy has computed all that is read of it."""
    made = {new.name for new in edits.added}
    read = {*(t for new in edits.added for t in new.inputs), *(r.tensor for r in edits.rewires)}
    found = {extra_reader_name(copy, slot): identity(
        extra_reader_name(copy, slot), f"{copy}:{slot}", (), tensor.dtype, source.device)
        for slot, tensor in enumerate(source.outputs) if f"{copy}:{slot}" in read}
    done = Create(done_name(copy), NO_OP, (), tuple(found), (), {}, source.device)
    return [*(new for name, new in found.items() if name not in made), done]


def _following(graph: Graph, edits: Edits) -> nx.DiGraph:
    """Return the edited graph, with edges from each op to those that read it or wait for it."""
    tensors, waits, _ = edited(graph, edits)
    return nx.DiGraph([(before, name) for name in tensors
                       for before in (*map(op_of, tensors[name]), *waits[name])])


PASS = Pass("state writes", lambda context, edits: delay_writes(context.graph, edits),
            requires=frozenset({Property.COPIES}), ensures=frozenset({Property.LOOP_STATE}))
