"""Whether loops over segments compute what the plain loops do, by the ops that will run.

The functions are the same, but TensorFlow's optimizers see them in another place: they fuse two ops
only where they know both shapes, and add in the order of names. So what they make of each body is
compared (`tfckpt.verify.arithmetic.bodies`): in the plain step once, in the rewritten one for the
forward, for the segments that are run again, and for the gradient. Ops may be missing, as nothing
reads all that a segment makes which is run again; what is fused into others changes these.
"""

from __future__ import annotations

import re
from typing import Any

from tfckpt.ir.edits import Edits, traced
from tfckpt.plan.loops.segments import LAST, MARK
from tfckpt.verify.arithmetic.bodies import (
    Uses,
    body_in,
    integers_in,
    meanings_in,
    named_as_in,
    needed_of,
    otherwise,
)

_AGAIN, _GRADIENT = (rf"{loop}/body/_\d+/" for loop in ("tfckpt_loop", "tfckpt_loop_1"))
"""Scopes of loops over a segment, in that of a loop over segments."""


def differences(plain: Any, edited: Any, edits: Edits) -> tuple[str, ...]:
    """Return the ops of loops in segments that are not what they are in the plain step, by name.

    Args:
      plain: GraphDef of what Grappler makes of the plain step, loops lowered.
      edited: that of the rewritten step.
      edits: what was done to it; its loops are named as in `edited`.
    """
    loops = [entry.old for entry in edits.replaced if entry.new.endswith((MARK, LAST))]
    found: dict[str, None] = {}
    plain, needed = needed_of(plain), needed_of(edited)
    for forward, gradient in zip(loops[::2], loops[1::2], strict=True):
        scopes = [rf"{re.escape(traced(loop))}/body/_\d+/" for loop in (forward, gradient)]
        once, backward = (body_in(plain, scope) for scope in scopes)
        meant = [meanings_in(plain, scope) for scope in scopes]
        integers = [integers_in(plain, scope) for scope in scopes]
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
            made = named_as_in(wanted, meant[wanted is backward], body_in(needed, scope),
                                meanings_in(needed, scope))
            found.update(dict.fromkeys(otherwise(
                wanted, integers[wanted is backward], made, integers_in(edited, scope),
                Uses(edited, scope))))
            if not made:
                found[loop.removesuffix(MARK).removesuffix(LAST)] = None
    return tuple(found)


def _levels(definition: Any, loop: str) -> int:
    """Return how many loops stand in each other in one over segments, which may be in segments."""
    within = re.compile(rf"{re.escape(loop)}/body/_\d+/((?:{_GRADIENT})+)")
    return max((len(re.findall(_GRADIENT, match[1])) for node in definition.node
                if (match := within.match(node.name))), default=1)
