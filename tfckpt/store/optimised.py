"""Grappler's result for a plain step, kept: to ask again may take as long as to trace the step.

It is asked where operands may come to be added or multiplied in another order than in the plain
step, which follows from names among others (`tfckpt.rewrite.summation_order`). So names are part of
this key, and what is kept serves any plan of the step.
"""

from __future__ import annotations

import datetime
import hashlib
import json

import tensorflow as tf

import tfckpt
from tfckpt.capture import tf_adapter
from tfckpt.common import faults
from tfckpt.ir.graph import Graph
from tfckpt.rewrite.passes.manager import Node
from tfckpt.rewrite.passes.operand_order import read_of
from tfckpt.rewrite.plain_step import Ask, LiveStep, Optimised
from tfckpt.store import files
from tfckpt.store.definition import named_digest
from tfckpt.store.key import plain
from tfckpt.store.surroundings import surroundings


class Answers:
    """Grappler's answers about a step.

    Args:
      name, graph: of the step, as captured.
      stored: whether they may come from the store, and go there.
    """

    def __init__(self, name: str, graph: Graph, stored: bool) -> None:
        self.name, self.graph, self.stored = name, graph, stored

    def __call__(self, step: LiveStep, ask: Ask) -> Optimised:
        """Return what the passes read of Grappler's answer; ask it where nothing is kept."""
        where = files.folder() if self.stored else None
        if where is None:
            return self._asked(ask)
        try:
            key = _key(step)
            known = _nodes(files.read(where, key))
        except Exception as error:
            faults.said(error, f"no kept answer of Grappler about {self.name} is looked for")
            return self._asked(ask)
        if known is not None:
            return known
        answer = self._asked(ask)
        if answer is not None:
            files.write(where, key, self._head(), [
                [node.name, node.type, *node.inputs] for node in answer.values()])
        return answer

    def _asked(self, ask: Ask) -> Optimised:
        answer = ask()
        return None if answer is None else read_of(self.graph, answer)

    def _head(self) -> dict[str, object]:
        return {"made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "step": self.name, "ops": len(self.graph.ops), "kind": "Grappler's answer",
                "tfckpt": tfckpt.__version__, "tensorflow": tf.__version__}


def _nodes(found: tuple[object, object] | None) -> dict[str, Node] | None:
    """Return the ops that a file lists; None where there is none, or it lists something else."""
    rows = [] if found is None else found[1]
    if found is None or not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) > 1 for row in rows):
        return None
    return {name: Node(name, kind, tuple(inputs)) for name, kind, *inputs in rows}


def _key(step: LiveStep) -> str:
    live = step.live
    what = ["optimised", named_digest(live.as_graph_def()), list(step.wanted),
            [t.name for t in getattr(live, "inputs", ())],
            [t.name for t in getattr(live, "outputs", ()) if t is not None],
            sorted(op.name for op in tf_adapter.control_outputs(live)), plain(surroundings())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()
