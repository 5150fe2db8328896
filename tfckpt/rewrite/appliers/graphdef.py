"""Applies edits to a GraphDef or a FunctionDef: offline, to a copy, so all or nothing.

The two write the same nodes and name tensors differently. A GraphDef says `op` and `op:2`; a
FunctionDef says `op:argument:0`, where `argument` is an output of the op's definition and may
stand for a list of tensors, and plain `name` for an argument of the function itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.inline import Inlining
from tfckpt.capture.nodes import calls_functions, results_of
from tfckpt.errors import RewriteError
from tfckpt.ir.edits import PROTECTED, Clone, Create, Edits
from tfckpt.ops.names import IDENTITY_N, NO_OP
from tfckpt.rewrite.appliers.attrs import attr_values, copy_attrs


def apply_to_graph_def(definition: tf.compat.v1.GraphDef, edits: Edits) -> tf.compat.v1.GraphDef:
    """Return the edited definition; the one given is left as it is.

    Args:
      definition: a GraphDef; not changed.
      edits: what is done to it; ops are named as in the definition.

    Raises:
      RewriteError: an edit names an op, input or tensor that does not exist.
    """
    edited = tf.compat.v1.GraphDef()
    edited.CopyFrom(definition)
    edit_graph_def(edited, edits)
    return edited


def protected(definition: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Mark the ops of a definition so that Grappler leaves them alone; return it.

    Args:
      definition: changed in place; what calls functions is not marked.
    """
    for node in definition.node:
        if not calls_functions(node):
            node.attr[PROTECTED].b = True
    return definition


def edit_graph_def(definition: tf.compat.v1.GraphDef, edits: Edits) -> None:
    """Edit a definition in place: large ones are worth not copying. See `apply_to_graph_def`.

    Args:
      definition: a GraphDef; its library gets the functions that new ops call.
      edits: what is done to it; ops are named as in the definition.

    Raises:
      RewriteError: an edit names an op, input or tensor that does not exist; the definition may be
        changed in part by then.
    """
    _Nodes(definition.node, (), {}).apply(edits)
    _drop(definition.node, edits.dropped, ())
    add_functions(definition, edits)


def add_functions(definition: tf.compat.v1.GraphDef, edits: Edits) -> None:
    """Add the functions that new ops call to the library of a definition.

    Args:
      definition: a GraphDef; functions whose names its library has already are left as they are.
      edits: their `functions` are added.
    """
    known = {function.signature.name for function in definition.library.function}
    for text in edits.functions:
        function = tf_adapter.FunctionDef.FromString(text)
        if function.signature.name not in known:
            definition.library.function.append(function)


def edit_function_def(function: Any, edits: Edits, library: Iterable[Any] = ()) -> None:
    """Edit a FunctionDef in place; name, arguments and results stay, so callers need no change.

    Args:
      function: a FunctionDef.
      edits: their ops and tensors are named as in `tf_adapter.function_graph(function)`.
      library: FunctionDefs whose names the function uses as op types.

    Raises:
      RewriteError: an edit names an op, input or tensor that does not exist; the function may be
        changed in part by then.
    """
    arguments = [argument.name for argument in function.signature.input_arg]
    signatures = {entry.signature.name: entry.signature for entry in library}
    _Nodes(function.node_def, arguments, signatures, nested=True).apply(edits)
    renamed = edits.renamed
    for key, name in function.control_ret.items():
        function.control_ret[key] = renamed.get(name, name)
    results = [*function.ret.values(), *(f"^{name}" for name in function.control_ret.values())]
    _drop(function.node_def, edits.dropped, results)


def with_inlined(definition: tf.compat.v1.GraphDef, inlining: Inlining) -> None:
    """Put the bodies of inlined calls into the definition that they were inlined from.

    What a session fetches by the name of a call is still there.

    Args:
      definition: a GraphDef, whose nodes are changed in place.
      inlining: what was inlined in the graph that was imported from it.
    """
    called = [node.name for node in definition.node if node.name in inlining.results]
    del definition.node[:]
    definition.node.extend(inlining.definition().node)
    for name in called:
        tensors, ends = inlining.results[name]
        results = [inlining.tensor(t) for t in tensors]
        node = definition.node.add(name=name, op=IDENTITY_N if results else NO_OP)
        node.input.extend(t.name for t in results)
        node.input.extend(f"^{op.name}" for end in ends for op in inlining.ops(end))
        if results:
            node.attr["T"].list.type.extend(t.dtype.as_datatype_enum for t in results)


