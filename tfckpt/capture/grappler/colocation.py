"""Which ops the runtime places with which, as far as Grappler does not join ops for it.

Grappler takes two equal ops for one unless their attributes differ, and what an op is placed with
is an attribute. Asked about a graph it drops that attribute first, and where it inlines it names
others in it than the runtime does. So it is told under another name, and named as the runtime does:

  1. What an op of a function is placed with is called by its name in the function, after the
     scope of the call.
  2. What hands an input on to a lowered branch, or to a function's body, or a result on from there,
     is placed with what makes it; with a loop or branch if that makes it, though it is lowered.
"""

from __future__ import annotations

import re

import tensorflow as tf

from tfckpt.capture.nodes import op_of
from tfckpt.ops.names import IDENTITY, SWITCHES

_COLOCATED = "_class"
_ASIDE = "_tfckpt_hidden_class"
"""The same attribute; TensorFlow 2.18 warns of those that begin with a letter."""
_GROUP = b"loc:@"
_PASSED = re.compile(r"Func/.*/(?:input|output)/_\d+$")
_RESULT = re.compile(r"(.*)/(?:output|merge|exit)/_\d+(?::0)?$")
_CALLED = b"called:"
"""Before the name of an op in its function, last in the attribute until calls are inlined."""


def hide_colocation(definition: tf.compat.v1.GraphDef) -> None:
    """Have Grappler keep apart what is placed with other ops, though it forgets that.

    Args:
      definition: before functions are inlined; it and its functions are changed.
    """
    for node in definition.node:
        _hide(node)
    for function in definition.library.function:
        for node in function.node_def:
            if _hide(node):
                node.attr[_ASIDE].list.s.append(_CALLED + node.name.encode())


def _hide(node: tf.compat.v1.NodeDef) -> bool:
    """Return whether there was something to hide."""
    if _COLOCATED not in node.attr:
        return False
    node.attr[_ASIDE].CopyFrom(node.attr.pop(_COLOCATED))
    return True


def colocate_inlined(definition: tf.compat.v1.GraphDef) -> None:
    """Call by the names of the graph what inlined ops are placed with.

    Args:
      definition: what became of a graph that `hide_colocation` was told of once functions were
        inlined, and loops and branches lowered or not; changed.
    """
    for node in definition.node:
        if _ASIDE in node.attr:
            _call_in_scope(node)
            continue
        makers = [maker for maker in _makers(node) if _hands_on(node, maker)]
        node.attr.pop(_COLOCATED, None)
        if makers:
            node.attr[_ASIDE].list.s.append(_GROUP + makers[0].encode())


def _makers(node: tf.compat.v1.NodeDef) -> list[str]:
    """Return what made the first that an op reads, by its names before lowering and after."""
    if not node.input:
        return []
    result = _RESULT.match(node.input[0])
    return [*([result[1]] if result else []), op_of(node.input[0])]


def _hands_on(node: tf.compat.v1.NodeDef, maker: str) -> bool:
    """Return whether an op is there since inlining or lowering, to hand on what another makes (2).

    What hands a tensor on to a branch is called by what makes that; that of a loop otherwise.
    """
    if node.op == IDENTITY:
        return bool(_PASSED.match(node.name))
    return node.op in SWITCHES and node.name.rpartition("/_")[0].endswith(f"/{maker}")


def _call_in_scope(node: tf.compat.v1.NodeDef) -> None:
    """Name what an op of a function is placed with as the runtime does it (1)."""
    groups = list(node.attr[_ASIDE].list.s)
    if not groups or not groups[-1].startswith(_CALLED):
        return
    scope = node.name.encode().removesuffix(groups.pop().removeprefix(_CALLED))
    del node.attr[_ASIDE].list.s[:]
    node.attr[_ASIDE].list.s.extend(
        _GROUP + scope + group.removeprefix(_GROUP) for group in groups)


def show_colocation(node: tf.compat.v1.NodeDef) -> None:
    """Have a node say again what it is placed with.

    Args:
      node: of a graph that Grappler was asked about; changed.
    """
    if _ASIDE in node.attr:
        node.attr[_COLOCATED].CopyFrom(node.attr.pop(_ASIDE))
