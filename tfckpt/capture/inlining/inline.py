"""Inlines the functions that a step calls, so that the rewriter sees one graph.

A `tf.function` called under a tape is a pair of calls: of a forward function, and of a backward
function that reads what the first hands on. TensorFlow inlines both, but only after the trace.
This does it before, in the way in which TensorFlow does it, so that the same ops are fused later
and rounding stays the same:

  1. A call gives way to the ops of the body, which read the call's inputs.
  2. Where the call waits for other ops, body ops that start from a resource or from nothing wait
     for those, and every other argument passes through an Identity that does.
  3. What waited for the call waits for the body's control outputs.
  4. What a backward function computes stands in a gradient scope (see `regions`).
  5. What computes a result that nobody reads stays; capture and TensorFlow leave it out.
  6. A function stays a call where it is more than its body: see `_why_opaque`.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.inlining.body import Placed, read_body
from tfckpt.capture.inlining.compiled_calls import is_compiled
from tfckpt.capture.inlining.live_changes import LiveChanges
from tfckpt.capture.regions import is_gradient_scope
from tfckpt.ops import Calls, record

_OURS = re.compile(r"(^|/)tfckpt/|-tfckpt[0-9_]")
"""Names that only `tfckpt.rewrite` gives."""

_GENERATED = re.compile(r"^__(?:inference|forward|backward)_(.*?)(?:_\d+)*$")


def is_call(op_type: str) -> bool:
    """Return whether ops of a type call a function once, and do nothing else.

    Args:
      op_type: TensorFlow op type.
    """
    return record(op_type).calls is Calls.FUNCTION


def _is_call(op: tf.Operation) -> bool:
    return is_call(op.type)


def is_rewritten(name: str) -> bool:
    """Return whether an op's name says that tfckpt made it.

    Args:
      name: of an op, with the scopes before it.
    """
    return bool(_OURS.search(name))


def readable(function: str) -> str:
    """Return what a person called a function: `__inference_train_88` is `train`.

    Args:
      function: its name in TensorFlow; returned as it is where TensorFlow did not make it up.
    """
    while match := _GENERATED.match(function):
        function = match[1]
    return function


def lines_of(calls: Iterable[str], find: Callable[[str], Any]) -> tuple[str, ...]:
    """Return a line for each function that is inlined: its name, and how many calls of it.

    Args:
      calls: the functions that are called, by name; those that they call follow.
      find: gives the FunctionDef by a name; None where there is none.
    """
    counts: collections.Counter[str] = collections.Counter()
    pending = list(calls)[::-1]
    while pending:
        function = find(name := pending.pop())
        if function is None or not _is_backward(function):
            counts[readable(name)] += 1
        pending += [node.attr["f"].func.name for node in (function.node_def if function else ())
                    if is_call(node.op)][::-1]
    return _lines(counts)


def _lines(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(f"{name}, {count} call{'s' if count > 1 else ''}"
                 for name, count in counts.items())


class Inlining:
    """The calls that were inlined in a graph.

    Attributes:
      graph: the graph.
      functions: a line for each function: its name and how many calls of it were inlined.
      refused: a line for each call that stays one, with the reason.
      results: what became of the inlined calls: for each by name its results, and the ops that
        must have run when it ends.
    """

    def __init__(self, graph: tf.Graph, library: Iterable[Any] = (),
                 changes: LiveChanges | None = None) -> None:
        """Inline every call that can be, in place, those inside of others too.

        Args:
          graph: a FuncGraph whose trace is complete, or an imported graph.
          library: the FunctionDefs of the file that a graph was imported from.
          changes: of the graph; who made it can take the inlining back.
        """
        given = {function.signature.name: function for function in library}
        find = given.get if given else functools.partial(tf_adapter.find_function, graph)
        self.functions: tuple[str, ...] = ()
        self.refused: tuple[str, ...] = ()
        self.results: dict[str, tuple[list[tf.Tensor], list[tf.Operation]]] = {}
        self.graph, self._find = graph, find
        self._changes = changes or LiveChanges(graph)
        self._bodies: dict[str, list[tf.Operation]] = {}
        self._body = functools.cache(lambda name: read_body(graph, find(name)))
        self._why = functools.cache(functools.partial(_why_opaque, find=find))
        calls = [op for op in graph.get_operations() if _is_call(op)]
        self._inline(calls)
        if self._bodies:
            self._changes.show(self._order(), [*self._bodies])

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return what a tensor of the graph has become.

        Args:
          tensor: of the graph; returned itself where it is no result of an inlined call.
        """
        while tensor.op.name in self.results:
            tensor = self.results[tensor.op.name][0][tensor.value_index]
        return tensor

    def ops(self, op: tf.Operation) -> list[tf.Operation]:
        """Return what has to run now for an op of the graph to have run.

        Args:
          op: of the graph; it is all that is returned where it is no inlined call.
        """
        found, pending = {}, [op]
        while pending:
            op = pending.pop()
            if op.name not in self.results:
                found[op.name] = op
                continue
            results, ends = self.results[op.name]
            pending += [*ends, *(t.op for t in results)]
        return list(found.values())

    def definition(self) -> tf.compat.v1.GraphDef:
        """Return the graph as it is now, without its calls and without a library."""
        definition = tf_adapter.shown_definition(self.graph)
        definition.ClearField("library")
        return definition

    def _inline(self, calls: Sequence[tf.Operation]) -> None:
        counts: collections.Counter[str] = collections.Counter()
        pending: list[tuple[tf.Operation, tuple[str, ...]]] = [
            (call, ()) for call in reversed(calls)]
        while pending:
            call, callers = pending.pop()
            name = tf_adapter.called_function(call)
            reason = "it calls itself" if name in callers else _why_special(call) or self._why(name)
            ops: list[tf.Operation] = []
            if not reason:
                before = self._changes.point()
                try:
                    ops = self._inline_call(call, name)
                except Exception as error:  # whatever TensorFlow makes of a body: the call stays
                    self._changes.revert(before)
                    reason = f"{type(error).__name__}: {error}"
            if reason:
                self.refused += (f"{call.name}: the nested function {readable(name)} is one op "
                                 f"to tfckpt: {reason}",)
                continue
            self._bodies[call.name] = ops
            if not _is_backward(self._find(name)):
                counts[readable(name)] += 1
            pending += [(op, (*callers, name)) for op in reversed(ops) if _is_call(op)]
        self.functions = _lines(counts)

    def _inline_call(self, call: tf.Operation, name: str) -> list[tf.Operation]:
        body = self._body(name)
        backward = _is_backward(self._find(name)) or is_gradient_scope(call.name)
        placed = Placed(self.graph, body, list(call.inputs), list(call.control_inputs),
                        _scope(call.name, backward), call.device)
        results = [placed.tensor(result) for result in body.results]
        ends = [placed.op(name) for name in body.control_outputs]
        for output, tensor in zip(call.outputs, results, strict=True):
            tensor.set_shape(output.shape)
            self._replace(output, tensor)
        self._hand_on(call, ends)
        self.results[call.name] = results, ends
        return placed.ops

    def _replace(self, old: tf.Tensor, new: tf.Tensor) -> None:
        """Have every reader of a call's output read what the body computes (rule 1)."""
        for reader in old.consumers():
            for i, tensor in enumerate(reader.inputs):
                if tensor.op.name == old.op.name and tensor.value_index == old.value_index:
                    self._changes.update_input(reader, i, new)
        outputs = list(getattr(self.graph, "outputs", ()))
        if any(t is old for t in outputs):
            self._changes.replace_results("outputs", [new if t is old else t for t in outputs])

    def _hand_on(self, call: tf.Operation, ends: Sequence[tf.Operation]) -> None:
        """Have what waited for a call wait for what must have run in its body (rule 3)."""
        for waiting in tf_adapter.waiting_for(call):
            self._changes.replace_control_inputs(
                waiting, _in_place_of(call, ends, waiting.control_inputs))
        must_run = tf_adapter.control_outputs(self.graph)
        if any(op is call for op in must_run):
            self._changes.replace_results("control_outputs", _in_place_of(call, ends, must_run))

    def _order(self) -> list[str]:
        """Return names of the graph's ops, those of a body where its call stood.

        They are in the order in which they would be if the body had been traced there.
        """
        inside = {op.name for body in self._bodies.values() for op in body}
        pending = [op for op in reversed(self.graph.get_operations()) if op.name not in inside]
        order = []
        while pending:
            op = pending.pop()
            if op.name in self._bodies:
                pending += reversed(self._bodies[op.name])
            else:
                order.append(op.name)
        return order


