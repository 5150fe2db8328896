"""Straight-line programs over element-wise ops: the form in which derivatives are written down.

A `Program` is a tuple of nodes, each reading earlier ones, so that sharing costs nothing and
nothing here recurses. A node is a TensorFlow op by name, or one of three leaves and one form:

  tensor   a tensor of the captured graph
  number   a scalar constant
  two      `on` where a mask is true and `off` elsewhere: a derivative that takes two values

`Builder` interns nodes and simplifies as it goes: multiplying by one costs no op, and products,
selections and disjoint sums of two-valued terms stay two-valued, so that the derivative of a
piecewise linear function is found to need one boolean per element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

TENSOR, NUMBER, TWO = "tensor", "number", "two"
CAST = "Cast"
"""Type of the nodes that `cast` makes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One instruction.

    Attributes:
      type: TensorFlow op type, or `TENSOR`, `NUMBER`, `TWO`.
      args: nodes read, all earlier in the program.
      dtype: of the result.
      attrs: of the op, as pairs; `("tensor", id)`, `("value", v)`, `("on", a), ("off", b)`.
    """

    type: str
    args: tuple[int, ...]
    dtype: str
    attrs: tuple[tuple[str, object], ...] = ()

    def attr(self, name: str) -> Any:
        """Return the value of an attribute that is there.

        Args:
          name: of an attribute in `attrs`.

        Raises:
          KeyError: the node has no such attribute.
        """
        return dict(self.attrs)[name]


Program = tuple[Node, ...]


class Builder:
    """Appends nodes to a program; equal nodes are made once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Node, int] = {}

    def program(self) -> Program:
        """Return what was built so far."""
        return tuple(self.nodes)

    def node(self, kind: str, args: tuple[Term, ...] = (), dtype: str = "",
             attrs: Mapping[str, object] | None = None) -> Term:
        """Return a node as it is, without simplification.

        Args:
          kind: TensorFlow op type, or `TENSOR`, `NUMBER`, `TWO`.
          args: terms of this builder that the node reads; none for a leaf.
          dtype: of the result; "" for that of the last of `args`.
          attrs: of the op, by name; None for none.
        """
        entry = Node(kind, tuple(a.index for a in args), dtype or args[-1].dtype,
                     tuple(sorted((attrs or {}).items())))
        if entry not in self._known:
            self._known[entry] = len(self.nodes)
            self.nodes.append(entry)
        return Term(self, self._known[entry])

    def tensor(self, tensor: tuple[int, int], dtype: str) -> Term:
        """Return a tensor of the graph.

        Args:
          tensor: (op index, output slot), or another pair of ints that the program's reader knows.
          dtype: of the tensor.
        """
        return self.node(TENSOR, (), dtype, {"tensor": tensor})

    def number(self, value: float, dtype: str) -> Term:
        """Return a scalar constant.

        Args:
          value: of the constant.
          dtype: of the constant.
        """
        return self.node(NUMBER, (), dtype, {"value": float(value)})

    def two(self, mask: Term, on: float, off: float, dtype: str) -> Term:
        """Return `on` where the mask is true, else `off`; a number where they are equal.

        Args:
          mask: term of this builder whose dtype is bool.
          on: value where the mask is true.
          off: value elsewhere.
          dtype: of the result.
        """
        if on == off:
            return self.number(on, dtype)
        if on == 0.0:  # the form that products and sums know
            mask, on, off = mask.test("LogicalNot"), off, on
        return self.node(TWO, (mask,), dtype, {"on": float(on), "off": float(off)})


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """A node of a builder, with arithmetic. Numbers take the dtype of the other operand."""

    builder: Builder
    index: int

    @property
    def node(self) -> Node:
        """Return the instruction itself."""
        return self.builder.nodes[self.index]

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.node.dtype

    @property
    def number(self) -> float | None:
        """Return the value, where the term is a number."""
        return self.node.attr("value") if self.node.type == NUMBER else None

    @property
    def two(self) -> tuple[Term, float, float] | None:
        """Mask and the two values, where the term has this form."""
        node = self.node
        if node.type != TWO:
            return None
        return Term(self.builder, node.args[0]), node.attr("on"), node.attr("off")

    def op(self, kind: str, *others: Term | float, dtype: str = "", **attrs: object) -> Term:
        """Return an op applied to this term and others, without simplification.

        Args:
          kind: TensorFlow op type.
          *others: what it reads after this term; numbers become constants of this term's dtype.
          dtype: of the result; "" for that of this term.
          **attrs: of the op, by name.
        """
        terms = tuple(self._term(o) for o in others)
        return self.builder.node(kind, (self, *terms), dtype or self.dtype, attrs)

    def test(self, kind: str, *others: Term | float) -> Term:
        """Return a comparison or a logical op: a mask.

        Args:
          kind: TensorFlow op type whose result is a bool.
          *others: what it reads after this term; numbers become constants of this term's dtype.
        """
        return self.op(kind, *others, dtype="bool")

    def _term(self, other: Term | float) -> Term:
        return other if isinstance(other, Term) else self.builder.number(other, self.dtype)

    def __mul__(self, other: Term | float) -> Term:
        other = self._term(other)
        for a, b in ((self, other), (other, self)):
            if a.number is not None:
                return b._scaled(a.number)
        first, second = self.two, other.two
        if first and second:
            both = _both(first, second, self)
            return both if both is not None else self.op("Mul", other)
        for two, term in ((first, other), (second, self)):
            if two:
                return select(two[0], term * two[1], term * two[2])
        return self.op("Mul", other)

    __rmul__ = __mul__

    def _scaled(self, factor: float) -> Term:
        if factor == 1.0:
            return self
        if self.number is not None:
            return self.builder.number(self.number * factor, self.dtype)
        if self.two:
            mask, on, off = self.two
            return self.builder.two(mask, on * factor, off * factor, self.dtype)
        if factor == -1.0:
            node = self.node
            return Term(self.builder, node.args[0]) if node.type == "Neg" else self.op("Neg")
        return self.op("Mul", factor) if factor else self.builder.number(0.0, self.dtype)

    def __neg__(self) -> Term:
        return self._scaled(-1.0)

    def __truediv__(self, other: Term | float) -> Term:
        other = self._term(other)
        if other.number is not None and (self.number is not None or self.two):
            return self._scaled(1.0 / other.number) if other.number else self.op("RealDiv", other)
        if self.number is not None and self.number == 1.0:
            return other.op("Reciprocal")
        return self.op("RealDiv", other)

    def __rtruediv__(self, other: float) -> Term:
        return self._term(other) / self

    def __add__(self, other: Term | float) -> Term:
        other = self._term(other)
        if self.number == 0.0:
            return other
        if other.number == 0.0:
            return self
        if self.number is not None and other.number is not None:
            return self.builder.number(self.number + other.number, self.dtype)
        for a, b in ((self, other), (other, self)):
            if a.two and b.number is not None:
                mask, on, off = a.two
                return self.builder.two(mask, on + b.number, off + b.number, self.dtype)
        if self.two and other.two:
            either = _either(self.two, other.two, self)
            if either is not None:
                return either
        return self.op("AddV2", other)

    __radd__ = __add__

    def __sub__(self, other: Term | float) -> Term:
        other = self._term(other)
        if self.number is None and not self.two and other.number is None and not other.two:
            return self.op("Sub", other)
        if self.number is not None and other.number is None and not other.two and self.number:
            return self.op("Sub", other)
        return self + (-other)

    def __rsub__(self, other: float) -> Term:
        return self._term(other) - self


