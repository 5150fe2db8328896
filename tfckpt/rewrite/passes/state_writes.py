"""Has what may write a variable wait for the copies of loops that read it.

A copy of a loop reads its variables anew, in the backward, so they must not have changed: the
numbers would be wrong without a sign. Which ops may change them is noted at capture
(`tfckpt.capture.loops.repeated`). Most follow from the loop's gradient, and so from the copy, in
any case; the others get a control edge.
"""

from __future__ import annotations

import dataclasses

import networkx as nx

from tfckpt.capture.devices import device_key
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import AddControl, Edits, edited, op_of
from tfckpt.ir.graph import Graph
from tfckpt.rewrite.passes.manager import Pass, Property


def delay_writes(graph: Graph, edits: Edits) -> Edits:
    """Return the edits, and control edges from copies of loops to later writes of what they read.

    The edges may close a cycle, which `check_edits` finds.

    Args:
      graph: the captured step.
      edits: what is done to the step so far.

    Raises:
      RewriteError: such a write runs on another device.
    """
    ops = {op.name: op for op in graph.ops}
    added: list[AddControl] = []
    following: nx.DiGraph | None = None
    for clone in edits.clones:
        source = ops.get(clone.source)
        if source is None or source.loop is None or not source.loop.later_writes:
            continue
        if following is None:
            following = _following(graph, edits)
        after = nx.descendants(following, clone.name)
        for name in source.loop.later_writes:
            if name in after or name not in ops:  # a part of a graph has no initialisers
                continue
            if device_key(ops[name].device) != device_key(ops[clone.source].device):
                raise RewriteError(f"rewrite: {name!r}, which may write a variable that the loop "
                                f"{clone.source!r} reads, runs on another device")
            added.append(AddControl(name, clone.name))
    return dataclasses.replace(edits, controls=(*edits.controls, *added)) if added else edits


def _following(graph: Graph, edits: Edits) -> nx.DiGraph:
    """Return the edited graph, with edges from each op to those that read it or wait for it."""
    tensors, waits, _ = edited(graph, edits)
    return nx.DiGraph([(before, name) for name in tensors
                       for before in (*map(op_of, tensors[name]), *waits[name])])


PASS = Pass("state writes", lambda context, edits: delay_writes(context.graph, edits),
            requires=frozenset({Property.COPIES}), ensures=frozenset({Property.LOOP_STATE}))