def _in_place_of(call: tf.Operation, ends: Sequence[tf.Operation],
                 ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Return the ops without the call, and with what ends it."""
    kept = [op for op in ops if op.name != call.name]
    return list({op.name: op for op in [*kept, *ends]}.values())


def _scope(call: str, backward: bool) -> str:
    """Return the name scope of a body: a gradient scope exactly where it is of the backward.

    That is rule 4. It begins as where TensorFlow inlines the call: equal ops are merged under the
    name that comes first in the alphabet, and with it operands change their order.
    """
    named_so = is_gradient_scope(f"{call}/")
    if backward == named_so:
        return call
    return f"{call}/gradient_tape" if backward else f"{call}_function"


def _is_backward(function: Any) -> bool:
    return "forward_function_name" in function.attr


def _why_special(call: tf.Operation) -> str:
    """Return why a call is more than its function's body, by the call's own attributes (rule 6)."""
    attrs = tf_adapter.node_attrs(call)
    if is_compiled(attrs):
        return _COMPILED
    if "executor_type" in attrs and attrs["executor_type"].s:
        return "it has an executor of its own"
    return _GRADIENT if "_gradient_op_type" in attrs else ""


_COMPILED = "it is compiled by itself (jit_compile=True)"
_GRADIENT = "it has a gradient of its own (tf.custom_gradient or tf.recompute_grad)"


def _why_opaque(name: str, find: Callable[[str], Any]) -> str:
    """Return why a function is more than its body; "" where it is not (rule 6).

    A backward function stays a call where its forward function does: neither is of use alone.
    """
    function = find(name)
    if function is None:
        return "its definition is missing"
    true = {key for key, value in function.attr.items() if value.b}
    if "_noinline" in true:
        return "it is marked _noinline"
    if is_compiled(function.attr):
        return _COMPILED
    if "api_implements" in function.attr:
        return "TensorFlow may put another implementation in its place (experimental_implements)"
    if any("_gradient_op_type" in node.attr for node in function.node_def):
        return _GRADIENT
    if any(is_rewritten(node.name) for node in function.node_def):
        return "tfckpt has rewritten it already"
    if _is_backward(function):
        forward = function.attr["forward_function_name"].s.decode()
        return "" if find(forward) is None else _why_opaque(forward, find)
    return ""