def function_with_inlined(function: Any, inlining: Inlining, library: Iterable[Any] = ()) -> None:
    """Put the bodies of inlined calls into the FunctionDef that they were inlined from.

    Name, arguments and results stay.

    Args:
      function: a FunctionDef, changed in place.
      inlining: what was inlined in the graph that was imported from it.
      library: FunctionDefs whose names the function uses as op types.

    Raises:
      RewriteError: TensorFlow does not know an op type of the function.
    """
    arguments = [argument.name for argument in function.signature.input_arg]
    given = frozenset(arguments)
    del function.node_def[:]
    function.node_def.extend(n for n in inlining.definition().node if n.name not in given)
    signatures = {entry.signature.name: entry.signature for entry in library}
    names = _Nodes(function.node_def, arguments, signatures, nested=True)
    for node in function.node_def:
        for i, name in enumerate(node.input):
            if not name.startswith("^"):
                node.input[i] = names.tensor(name if ":" in name else f"{name}:0")
    for result, tensor in zip(function.signature.output_arg, inlining.graph.outputs, strict=True):
        function.ret[result.name] = names.tensor(tensor.name)
    ends = [op.name for op in tf_adapter.control_outputs(inlining.graph)]
    function.control_ret.clear()
    function.control_ret.update({name: name for name in ends})
    del function.signature.control_output[:]
    function.signature.control_output.extend(ends)


def _drop(nodes: Any, names: Iterable[str], results: Iterable[str]) -> None:
    """Remove the named nodes, but those that lead to a result or to a node that stays."""
    gone = set(names)
    known = {node.name: node for node in nodes}
    pending = [*results, *(name for node in nodes if node.name not in gone for name in node.input)]
    while pending:
        name = pending.pop().lstrip("^").partition(":")[0]
        if name in gone:
            gone.remove(name)
            pending.extend(known[name].input)
    kept = [node for node in nodes if node.name not in gone]
    if len(kept) < len(nodes):
        del nodes[:]
        nodes.extend(kept)


class _Nodes:
    """A list of NodeDefs being edited, and how tensors are named in it."""

    def __init__(self, nodes: Any, arguments: Iterable[str], signatures: Mapping[str, Any],
                 nested: bool = False) -> None:
        self.nodes, self.nested = nodes, nested
        self.arguments = frozenset(arguments)
        self.signatures = signatures
        self.by_name = {node.name: node for node in nodes}
        self.slots: dict[str, list[str]] = {}

    def apply(self, edits: Edits) -> None:
        """Add, rewires and make wait; time linear in nodes and edit."""
        for new in edits.added:
            self._add(new)
        for rewire in edits.rewires:
            inputs = self._node(rewire.op).input
            if not 0 <= rewire.index < sum(not name.startswith("^") for name in inputs):
                raise RewriteError(f"rewrite: {rewire.op!r} has no input {rewire.index}")
            inputs[rewire.index] = self.tensor(rewire.tensor)
        for control in edits.controls:
            self._wait(self._node(control.op), control.control)
        renamed = {f"^{entry.old}": entry.new for entry in edits.replaced}
        for node in self.nodes if renamed else ():
            awaited = [renamed[name] for name in node.input if name in renamed]
            if awaited and node.name not in edits.dropped:
                kept = [name for name in node.input if name not in renamed]
                del node.input[:]
                node.input.extend(kept)
                for name in awaited:
                    self._wait(node, name)

    def _node(self, name: str) -> Any:
        if name not in self.by_name:
            raise RewriteError(f"rewrite: op {name!r} does not exist in the definition; was it "
                               "captured from another file?")
        return self.by_name[name]

    def _add(self, new: Create | Clone) -> None:
        if new.name in self.by_name or new.name in self.arguments:
            raise RewriteError(f"rewrite: two ops would be named {new.name!r}")
        node = tf.compat.v1.NodeDef(name=new.name)
        if isinstance(new, Clone):
            source = self._node(new.source)
            node.op, node.device = source.op, source.device
            attrs = copy_attrs(new, source.attr)
            if source.HasField("experimental_debug_info"):
                node.experimental_debug_info.CopyFrom(source.experimental_debug_info)
        else:
            node.op, node.device = new.type, new.device
            attrs = attr_values(new.attrs)
        for key in sorted(attrs):
            node.attr[key].CopyFrom(attrs[key])
        node.input.extend(self.tensor(tensor) for tensor in new.inputs)
        for control in new.controls:
            self._wait(node, control)
        self.nodes.append(node)
        self.by_name[new.name] = self.nodes[-1]

    def _wait(self, node: Any, control: str) -> None:
        if control not in self.arguments:
            self._node(control)
        if f"^{control}" not in node.input:
            node.input.append(f"^{control}")

    def tensor(self, tensor: str) -> str:
        """Return a tensor named `op:slot`, as this kind of definition writes it."""
        op, _, slot = tensor.rpartition(":")
        if op in self.arguments:
            return op
        if not self.nested:
            self._node(op)
            return op if slot == "0" else tensor
        if op not in self.slots:
            self.slots[op] = self._outputs(self._node(op))
        try:
            return f"{op}:{self.slots[op][int(slot)]}"
        except IndexError:
            raise RewriteError(f"rewrite: {op!r} has no output {slot}") from None

    def _outputs(self, node: Any) -> list[str]:
        """Output slots of a node as `argument:index`."""
        definition = self.signatures.get(node.op) or tf_adapter.op_definition(node.op)
        if definition is None:
            raise RewriteError(f"rewrite: op type {node.op!r} of {node.name!r} is not registered; "
                               "load the library that defines it with tf.load_op_library")
        return results_of(node, definition)
