"""What Grappler makes of a step, asked before the step runs.

TensorFlow inlines functions and lowers loops and branches before it asks Grappler. Here the same is
done first, and ops are placed, so that what comes back is what will run on one CPU or GPU, but for
the kernels that are chosen after that. Grappler ends the process where two ops have one name, so
that it is not asked there.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler.colocation import colocate_inlined, hide_colocation, show_colocation
from tfckpt.capture.grappler.control_edges import wait_as_asked, wait_as_called
from tfckpt.capture.grappler.lowered_loops import NotRaised, has_loops, with_loops
from tfckpt.capture.grappler.machine import is_relaid, optimized, spelt
from tfckpt.capture.grappler.side_effects import awaited
from tfckpt.capture.grappler.terms import (
    Terms,
    has_calls,
    stateful_kept,
    terms_of_calls,
    unmark,
)
from tfckpt.capture.inlining.compiled_calls import is_compiled
from tfckpt.capture.inlining.inline import is_call
from tfckpt.capture.nodes import LOWER, functions_of, is_loop, op_of
from tfckpt.ops.names import ARG, FED, IDENTITY_N, NO_OP, RETVAL


@dataclasses.dataclass(frozen=True)
class Question:
    """A graph that Grappler can be asked about, whatever becomes of the live one meanwhile.

    Attributes:
      definition: of a function's body: `_Arg` nodes stand for `inputs`, in order, and a `_Retval`
        node for each result.
      running: what has to run, by name.
      inputs: tensors of the live graph, for what is known of their shapes.
      terms: in which it is asked.
      gpu: a NamedDevice, serialised, where ops without a device run on a GPU.
      returns: whether the function has results.
    """

    definition: tf.compat.v1.GraphDef
    running: tuple[str, ...]
    inputs: tuple[tf.Tensor, ...]
    terms: Terms
    gpu: bytes = b""
    returns: bool = True

    def answer(self, inlined: Callable[[tf.compat.v1.GraphDef], object] = lambda definition: None,
               lower: bool = False) -> tf.compat.v1.GraphDef:
        """Return what Grappler makes of the graph; nothing runs.

        Functions are inlined first, as TensorFlow does it.

        Args:
          inlined: is told of the graph then.
          lower: whether loops and branches are lowered first, as TensorFlow does it; otherwise they
            are left as they are, and what is around them is optimised by itself.

        Raises:
          ValueError, MemoryError, tf.errors.OpError: Grappler does not accept the graph, or would
            not inline its functions as the runtime does.
        """
        config = tf.compat.v1.ConfigProto.FromString(self.terms.config)
        if lower and self._has_loops and not self._leaves_calls:
            lowered, answer = self._lowered()
            inlined(lowered)
            found = self._needed(answer)
        else:
            meta = self._inlined(config, lower)
            inlined(meta.graph_def)
            if lower or not has_loops(meta.graph_def):
                found = self._needed(self._inlined_there(config) if self._leaves_calls
                                     else self._optimized(config, meta))
            else:
                found = self._around_loops(config, meta)
                self._add_functions(found)
        for node in found.node:
            _show(node)
            if node.name in self._number and node.op in (FED, ARG):
                number = self._number[node.name]
                _as_argument(node, number, self.inputs[number])
        return found

    def inlined(self) -> tf.compat.v1.GraphDef:
        """Return the graph with its functions inlined, loops and branches as ops; nobody is asked.

        Raises:
          ValueError: its functions would not be inlined as the runtime does it.
        """
        config = tf.compat.v1.ConfigProto.FromString(self.terms.config)
        found = self._inlined(config, False).graph_def
        for node in found.node:
            _show(node)
        self._add_functions(found)
        return found

    def _around_loops(self, config: Any, meta: tf.compat.v1.MetaGraphDef
                      ) -> tf.compat.v1.GraphDef:
        """Return what Grappler makes of what is around loops and branches."""
        lowered, answer = self._lowered()
        asked = tf.compat.v1.GraphDef.FromString(meta.graph_def.SerializeToString())
        for node in asked.node:
            _show(node)
        self._add_functions(asked)
        try:
            if is_relaid(answer):  # perhaps in the bodies too, and these are left as they are
                raise NotRaised("images lie in memory in another way")
            return with_loops(answer, asked, lowered, self.running)
        except NotRaised as error:
            logging.info("tfckpt: what is around loops is optimised by itself: %s", error)
        found = self._optimized(config, meta)
        wait_as_asked(meta.graph_def, found)
        return found

    def _lowered(self) -> tuple[tf.compat.v1.GraphDef, tf.compat.v1.GraphDef]:
        """Return the graph with loops and branches lowered, and what Grappler makes of that."""
        lowered, answer = map(tf.compat.v1.GraphDef.FromString, self._lowered_once)
        return lowered, answer

    @functools.cached_property
    def _lowered_once(self) -> tuple[bytes, bytes]:
        """Return the same as bytes: what is around loops is asked about, and then their bodies."""
        config = tf.compat.v1.ConfigProto.FromString(self.terms.config)
        meta = self._inlined(config, lower=True)
        lowered = meta.graph_def.SerializeToString()
        return lowered, self._optimized(config, meta).SerializeToString()

    def _add_functions(self, definition: tf.compat.v1.GraphDef) -> None:
        """Add the functions of loops, which inlining drops: they were hidden then."""
        known = {function.signature.name for function in definition.library.function}
        definition.library.function.extend(
            function for function in self.definition.library.function
            if function.signature.name not in known)

    def _needed(self, found: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
        """Return what has to run of a graph: Grappler leaves ops in it that nothing reads."""
        nodes = {node.name: node for node in found.node}
        pending = [name for name in self.running if name in nodes]
        if not pending:
            return found
        if self.terms.keeps_stateful:
            pending += [node.name for node in found.node
                        if tf_adapter.is_stateful_type(node.op) and node.name not in self._number]
        needed = {*pending, *(name for name in self._number if name in nodes)}
        while pending:
            for text in nodes[pending.pop()].input:
                name = op_of(text)
                if name not in needed:
                    needed.add(name)
                    pending.append(name)
        left = [node for node in found.node if node.name in needed]
        del found.node[:]
        found.node.extend(left)
        return found

    def _optimized(self, config: Any, meta: tf.compat.v1.MetaGraphDef) -> tf.compat.v1.GraphDef:
        """Return what Grappler makes of a graph that the runtime hands over."""
        asking = type(config).FromString(config.SerializeToString())
        if not self._leaves_calls:
            rewriting = asking.graph_options.rewrite_options
            rewriting.function_optimization = rewriting.OFF  # that is done
        if not self.terms.keeps_stateful:
            return optimized(asking, meta, self.gpu, self.returns)
        with stateful_kept(meta.graph_def) as marked:
            found = optimized(asking, meta, self.gpu, self.returns)
        unmark(found, marked)
        return found

    @functools.cached_property
    def _has_loops(self) -> bool:
        """Return whether there are loops or branches, in functions that the graph calls too."""
        return has_loops(self.definition) or any(
            is_loop(node) for function in self.definition.library.function
            for node in function.node_def)

    @functools.cached_property
    def _leaves_calls(self) -> bool:
        """Return whether calls are left to Grappler; beside loops that is not told apart."""
        return not self.terms.inlines and has_calls(self.definition) and not has_loops(
            self.definition)

    def _inlined_there(self, config: Any) -> tf.compat.v1.GraphDef:
        """Return what Grappler makes of a graph in which it inlines functions itself.

        The runtime has it place what these return; here they are placed after that, and it is asked
        again.
        """
        meta = self._inlined(config, lower=False, inline=False)
        meta.graph_def.CopyFrom(self._optimized(config, meta))
        for node in meta.graph_def.node:
            node.device = spelt(node.device, self.gpu)
            node.attr.pop("_class", None)
        return self._optimized(config, meta)

    @functools.cached_property
    def _number(self) -> Mapping[str, int]:
        """Of each input, by the name of its op."""
        return {tensor.op.name: i for i, tensor in enumerate(self.inputs)}

    def _inlined(self, config: Any, lower: bool, inline: bool = True
                 ) -> tf.compat.v1.MetaGraphDef:
        """Return the graph as Grappler is asked about it: functions inlined, inputs fed."""
        meta = tf.compat.v1.MetaGraphDef(graph_def=self.definition)
        calls = frozenset() if inline else frozenset(
            node.name for node in meta.graph_def.node if is_call(node.op))
        meta.collection_def["train_op"].node_list.value.extend(
            name for name in self.running if name not in calls)
        meta.collection_def[_AWAITED].node_list.value.extend(
            name for name in self.running if name in calls)
        hide_colocation(meta.graph_def)
        if not lower:
            for node in tf_adapter.nodes_with_bodies(meta.graph_def):
                _hide_loop(node)
        for node in meta.graph_def.node:
            node.device = spelt(node.device, self.gpu)
            if node.op == ARG:
                given = self.inputs[self._number[node.name]]
                if given.dtype not in (tf.resource, tf.variant):
                    _as_fed(node, given)
        if inline and any(_is_inlined(node, lower) for node in meta.graph_def.node):
            _refuse_clashes(meta.graph_def)
            known = {function.signature.name for function in meta.graph_def.library.function}
            self._inline_calls(meta, config, lower)
            _refuse_functions_but(known, meta.graph_def)
            _refuse_calls(meta.graph_def)
            colocate_inlined(meta.graph_def)
        return meta

    def _inline_calls(self, meta: tf.compat.v1.MetaGraphDef, config: Any, lower: bool) -> None:
        """Inline functions as the runtime does it, and do nothing else of what Grappler does."""
        inlining = type(config).FromString(config.SerializeToString())
        rewriting = inlining.graph_options.rewrite_options
        rewriting.optimizers.append("function")
        rewriting.disable_tfg_optimizer = True
        rewriting.meta_optimizer_iterations = rewriting.ONE
        calls = {node.name: {name[1:] for name in node.input if name.startswith("^")}
                 for node in meta.graph_def.node if _is_inlined(node, lower)}
        with awaited(meta, calls):
            meta.graph_def.CopyFrom(tf_adapter.optimize_graph(inlining, meta))
        wait_as_called(meta.graph_def, calls, bodies=self.terms.inlines)
        for node in meta.graph_def.node:
            node.device = spelt(node.device, self.gpu)
            if node.name in calls and node.op == IDENTITY_N:  # kept for who only waits for it
                node.op = NO_OP
                node.attr.clear()
                waits = [name for name in node.input if name.startswith("^")]
                del node.input[:]
                node.input.extend(waits)


def question(graph: tf.Graph, wanted: Sequence[str] = (),
             definition: tf.compat.v1.GraphDef | None = None,
             renamed: Mapping[str, str] | None = None, terms: Terms | None = None) -> Question:
    """Return a graph that runs by itself, for Grappler to be asked about.

    Args:
      graph: a FuncGraph, or an imported graph.
      wanted: the ops that a session would run, by name; a FuncGraph knows its own.
      definition: of the graph, where it is not what the graph shows now; changed here.
      renamed: ops of the graph in whose place the definition has others.
      terms: in which the runtime asks; default those of a call by this thread.
    """
    terms = terms or terms_of_calls()
    definition = tf_adapter.shown_definition(graph) if definition is None else definition
    running = [(renamed or {}).get(name, name) for name in as_body(graph, definition)]
    return Question(definition, tuple(running or wanted), tuple(getattr(graph, "inputs", ())),
                    terms, tf_adapter.own_gpu(), bool(getattr(graph, "outputs", True)))


def _is_inlined(node: tf.compat.v1.NodeDef, lower: bool) -> bool:
    return is_call(node.op) or lower and LOWER in node.attr


def _refuse_clashes(definition: tf.compat.v1.GraphDef) -> None:
    """Refuse a graph in which an op has the name that one of an inlined function would get."""
    bodies = {function.signature.name: function.node_def
              for function in definition.library.function}
    names: set[str] = set()

    def add(nodes: Iterable[tf.compat.v1.NodeDef], scope: str) -> None:
        for node in nodes:
            name = scope + node.name
            if name in names:
                raise ValueError(f"two ops would be called {name} once functions are inlined")
            names.add(name)
            for function in functions_of(node) if is_call(node.op) else ():
                add(bodies.get(function.name, ()), f"{name}/")

    add(definition.node, "")


def _refuse_functions_but(known: Collection[str], definition: tf.compat.v1.GraphDef) -> None:
    """Refuse a graph that calls functions which Grappler wrote anew: they have other names."""
    for node in definition.node:
        for function in functions_of(node):
            if function.name.removeprefix(_HIDDEN) not in known:
                raise ValueError(f"{node.name} calls {function.name}, which was made of another")


def _refuse_calls(definition: tf.compat.v1.GraphDef) -> None:
    """Refuse a graph with a call that the runtime inlines and Grappler has not."""
    apart = {function.signature.name for function in definition.library.function
             if _is_apart(function.attr)}
    for node in definition.node:
        if is_call(node.op) and not _is_apart(node.attr) and not any(
                function.name in apart for function in functions_of(node)):
            raise ValueError(f"{node.name} is not inlined as the runtime does it")


def _is_apart(attrs: Mapping[str, Any]) -> bool:
    """Return whether a call, or a function, is not inlined, or perhaps not."""
    return is_compiled(attrs) or any(
        attrs[key].b or attrs[key].s for key in _APART if key in attrs)


_APART = ("_noinline", "api_implements", "executor_type")
"""Attributes of these, beside that of what XLA compiles by itself."""
_HIDDEN = "tfckpt_hidden_"
"""Before what Grappler is not to see: functions of loops and branches."""
_ASIDE = "_tfckpt_hidden_lower"
_AWAITED = "tfckpt_awaited"
"""Collection of calls that somebody waits for: they are kept, but not what they return."""


def _hide_loop(node: tf.compat.v1.NodeDef) -> None:
    """Have Grappler leave an op alone if it is a loop or branch."""
    if LOWER in node.attr:
        node.attr[_ASIDE].CopyFrom(node.attr.pop(LOWER))
    if is_loop(node):
        for function in functions_of(node):
            function.name = _HIDDEN + function.name


def _show(node: tf.compat.v1.NodeDef) -> None:
    """Undo what `_hide_loop` and `hide_colocation` did."""
    show_colocation(node)
    if _ASIDE in node.attr:
        node.attr[LOWER].CopyFrom(node.attr.pop(_ASIDE))
    for function in functions_of(node):
        function.name = function.name.removeprefix(_HIDDEN)


def _as_fed(node: tf.compat.v1.NodeDef, tensor: tf.Tensor) -> None:
    """Make an op of a known shape of one that stands for a function's input.

    What is known of an argument's shape TensorFlow forgets before it asks Grappler.
    """
    node.op = FED
    node.ClearField("attr")
    node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())


def as_body(graph: tf.Graph, definition: tf.compat.v1.GraphDef) -> list[str]:
    """Write a graph's definition as that of a function's body, and return what runs, by name.

    Inputs become `_Arg` nodes, and a `_Retval` node is added for each output.

    Args:
      graph: a FuncGraph, or an imported graph, which has neither inputs nor outputs; not changed.
      definition: of the graph; changed in place.
    """
    inputs, outputs = getattr(graph, "inputs", ()), getattr(graph, "outputs", ())
    number = {tensor.op.name: i for i, tensor in enumerate(inputs)}
    for node in definition.node:
        if node.name in number:
            _as_argument(node, number[node.name], inputs[number[node.name]])
    running = [op.name for op in tf_adapter.control_outputs(graph)]
    for i, tensor in enumerate(outputs):
        name = re.sub("[^a-z0-9_]", "_", tensor.op.name.lower())
        node = definition.node.add(name=f"{name}_RetVal_{i}", op=RETVAL, input=[tensor.name])
        node.attr["T"].type = tensor.dtype.as_datatype_enum
        node.attr["index"].i = i
        running.append(node.name)
    return running


def _as_argument(node: tf.compat.v1.NodeDef, number: int, tensor: tf.Tensor) -> None:
    node.op = ARG
    node.ClearField("attr")
    node.attr["T"].type = tensor.dtype.as_datatype_enum
    node.attr["index"].i = number
    tell_argument(node, tensor)


def tell_argument(node: tf.compat.v1.NodeDef, tensor: tf.Tensor) -> None:
    """Write into an `_Arg` node what is known of the shape of a function's input.

    Args:
      node: changed in place; it forgets what it said of shapes before.
      tensor: the input, of the live graph; for a variable's handle, also the variable's shape.
    """
    for key in ("_output_shapes", "_handle_shapes", "_handle_dtypes"):
        node.attr.pop(key, None)
    node.attr["_output_shapes"].list.shape.append(tensor.shape.as_proto())
    handle = tf_adapter.handle_shape(tensor) if tensor.dtype == tf.resource else None
    if handle is not None:
        node.attr["_handle_shapes"].list.shape.append(handle[0].as_proto())
        node.attr["_handle_dtypes"].list.type.append(handle[1].as_datatype_enum)
