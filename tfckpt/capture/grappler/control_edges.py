"""Control edges that Grappler adds where it inlines, and takes away from loops and branches.

Grappler has all of a body wait for all arguments of its call, and all of a loop that waits for
nothing and reads a variable for all that it is given; the runtime does neither. And where loops
and branches are not lowered yet, Grappler takes them for ops like any others, which begin when all
that they read is there: a control edge that says so again is dropped. Once they are lowered they
begin with whatever is there first, and a read of a variable in a body may then come before the
write that it has to follow. What writes a variable may no longer wait for what reads it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.nodes import is_loop, op_of
from tfckpt.ops import Access, record
from tfckpt.ops.names import MERGE, NO_OP, SWITCHES

_PASSED_IN = re.compile(r"Func/(.*)/input/_\d+$")
_BEFORE_BODY = re.compile(r"Func/(.*)/input_control_node/_\d+$")
_BEFORE_LOOP = re.compile(r"(.*)/LoopControlInputs/_\d+$")
_BEFORE_BRANCH = re.compile(r"(.*)/(?:switch_pred|branch_index)/_\d+$")

_EXECUTED = re.compile(r"(.*)/(?:branch_executed|LoopExecuted)/_\d+$")


def _executed(name: str) -> str:
    """Return the loop or branch whose end an op of the lowered graph stands for, or the op."""
    found = _EXECUTED.match(name)
    return found[1] if found else name


def wait_as_called(definition: tf.compat.v1.GraphDef, calls: Mapping[str, Collection[str]],
                   bodies: bool = True) -> None:
    """Have bodies, lowered loops and branches wait for no more than their calls did.

    A lowered loop's condition waits for the first of what it is given: that keeps its constants in
    the loop. If it waited for all, nothing of the loop would be pruned.

    Args:
      definition: what became of a graph whose calls were inlined; changed.
      calls: what those of the step, not those of functions, wait for.
      bodies: whether the runtime inlines functions, and not Grappler itself.
    """
    kinds = {node.name: node.op for node in definition.node}
    arguments: dict[str, dict[str, None]] = {}
    for node in definition.node:
        if found := _PASSED_IN.match(node.name):
            arguments.setdefault(found[1], {})[op_of(node.input[0])] = None
    empty = set()
    for node in definition.node:
        if node.op == NO_OP and (found := _BEFORE_BODY.match(node.name)):
            if not bodies:
                continue
            given = arguments.get(found[1], {})
        elif node.op == NO_OP and (found := _BEFORE_LOOP.match(node.name)) or (
                node.op in SWITCHES and (found := _BEFORE_BRANCH.match(node.name))):
            given = dict.fromkeys(op_of(name) for name in node.input if name[:1] == "^")
        else:
            continue
        first = next((name for name in given if kinds[name] == MERGE), None)
        more = {name for name in given if _executed(name) not in calls[found[1]]} if (
            found[1] in calls) else {
                name for name in given
                if name != first and not tf_adapter.is_stateful_type(kinds[name])}
        _keep_inputs(node, [name for name in node.input
                            if name[:1] != "^" or name[1:] not in more])
        if not node.input:
            empty.add(node.name)
    kept = [node for node in definition.node if node.name not in empty]
    for node in kept:
        _keep_inputs(node, [name for name in node.input
                            if name[:1] != "^" or name[1:] not in empty])
    del definition.node[:]
    definition.node.extend(kept)


def wait_as_asked(asked: tf.compat.v1.GraphDef, found: tf.compat.v1.GraphDef) -> None:
    """Have loops and branches wait, and be waited for, as before Grappler saw them.

    Args:
      asked: the graph that Grappler was asked about.
      found: what it made of it; changed.
    """
    nodes = {node.name: node for node in asked.node}
    left = {node.name for node in found.node}
    whole = {name for name in left & nodes.keys()
             if is_loop(nodes[name])}
    for node in found.node if whole else ():
        if node.name not in nodes:
            continue
        awaited = {name[1:] for name in node.input if name[:1] == "^"}
        node.input.extend(
            f"^{name}" for name in _awaited(nodes[node.name], nodes, left)
            if name not in awaited and (name in whole or node.name in whole))


def write_after_reads(asked: tf.compat.v1.GraphDef, found: tf.compat.v1.GraphDef) -> None:
    """Have writes of variables wait for the reads that they waited for before Grappler saw them.

    Grappler drops such an edge where data leads from the read to the write, and then makes a
    constant of that data. Nothing orders the two any more. TensorFlow begins with what waits for
    nothing, so that the read is the first in nearly every run; what runs later in a rewritten step
    might find the new value.

    Args:
      asked: the graph that Grappler was asked about.
      found: what it made of it; changed.
    """
    reads = {node.name for node in found.node if record(node.op).access is Access.VALUE}
    waits = {node.name: node.input for node in asked.node}
    for node in found.node:
        if record(node.op).writes:
            left = set(node.input)
            node.input.extend(name for name in waits.get(node.name, ()) if name[:1] == "^"
                              and name[1:] in reads and name not in left)


def _awaited(node: tf.compat.v1.NodeDef, nodes: Mapping[str, tf.compat.v1.NodeDef],
             left: Collection[str]) -> list[str]:
    """Return what an op waits for by control edges, of what is left.

    Of an op that is gone, what it read and waited for itself.
    """
    pending = [name[1:] for name in node.input if name[:1] == "^"]
    found: dict[str, None] = {}
    seen = set(pending)
    while pending:
        name = pending.pop()
        if name in left:
            found[name] = None
            continue
        before = [read for text in nodes[name].input if (read := op_of(text)) not in seen]
        seen.update(before)
        pending += before
    return list(found)


def _keep_inputs(node: tf.compat.v1.NodeDef, left: list[str]) -> None:
    del node.input[:]
    node.input.extend(left)
