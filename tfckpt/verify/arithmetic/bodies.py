"""Bodies of loops as TensorFlow will run them, and whether two compute the same.

Each op has to be there under its name, of the same kind, with the same attributes, and with
operands of the same names, in the same order where that matters; of several ops that are equal
another may stand for all. What a body is handed counts as one operand: which it is follows from the
function. So do integers, of which Grappler computes some here and keeps others there, and what
changes no number is seen through: it goes where Grappler knows the shapes. Left out is what does
not round, integers, shapes and lists; and what nothing reads, which is there where something waits
for a loop.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfckpt.capture.nodes import op_of
from tfckpt.ops import Broadcast, record
from tfckpt.ops.names import ENSURE_SHAPE, IDENTITY, LOWERED, NO_OP
from tfckpt.verify.arithmetic.op_labels import (
    NO_ARITHMETIC,
    PRODUCT,
    SAME_ENDS,
    SHAPED,
    called,
    hashed,
)

WHAT_IS_HANDED, _INTEGER = "what the body is handed", "an integer"
_WHOLE = b"integers "
"""Before the value of a constant that is not rounded."""
_NUMBER = re.compile(r"/_\d+(?=[:/]|$)")
_ARGUMENT = re.compile(r"Func/.+/input/_\d+")
_PASSED = LOWERED | {ENSURE_SHAPE, IDENTITY, NO_OP}

Body = dict[str, tuple]
"""By the name of an op within a body: its kind, attributes and operands."""
Meanings = Mapping[str, str]
"""What ops compute that are not compared, by name."""


def otherwise(wanted: Body, wanted_integers: frozenset[str], made: Body,
               made_integers: frozenset[str], uses: Uses) -> list[str]:
    """Return the ops of a body that are not what they are in another, or may not be, by name.

    Args:
      wanted: the other.
      wanted_integers: see `integers_in`; of the other.
      made: the body, with the names of the other.
      made_integers: of the body.
      uses: who reads what in it.
    """
    # Grappler leaves a sum out where it knows that it adds over no axis
    left_out = {name: operands[0] for name, (kind, _, operands) in wanted.items()
                if name not in made and record(kind).broadcast is Broadcast.SUM
                and isinstance(operands[0], str)}

    def same(expected: tuple, op: tuple) -> bool:
        expected, op = (without_integers(expected, wanted_integers),
                        without_integers(op, made_integers))
        return alike(expected, op) or alike(renamed(expected, left_out), op)

    return [name for name, op in made.items() if name not in wanted or not same(wanted[name], op)
            or uses.may_begin_otherwise(name, op)]


def alike(one: tuple, other: tuple) -> bool:
    """Return whether two ops are the same, be it that one is given integers that are known.

    Args:
      one: kind, attributes and operands.
      other: the like.
    """
    def same(first: str | bytes, second: str | bytes) -> bool:
        return first == second or {type(first), type(second)} == {str, bytes} and all(
            text == _INTEGER if isinstance(text, str) else text.startswith(_WHOLE)
            for text in (first, second))

    return one[:2] == other[:2] and len(one[2]) == len(other[2]) and all(
        map(same, one[2], other[2]))


def integers_in(definition: Any, scope: str) -> frozenset[str]:
    """Return the ops of a body whose results are no numbers that are rounded, by name.

    Args:
      definition: GraphDef, loops lowered, or some of its nodes.
      scope: pattern of the names in front of those within the body.
    """
    pattern = re.compile(scope)
    return frozenset(within(node.name, match[0]) for node in definition.node
                     if (match := pattern.match(node.name)) and (
                         record(node.op).shape_only or not _rounds(node)))


def without_integers(op: tuple, integers: frozenset[str]) -> tuple:
    """Return an op without which integers it reads.

    Args:
      op: its kind, attributes and operands.
      integers: see `integers_in`.
    """
    return renamed(op, {operand: _INTEGER for operand in op[2] if isinstance(operand, str)
                         and operand.partition(":")[0] in integers})


def renamed(op: tuple, names: Mapping[str, str]) -> tuple:
    """Return an op with other names of what it reads.

    Args:
      op: its kind, attributes and operands.
      names: new names, by those that there are.
    """
    kind, attributes, operands = op
    return kind, attributes, operands_of(kind, (
        operand if isinstance(operand, bytes) else names.get(operand, operand)
        for operand in operands))


def body_in(definition: Any, scope: str) -> Body:
    """Return the ops in a scope that a pattern describes.

    Args:
      definition: GraphDef, loops lowered, or some of its nodes.
      scope: pattern of the names in front of those within the body.
    """
    pattern = re.compile(scope)
    constants = {node.name: (b"" if _rounds(node) else _WHOLE)
                 + node.attr["value"].SerializeToString(deterministic=True)
                 for node in definition.node if record(node.op).is_constant}
    same = _unchanged(definition)

    def read(text: str) -> str:
        """Return what an op reads, seen through what changes no number."""
        while text in same and pattern.match(text):
            text = same[text]
        return text

    found: Body = {}
    for node in definition.node:
        match = pattern.match(node.name)
        if (match is None or node.op in _PASSED or node.name in constants or node.name in same
                or record(node.op).holds_values and not record(node.op).adds
                or record(node.op).shape_only
                or not _rounds(node)):
            continue
        found[within(node.name, match[0])] = (node.op, _attributes(node), operands_of(
            node.op, (constants.get(name) or within(read(name), match[0])
                      for name in node.input if name[:1] != "^")))
    return found


def _unchanged(definition: Any) -> dict[str, str]:
    """Return what ops read that change a shape alone, or multiply by one: Grappler takes these out.

    It does where it knows shapes, which it may know more of in one place than in another.
    """
    ones = {node.name for node in definition.node if record(node.op).is_constant
            and not node.attr["value"].tensor.tensor_shape.dim
            and tf.make_ndarray(node.attr["value"].tensor) == 1}
    found = {}
    for node in definition.node:
        if node.op in SHAPED:
            found[node.name] = node.input[0]
        elif node.op == PRODUCT and not ones.isdisjoint(node.input[:2]):
            found[node.name] = node.input[0 if node.input[1] in ones else 1]
    return found


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """Some nodes of a graph."""

    node: tuple[Any, ...]


def needed_of(definition: Any) -> _Nodes:
    """Return the ops whose results come to more than what a loop hands on to its end.

    Args:
      definition: GraphDef, loops lowered.
    """
    nodes = {node.name: node for node in definition.node}
    read = {op_of(text) for node in definition.node for text in node.input if text[:1] != "^"}
    pending = [node.name for node in definition.node
               if node.name not in read and node.op not in LOWERED]
    found = set(pending)
    while pending:
        for text in nodes[pending.pop()].input:
            name = op_of(text)
            if text[:1] != "^" and name in nodes and name not in found:
                found.add(name)
                pending.append(name)
    return _Nodes(tuple(node for node in definition.node if node.name in found))


def operands_of(kind: str, operands: Iterable[str | bytes]) -> tuple[str | bytes, ...]:
    """Return what an op reads, in one order for all where the order changes no bit.

    Of a sum these are the first two, between which only the one matters that is written into.

    Args:
      kind: type of the op.
      operands: names, or values of constants.
    """
    read = list(operands)
    same = len(read) if called(kind) in SAME_ENDS else 2 if record(kind).adds else 0
    return (*sorted(read[:same], key=repr), *read[same:])


class Uses:
    """Who reads what in a body, of all its ops."""

    def __init__(self, definition: Any, scope: str) -> None:
        pattern = re.compile(scope)
        self.read: dict[str, set[str]] = {}
        self.readers: dict[str, set[str]] = {}
        for node in definition.node:
            match = pattern.match(node.name)
            if match is None or record(node.op).shape_only:
                continue
            name = within(node.name, match[0])
            self.read[name] = {within(text, match[0]) for text in node.input if text[:1] != "^"}
            for text in self.read[name]:
                self.readers.setdefault(text, set()).add(name)

    def may_begin_otherwise(self, name: str, op: tuple) -> bool:
        """Return whether with which term a sum begins may depend on where its body stands.

        Its kernel writes into the first term that nothing else uses, and begins with that. Who uses
        what a body is handed depends on where it stands; where that is one of the first two terms,
        and what reads the other has run before the rest is there, the sum begins with one of these
        two, which changes no bit.

        Args:
          name: of the op in the body.
          op: its kind, attributes and operands.
        """
        kind, _, operands = op
        first, rest = operands[:2], operands[2:]
        if not record(kind).adds or not rest or WHAT_IS_HANDED not in first:
            return False
        others = [term for term in first if term != WHAT_IS_HANDED]
        before, pending = set[str](), list(rest)
        while pending:
            for source in self.read.get(pending.pop(), ()):
                if source not in before:
                    before.add(source)
                    pending.append(source)
        before.update(rest)
        readers = self.readers.get(others[0], set()) if others else set()
        return not readers or not readers - {name} <= before


def named_as_in(wanted: Body, wanted_meanings: Meanings, made: Body,
                 made_meanings: Meanings) -> Body:
    """Return a body with the names that another has for the ops which stand for their equals.

    Of ops that compute the same from the same Grappler keeps one: which, depends on where the body
    stands. One alone of those missing in each body may be it.

    Args:
      wanted: the body with those names.
      wanted_meanings: see `meanings_in`; of it.
      made: the body that is renamed.
      made_meanings: of that.
    """
    while True:
        missing = _by_value({name: op for name, op in wanted.items() if name not in made},
                            wanted_meanings)
        added = _by_value({name: op for name, op in made.items() if name not in wanted},
                          made_meanings)
        names = {names[0]: missing[op][0] for op, names in added.items()
                 if len(names) == len(missing.get(op, ())) == 1}
        if not names:
            return made
        made = {names.get(name, name): wanted[names[name]] if name in names else (
            kind, attributes, operands_of(kind, (names.get(operand, operand)
                                               for operand in operands)))
            for name, (kind, attributes, operands) in made.items()}


def _by_value(body: Body, meanings: Meanings) -> dict[tuple, list[str]]:
    found: dict[tuple, list[str]] = {}
    for name, (kind, attributes, operands) in body.items():
        found.setdefault(renamed((kind, attributes, operands), meanings), []).append(name)
    return found


def meanings_in(definition: Any, scope: str) -> Meanings:
    """Return what ops of a body compute that are not compared: integers and shapes, by name.

    Args:
      definition: GraphDef, loops lowered, or some of its nodes.
      scope: pattern of the names in front of those within the body.
    """
    pattern, compared = re.compile(scope), body_in(definition, scope)
    nodes = {within(node.name, match[0]): (node, match[0]) for node in definition.node
             if (match := pattern.match(node.name)) is not None}
    constants = {node.name: node.attr["value"].SerializeToString(deterministic=True)
                 for node in definition.node if record(node.op).is_constant}
    found: dict[str, str] = {}

    def meaning(name: str) -> str:
        if name in compared or name not in nodes:
            return name
        if name not in found:
            found[name] = name  # where it is needed for itself
            node, place = nodes[name]
            if node.op not in _PASSED:
                found[name] = hashed((node.op, _attributes(node), [
                    constants.get(text) or meaning(within(text, place))
                    for text in node.input if text[:1] != "^"]))
        return found[name]

    for name in nodes:
        meaning(name)
    return found


def _attributes(node: Any) -> tuple[tuple[str, bytes], ...]:
    return tuple((key, node.attr[key].SerializeToString(deterministic=True))
                 for key in sorted(node.attr)
                 if not key.startswith("_") and key not in NO_ARITHMETIC)


def _rounds(node: Any) -> bool:
    """Return whether an op may compute with numbers that are rounded."""
    kinds = [tf.dtypes.as_dtype(attr.type) for attr in node.attr.values() if attr.type]
    return not kinds or any(kind.is_floating or kind.is_complex for kind in kinds)


def within(name: str, scope: str) -> str:
    """Return a name without what depends on where a loop stands: numbers, and scopes around it.

    What a branch in the body is given has the name of that within its own.

    Args:
      name: of an op, or of its result.
      scope: in front of it, where it is in the body.
    """
    if not name.startswith(scope):
        return WHAT_IS_HANDED
    return _NUMBER.sub("/_", _ARGUMENT.sub("Func", name).replace(scope, ""))
