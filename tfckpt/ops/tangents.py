"""Building blocks of tangent rules.

A rule says how a tangent passes an op: given the op's inputs `a`, `b` (by position), its
output `y` and a tangent `t`, what that tangent contributes. An element-wise op's Jacobian is
diagonal, so the same rule carries a tangent of an input to the output and a cotangent of the
output to an input: the table serves both directions. At kinks and ties the rules follow
TensorFlow's own gradients: relu'(0) = 0, |x|' = sign(x), a tie of Maximum or Minimum goes to the
first operand, a Select passes to the chosen branch only.

`fused` rules use TensorFlow's gradient kernel on a full tangent and a formula where the tangent
is a number. Where a rule selects between numbers, the derivative takes two values, and what is
kept of it is a boolean (see `tfckpt.ops.terms`).

Source: Guo et al., section III-A (the fad operations).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfckpt.ops.terms import Term, select


@dataclasses.dataclass(frozen=True, slots=True)
class At:
    """One op at which a rule is applied."""

    inputs: Sequence[Term]
    y: Term
    t: Term
    attrs: Mapping[str, object]

    @property
    def a(self) -> Term:
        """First input."""
        return self.inputs[0]

    @property
    def b(self) -> Term:
        """Second input."""
        return self.inputs[1]


TangentRule = Callable[[At], Term]


def zero(o: At) -> Term:
    """State that the output does not move with this input.

    Args:
      o: the op at which the rule is applied.

    Returns:
      A zero of the tangent's dtype.
    """
    return o.t * 0.0


def same(o: At) -> Term:
    """State that the output moves as this input does.

    Args:
      o: the op at which the rule is applied.

    Returns:
      The tangent as it is.
    """
    return o.t


def fused(kernel: str, saved: str, one: TangentRule, gradient_first: bool = False
          ) -> tuple[TangentRule]:
    """Return the gradient kernel on (saved, t), or on (t, saved); a formula for a number.

    Args:
      kernel: op type of TensorFlow's gradient kernel.
      saved: what the kernel reads beside the tangent: "a", the input, or "y", the output.
      one: the formula, a derivative: used where the tangent is a number or takes two values.
      gradient_first: whether the kernel reads the tangent first.

    Returns:
      The rule of the only input, as a tuple of one.
    """
    def rule(o: At) -> Term:
        if o.t.number is not None or o.t.two:
            return o.t * one(o)
        kept = getattr(o, saved)
        first, second = (o.t, kept) if gradient_first else (kept, o.t)
        return first.op(kernel, second, dtype=o.t.dtype)
    return (rule,)


def branch(chosen: Callable[[At], Term], when_true: bool) -> TangentRule:
    """Return the tangent where the mask chooses this operand.

    Args:
      chosen: gives the mask at an op at which the rule is applied.
      when_true: whether this operand is chosen where the mask is true, or where it is false.
    """
    def rule(o: At) -> Term:
        mask, none = chosen(o), o.t * 0.0
        return select(mask, o.t, none) if when_true else select(mask, none, o.t)
    return rule
