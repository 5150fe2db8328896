"""Whether loops over segments compute what the plain loops do, by the ops that will run.

The functions are the same, but TensorFlow's optimizers see them in another place: they fuse two ops
only where they know both shapes, and add in the order of names. So what they make of each body is
compared: in the plain step once, in the rewritten one for the forward, for the segments that are
run again, and for the gradient. Each op has to be there under its name, of the same kind, with the
same attributes, and with operands of the same names, in the same order where that matters; of
several ops that are equal another may stand for all, also where what it reads of integers is
computed by other equals. What a body is handed counts as one operand:
which it is follows from the function. Ops may be missing, as nothing reads all that a segment makes
which is run again; what is fused into others changes these. Left out is what does not round:
integers, shapes and lists; and what nothing reads, which is there where something waits for a loop.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfckpt.capture.nodes import op_of
from tfckpt.ir.edits import Edits, traced
from tfckpt.ops import record
from tfckpt.ops.names import IDENTITY, LOWERED, NO_OP
from tfckpt.plan.loops.segments import LAST, MARK
from tfckpt.verify.arithmetic.op_labels import NO_ARITHMETIC, SAME_ENDS, called, hashed

_AGAIN, _GRADIENT = (rf"{loop}/body/_\d+/" for loop in ("tfckpt_loop", "tfckpt_loop_1"))
"""Scopes of loops over a segment, in that of a loop over segments."""
_HANDED = "what the body is handed"
_NUMBER = re.compile(r"/_\d+(?=[:/]|$)")
_ARGUMENT = re.compile(r"Func/.+/input/_\d+")
_PASSED = LOWERED | {IDENTITY, NO_OP}

Body = dict[str, tuple]
"""By the name of an op within a body: its kind, attributes and operands."""
Meanings = Mapping[str, str]
"""What ops compute that are not compared, by name."""


def differences(plain: Any, edited: Any, edits: Edits) -> tuple[str, ...]:
    """Return the ops of loops in segments that are not what they are in the plain step, by name.

    Args:
      plain: GraphDef of what Grappler makes of the plain step, loops lowered.
      edited: that of the rewritten step.
      edits: what was done to it; its loops are named as in `edited`.
    """
    loops = [entry.old for entry in edits.replaced if entry.new.endswith((MARK, LAST))]
    found: dict[str, None] = {}
    plain, needed = _needed(plain), _needed(edited)
    for forward, gradient in zip(loops[::2], loops[1::2], strict=True):
        scopes = [rf"{re.escape(traced(loop))}/body/_\d+/" for loop in (forward, gradient)]
        once, backward = (_body(plain, scope) for scope in scopes)
        meant = [_meanings(plain, scope) for scope in scopes]
        copies = [clone.name for clone in edits.clones if clone.source == forward + MARK]
        last = [name for name in (forward + LAST, gradient + LAST)
                if any(clone.name == name for clone in edits.clones)]
        levels = _levels(edited, gradient + MARK)
        for wanted, loop, inner in (
                *((once, loop, _AGAIN * levels) for loop in (forward + MARK, *copies)),
                *((once, gradient + MARK, _GRADIENT * n + _AGAIN * (levels - n))
                  for n in range(levels)),
                (backward, gradient + MARK, _GRADIENT * levels),
                *zip((once, backward), last, ("", ""), strict=False)):
            scope = rf"{re.escape(loop)}/body/_\d+/{inner}"
            uses = _Uses(edited, scope)
            made = _named_as_in(wanted, meant[wanted is backward], _body(needed, scope),
                                _meanings(needed, scope))
            found.update(dict.fromkeys(name for name, op in made.items() if wanted.get(name) != op
                                       or uses.may_begin_otherwise(name, op)))
            if not made:
                found[loop.removesuffix(MARK).removesuffix(LAST)] = None
    return tuple(found)


def _levels(definition: Any, loop: str) -> int:
    """Return how many loops stand in each other in one over segments, which may be in segments."""
    within = re.compile(rf"{re.escape(loop)}/body/_\d+/((?:{_GRADIENT})+)")
    return max((len(re.findall(_GRADIENT, match[1])) for node in definition.node
                if (match := within.match(node.name))), default=1)


def _body(definition: Any, scope: str) -> Body:
    """Return the ops in a scope that a pattern describes."""
    pattern = re.compile(scope)
    constants = {node.name: node.attr["value"].SerializeToString(deterministic=True)
                 for node in definition.node if record(node.op).is_constant}
    found: Body = {}
    for node in definition.node:
        match = pattern.match(node.name)
        if (match is None or node.op in _PASSED or node.name in constants
                or record(node.op).holds_values and not record(node.op).adds
                or record(node.op).shape_only
                or not _rounds(node)):
            continue
        found[_within(node.name, match[0])] = (node.op, _attributes(node), _operands(
            node.op, (constants.get(name) or _within(name, match[0])
                      for name in node.input if name[:1] != "^")))
    return found


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """Some nodes of a graph."""

    node: tuple[Any, ...]


def _needed(definition: Any) -> _Nodes:
    """Return the ops whose results come to more than what a loop hands on to its end."""
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


def _operands(kind: str, operands: Iterable[str | bytes]) -> tuple[str | bytes, ...]:
    """Return what an op reads, in one order for all where the order changes no bit.

    Of a sum these are the first two, between which only the one matters that is written into.
    """
    read = list(operands)
    same = len(read) if called(kind) in SAME_ENDS else 2 if record(kind).adds else 0
    return (*sorted(read[:same], key=repr), *read[same:])


class _Uses:
    """Who reads what in a body, of all its ops."""

    def __init__(self, definition: Any, scope: str) -> None:
        pattern = re.compile(scope)
        self.read: dict[str, set[str]] = {}
        self.readers: dict[str, set[str]] = {}
        for node in definition.node:
            match = pattern.match(node.name)
            if match is None or record(node.op).shape_only:
                continue
            name = _within(node.name, match[0])
            self.read[name] = {_within(text, match[0]) for text in node.input if text[:1] != "^"}
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
        if not record(kind).adds or not rest or _HANDED not in first:
            return False
        others = [term for term in first if term != _HANDED]
        before, pending = set[str](), list(rest)
        while pending:
            for source in self.read.get(pending.pop(), ()):
                if source not in before:
                    before.add(source)
                    pending.append(source)
        before.update(rest)
        readers = self.readers.get(others[0], set()) if others else set()
        return not readers or not readers - {name} <= before


def _named_as_in(wanted: Body, wanted_meanings: Meanings, made: Body,
                 made_meanings: Meanings) -> Body:
    """Return a body with the names that another has for the ops which stand for their equals.

    Of ops that compute the same from the same Grappler keeps one: which, depends on where the body
    stands. One alone of those missing in each body may be it.
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
            kind, attributes, _operands(kind, (names.get(operand, operand)
                                               for operand in operands)))
            for name, (kind, attributes, operands) in made.items()}


def _by_value(body: Body, meanings: Meanings) -> dict[tuple, list[str]]:
    found: dict[tuple, list[str]] = {}
    for name, (kind, attributes, operands) in body.items():
        op = kind, attributes, _operands(kind, (
            meanings.get(operand, operand) if isinstance(operand, str) else operand
            for operand in operands))
        found.setdefault(op, []).append(name)
    return found


def _meanings(definition: Any, scope: str) -> Meanings:
    """Return what ops of a body compute that are not compared: integers and shapes, by name."""
    pattern, compared = re.compile(scope), _body(definition, scope)
    nodes = {_within(node.name, match[0]): (node, match[0]) for node in definition.node
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
                    constants.get(text) or meaning(_within(text, place))
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


def _within(name: str, scope: str) -> str:
    """Return a name without what depends on where a loop stands: numbers, and scopes around it.

    What a branch in the body is given has the name of that within its own.
    """
    if not name.startswith(scope):
        return _HANDED
    return _NUMBER.sub("/_", _ARGUMENT.sub("Func", name).replace(scope, ""))
