"""A Grappler item as a training step, and the step rewritten.

An item is a function's body after inlining: arguments are `_Arg` nodes, results `_Retval` nodes,
and ops that must run are named to be kept. For capture, arguments become what a graph can be
imported with; edits are then applied to the item's own graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import tensorflow as tf

from grappler_ext.frames import Frame, collapse, expand
from tfckpt.capture.grappler.items import importable
from tfckpt.capture.inlining.inline import readable
from tfckpt.capture.nodes import op_of
from tfckpt.capture.order import in_program_order
from tfckpt.capture.regions import around_gradients, is_gradient_scope
from tfckpt.capture.shapes import planned_shapes
from tfckpt.capture.steps import imported, training_part, trains
from tfckpt.capture.tfgraph import capture
from tfckpt.driver import INLINED
from tfckpt.driving.carrier import Captured
from tfckpt.errors import CaptureError
from tfckpt.ir.edits import Edits
from tfckpt.ops import record
from tfckpt.ops.names import ARG, ASSERT, CONST
from tfckpt.request.options import Options
from tfckpt.rewrite.appliers.graphdef import apply_to_graph_def
from tfckpt.verify.arithmetic.certified import certificate_of_definitions
from tfckpt.verify.arithmetic.same import Certificate

_FAILURE = "tfckpt/failure"
_SHAPES = "_output_shapes"
_LOWERED = ("{}: TensorFlow has lowered the loop, so that it runs as it is, and what it keeps for "
            "each iteration is not counted")


@dataclasses.dataclass(frozen=True)
class Names:
    """An item's properties according to Grappler.

    Attributes:
      id: of the function.
      fetch: what it returns.
      parameters: of the pass.
      forward, later: names of the ops that followed no gradient, and one, before Grappler merged
        equal ops; empty where the function was not seen then.
    """

    id: str
    fetch: tuple[str, ...]
    parameters: Mapping[str, str]
    forward: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Names:
        """Read what the native pass wrote: lines of a kind and a name.

        Args:
          text: lines; kinds are "id", "fetch", "parameter" and "placed", others are left out.
        """
        lines = [line.partition(" ") for line in text.splitlines()]
        given = (name.partition(" ") for kind, _, name in lines if kind == "parameter")
        return cls(next((name for kind, _, name in lines if kind == "id"), ""),
                   tuple(name for kind, _, name in lines if kind == "fetch"),
                   {key: value for key, _, value in given},
                   *_around_gradients([op.split() for kind, _, op in lines if kind == "placed"]))


def _around_gradients(placed: Sequence[Sequence[str]]
                      ) -> tuple[frozenset[str], frozenset[str]]:
    """Return the ops that follow no gradient, and those that do.

    Args:
      placed: of each op its name, its type, and what it reads and (marked) waits for, by number.
    """
    return around_gradients(
        [op[0] for op in placed],
        [[int(source) for source in op[2:] if source[0] != "^"] for op in placed],
        [[int(source[1:]) for source in op[2:] if source[0] == "^"] for op in placed],
        {number for number, op in enumerate(placed) if record(op[1]).lists.empty})


class Item:
    """A function that Grappler is optimising, rewritten before it runs.

    Attributes:
      rewritten: the graph to run instead; None where it is as it was.
    """

    kind: ClassVar[str] = "native pass"
    leaves_out: ClassVar[Mapping[str, str]] = {
        INLINED: "Grappler has inlined them"}
    optimised: ClassVar[bool] = True

    def __init__(self, definition: tf.compat.v1.GraphDef, names: Names) -> None:
        self.definition, self.names = definition, names
        self.rewritten: tf.compat.v1.GraphDef | None = None
        self._loops: tuple[Frame, ...] = ()

    def capture(self, options: Options) -> Captured | None:
        """Return the step, in the order of a program; None where the item trains nothing.

        Args:
          options: how the step is planned.

        Raises:
          CaptureError: the gradient is computed inside of a loop that TensorFlow has lowered.
        """
        collapsed, self._loops = collapse(self.definition)
        live = imported(importable(collapsed))
        fetched = [name.partition(":") for name in self.names.fetch]
        fetches = [live.get_operation_by_name(op).outputs[int(slot or 0)]
                   for op, _, slot in fetched if live.get_operation_by_name(op).outputs]
        shapes, planned_for = planned_shapes(
            live, options.batch_size, may_assume=not options.budgets.sized,
            library=self.definition.library)
        name = readable(self.names.id)
        graph = in_program_order(training_part(
            capture(live, fetches=fetches, name=name, shapes=shapes, forward=self.names.forward,
                    later=self.names.later)))
        if not trains(graph):
            self._refuse_loop_that_trains()
            return None
        graph = dataclasses.replace(graph, refused=(*graph.refused, *(
            _LOWERED.format(loop.name) for loop in self._loops)))
        return Captured(graph.name, graph, live, planned_for=planned_for, arithmetic=self)

    def _refuse_loop_that_trains(self) -> None:
        """Raise `CaptureError` where the gradient is computed inside of a loop."""
        for loop in self._loops:
            inside = next(filter(is_gradient_scope, loop.inside), "")
            if inside and not is_gradient_scope(loop.name):
                raise CaptureError(f"capture: {inside!r} is computed inside of a loop that "
                                   "TensorFlow has lowered; put the decorator on the function "
                                   "that the loop calls")

    def before(self, edits: Edits) -> Certificate:
        """Compare the item with what it would be: nothing is optimised after the pass.

        Args:
          edits: what is done to the step; not applied.

        Returns:
          Whether both compute the same, as far as that can be known.
        """
        return self._compared(rewrite_item(self.definition, expand(edits, self._loops)))

    def loops(self, edits: Edits) -> Certificate:
        """Return that nothing is known: TensorFlow has lowered the item's loops.

        Args:
          edits: what is done to the step; not looked at.
        """
        return Certificate(None, reason="its loops are lowered")

    def after(self) -> Certificate:
        """Compare the item with what it has become."""
        return self._compared(self.rewritten or self.definition)

    def _compared(self, edited: tf.compat.v1.GraphDef) -> Certificate:
        functions = {function.signature.name: function
                     for function in self.definition.library.function}
        return certificate_of_definitions(self.definition, edited, functions.get)

    def apply(self, edits: Edits) -> None:
        """Edit a copy of the item's graph.

        Args:
          edits: what is done to the step; loops are named as in the captured graph.
        """
        self.rewritten = rewrite_item(self.definition, expand(edits, self._loops))


def rewrite_item(definition: tf.compat.v1.GraphDef, edits: Edits) -> tf.compat.v1.GraphDef:
    """Return the item's graph, edited.

    The placer has run already, so what is added says on which device: that of its first source,
    or of a reader.

    Args:
      definition: graph of the item; not changed.
      edits: what is done to it; ops are named as in that graph.
    """
    edited = apply_to_graph_def(definition, edits)
    _forget_shapes(edited)
    device = {node.name: node.device for node in edited.node}
    known = {node.name for node in definition.node}
    added = [node for node in edited.node if node.name not in known]
    for node in added:
        if not node.device and node.input:
            node.device = device[node.name] = device[op_of(node.input[0])]
    reader = {op_of(text): node.device for node in edited.node for text in node.input}
    for node in added:  # a fence that nothing comes before
        if not node.device:
            node.device = reader.get(node.name, "")
    return edited


def _forget_shapes(definition: tf.compat.v1.GraphDef) -> None:
    """Remove what Grappler has told us alone, and what does not belong into a graph that runs."""
    for node in definition.node:
        if node.op != ARG:
            node.attr.pop(_SHAPES, None)


def failing(definition: tf.compat.v1.GraphDef, message: str) -> tf.compat.v1.GraphDef:
    """Return the item's graph with a failing assertion before all else.

    TensorFlow runs a function as it was if a pass fails on it; this is how a pass can insist. Only
    what nothing else comes before waits for the assertion: no edge may lead into a loop.

    Args:
      definition: graph of the item; not changed.
      message: what the assertion says.
    """
    failed = tf.compat.v1.GraphDef()
    failed.CopyFrom(definition)
    device = next((node.device for node in definition.node if node.device), "")
    _forget_shapes(failed)
    arguments = {node.name for node in definition.node if node.op == ARG}
    for node in failed.node:
        if node.op != ARG and all(
                name.lstrip("^").partition(":")[0] in arguments for name in node.input):
            node.input.append(f"^{_FAILURE}")
    condition = failed.node.add(name=f"{_FAILURE}/condition", op=CONST, device=device)
    condition.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(False))
    said = failed.node.add(name=f"{_FAILURE}/said", op=CONST, device=device)
    said.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(message))
    for const in (condition, said):
        const.attr["dtype"].type = const.attr["value"].tensor.dtype
    failure = failed.node.add(name=_FAILURE, op=ASSERT, device=device,
                              input=[condition.name, said.name])
    failure.attr["T"].list.type.append(tf.string.as_datatype_enum)
    failure.attr["summarize"].i = 3
    return failed
