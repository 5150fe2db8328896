"""Copies of what a plan recomputes, and the fences, waits or guards that delay them.

A plan was made for the step with derivatives taken, so they are written before.
"""

from __future__ import annotations

from tfckpt.ir.edits import Edits
from tfckpt.rewrite.build import build_edits
from tfckpt.rewrite.passes.manager import Context, Pass, Property


def write_copies(context: Context, edits: Edits) -> Edits:
    """Return the edits, and those that realise the plan of each part.

    Args:
      context: the step, and what was decided for each of its parts.
      edits: what is done to the step so far.

    Raises:
      RewriteError, PlanError: as for `tfckpt.rewrite.build.build_edits`.
    """
    for part in context.parts:
        decision = part.decision
        edits = edits.then(build_edits(
            decision.graph, decision.cost, decision.planned.plan, part.target,
            device=part.device, label=part.label))
    return edits


PASS = Pass("copies", write_copies, requires=frozenset({Property.DERIVATIVES}),
            ensures=frozenset({Property.COPIES}))
