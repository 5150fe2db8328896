"""The functions of loops of which the gradient's computes entries of lists again.

The forward's body appends as before, so that its ops have the readers that they had and TensorFlow
fuses them as in the plain step, but hands on the lists that it was given. The gradient's body has
copies of the forward's ops, which read the entries that are kept. Those of ops with several readers
are marked: TensorFlow's optimizers leave them alone, as they do in the forward. A pass-through
stands where an entry was taken from a list.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.nodes import results_of
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import KEPT_SLOTS, PROTECTED
from tfckpt.ops import names, record
from tfckpt.plan.loops.segments import HANDED, PREFIX, RESULT, Again
from tfckpt.rewrite.loops.bodies import (
    BY_PLACE,
    VARIANT,
    FunctionBody,
    function_of,
    name_of,
    named,
    origin,
    push_of,
    read_instead,
)


def loop_of(role: Again, live: tf.Graph) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return the attributes of a new loop, and the functions that it calls.

    Args:
      role: its task.
      live: the graph that is edited.

    Raises:
      RewriteError: the functions of a loop are not known, or not as they are expected.
    """
    operations = {op.name: op for op in live.get_operations()}
    loop = operations[role.gradient if role.is_gradient else role.forward]
    attrs, forward = tf_adapter.node_attrs(loop), operations[role.forward]
    given = [forward.inputs[n] for n in role.given] if role.is_gradient else []
    kinds = [tensor.dtype.as_datatype_enum for tensor in given]
    shapes = [tensor.shape.as_proto() for tensor in given]
    body, cond = (function_of(live, attrs[key].func.name) for key in ("body", "cond"))
    for made in (body, cond):
        made.attr.pop("_input_shapes", None)
        for n, kind in enumerate(kinds):
            made.signature.input_arg.add(name=_given(n), type=kind)
    if role.is_gradient:
        first = function_of(live, tf_adapter.node_attrs(forward)["body"].func.name)
        _compute(body, _First(first, tf_adapter.called_graph(forward, "body")), role, kinds)
    else:
        _hand_on(body, role)
    functions = named(cond, "cond"), named(body, "body")
    return _attributes(attrs, loop, kinds, shapes, *map(name_of, functions)), functions


def _given(n: int) -> str:
    """Return what the gradient's functions call what they are given besides, by its place."""
    return f"tfckpt_given_{n}"


def _attributes(attrs: Mapping[str, Any], loop: tf.Operation, kinds: Sequence[int],
                shapes: Sequence[Any], cond: str, body: str) -> dict[str, Any]:
    value, several = tf.compat.v1.AttrValue, tf.compat.v1.AttrValue.ListValue
    made = {}
    for key, attr in attrs.items():
        if key not in BY_PLACE:
            made[key] = value()
            made[key].CopyFrom(attr)
    count = len(loop.inputs)
    made["parallel_iterations"].i = 1  # what one computes again would be there for several
    made["T"].list.type.extend(kinds)
    made["output_shapes"].list.shape.extend(shapes)
    made["cond"].func.name, made["body"].func.name = cond, body
    made["_num_original_outputs"] = value(i=count + len(kinds))
    made[KEPT_SLOTS] = value(list=several(i=range(count)))
    read_only = list(attrs["_read_only_resource_inputs"].list.i) if (
        "_read_only_resource_inputs" in attrs) else []
    resources = [count + n for n, kind in enumerate(kinds)
                 if kind == tf.resource.as_datatype_enum]  # which the forward only reads
    if read_only or resources:
        made["_read_only_resource_inputs"] = value(list=several(i=[*read_only, *resources]))
    return made


def _hand_on(body: Any, role: Again) -> None:
    """Have a body hand lists on as they are given, once it has appended to them what it did.

    What is appended is there until the iteration is over, as in the plain step: a sum might else
    begin with another of its terms, in the memory of one that nothing else needs.
    """
    nodes = {node.name: node for node in body.node_def}
    adding = FunctionBody(body)
    results = [body.signature.output_arg[slot].name for slot in role.segments.states]
    over = dict.fromkeys(f"^{op}" for name in results
                         if (op := body.ret[name].partition(":")[0]) in nodes)
    for slot in role.slots:
        result = body.signature.output_arg[slot].name
        push, _ = push_of(body, nodes, slot)
        push.attr[PROTECTED].b = True
        held = adding.new("tfckpt_held")
        held.op = names.LIST_LENGTH
        held.input.extend([f"{push.name}:output_handle:0", *over])
        held.attr[PROTECTED].b = True
        body.ret[result] = adding.node(
            names.IDENTITY, (body.signature.input_arg[slot].name, f"^{held.name}"), "output",
            T=VARIANT)


class _First(NamedTuple):
    """The forward's body: its FunctionDef, and its graph, which knows shapes."""

    definition: Any
    graph: Any

    def shape(self, tensor: str) -> Any:
        """Return the shape of a result of an op, or of an argument, as a proto."""
        name, _, result = tensor.partition(":")
        for argument, made in zip(self.definition.signature.input_arg, self.graph.inputs,
                                  strict=True):
            if argument.name == name:
                return made.shape.as_proto()
        node = next(node for node in self.definition.node_def if node.name == name)
        return self.graph.get_operation_by_name(name).outputs[
            _place(node, result)].shape.as_proto()


