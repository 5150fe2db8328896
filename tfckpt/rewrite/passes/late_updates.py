"""Has updates wait for what reads the old value of their variable, as planned.

Which these are is part of the graph that was planned (`tfckpt.cost.variables.updated_late`); the
captured step gets the control edges that it lacks.
"""

from __future__ import annotations

import dataclasses

from tfckpt.ir.edits import AddControl, Edits
from tfckpt.ir.graph import UPDATE
from tfckpt.rewrite.passes.manager import Context, Pass, Property


def delay_updates(context: Context, edits: Edits) -> Edits:
    """Return the edits, and the control edges of updates that planning has added.

    Args:
      context: the step, and what was decided for each of its parts.
      edits: what is done to the step so far.
    """
    given = {op.name: {context.graph.ops[c].name for c in op.controls}
             for op in context.graph.ops if op.region == UPDATE}
    added = []
    for part in context.parts:
        planned = part.decision.graph
        for op in planned.ops:
            if op.name in given:
                added += [AddControl(op.name, planned.ops[c].name) for c in op.controls
                          if planned.ops[c].name not in given[op.name]]
    return dataclasses.replace(edits, controls=(*edits.controls, *added)) if added else edits


def _refusal(context: Context) -> str:
    return "" if context.target.orders_by_control else "XLA waits for no control edges"


PASS = Pass("late updates", delay_updates, requires=frozenset({Property.DERIVATIVES}),
            refusal=_refusal)
