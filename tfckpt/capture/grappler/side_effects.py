"""Side effects that something waits for while Grappler inlines functions.

Grappler inlines a function where it can tell that its side effects will take place: where something
waits for the call, and the end of the function for each of its ops with state. The runtime inlines
it in any case. A call that is left waits for all that it reads, so that a control edge from one of
these is dropped, and nothing orders its side effects once it is inlined after all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.nodes import op_of
from tfckpt.ops.names import NO_OP

_AWAITING = "tfckpt_awaiting"


@contextlib.contextmanager
def awaited(meta: tf.compat.v1.MetaGraphDef, calls: Iterable[str]) -> Iterator[None]:
    """Have ops wait for calls, and for ops with state in functions, while this context lasts.

    Args:
      meta: the graph; its collection `train_op` names what has to run. What Grappler makes of it
        takes its place in this context.
      calls: those of the graph, by name.
    """
    running = meta.collection_def["train_op"].node_list.value
    _wait(meta.graph_def.node, calls)
    running.append(_AWAITING)
    plain = {}
    for function in meta.graph_def.library.function:
        stateful = [node.name for node in function.node_def
                    if tf_adapter.is_stateful_type(node.op)]
        if not set(stateful) <= set(function.control_ret.values()):
            plain[function.signature.name] = function.SerializeToString()
            _wait(function.node_def, stateful)
            function.control_ret[_AWAITING] = _AWAITING
            function.signature.control_output.append(_AWAITING)
    yield
    running.remove(_AWAITING)
    for function in meta.graph_def.library.function:
        if function.signature.name in plain:
            function.ParseFromString(plain[function.signature.name])
    _forget(meta.graph_def)


def _wait(nodes: Any, awaited: Iterable[str]) -> None:
    nodes.add(name=_AWAITING, op=NO_OP, input=[f"^{name}" for name in awaited])


def _forget(definition: tf.compat.v1.GraphDef) -> None:
    """Remove what waits, in functions that were inlined too."""
    left = [node for node in definition.node if not _is_awaiting(node.name)]
    for node in left:
        node.input[:] = [text for text in node.input if not _is_awaiting(op_of(text))]
    del definition.node[:]
    definition.node.extend(left)


def _is_awaiting(name: str) -> bool:
    return name.rpartition("/")[2] == _AWAITING
