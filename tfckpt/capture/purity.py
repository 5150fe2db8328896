"""May this op run twice? Only if nothing but time and memory tells the two runs apart.

Stateful ops never (random generators, variable reads and writes, iterators, queues, prints,
Python calls, summaries); nor those TensorFlow does not mark as stateful although running them
twice shows. Their outputs may still be kept and read by copies. Stateless random ops with the
same seed tensor may. Loops are judged by their bodies (`tfckpt.capture.loops.purity`).
"""

from __future__ import annotations

from tfckpt.ops import record


def is_pure(op_type: str, stateful: bool, dtypes: tuple[str, ...]) -> bool:
    """Return whether a copy of the op computes the same and disturbs nothing.

    Args:
      op_type: TensorFlow op type.
      stateful: what the op's registration says.
      dtypes: dtypes of its outputs; of those that hold handles only lists of rows are copied, and
        of zeros.
    """
    known = record(op_type)
    if stateful or not known.repeatable:
        return False
    makes_list = known.lists.rows or known.fills is not None
    return not any(dtype == "resource" or dtype == "variant" and not makes_list
                   for dtype in dtypes)


def is_write(op_type: str, reads_resource: bool, stateful: bool) -> bool:
    """Return whether the op writes a resource or takes part in a collective.

    Args:
      op_type: TensorFlow op type.
      reads_resource: whether one of its inputs is a resource, or a reference to a variable.
      stateful: what the op's registration says.
    """
    known = record(op_type)
    return known.collective or reads_resource and stateful and known.writes
