"""What Grappler makes of a step whose loops and branches are lowered, with these as ops again.

TensorFlow lowers loops and branches before it asks Grappler, and what Grappler makes of the rest
depends on what is in them: it follows no control edge through a lowered loop, knows other shapes of
its results, and moves a constant from one factor of a product to the other each time that it looks
at the graph, which it does more often where there is more to fold. So it is asked with loops
lowered. What of its answer the step's results need is taken, and where that is an end of a loop or
of a branch, the op that was lowered stands for it.

  1. What a loop or branch reads is what its lowered form reads. Where that reads nothing any more
     it is what the op read before; if its functions never read it, and that is gone, a zero.
  2. It waits for what it waited for before.
  3. What Grappler keeps apart for two branches though it is one, since it was made by two ops that
     were found to be equal later, is handed to each by an op of its own.
  4. What is left of a lowered loop or branch gets another name: TensorFlow numbers what it makes
     when it lowers, does so again when the step runs, and refuses a name that is there already.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from tfckpt.capture.grappler.control_edges import wait_as_asked
from tfckpt.capture.nodes import arguments_read, bodies_of, functions_of, is_loop, op_of
from tfckpt.ops import Calls, record
from tfckpt.ops.names import CONST, ENTER, EXIT, IDENTITY, LOWERED, MERGE, SWITCHES

_NUMBERED = re.compile(r"(.+)/([^/]+)/_(\d+)$")
_GIVEN = re.compile(r"/_(?=\d+(?:/|$))")
"""Before a number that TensorFlow gives when it lowers or inlines."""
_RESULTS = ("output", "merge")
"""What TensorFlow calls the results of a lowered branch."""
_RUN = frozenset(("branch_executed", "LoopExecuted"))
"""What others wait for, that wait for a lowered op."""
_WITHOUT_ZERO = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)


class NotRaised(ValueError):
    """A lowered graph has something in it that no loop or branch of the step explains."""


def has_loops(definition: tf.compat.v1.GraphDef) -> bool:
    """Return whether there are loops or branches that are ops.

    Args:
      definition: the graph; bodies of functions in its library are not looked at.
    """
    return any(map(is_loop, definition.node))


def with_loops(found: tf.compat.v1.GraphDef, asked: tf.compat.v1.GraphDef,
               lowered: tf.compat.v1.GraphDef, running: Iterable[str]) -> tf.compat.v1.GraphDef:
    """Return what Grappler made of a step with lowered loops, these as ops again.

    Args:
      found: what Grappler made.
      asked: the step, functions inlined, with loops and branches as ops.
      lowered: the same as Grappler was asked about it.
      running: what has to run, by name.

    Raises:
      NotRaised: it is not understood.
    """
    try:
        return _Raised(found, asked, lowered).graph(running)
    except KeyError as error:
        raise NotRaised(f"there is no op {error}") from error


@dataclasses.dataclass
class _Lowered:
    """What a loop or branch is once it is lowered.

    Attributes:
      op: the loop or branch.
      entries: for each of its inputs the ops that read it, by name.
      results: the number of the result that an op hands out, by its name.
    """

    op: tf.compat.v1.NodeDef
    entries: Mapping[int, Sequence[str]]
    results: Mapping[str, int]


class _Raised:
    """A graph that is put together of what Grappler made."""

    def __init__(self, found: tf.compat.v1.GraphDef, asked: tf.compat.v1.GraphDef,
                 lowered: tf.compat.v1.GraphDef) -> None:
        self.asked = asked
        self.library = found.library
        self.versions = found.versions
        self.made = {node.name: node for node in found.node}
        self.before = {node.name: node for node in asked.node}
        self.loops = dict(_lowered_loops(asked, lowered))
        self.result_of = {name: (loop, slot) for loop, lowered in self.loops.items()
                          for name, slot in lowered.results.items()}
        self.switches = collections.Counter(
            tuple(node.input[:2]) for node in found.node if node.op in SWITCHES)

    def graph(self, running: Iterable[str]) -> tf.compat.v1.GraphDef:
        """Return all that runs where these ops have to."""
        found: dict[str, tf.compat.v1.NodeDef] = {}
        pending = [self._op(name) for name in running]
        while pending:
            name = pending.pop()
            if name in found:
                continue
            found[name] = node = self._node(name)
            pending += [op_of(text) for text in node.input]
        raised = tf.compat.v1.GraphDef(library=self.library, versions=self.versions)
        raised.node.extend(found.values())
        wait_as_asked(self.asked, raised)
        self._rename(raised)
        return raised

    def _rename(self, raised: tf.compat.v1.GraphDef) -> None:
        """Rename what is left of lowered loops and branches (rule 4)."""
        names = {node.name for node in raised.node}
        given = {name: _GIVEN.sub("/", name) for name in names - self.before.keys()}
        if len({given.get(name, name) for name in names}) < len(names):
            raise NotRaised("two ops that are left of loops or branches would have one name")
        for node in raised.node:
            node.name = given.get(node.name, node.name)
            for i, text in enumerate(node.input):
                name = op_of(text)
                node.input[i] = text.replace(name, given.get(name, name), 1)

    def _node(self, name: str) -> tf.compat.v1.NodeDef:
        """Return an op as it stands in the graph."""
        if name in self.loops:
            return self._loop(self.loops[name])
        known = self.made.get(name, self.before.get(name))
        if known is None or known.op in LOWERED:
            raise NotRaised(f"{name} is in a lowered loop or branch")
        node = tf.compat.v1.NodeDef.FromString(known.SerializeToString())
        handed_on = self._handed_on if name not in self.made else str
        read = [self._tensor(text if text[:1] == "^" else handed_on(text)) for text in known.input]
        del node.input[:]
        node.input.extend(text for text in read if text[:1] != "^")
        node.input.extend(dict.fromkeys(text for text in read if text[:1] == "^"))
        return node

    def _loop(self, loop: _Lowered) -> tf.compat.v1.NodeDef:
        node = tf.compat.v1.NodeDef.FromString(loop.op.SerializeToString())
        data = [text for text in node.input if text[:1] != "^"]
        del node.input[:]
        for i, text in enumerate(data):
            entry = next((self.made[name] for name in loop.entries[i] if name in self.made
                          and self.made[name].op in LOWERED), None)
            node.input.append(self._unused(loop.op, i, text) if entry is None
                              else self._given(loop.op, i, entry))
        return node

    def _given(self, loop: tf.compat.v1.NodeDef, place: int, entry: tf.compat.v1.NodeDef) -> str:
        """Return what a loop or branch reads by an op of the lowered graph (rule 3)."""
        read = self._tensor(_read_by(entry, place))
        if not place or entry.op not in SWITCHES or self.switches[tuple(entry.input[:2])] == 1:
            return read
        name = f"{loop.name}/input_{place}"
        self.before[name] = own = tf.compat.v1.NodeDef(
            name=name, op=IDENTITY, input=[read], device=entry.device)
        own.attr["T"].type = _input_type(loop, place)
        return name

    def _unused(self, loop: tf.compat.v1.NodeDef, place: int, text: str) -> str:
        """Return what a loop or branch reads where nothing in it needs that (rule 1)."""
        text = self._handed_on(text)
        name = op_of(text)
        kind = _input_type(loop, place)
        if name in self.made or name in self.loops or kind in _WITHOUT_ZERO or (
                self._reads(loop, place)):
            return self._tensor(text)
        zero = tf.compat.v1.NodeDef(name=f"{loop.name}/unused_{place}", op=CONST,
                                    device=loop.device)
        zero.attr["dtype"].type = kind
        zero.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(
            "" if kind == tf.string else 0, tf.as_dtype(kind), ()))
        self.before[zero.name] = zero
        return zero.name

    def _reads(self, loop: tf.compat.v1.NodeDef, place: int) -> bool:
        """Return whether functions of a loop or branch read one of its inputs, or may do so."""
        place -= record(loop.op).calls is Calls.BRANCHES  # no function has the first, which chooses
        called = {function.signature.name: function for function in bodies_of(loop, self.asked)}
        if {function.name for function in functions_of(loop)} - called.keys():
            return True
        return not functions_of(loop) or any(
            place < 0 or place in arguments_read(function) for function in called.values())

    def _handed_on(self, text: str) -> str:
        """Return what was read, seen through what only hands it on and is gone."""
        name, _, slot = text.partition(":")
        while name not in self.made and name not in self.loops and (
                record(self.before[name].op).passes_on):
            text = self.before[name].input[int(slot or 0)]
            name, _, slot = text.partition(":")
        return text

    def _op(self, name: str) -> str:
        """Return the op that stands for one of the lowered graph."""
        if name in self.result_of:
            return self.result_of[name][0]
        found = _NUMBERED.match(name)
        return found[1] if found and found[1] in self.loops and found[2] in _RUN else name

    def _tensor(self, text: str) -> str:
        """Return what stands for what an op of the lowered graph reads or waits for."""
        if text[:1] == "^":
            return f"^{self._op(text[1:])}"
        name, _, slot = text.partition(":")
        if name not in self.result_of:
            return text
        if slot not in ("", "0"):
            raise NotRaised(f"{text} is no result of a loop or branch")
        loop, number = self.result_of[name]
        return f"{loop}:{number}" if number else loop


def _input_type(loop: tf.compat.v1.NodeDef, place: int) -> int:
    """Return the type of what a loop or branch reads."""
    if record(loop.op).calls is Calls.LOOP:
        return loop.attr["T"].list.type[place]
    return loop.attr["Tin"].list.type[place - 1] if place else tf.int32.as_datatype_enum


def _read_by(entry: tf.compat.v1.NodeDef, place: int) -> str:
    """Return what an op hands on to the inside of a loop or branch, or what chooses the branch."""
    return entry.input[1 if entry.op in SWITCHES and not place else 0]


def _lowered_loops(asked: tf.compat.v1.GraphDef, lowered: tf.compat.v1.GraphDef
                   ) -> Iterator[tuple[str, _Lowered]]:
    """Yield what becomes of loops and branches, by name.

    Raises:
      NotRaised: their inputs and results are not found.
    """
    nodes = {node.name: node for node in lowered.node}
    parts: dict[str, list[tuple[int, str, tf.compat.v1.NodeDef]]] = {}
    for node in lowered.node:
        if node.op in LOWERED and (found := _NUMBERED.match(node.name)):
            parts.setdefault(found[1], []).append((int(found[3]), found[2], node))
    switches, alike = _switches(lowered.node), _alike(nodes)
    for op in filter(is_loop, asked.node):
        if op.name in nodes and is_loop(nodes[op.name]):
            raise NotRaised(f"{op.name} is not lowered")
        ends = sorted(parts.get(op.name, ()), key=lambda part: part[0])
        data = sum(text[:1] != "^" for text in op.input)
        if record(op.op).calls is Calls.LOOP:
            yield op.name, _loop(op, ends, data, nodes)
        else:
            yield op.name, _branch(op, ends, data, switches, alike)


def _loop(op: tf.compat.v1.NodeDef, ends: Sequence[tuple[int, str, tf.compat.v1.NodeDef]],
          data: int, nodes: Mapping[str, tf.compat.v1.NodeDef]) -> _Lowered:
    enters = [node.name for _, kind, node in ends if node.op == ENTER and kind == "enter"]
    if len(enters) != data:
        raise NotRaised(f"{op.name} has {data} inputs, and {len(enters)} once it is lowered")
    results = {}
    for _, kind, node in ends:
        if node.op == EXIT and kind == "exit":
            entry = node
            while entry.op != ENTER:
                entry = nodes[op_of(entry.input[0])]
            results[node.name] = enters.index(entry.name)
    return _Lowered(op, {i: (name,) for i, name in enumerate(enters)}, results)


def _branch(op: tf.compat.v1.NodeDef, ends: Sequence[tuple[int, str, tf.compat.v1.NodeDef]],
            data: int, switches: Mapping[str, Sequence[str]], alike: Mapping[str, Sequence[str]]
            ) -> _Lowered:
    merges = [node.name for _, kind, node in ends if node.op == MERGE and kind in _RESULTS]
    if len(merges) != len(op.attr["Tout"].list.type):
        raise NotRaised(f"{op.name} has other results once it is lowered")
    passing = switches.get(op.name, ())
    if len(passing) != data - 1:
        raise NotRaised(f"{op.name} has {data} inputs, and {len(passing)} once it is lowered")
    return _Lowered(op, {0: passing, **{i: alike[name] for i, name in enumerate(passing, start=1)}},
                    {name: i for i, name in enumerate(merges)})


def _switches(nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, list[str]]:
    """Return what hands inputs on to branches, in order, by the name of what was lowered."""
    found: dict[str, list[tuple[int, str]]] = {}
    for node in nodes:
        scope, _, number = node.name.rpartition("/_")
        read = f"/{op_of(node.input[0])}" if node.op in SWITCHES else ""
        if read and scope.endswith(read) and number.isdigit():
            found.setdefault(scope.removesuffix(read), []).append((int(number), node.name))
    return {name: [switch for _, switch in sorted(switches)] for name, switches in found.items()}


def _alike(nodes: Mapping[str, tf.compat.v1.NodeDef]) -> dict[str, list[str]]:
    """Return for each switch those that hand on the same for the same choice, itself first.

    Grappler leaves one of them.
    """
    def made_by(text: str) -> str:
        name, _, slot = text.partition(":")
        while record(nodes[name].op).passes_on:
            text = nodes[name].input[int(slot or 0)]
            name, _, slot = text.partition(":")
        return text

    found: dict[tuple[str, ...], list[str]] = {}
    keys = {node.name: (node.op, *map(made_by, node.input[:2])) for node in nodes.values()
            if node.op in SWITCHES}
    for name, key in keys.items():
        found.setdefault(key, []).append(name)
    return {name: [name, *(other for other in found[key] if other != name)]
            for name, key in keys.items()}
