"""The functions that loops over segments call, and what such loops have to run before.

A gradient's loop that runs a forward's again reads the variables that that reads, in the backward:
what may write them later waits for it, as for a copy (`tfckpt.rewrite.passes.state_writes`).
"""

from __future__ import annotations

import dataclasses

from tfckpt.errors import RewriteError
from tfckpt.ir.edits import AddControl, Edits
from tfckpt.plan.loops.segments import SEGMENTED, Again, Role
from tfckpt.rewrite.passes.manager import Context, Pass, Property


def write_functions(context: Context, edits: Edits) -> Edits:
    """Return the edits with the functions of loops over segments.

    Args:
      context: the step, and what was decided for each of its parts.
      edits: what is done to the step so far.

    Raises:
      RewriteError: the step is not at hand, or its functions are not known.
    """
    roles = {op.name: role for op in edits.added
             if isinstance(role := op.attrs.get(SEGMENTED), Role | Again)}
    if not roles:
        return edits
    live = getattr(context.plain, "live", None)
    if live is None:
        raise RewriteError("rewrite: the functions of the step's loops are not at hand")
    # Here, not above: passes are planned and tested without TensorFlow.
    from tfckpt.rewrite.loops.segments import with_functions

    later = {op.name: op.later_writes for op in context.graph.ops if op.loop is not None}
    waits = [AddControl(write, name) for name, role in roles.items() if role.is_gradient
             for write in later[role.forward]]
    known = {op.name for op in context.graph.ops}
    return with_functions(dataclasses.replace(edits, controls=(
        *edits.controls, *(w for w in waits if w.op in known))), live)


PASS = Pass("loop segments", write_functions, requires=frozenset({Property.DERIVATIVES}))