def _place(node: Any, result: str) -> int:
    """Return which of all results of an op one is, `argument:number`."""
    definition = tf_adapter.op_definition(node.op)
    if definition is None:
        raise RewriteError(f"rewrite: {node.op!r}, which a loop's body calls, is not known")
    return results_of(node, definition).index(result)


def _compute(body: Any, first: _First, role: Again, kinds: Sequence[int]) -> None:
    """Have the gradient's body compute entries again, with copies of the forward's ops.

    Args:
      body: FunctionDef of the gradient's body, with all arguments; changed.
      first: the forward's.
      role: says which entries.
      kinds: dtypes of what it is given besides, as enumerated.
    """
    for n, kind in enumerate(kinds):
        body.signature.output_arg.add(name=f"tfckpt_handed_{n}", type=kind)
        body.ret[f"tfckpt_handed_{n}"] = _given(n)
    copies = _Copies(body, first, role)
    for slot in role.slots:
        copies.replace(slot)


class _Copies:
    """Copies of ops of the forward's body in the gradient's."""

    def __init__(self, body: Any, forward: _First, role: Again) -> None:
        first = forward.definition
        self.body, self.shape = body, forward.shape
        self.adding = FunctionBody(body)
        self.nodes = {node.name: node for node in first.node_def}
        self.readers = collections.Counter(
            text.partition(":")[0] for node in first.node_def for text in node.input)
        self.made: dict[str, str] = {}
        segments = role.segments
        own = [argument.name for argument in body.signature.input_arg]
        arguments = [argument.name for argument in first.signature.input_arg]
        self.given = {arguments[slot]: _given(n) for n, slot in enumerate(role.given)}
        self.own = {node.name: node for node in body.node_def}
        takers = {origin(self.own, node.input[0]): node for node in body.node_def
                  if record(node.op).lists.removes}
        self.pop = {slot: takers[own[residual]] for slot, residual in zip(
            segments.lists, segments.residuals, strict=True)}
        self.argument = {slot: own[residual] for slot, residual in zip(
            segments.lists, segments.residuals, strict=True)}
        self.entry = {slot: origin(self.nodes, push_of(first, self.nodes, slot)[1])
                      for slot in segments.lists}
        self.kept = {self.entry[slot]: slot for slot in reversed(segments.lists)
                     if slot not in role.slots}

    def replace(self, slot: int) -> None:
        """Put a pass-through of what is computed again in the place of what takes an entry."""
        pop = self.pop[slot]
        kind = pop.attr["element_dtype"].type
        read_instead(self.body, f"{pop.name}:output_handle:", self.argument[slot])
        read_instead(self.body, f"{pop.name}:tensor:", f"{pop.name}:output:0")
        source, shape = self._again(self.entry[slot]), self._taken_shape(pop)
        del pop.input[:]
        pop.op = names.PLACEHOLDER_WITH_DEFAULT
        pop.input.append(source)
        pop.attr.clear()
        pop.attr["dtype"].type = kind
        pop.attr["shape"].shape.CopyFrom(shape)
        pop.attr[PROTECTED].b = True

    def _taken_shape(self, pop: Any) -> Any:
        """Return what of its shape TensorFlow knows of an entry that is taken from a list."""
        given = self.own.get(origin(self.own, pop.input[1]).partition(":")[0])
        if given is None or not record(given.op).is_constant:
            return tf.TensorShape(None).as_proto()
        value = tf.make_ndarray(given.attr["value"].tensor)
        return tf.TensorShape(
            [None if n < 0 else n for n in value] if value.ndim else None).as_proto()

    def _again(self, tensor: str) -> str:
        """Return a result of an op of the forward's body, in the gradient's."""
        tensor = origin(self.nodes, tensor)
        if tensor in self.kept:
            return self._taken(tensor)
        if ":" not in tensor:
            if tensor not in self.given:
                raise RewriteError(f"rewrite: {tensor!r} is not there to be computed with again")
            return self.given[tensor]
        name, output, number = tensor.split(":")
        if name not in self.made:
            self._copy(self.nodes[name])
        return f"{self.made[name]}:{output}:{number}"

    def _copy(self, source: Any) -> None:
        read = [self._again(text) for text in source.input if not text.startswith("^")]
        node = self.adding.copy(source, f"{PREFIX}{source.name}", read)
        if self.readers[source.name] > 1:  # what one op reads may be fused into it there too
            node.attr[PROTECTED].b = True
        self.made[source.name] = node.name

    def _taken(self, tensor: str) -> str:
        """Return an entry that is kept, under the name of the op that made it.

        Its shape is known, as in the forward: TensorFlow fuses ops only where it is.
        """
        if tensor not in self.made:
            pop = self.pop[self.kept[tensor]]
            name, _, result = tensor.partition(":")
            place, shape = _place(self.nodes[name], result) if result else 0, self.shape(tensor)
            kind = pop.attr["element_dtype"].type
            node = self.adding.new(f"{PREFIX}{'' if result else HANDED}{name}"
                                   + (f"{RESULT}{place}" if place else ""))
            node.op = names.IDENTITY
            node.input.append(self.adding.shaped(f"{pop.name}:tensor:0", shape, kind))
            node.attr["T"].type = kind
            node.attr[PROTECTED].b = True
            self.made[tensor] = f"{node.name}:output:0"
        return self.made[tensor]
