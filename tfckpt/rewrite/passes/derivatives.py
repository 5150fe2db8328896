"""Edits of forward AD: kept derivatives, and the products that the backward makes of them."""

from __future__ import annotations

from tfckpt.ir.edits import Edits, together
from tfckpt.rewrite.passes.manager import Context, Pass, Property


def write_derivatives(context: Context, edits: Edits) -> Edits:
    """Return the edits, and those that forward AD recorded for each part.

    Args:
      context: the step, and what was decided for each of its parts.
      edits: what is done to the step so far.
    """
    return edits.then(together(part.decision.edits for part in context.parts))


PASS = Pass("derivatives", write_derivatives, ensures=frozenset({Property.DERIVATIVES}))
