"""The forward of later backward passes: a step may take several gradients, one after the other.

What follows from a gradient is backward or update by the rules of `regions`. But a step may go on
from there and take another gradient: of a loss with a gradient in it (gradient penalties, physics
by automatic differentiation), of weights that were moved by one (SAM, MAML), of one more network.
To that pass all before it is forward, whatever it is called, and may be recomputed for it.

A backward pass is linear in the gradient that it begins with: it never multiplies two tensors that
both follow from it. So an op of a gradient scope that multiplies two tensors which follow from a
gradient, one of them through the other, belongs to a later pass. What all leads to is what this
pass has come with, the other is a *residual* of it. (Of a factor that a gradient is multiplied by,
such as that of GELU, only ops of the forward are known, whatever scope it stands in.)

  1. Residuals of later passes are forward.
  2. So is what lies on the way from one of them to another, in a gradient scope or not.
  3. So is what leads to one of them outside of gradient scopes, unless the earlier pass goes on
     from there (its sums, its custom gradients): weights that a gradient has moved.
  4. So is what they lead to outside of gradient scopes before the later pass has begun: the end of
     its forward, whose gradient is not multiplied by anything yet.
  5. What writes is none of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from tfckpt.capture.regions import ancestors, descendants
from tfckpt.ir.graph import BACKWARD, FORWARD, UPDATE


def with_later_passes(region: Sequence[str], inputs: Sequence[Sequence[int]],
                      depth: Sequence[int], multiplies: Sequence[bool],
                      writes: Sequence[bool]) -> list[str]:
    """Return the regions of all ops, with the forward of later passes.

    Args:
      region: of each op by the rules of `regions`; ops in topological order.
      inputs: for each op the indices of the ops whose values it reads; not of those of which it
        reads the shape alone.
      depth: for each op in how many gradient scopes it stands, one in the other.
      multiplies: for each op whether its result has products of what its inputs hold.
      writes: for each op whether it writes a resource or is a collective.
    """
    result, scoped = list(region), [d > 0 for d in depth]
    computed = [s and bool(read) for s, read in zip(scoped, inputs, strict=True)]
    follows = descendants(computed, inputs)
    follows = [f and r in (BACKWARD, UPDATE) for f, r in zip(follows, region, strict=True)]
    residual = _residuals(inputs, follows, scoped, multiplies)
    if not any(residual):
        residual = _of_gradients(inputs, follows, depth, multiplies)
    if not any(residual):
        return result
    after = descendants(residual, inputs)
    before = ancestors(residual, inputs)
    earlier = ancestors([s and f and not a for s, f, a in zip(scoped, follows, after, strict=True)],
                       inputs)
    later = [False] * len(result)  # whether an op follows from one of the later pass itself
    for op, sources in enumerate(inputs):
        between = residual[op] or before[op] and (  # rules 1, 2, 3
            after[op] or not scoped[op] and not earlier[op])
        later[op] = any(later[s] for s in sources) or scoped[op] and after[op] and not between
        ends = after[op] and not scoped[op] and not later[op] and region[op] == BACKWARD  # rule 4
        if follows[op] and (between or ends) and not writes[op]:  # rule 5
            result[op] = FORWARD
    return result


def _residuals(inputs: Sequence[Sequence[int]], follows: Sequence[bool], scoped: Sequence[bool],
               multiplies: Sequence[bool]) -> list[bool]:
    """Return which ops' results a later pass multiplies with the gradient that it has come with.

    Each set of ops is a number with a bit for each of those that may be residuals.
    """
    pairs = [(older, op) for op, sources in enumerate(inputs) if scoped[op] and multiplies[op]
             for older in sorted({s for s in sources if follows[s]})[:-1]]
    bits = {older: 1 << n for n, older in enumerate(dict.fromkeys(older for older, _ in pairs))}
    leading = [0] * len(inputs)  # those that lead to each op
    for op, sources in enumerate(inputs) if pairs else ():
        if follows[op]:
            leading[op] = functools.reduce(operator.or_, (leading[s] | bits.get(s, 0)
                                                          for s in sources if follows[s]), 0)
    found = [False] * len(inputs)
    for older, op in pairs:
        found[older] |= any(leading[s] & bits[older] for s in inputs[op])
    return found


def _of_gradients(inputs: Sequence[Sequence[int]], follows: Sequence[bool],
                  depth: Sequence[int], multiplies: Sequence[bool]) -> list[bool]:
    """Return which ops' results the gradient of a gradient multiplies with something.

    Where a vector is given (as in Hessian times vector), what the later pass comes with follows
    from that, and from no residual.
    """
    found = [False] * len(inputs)
    for op, sources in enumerate(inputs):
        if depth[op] > 1 and multiplies[op]:
            for source in sources:
                found[source] |= follows[source] and depth[source] == 1
    return found
