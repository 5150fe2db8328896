"""From decisions to checked edits of the whole step: the passes, in their order."""

from __future__ import annotations

from tfckpt.rewrite.passes import (
    body_results,
    copies,
    derivatives,
    late_products,
    late_updates,
    loop_segments,
    loop_starts,
    operand_order,
    reference_variables,
    state_writes,
    zero_lists,
)
from tfckpt.rewrite.passes.manager import Context, Realised, run_passes

PASSES = (derivatives.PASS, loop_segments.PASS, late_updates.PASS, copies.PASS,
          body_results.PASS, late_products.PASS, operand_order.PASS, loop_starts.PASS,
          state_writes.PASS, reference_variables.PASS, zero_lists.PASS)


def realise(context: Context) -> Realised:
    """Return the checked edits that realise what was decided for each part of a step.

    Args:
      context: the step, and what was decided for each of its parts.

    Raises:
      RewriteError, PlanError: what was decided cannot be realised; the message names the pass.
    """
    return run_passes(PASSES, context)


def refusals(context: Context) -> dict[str, str]:
    """Return for each pass why it does not apply in a context; "" where it does.

    Args:
      context: the step; its parts are not looked at.
    """
    return {each.name: each.refusal(context) for each in PASSES}
