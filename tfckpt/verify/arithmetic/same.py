"""Whether a rewritten step computes what the plain one does, in the same arithmetic.

The terms of both are compared (`tfckpt.verify.arithmetic.terms`): what TensorFlow's optimizers
rearrange in one and not in the other is found, whatever the rule by which they do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfckpt.capture.nodes import op_of
from tfckpt.ir.edits import traced
from tfckpt.ops.names import IDENTITY
from tfckpt.verify.arithmetic.op_labels import CONSTANT, SHAPES
from tfckpt.verify.arithmetic.terms import Computation, Terms, first_differences, terms_of

_COPY = re.compile(r"-tfckpt\d+(?=$|/)")
_NUMBER = re.compile(r"/_+\d+(?=/|$)")
"""What TensorFlow puts into the names of ops of lowered bodies."""
ARRIVING = ("these sums of the plain step add their terms in the order in which they arrive, so "
            "that it may come out in several ways itself:")
UNDECIDED = ("time alone decides with which of their terms these sums of the plain step begin, so "
             "that it may come out in several ways itself:")
_SHOWN = 6
UNCHANGED = "the step runs as it is"
COMPILED = "XLA compiles the step, and its arithmetic is not looked into"
SEGMENTED = ("loops are recomputed in segments: their bodies compute as before, and what is around "
             "them is not compared where Grappler's answer is not what is planned")


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What can be said of the numbers of a rewritten step.

    Attributes:
      same: True where every result, every write to a variable and every other effect is computed by
        the same kernels from the same operands in the same order; False where one is not; None
        where it cannot be known.
      differences: the first ops that compute otherwise, by name.
      roots: what comes out otherwise, such as "result 0".
      reason: why `same` is True of a step that is not rewritten, or is None.
    """

    same: bool | None
    differences: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.same:
            return f"the same arithmetic{f': {self.reason}' if self.reason else ''}"
        if self.same is None:
            return f"not known whether the arithmetic is the same: {self.reason}"
        count = len(self.roots)
        said = "1 result or write is" if count == 1 else f"{count} results and writes are"
        return f"{said} computed otherwise, from {_listed(self.differences)} on"


def _listed(names: Sequence[str]) -> str:
    """Return the first few of some names, and how many there are besides."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def compared(plain: Computation, edited: Computation) -> Certificate:
    """Compare what a plain step computes with what a rewritten one does.

    What no order decides in the plain step, ours may decide as it turns out where ops run in the
    order in which they become ready, or in one of several ways where they become so at once. Of a
    sum it is not known then, since time decides it there.

    Args:
      plain: the graphs of the plain step, as they are executed.
      edited: those of the rewritten step.

    Returns:
      Whether all results and writes are the same, and what is not.
    """
    plain, edited = _with_known(plain, edited), _with_known(edited, plain)
    before, after = terms_of([plain, edited])
    found = certificate_of(before, after)
    still_open = {_in_trace(name) for name in (*after.open, *after.open_sums)}
    early = frozenset(name for name in (*before.open, *before.open_sums)
                      if _in_trace(name) not in still_open)
    begins = {_in_trace(name): place for name, place in after.begins.items()}
    begun = {name: begins[_in_trace(name)] for name in before.open_sums
             if _in_trace(name) in begins}
    ways: list[dict[str, int]] = [{}] * bool(early) + [begun] * bool(begun)
    for way in ways if found.same is False else ():
        settled = certificate_of(*terms_of(
            [dataclasses.replace(plain, early=early, begun=way), edited]))
        if settled.same is not False:
            found = settled
            break
    if found.same and before.open_sums:
        return Certificate(None, reason=f"{UNDECIDED} {_listed(before.open_sums)}")
    return found


def _with_known(computation: Computation, other: Computation) -> Computation:
    """Return a computation with what TensorFlow knows in the other alone.

    It makes a constant of a shape, that waits for what was asked for it, where it can infer it; and
    of what leaves an operand as it is (a sum over no axis, a choice that is known) an identity.
    """
    known = {_original(node.name): node for node in other.nodes
             if node.op == CONSTANT and node.input}
    passing = {_original(node.name): node for node in other.nodes
               if node.op == IDENTITY and not node.input[0].startswith("^")}
    return dataclasses.replace(computation, nodes=[
        _as_known(node, known) if node.op in SHAPES else _as_passing(node, passing)
        for node in computation.nodes])


def _as_passing(node: Any, passing: Mapping[str, Any]) -> Any:
    """Return an op as the identity that it is in the other graph, if that reads what it reads."""
    other = passing.get(_original(node.name))
    if other is None or node.op == IDENTITY:
        return node
    wanted = [text for text in node.input if _original(text) == _original(other.input[0])]
    if not wanted:
        return node
    made = type(node)(name=node.name, op=IDENTITY, attr=other.attr)
    made.input.extend([wanted[0], *(
        f"^{op_of(text)}" for text in node.input if text != wanted[0])])
    return made


def _as_known(shape: Any, known: Mapping[str, Any]) -> Any:
    constant = known.get(_original(shape.name))
    if constant is None:
        return shape
    made = type(shape)(name=shape.name, op=constant.op, attr=constant.attr)
    made.input.extend(f"^{op_of(text)}" for text in shape.input)
    return made


def _in_trace(name: str) -> str:
    """Return what an op is called in the trace, in what body it may stand."""
    return _NUMBER.sub("/", _original(name))


def _original(name: str) -> str:
    """Return what an op is called in the trace, and what of it a copy is of."""
    return traced(_COPY.sub("", name))


def certificate_of(before: Terms, after: Terms) -> Certificate:
    """Compare the terms of a plain step with those of a rewritten one.

    Args:
      before: the terms of the plain step.
      after: those of the rewritten step.

    Returns:
      Whether both have the same roots, and which ops are the first that differ.
    """
    roots = tuple(sorted(root for root in {**before.roots, **after.roots}
                         if before.roots.get(root) != after.roots.get(root)))
    if roots:
        names = dict.fromkeys(map(_original, first_differences(before, after)))
        return Certificate(False, tuple(names), roots)
    if before.arrivals:
        return Certificate(None, reason=f"{ARRIVING} {_listed(before.arrivals)}")
    return Certificate(True)
