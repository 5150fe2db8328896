"""What Grappler makes of the functions of loops and branches, where these are lowered.

TensorFlow puts the ops of a body in the place of a loop before it asks Grappler, which knows other
shapes there, and fuses less, than where the function runs by itself. So the step is asked about,
and what stands in the place of a function is taken out of the answer.

  1. An argument is what was handed to the function in the place where it is lowered.
  2. A result is what reads it there.
  3. Nothing waits for what is outside: the function waits for that as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfckpt.capture import tf_adapter
from tfckpt.capture.grappler.lowered_loops import NotRaised, has_loops, with_loops
from tfckpt.capture.grappler.question import Question, question
from tfckpt.capture.nodes import op_of
from tfckpt.ops import Access, Calls, record
from tfckpt.ops.names import ARG, NO_OP, RETVAL, SWITCHES


class LoweredStep:
    """A step, its loops and branches lowered, before and after Grappler; asked when it is needed.

    Args:
      plain: the step as it was traced.
    """

    def __init__(self, plain: Question) -> None:
        self._plain = plain

    @functools.cached_property
    def _answer(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        asked = tf.compat.v1.GraphDef()
        found = self._plain.answer(asked.CopyFrom, lower=True)
        return ({node.name: node for node in asked.node}, {node.name: node for node in found.node})

    @functools.cached_property
    def _readers(self) -> Mapping[str, list[tuple[str, int]]]:
        """Return what reads a result before Grappler, and in which place."""
        found: dict[str, list[tuple[str, int]]] = {}
        for node in self._answer[0].values():
            for place, text in enumerate(node.input):
                found.setdefault(_spelt(text), []).append((node.name, place))
        return found

    def scope(self, op: str, number: int) -> str:
        """Return the name scope of one of the functions of a loop or branch, with a slash.

        Args:
          op: its name, with the scopes of all around it.
          number: which function, in the order in which they are lowered.

        Raises:
          NotRaised: there is no such scope.
        """
        before, _ = self._answer
        starts = re.compile(rf"Func/({re.escape(op)}/[^/]+/_(\d+))/input(?:_control_node)?/_\d+$")
        found = {int(match[2]): match[1] for name in before if (match := starts.match(name))}
        if number >= len(found):
            raise NotRaised(f"{op} is not lowered")
        return found[sorted(found)[number]] + "/"

    def body(self, graph: Any, scope: str) -> InPlace:
        """Return what Grappler makes of a function.

        Args:
          graph: the FuncGraph of the function.
          scope: in which it is lowered.

        Raises:
          NotRaised: it is not understood.
        """
        before, made = self._answer
        try:
            lowered = _Body(before, before, self._readers, graph, scope)
            named = {name: lowered.named_as_lowered(name) for name in before}
            return InPlace(question(graph, (), tf_adapter.shown_definition(graph),
                                    terms=self._plain.terms),
                           _Body(before, before, self._readers, graph, scope, named).definition(
                               whole=True),
                           _Body(before, made, self._readers, graph, scope, named).definition())
        except KeyError as error:
            raise NotRaised(f"there is no op {error}") from error


@dataclasses.dataclass(frozen=True)
class InPlace:
    """What Grappler makes of a function where it is lowered, asked like a `Question`.

    Attributes:
      alone: the function, to be asked about by itself.
      lowered, made: what stands in its place in the step, before and after Grappler.
    """

    alone: Question
    lowered: tf.compat.v1.GraphDef
    made: tf.compat.v1.GraphDef

    def answer(self, inlined: Callable[[tf.compat.v1.GraphDef], object]) -> tf.compat.v1.GraphDef:
        """Return what Grappler made of it, loops and branches in it as ops again.

        Args:
          inlined: is told of the function by itself, its own calls inlined.

        Raises:
          NotRaised: what is in it is not understood.
        """
        asked = self.alone.inlined()
        inlined(asked)
        if not has_loops(asked):
            return self.made
        ends = [node.name for node in self.made.node if node.op == RETVAL]
        there = {node.name for node in asked.node if node.op != RETVAL}
        effects = [name for name in self.alone.running if name in there]
        return with_loops(self.made, asked, self.lowered, [*ends, *effects])


class _Body:
    """The ops that stand in the place of a function."""

    def __init__(self, before: Mapping[str, Any], made: Mapping[str, Any],
                 readers: Mapping[str, list[tuple[str, int]]], graph: Any, scope: str,
                 named: Mapping[str, str] = MappingProxyType({})) -> None:
        self.before, self.made, self.graph, self.scope = before, made, graph, scope
        self.readers, self._known = readers, named
        arguments, self.results = self._passed("input"), self._passed("output")
        if len(arguments) != len(graph.inputs) or len(self.results) != len(graph.outputs):
            raise NotRaised(f"{scope} has other arguments or results once it is lowered")
        self.argument: dict[str, str] = {}
        for name, tensor in zip(arguments, graph.inputs, strict=True):
            for text in (name, self._source(before[name].input[0])):
                self.argument.setdefault(_spelt(text), tensor.op.name)

    def _passed(self, which: str) -> list[str]:
        """Return the ops that pass arguments or results on, in order."""
        start = f"Func/{self.scope}{which}/_"
        return sorted((name for name in self.before if name.startswith(start)),
                      key=lambda name: int(name.removeprefix(start)))

    def _source(self, text: str) -> str:
        """Return what is passed on by what is gone."""
        name = op_of(text)
        while name not in self.made and record(self.before[name].op).passes_on:
            text = self.before[name].input[0]
            name = op_of(text)
        return text

    def named_as_lowered(self, name: str) -> str:
        """Return what an op would be called if the function had been lowered by itself.

        What hands an input on to a branch has the name of that input in its own.

        Args:
          name: in the step.
        """
        node = self.before[name]
        if node.op in SWITCHES and self._is_inside(name):
            read = op_of(node.input[0])
            scope, _, number = name.rpartition("/_")
            if scope.endswith(f"/{read}"):
                op = self._named(scope.removesuffix(f"/{read}"))
                return f"{op}/{op_of(self._tensor(node.input[0]))}/_{number}"
        return self._named(name)

    def definition(self, whole: bool = False) -> tf.compat.v1.GraphDef:
        """Return the function's ops, arguments and results.

        Args:
          whole: whether also the ops that nothing needs.
        """
        read = [self._result(name) for name in self.results]
        results = [self._tensor(text) for text, _ in read]
        running = [self.scope + op.name for op in self.graph.control_outputs]
        calls: dict[str, list[str]] = {}  # what stands for calls that are waited for
        for op, name in zip(self.graph.control_outputs, running, strict=True):
            known = record(op.type)
            if name in self.made or known.has_bodies:
                continue
            if known.calls is Calls.FUNCTION:
                calls[op.name] = self._effects(name)
            elif known.writes or known.access is not Access.VALUE:
                raise NotRaised(f"{op.name} is gone")
        awaited = {name for _, waits in read for name in waits if self._is_inside(name)}
        names = {self._named(name): name for name in self.made if self._is_inside(name)}
        arguments = {tensor.op.name for tensor in self.graph.inputs}
        found: dict[str, tf.compat.v1.NodeDef] = {}
        pending = [*results, *(self._named(name) for name in (*running, *sorted(awaited))
                               if name in self.made), *(names if whole else ()),
                   *(self._named(name) for effects in calls.values() for name in effects)]
        while pending:
            name = op_of(pending.pop())
            if name not in found and name not in arguments:
                found[name] = self._node(self.made[names[name]])
                pending += found[name].input
        for name, effects in calls.items():
            found[name] = tf.compat.v1.NodeDef(
                name=name, op=NO_OP, input=[f"^{self._named(effect)}" for effect in effects])
        return self._with_ends(found, results)

    def _effects(self, call: str) -> list[str]:
        """Return what who waits for a call waits for once it is inlined, ops of the answer."""
        start, found = f"Func/{call}/output_control_node/_", dict[str, None]()
        pending = [name for name in self.before if name.startswith(start)]
        if not pending:
            raise NotRaised(f"{call} is not inlined")
        seen = set(pending)
        while pending:
            for text in self.before[pending.pop()].input:
                name = op_of(text)
                if name in self.made and self._is_inside(name):
                    found[name] = None
                elif text[:1] == "^" and name not in seen:
                    seen.add(name)
                    pending.append(name)
        return sorted(found)

    def _with_ends(self, found: Mapping[str, Any], results: list[str]) -> tf.compat.v1.GraphDef:
        body = tf.compat.v1.GraphDef()

        def add(kind: str, number: int, tensor: tf.Tensor, name: str, *read: str) -> None:
            node = body.node.add(name=name, op=kind, input=read)
            node.attr["T"].type = tensor.dtype.as_datatype_enum
            node.attr["index"].i = number

        for number, tensor in enumerate(self.graph.inputs):
            add(ARG, number, tensor, tensor.op.name)
        body.node.extend(found.values())
        for number, (tensor, text) in enumerate(zip(self.graph.outputs, results, strict=True)):
            add(RETVAL, number, tensor, f"result_RetVal_{number}", text)
        if len({node.name for node in body.node}) < len(body.node):
            raise NotRaised(f"two ops of {self.scope} would have one name")
        return body

    def _result(self, name: str) -> tuple[str, list[str]]:
        """Return what is read of a result (rule 2), and what its reader waits for."""
        for reader, place in self.readers.get(name, ()):
            if reader in self.made:
                read = self.made[reader].input
                return str(read[place]), [text[1:] for text in read if text[:1] == "^"]
        return self._source(name), []

    def _node(self, known: Any) -> tf.compat.v1.NodeDef:
        """Return an op as it stands in the function."""
        node = tf.compat.v1.NodeDef.FromString(known.SerializeToString())
        node.name = self._named(known.name)
        read = [self._tensor(text) for text in known.input if text[:1] != "^"]
        awaited = [f"^{self._named(text[1:])}" for text in known.input
                   if text[:1] == "^" and self._is_inside(text[1:])]  # rule 3
        del node.input[:]
        node.input.extend([*read, *awaited])
        return node

    def _tensor(self, text: str) -> str:
        """Return what an op of the function reads in it."""
        given = self.argument.get(_spelt(text))
        if given is not None:
            return given
        name = op_of(text)
        node = self.made[name]
        if record(node.op).passes_on and not self._is_inside(name):
            return self._tensor(node.input[0])
        if not self._is_inside(name):
            raise NotRaised(f"{self.scope} reads {text}, which is outside")
        return self._named(name) + text.removeprefix(name)

    def _is_inside(self, name: str) -> bool:
        return self.scope in name and not name.startswith(
            (f"Func/{self.scope}input", f"Func/{self.scope}output"))

    def _named(self, name: str) -> str:
        return self._known.get(name) or name.replace(self.scope, "")


def _spelt(text: str) -> str:
    return text.removesuffix(":0")
