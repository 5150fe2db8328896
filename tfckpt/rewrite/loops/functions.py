"""The functions of a loop of the forward and its gradient's, as loops over segments call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.nodes import arguments_read
from tfckpt.capture.variables import origin
from tfckpt.plan.loops.segments import Role
from tfckpt.rewrite.loops.bodies import INT, FunctionBody, function_of, named, with_own_calls
from tfckpt.rewrite.loops.spared import Spared, spared

SHAPES, TYPES = "output_shapes", "T"
"""Attributes of a loop: the shapes and dtypes of its results."""
_ANY_SHAPE = tf.TensorShape(None).as_proto()


class Functions:
    """A loop of the forward and its gradient's, and what they call.

    Args:
      role: of the loop that is made, or of one over the segments of a segment.
      live: the graph that is edited.
      where: says for which segments the functions are, if not for those of the whole loop.

    Attributes:
      called: functions that the new ones call, callees first.
      known: shapes of what iterations of the forward's loop are handed; any where none reads it:
        Grappler may give a loop a scalar there, whatever its iterations hand on.
    """

    def __init__(self, role: Role, live: tf.Graph, where: str = "") -> None:
        self.role, self.segments, self.live, self.where = role, role.segments, live, where
        self.called: list[bytes] = []
        operations = {op.name: op for op in live.get_operations()}
        self.forward = operations[role.forward]
        self.gradient = operations[role.gradient]
        self.f, self.g = (tf_adapter.node_attrs(op) for op in (self.forward, self.gradient))
        self.count = len(self.forward.inputs)
        empty = self.segments.lists if role.compiled else ()  # a number stands for them
        self.kinds = [INT if n in empty else kind
                      for n, kind in enumerate(self.f[TYPES].list.type)]
        self.shapes = [tf.TensorShape([]).as_proto() if n in empty else shape
                       for n, shape in enumerate(self.f[SHAPES].list.shape)]
        opened = self.segments.open
        self.told: dict[int, int | list[int]] = {
            one.slot: list(one.dims) for one in (opened.lists if opened else ())
            if not one.gradient}
        read = frozenset().union(*(
            arguments_read(self.found(self.f[key].func.name)) for key in ("cond", "body")))
        self.known = [shape if n in read else _ANY_SHAPE
                      for n, shape in enumerate(self.f[SHAPES].list.shape)]
        self.states = len(role.segments.kept)
        self.spared: Spared | None = None
        if not role.within:
            self.inner_cond, self.again = self._inner_cond(), self._again()
            self.spared = self._spared() if role.is_gradient else None
            self.called += [self.inner_cond, self.again,
                            *(self.spared.functions if self.spared else ())]

    def _definition(self, attrs: dict, key: str, what: str) -> Any:
        """Return a function of a loop.

        XLA reads a function once and changes what it has read: it calls copies there, which are
        named by what they are for.
        """
        made = self.found(attrs[key].func.name)
        if self.role.compiled:
            self.called += with_own_calls(made, self.found, self.where + what)
        return made

    def found(self, name: str) -> Any:
        """Return a copy of a function of the graph.

        Args:
          name: of the function.

        Raises:
          RewriteError: it is not known.
        """
        return function_of(self.live, name)

    def _again(self) -> bytes:
        """Return the forward's body under a name of its own."""
        what = "gradient" if self.role.is_gradient else "forward"
        return named(self._definition(self.f, "body", what), self.where + what)

    def _spared(self) -> Spared | None:
        """Return the gradient's loop without what XLA is spared; None where there is nothing."""
        segments = self.segments
        if not segments.read_once and not segments.invariant:
            return None
        kinds = {residual: self._kind(slot) for residual, slot in zip(
            segments.residuals, segments.lists, strict=True) if slot in segments.invariant}
        return spared(self.g, self.found(self.g["cond"].func.name),
                      self.found(self.g["body"].func.name), segments.read_once, kinds)

    def _kind(self, slot: int) -> int:
        """Return the dtype of the entries of one of the forward's lists."""
        made = origin(self.forward.inputs[slot]).op
        return int(made.get_attr("element_dtype").as_datatype_enum)

    def _inner_cond(self) -> bytes:
        """Return the forward's condition, and that the segment is not over."""
        what = "again" if self.role.is_gradient else "cond"
        made = self._definition(self.f, "cond", what)
        self._end_at_the_bound(made)
        return named(made, self.where + what)

    def _end_at_the_bound(self, cond: Any) -> None:
        """Have a loop end where its segment does, which its bound says."""
        if self.segments.bounded:
            return
        counter, bound = (cond.signature.input_arg[n].name for n in (0, 1))
        (result,) = (output.name for output in cond.signature.output_arg)
        body = FunctionBody(cond)
        less = body.node("Less", (counter, bound), "z", T=cond.signature.input_arg[0].type)
        cond.ret[result] = body.node("LogicalAnd", (less, cond.ret[result]), "z")

    def outer_cond(self, more: Sequence[int]) -> bytes:
        """Return the forward's condition, of a loop with further variables.

        Args:
          more: their dtypes, as enumerated.
        """
        made = self._definition(self.f, "cond", "outer")
        made.attr.pop("_input_shapes", None)  # which a SavedModel's functions have: of the others
        for argument, kind in zip(made.signature.input_arg, self.kinds, strict=True):
            argument.type = kind
        for n, kind in enumerate(more):
            made.signature.input_arg.add(name=f"tfckpt_more_{n}", type=kind)
        if self.role.bounded:
            self._end_at_the_bound(made)
        return named(made, f"{self.where}cond")

    def only_reads(self, attrs: dict) -> bool:
        """Return whether both loops, or the forward's, are known to write nothing they are given.

        Args:
          attrs: of one of the two; both are looked at unless they are the forward loop's.
        """
        loops = [self.f] if attrs is self.f else [self.f, self.g]
        return all(set(_resources(loop)) <= set(loop["_read_only_resource_inputs"].list.i)
                   for loop in loops)


def _resources(attrs: dict) -> list[int]:
    return [n for n, kind in enumerate(attrs[TYPES].list.type)
            if kind == tf.resource.as_datatype_enum]