TwoValued = tuple[Term, float, float]
"""A mask, and the values where it is true and where it is false."""


def select(mask: Term, on: Term, off: Term) -> Term:
    """Return `on` where the mask is true, else `off`: two-valued if both are, on compatible masks.

    Args:
      mask: term whose dtype is bool; all three are of one builder.
      on: term where the mask is true; the result has its dtype.
      off: term elsewhere, of the same dtype.
    """
    builder = mask.builder
    if on.index == off.index:
        return on
    if on.number is not None and off.number is not None:
        return builder.two(mask, on.number, off.number, on.dtype)
    if on.two and off.number is not None:
        inner, a, b = on.two
        if b == off.number:
            return builder.two(both(mask, inner), a, b, on.dtype)
    if off.two and on.number is not None:
        inner, a, b = off.two
        if b == on.number:
            return builder.two(both(mask.test("LogicalNot"), inner), a, b, on.dtype)
    return builder.node("SelectV2", (mask, on, off), on.dtype)


def cast(t: Term, dtype: str) -> Term:
    """Return the term in another floating dtype; numbers change dtype for nothing.

    Args:
      t: term of a floating dtype.
      dtype: of the result.
    """
    if t.dtype == dtype:
        return t
    if t.number is not None:
        return t.builder.number(t.number, dtype)
    if t.two:
        return t.builder.two(*t.two, dtype)
    return t.op(CAST, dtype=dtype, SrcT=f"dtype:{t.dtype}", DstT=f"dtype:{dtype}",
                Truncate=False)


def both(a: Term, b: Term) -> Term:
    """Return where both masks are true.

    Args:
      a: term whose dtype is bool.
      b: term of the same builder whose dtype is bool.
    """
    return a if a.index == b.index else a.test("LogicalAnd", b)


def _both(first: TwoValued, second: TwoValued, term: Term) -> Term | None:
    """Return the product of two-valued terms that are zero where their masks are false."""
    if first[2] or second[2]:
        return None
    return term.builder.two(both(first[0], second[0]), first[1] * second[1], 0.0, term.dtype)


def _either(first: TwoValued, second: TwoValued, term: Term) -> Term | None:
    """Return the sum of two-valued terms of the same value whose masks are never both true."""
    if first[2] or second[2] or first[1] != second[1]:
        return None
    if not _disjoint(first[0], second[0]):
        return None
    return term.builder.two(first[0].test("LogicalOr", second[0]), first[1], 0.0, term.dtype)


def _disjoint(a: Term, b: Term) -> bool:
    """Return whether one mask demands what the other forbids, read off their conjunctions."""
    first, second = _literals(a), _literals(b)
    return any((index, not value) in second for index, value in first)


def _literals(mask: Term) -> frozenset[tuple[int, bool]]:
    """Return the conjuncts of a mask as (node, the truth value that it must have)."""
    nodes, found, stack = mask.builder.nodes, [], [mask.index]
    while stack:
        index = stack.pop()
        node = nodes[index]
        if node.type == "LogicalAnd":
            stack.extend(node.args)
        elif node.type == "LogicalNot":
            found.append((node.args[0], False))
        else:
            found.append((index, True))
    return frozenset(found)
